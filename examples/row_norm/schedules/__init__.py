"""Templates of row_norm."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .norm_block import norm_block
from .norm_rows import norm_rows

TEMPLATES: tuple[Template, ...] = (norm_rows, norm_block)

# Those that run without tuning, by kind of machine: both fit every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (norm_rows,), "cuda": (norm_block,)}
