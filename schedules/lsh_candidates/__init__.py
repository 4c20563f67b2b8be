"""Templates of candidate words by hashing."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .beam_blocks import beam_blocks
from .lsh_stages import lsh_stages
from .plain_steps import plain_steps
from .row_clusters import row_clusters

TEMPLATES: tuple[Template, ...] = (
    lsh_stages,
    beam_blocks,
    row_clusters,
    plain_steps,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (lsh_stages,),
    # By itself `beam_blocks` is the faster one at beams of 12 (10.6 us for 11.6 on an H200). But whole steps of heads took
    # twice as long with it at 50,000 words, and at 24 rows: it may be that a cluster waits for 16 multiprocessors to be
    # free at once. So it is for tuning.
    "cuda": (row_clusters, beam_blocks, plain_steps),
}
