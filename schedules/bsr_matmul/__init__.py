"""Templates of the block-sparse product."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..papers.gu_elements import per_element, per_tile
from ..papers.gu_reductions import cross_thread, over_blocks, warp_shuffle
from .block_rows import block_rows
from .staged_x import staged_x
from .tensor_core import tensor_core
from .warpgroups import warpgroups

TEMPLATES: tuple[Template, ...] = (
    block_rows,
    per_element,
    per_tile,
    over_blocks,
    cross_thread,
    warp_shuffle,
    staged_x,
    tensor_core,
    warpgroups,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (block_rows,),
    "cuda": (
        warpgroups,
        tensor_core,
        staged_x,
        over_blocks,
        warp_shuffle,
        per_element,
    ),
}
