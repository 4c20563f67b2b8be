"""Templates of softmax; those of logsumexp are made of the same code (`tvm_sparse.schedules.logsumexp` lists them)."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .rows import softmax_rows
from .vectors import softmax_held, softmax_staged, softmax_streamed

TEMPLATES: tuple[Template, ...] = (softmax_rows, softmax_held, softmax_staged, softmax_streamed)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (softmax_rows,),
    "cuda": (softmax_held, softmax_streamed),
}
