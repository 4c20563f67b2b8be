"""Templates of a step of an LSH head in one program."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .fused_step import fused_step
from .listed import listed_dots, listed_rows

TEMPLATES: tuple[Template, ...] = (listed_rows, fused_step, listed_dots)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (listed_rows,), "cuda": (fused_step, listed_dots)}
