"""Which units a thread works for, and their weights, which it keeps for all steps.

Position p of a row is lane p % `lanes`'s, in its round p // `lanes`. The first rounds of a row stay in registers, and
what is left is read anew in every step. An entry that a row does not have refers to the
column behind the last one, where a zero is.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.selection import FULL_WARP
from ...device.words import value_in
from ...recurrent.exchange import INFINITY
from .space import Extents

NAN = 0x7FC00000


def place_of(e: Extents, words: Any, at: Any) -> tirx.PrimExpr:
    """Where the states of an entry's column are, in bytes from the first column's; `at`: the index of the entry's first
    word.
    """
    if e.words == 1:
        return (words[at] & T.uint32(0xFFFF)) * T.uint32(e.column_bytes)
    return words[at]


def value_of(e: Extents, words: Any, at: Any) -> tirx.PrimExpr:
    """An entry's value."""
    return value_in(e.dtype, words[at], 1) if e.words == 1 else T.reinterpret("float32", words[at + 1])


# The volatile move keeps the compiler from unpacking entries before the loop, which would keep both parts in registers.
AS_IT_IS = """
__device__ __forceinline__ unsigned int as_it_is(unsigned int word) {
  unsigned int held;
  asm volatile("mov.b32 %0, %1;" : "=r"(held) : "r"(word));
  return held;
}
"""


def held_word(s: Any, at: Any) -> tirx.PrimExpr:
    """A word of `weights` that has two parts."""
    return T.cuda.func_call("as_it_is", s.weights[at], source_code=AS_IT_IS, return_type="uint32")


def held_place(e: Extents, s: Any, row: Any, r: Any) -> tirx.PrimExpr:
    """`place_of` the entry in `weights` of a row and round."""
    first = row * e.row_words
    if e.form == "apart":
        return s.weights[first + r * 2]
    if e.form == "joined":
        return place_of(e, [held_word(s, first + r)], 0)
    pair = held_word(s, first + e.registers + r // 2)
    return ((pair >> T.Cast("uint32", r % 2 * 16)) & T.uint32(0xFFFF)) * T.uint32(e.column_bytes)


def held_value(e: Extents, s: Any, row: Any, r: Any) -> tirx.PrimExpr:
    """`value_of` the entry in `weights` of a row and round."""
    first = row * e.row_words
    if e.form == "joined":
        return value_of(e, [held_word(s, first + r)], 0)
    return T.reinterpret("float32", s.weights[first + (r * 2 + 1 if e.form == "apart" else r)])


# fmt: off
def take_units(e: Extents) -> Phase:
    """Deal the slots out: to the blocks equally many neighbours, to a block's groups in turn; the phase is (s, io,
    block).

    So neighbouring groups have neighbouring slots, which the host has given rows of similar lengths.

    Reads: `units`, `row_start`.
    Writes: `first`, `count`, `unit`, `begin`, `length`, `rounds`. A group without a slot has rows without entries.
    Barriers: none, but all lanes of a warp take part.
    """
    share, more = divmod(e.hidden, e.blocks)

    @T.inline
    def phase(s, io, block):
        s.first[0] = block * share + T.min(block, more)
        s.count[0] = share + T.Cast("int32", block < more)
        for u in T.unroll(e.units):
            slot: T.int32 = s.first[0] + T.min(u * e.groups + s.group, s.count[0] - 1)
            s.unit[u] = io.units[slot]
            for g in T.unroll(e.gates):
                row = u * e.gates + g
                s.begin[row] = io.row_start[slot * e.gates + g]
                s.length[row] = io.row_start[slot * e.gates + g + 1] - s.begin[row]
                if u * e.groups + s.group >= s.count[0]:
                    s.length[row] = 0
                s.rounds[row] = T.Cast("int32", T.call_extern(
                    "uint32", "__reduce_max_sync", T.uint32(FULL_WARP),
                    T.Cast("uint32", (s.length[row] + (e.lanes - 1)) // e.lanes)))

    return phase


def read_entry(e: Extents) -> Phase:
    """The lane's entry of a row, of some round; the phase is (s, io, row, r, words, at).

    Reads: `begin`, `length`, the entries. Writes: `words` from `at` on. Barriers: none.
    After: these words are the entry, or refer to the column of absent ones. Where copies of the states have an order of
    their own, or a gap, the place there is in the column's stead.
    """
    unit = 1 if e.words == 1 else e.column_bytes

    first, lacking = e.gap
    placed = e.by_slot or lacking > 0

    def absent(row: Any) -> tirx.PrimExpr:
        # Rows of the columns before the gap find a zero there.
        last = T.uint32(e.absent * unit)
        return T.Select(row % e.gates * e.hidden < first, T.uint32(first * unit), last) if lacking else last

    def place(s: Any, column: tirx.PrimExpr) -> tirx.PrimExpr:
        if lacking:
            return T.Cast("uint32", column) + T.Select(T.Cast("int32", column) >= first, T.uint32(lacking), T.uint32(0))
        return T.Cast("uint32", s.where[column] if e.by_slot else column)

    @T.inline
    def phase(s, io, row, r, words, at):
        words[at] = absent(row)
        if e.words == 2:
            words[at + 1] = T.uint32(0)
        if r * e.lanes + s.lane < s.length[row]:
            entry = T.meta_var(s.begin[row] + r * e.lanes + s.lane)
            if e.words == 1:
                words[at] = T.reinterpret("uint32", io.entries[entry, 0])
                if placed:
                    words[at] = (words[at] & T.uint32(0xFFFF0000)) | place(s, words[at] & T.uint32(0xFFFF))
            else:
                words[at] = place(s, io.entries[entry, 1]) * T.uint32(e.column_bytes)
                words[at + 1] = T.reinterpret("uint32", io.entries[entry, 0])

    return phase


def sum_of_zeros(e: Extents) -> Phase:
    """What a row adds up to if all states are zero: zero, or NaN where a value is none or infinite; the phase is (s,
    io, row).

    Reads: `begin`, `length`, `rounds`, the entries. Writes: `zeros`. Barriers: none, but all lanes of a warp take part.
    """
    read = read_entry(e)
    where, special = (0, INFINITY[e.dtype] << 16) if e.words == 1 else (1, INFINITY["float32"])

    @T.inline
    def phase(s, io, row):
        s.zeros[row] = T.float32(0)
        for r in T.serial(s.rounds[row]):
            read(s, io, row, r, s.word, 0)
            if (s.word[where] & T.uint32(special)) == T.uint32(special):
                s.zeros[row] = T.reinterpret("float32", T.uint32(NAN))
        for h in T.unroll(e.lanes.bit_length() - 1):
            s.zeros[row] = s.zeros[row] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.zeros[row], 1 << h, 32, 32)

    return phase


@phase
def hold(e, /, s, io, row, r):
    """Hold the r-th entry of a row in registers, in the extents' `form`."""
    read = T.meta_var(read_entry(e))
    first = T.meta_var(row * e.row_words)
    if e.form == "joined":
        read(s, io, row, r, s.weights, first + r)
    elif e.form == "apart" and e.words == 2:
        read(s, io, row, r, s.weights, first + r * 2)
    else:
        read(s, io, row, r, s.word, 0)
        if e.form == "apart":
            s.weights[first + r * 2] = place_of(e, s.word, 0)
            s.weights[first + r * 2 + 1] = T.reinterpret("uint32", value_of(e, s.word, 0))
        else:
            pair = T.meta_var(first + e.registers + r // 2)
            s.weights[first + r] = s.word[1]
            s.weights[pair] = T.Select(r % 2 == 0, T.uint32(0), s.weights[pair]) | (
                s.word[0] // T.uint32(e.column_bytes) << T.Cast("uint32", r % 2 * 16))


@phase
def load_weights(e, /, s, io):
    """Bring the group's weights on chip.

    Reads: the entries. Writes: `weights`, `zeros`. Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        for g in T.unroll(e.gates):
            for r in T.unroll(e.registers):
                hold(e)(s, io, u * e.gates + g, r)
            if e.resets:
                sum_of_zeros(e)(s, io, u * e.gates + g)


def load_ahead(e: Extents, begin: int = 0, end: int | None = None) -> Phase:
    """Begin the loads of the first round of each row that is not on chip; the phase is (s, io).

    `begin`, `end`: of the gates whose rows are loaded; all by default.

    Reads: `rounds`, the entries. Writes: `ahead`, where there is such a round. Barriers: none.
    """
    read = read_entry(e)
    gates = begin, e.gates if end is None else end

    @T.inline
    def phase(s, io):
        for u in T.unroll(e.units):
            for g in T.unroll(*gates):
                row = T.meta_var(u * e.gates + g)
                if s.rounds[row] > e.registers:
                    read(s, io, row, e.registers, s.ahead, row * e.words)

    return phase
# fmt: on
