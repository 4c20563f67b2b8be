"""Templates of row_argmax_logsumexp."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .argmax_block import argmax_block
from .argmax_rows import argmax_rows

TEMPLATES: tuple[Template, ...] = (argmax_rows, argmax_block)

# Those that run without tuning, by kind of machine: both fit every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (argmax_rows,), "cuda": (argmax_block,)}
