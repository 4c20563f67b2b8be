"""Templates of stream compaction."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .bitmap_scan import bitmap_scan
from .compact_slices import compact_slices
from .copy_if import copy_if

TEMPLATES: tuple[Template, ...] = (
    compact_slices,
    bitmap_scan,
    copy_if,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (compact_slices,),
    "cuda": (bitmap_scan, copy_if),
}
