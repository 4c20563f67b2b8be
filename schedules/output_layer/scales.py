"""Factors of exponents, which are powers of 2: scale * log2(e), of all rows or of each row; and soft caps of scores.

Where rows have temperatures (`per_row`), a kernel computes a row's factor where it may read what its producer kernel
has written, always by the same operations, so that both kernels have the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..device.arithmetic import LOG2_E, tanh_on_gpu
from ..softmax_topk.elements import capped
from ..softmax_topk.ending import own_of


def own_arguments(io: Any, row: Any) -> Any:
    """The arguments of a kernel with the scale of a row."""
    own = own_of(io.problem)
    return io if own is None else own(io, row)


def factors_of(io: Any, rows: Sequence[Any], factor: Any) -> Any:
    """The factors of some rows, in registers (`factor_at`), where they have their own; else `factor`, that of all."""
    if own_of(io.problem) is None:
        return factor
    held = T.alloc_local([len(rows)], "float32")
    for i, row in enumerate(rows):
        T.buffer_store(held, own_arguments(io, T.min(row, io.beam - 1)).scale * T.float32(LOG2_E), [i])
    return held


def factor_at(factor: Any, i: Any) -> Any:
    """The i-th factor of `factors_of`."""
    return factor[i] if isinstance(factor, tirx.Buffer) else factor


def has_cap(io: Any) -> bool:
    """Whether the operator has soft caps, and the problem one."""
    return bool(getattr(io.problem, "capped", 0))


def head_capped(io: Any, score: Any, tanh: Any = tanh_on_gpu) -> Any:
    """A score after the soft cap, if there is one."""
    return capped(io, score, tanh) if has_cap(io) else score
