"""Templates of the N-hot lookup."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..papers.argueta_chiang_lookup import lookup_elements
from .dealt_gather import dealt_gather
from .row_gather import row_gather
from .warp_gather import warp_gather

TEMPLATES: tuple[Template, ...] = (
    row_gather,
    lookup_elements,
    warp_gather,
    dealt_gather,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (row_gather,),
    "cuda": (dealt_gather, warp_gather),
}
