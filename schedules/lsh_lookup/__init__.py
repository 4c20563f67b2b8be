"""Templates of look-up by band codes."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .count_slices import count_slices
from .global_counts import global_counts
from .shared_counts import shared_counts

TEMPLATES: tuple[Template, ...] = (
    count_slices,
    shared_counts,
    global_counts,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (count_slices,),
    "cuda": (shared_counts, global_counts),
}
