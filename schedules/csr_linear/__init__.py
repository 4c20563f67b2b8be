"""Templates of linear layers with unstructured sparse weights."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .entry_rows import entry_rows
from .warp_entries import warp_entries

TEMPLATES: tuple[Template, ...] = (entry_rows, warp_entries)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (entry_rows,), "cuda": (warp_entries,)}
