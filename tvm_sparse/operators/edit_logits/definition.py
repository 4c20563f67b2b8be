"""Edits of a row's words in TVMScript, for the definition and CPU functions. Loads the compiler."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.operators.softmax_topk.definition import soft_capped as capped_float

from .penalties import PENALTIES


def penalised(x: tirx.PrimExpr, count: tirx.PrimExpr, repetition: Any, presence: Any, frequency: Any) -> tirx.PrimExpr:
    """The float32 score of a word that was seen: the repetition penalty first, then the other two."""
    repeated = T.Select(x > T.float32(0), x / repetition, x * repetition)
    return repeated - frequency * T.Cast("float32", count) - T.Select(count > 0, presence, T.float32(0))


def soft_capped(io: Any, x: Any, tanh: Any = T.tanh) -> Any:
    """A logit of the problem's dtype after the soft cap, which is applied in float32; the logit itself without one.
    `tanh` is of a float32.
    """
    if io.cap is None:
        return x
    wide = T.Cast("float32", x)
    return T.Cast(io.problem.dtype, capped_float(wide, wide / io.cap, io.cap, tanh))


def penalty(io: Any, name: str, row: Any) -> tirx.PrimExpr:
    """A penalty that is one number for all rows, or one for each row."""
    return getattr(io, PENALTIES[name])[row] if io.problem.per_row else getattr(io, name)


# fmt: off
@phase
def edit_row(problem, /, io, r):
    """All edits of a row, one word after another, as an SBlock.

    Reads: the row, if it is copied or capped; its words. Writes: the edited row.
    """
    dtype, vocab = T.meta_var(problem.dtype), T.meta_var(problem.vocab)
    with T.sblock("row"):
        row = T.axis.spatial(io.batch, r)
        T.reads(io.logits[row, 0:vocab])
        T.writes(io.edited[row, 0:vocab])
        x = T.sblock_alloc_buffer((1,), "float32")
        if bool(problem.capped) or io.copied != 0:
            for j in range(vocab):
                io.edited[row, j] = soft_capped(io, io.logits[row, j])
        if bool(problem.bias):
            for i in range(io.biased):
                if io.bias_ids[row, i] >= 0 and io.bias_ids[row, i] < vocab:
                    x[0] = T.Cast("float32", io.edited[row, io.bias_ids[row, i]]) + io.bias_values[row, i]
                    io.edited[row, io.bias_ids[row, i]] = T.Cast(dtype, x[0])
        if bool(problem.penalties):
            for i in range(io.seen):
                if io.seen_ids[row, i] >= 0 and io.seen_ids[row, i] < vocab:
                    x[0] = T.Cast("float32", io.edited[row, io.seen_ids[row, i]])
                    x[0] = penalised(
                        x[0], io.generated[row, i], penalty(io, "repetition", row), penalty(io, "presence", row),
                        penalty(io, "frequency", row))
                    io.edited[row, io.seen_ids[row, i]] = T.Cast(dtype, x[0])
# fmt: on
