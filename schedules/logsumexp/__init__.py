"""Templates of logsumexp: each is one of softmax that stops at the normaliser, so its code is in `..softmax`."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..softmax.rows import logsumexp_rows
from ..softmax.vectors import logsumexp_streamed

TEMPLATES: tuple[Template, ...] = (logsumexp_rows, logsumexp_streamed)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (logsumexp_rows,),
    "cuda": (logsumexp_streamed,),
}
