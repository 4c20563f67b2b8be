"""Templates of logsumexp: those of softmax without their second pass, and so in its files."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..softmax.softmax_ladder import logsumexp_block, logsumexp_thread, logsumexp_warp
from ..softmax.softmax_rows import logsumexp_rows
from ..softmax.softmax_vectors import logsumexp_streamed

TEMPLATES: tuple[Template, ...] = (
    logsumexp_rows,
    logsumexp_thread,
    logsumexp_block,
    logsumexp_warp,
    logsumexp_streamed,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (logsumexp_rows,),
    "cuda": (logsumexp_streamed,),
}
