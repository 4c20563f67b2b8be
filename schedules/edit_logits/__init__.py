"""Templates of edits of logits."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .edit_rows import edit_rows
from .edit_slices import edit_slices

TEMPLATES: tuple[Template, ...] = (edit_rows, edit_slices)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (edit_rows,), "cuda": (edit_slices,)}
