"""Sampling in TVMScript, word after word: the end of the definition, and of templates that have the chances at hand.

This module loads the compiler: it is imported when a definition or a program is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.operators.softmax_topk.definition import is_greedy

from .philox import MULTIPLIERS, ROUNDS, WEYL
from .reference import BELOW_ONE

LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """What is kept of a row while a word is drawn, in a block (`T.sblock`)."""

    chance: tirx.Buffer  # of the best words, in order
    scale: tirx.Buffer  # the inverse of the temperature; 1 of a row that is greedy
    limit: tirx.Buffer  # how many words count
    total: tirx.Buffer  # the sum of their chances, then of those that are left
    sum: tirx.Buffer  # a running sum
    left: tirx.Buffer  # how many are left
    place: tirx.Buffer  # which one is drawn
    last: tirx.Buffer  # which one has the last column
    words: tirx.Buffer  # of the generator's counter, then its results
    high: tirx.Buffer  # scratch of the generator
    key: tirx.Buffer  # of the generator

    @classmethod
    def alloc(cls, n: int) -> Draw:
        return cls(
            chance=T.sblock_alloc_buffer((n,), "float32"),
            scale=T.sblock_alloc_buffer((1,), "float32"),
            limit=T.sblock_alloc_buffer((1,), "int32"),
            total=T.sblock_alloc_buffer((1,), "float32"),
            sum=T.sblock_alloc_buffer((1,), "float32"),
            left=T.sblock_alloc_buffer((1,), "int32"),
            place=T.sblock_alloc_buffer((1,), "int32"),
            last=T.sblock_alloc_buffer((1,), "int32"),
            words=T.sblock_alloc_buffer((4,), "uint32"),
            high=T.sblock_alloc_buffer((2,), "uint32"),
            key=T.sblock_alloc_buffer((2,), "uint32"),
        )


@dataclass(frozen=True)
class Columns:
    """The columns of the best words, in order."""

    buffer: tirx.Buffer
    row: Any = None  # of the buffer, where it has rows

    def __getitem__(self, i: Any) -> tirx.PrimExpr:
        return self.buffer[i] if self.row is None else self.buffer[self.row, i]


def limit_of(temperature: tirx.PrimExpr, top_k: tirx.PrimExpr, words: int) -> tirx.PrimExpr:
    """How many of the best words count, see `reference.Filters.limits`."""
    free = T.Or(top_k <= 0, top_k >= words)
    return T.Select(is_greedy(temperature), 1, T.Select(free, T.int32(words), top_k))


def clamped(uniform: tirx.PrimExpr) -> tirx.PrimExpr:
    return T.max(T.min(uniform, T.float32(BELOW_ONE)), T.float32(0))


# fmt: off
@T.inline
def philox(words, high, key, seed, offset, row):
    """Philox4x32-10 of int64 seed and offset and uint32 row, see `philox.uniforms`.

    Writes: `words`; scratch is `high`, `key`.
    """
    key[0] = T.Cast("uint32", seed & T.int64(LOW))
    key[1] = T.Cast("uint32", (seed >> T.int64(32)) & T.int64(LOW))
    words[0] = T.Cast("uint32", offset & T.int64(LOW))
    words[1] = T.Cast("uint32", (offset >> T.int64(32)) & T.int64(LOW))
    words[2] = row
    words[3] = T.uint32(0)
    for _ in T.serial(ROUNDS):
        high[0] = T.Cast("uint32", (T.Cast("uint64", words[0]) * T.uint64(MULTIPLIERS[0])) >> T.uint64(32))
        high[1] = T.Cast("uint32", (T.Cast("uint64", words[2]) * T.uint64(MULTIPLIERS[1])) >> T.uint64(32))
        high[1] = high[1] ^ words[1] ^ key[0]
        high[0] = high[0] ^ words[3] ^ key[1]
        words[1] = words[2] * T.uint32(MULTIPLIERS[1])
        words[3] = words[0] * T.uint32(MULTIPLIERS[0])
        words[0] = high[1]
        words[2] = high[0]
        key[0] = key[0] + T.uint32(WEYL[0])
        key[1] = key[1] + T.uint32(WEYL[1])


def uniform_of(words: tirx.Buffer) -> tirx.PrimExpr:
    """The uniform number of what `philox` has left."""
    return T.Cast("float32", words[0] >> T.uint32(8)) * T.float32(2.0**-24)


def counter_of(seeded: int, row: tirx.PrimExpr, seeds: Any, seed: Any, offset: Any, offsets: Any) -> tuple[Any, ...]:
    """Seed, offset and row from which a row's random number is computed; `seeded` is that of `SoftmaxSample`."""
    if seeded == 1:
        return seeds[row, 0], seeds[row, 1], T.uint32(0)
    return seed, offset if seeded == 2 else offsets[row], T.Cast("uint32", row)


@phase
def sum_up(n, /, s):
    """All that counts of the first n words. Reads: `chance`, `limit`. Writes: `total`."""
    s.total[0] = T.float32(0)
    for i in range(n):
        if i < s.limit[0]:
            s.total[0] = s.total[0] + s.chance[i]


@phase
def cut(n, /, s, top_p, min_p):
    """How many of the first n words are left.

    The first is, whatever it is, and none of chance 0 beside it.

    Reads: `chance`, `limit`, `total`.
    Writes: `left`, and `sum`, their chances.
    """
    s.sum[0] = T.float32(0)
    s.left[0] = 0
    for i in range(n):
        if i < s.limit[0] and i == s.left[0] and (
            i == 0 or ((s.sum[0] < top_p * s.total[0] or top_p >= T.float32(1))
                       and s.chance[i] > T.float32(0) and s.chance[i] >= min_p * s.chance[0])
        ):
            s.sum[0] = s.sum[0] + s.chance[i]
            s.left[0] = i + 1


def take(n: int) -> Callable[..., Any]:
    """Which of the first n words is drawn; the phase is (s, uniform).

    Reads: `chance`, `left`, `sum`.
    Writes: `place`, which is `left` if their chances do not reach the uniform number's share of `sum`; `total`.
    """

    @T.inline
    def phase(s, uniform):
        s.total[0] = clamped(uniform) * s.sum[0]
        s.sum[0] = T.float32(0)
        s.place[0] = 0
        for i in range(n):
            if i < s.left[0]:
                s.sum[0] = s.sum[0] + s.chance[i]
                if s.sum[0] <= s.total[0]:
                    s.place[0] = i + 1

    return phase


@phase
def take_by_column(n, /, s, uniform, columns):
    """Which of the first n words is drawn in the order of columns.

    Reads: `chance`, `left`, `sum`.
    Writes: `place`; `total`, `sum` and `last`, as scratch.
    """
    s.total[0] = clamped(uniform) * s.sum[0]
    s.place[0] = -1
    s.last[0] = 0
    for i in range(n):
        if i < s.left[0]:
            s.sum[0] = T.float32(0)
            for j in range(n):
                if j < s.left[0] and columns[j] <= columns[i]:
                    s.sum[0] = s.sum[0] + s.chance[j]
            if s.sum[0] > s.total[0] and (s.place[0] < 0 or columns[i] < columns[T.max(s.place[0], 0)]):
                s.place[0] = i
            if columns[i] > columns[s.last[0]]:
                s.last[0] = i
    if s.place[0] < 0:
        s.place[0] = s.last[0]


def draw(n: int, vocab: int) -> Callable[..., Any]:
    """One of the first n words, by chances that descend; the phase is (s, top_p, min_p, uniform, columns).

    Without a top_k, which n = vocab words alone allow, the order is that of columns.

    Reads: `chance`, `limit`.
    Writes: `place`, and what the steps write.
    """
    summed, left, taken, taken_by_column = sum_up(n), cut(n), take(n), take_by_column(n)

    @T.inline
    def phase(s, top_p, min_p, uniform, columns):
        summed(s)
        left(s, top_p, min_p)
        if n == vocab and s.limit[0] == vocab:
            taken_by_column(s, uniform, columns)
        else:
            taken(s, uniform)
            s.place[0] = T.min(s.place[0], s.left[0] - 1)

    return phase
# fmt: on
