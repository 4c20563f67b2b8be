"""Which units a thread works for, and their weights, which it keeps for all steps.

Position p of a row is lane p % `lanes`'s, in its round p // `lanes`. The first rounds of a row stay in registers, the
next in shared memory, and what is left is read anew in every step. An entry that a row does not have refers to the
column behind the last one, where a zero is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...device.selection import FULL_WARP
from ...device.words import value_in
from ...recurrent.exchange import INFINITY
from .space import Extents

Phase = Callable[..., Any]
NAN = 0x7FC00000


def place_of(e: Extents, words: tirx.Buffer, at: Any) -> tirx.PrimExpr:
    """Where the states of an entry's column are, in bytes from the first one's; `at`: of the entry's first word."""
    if e.words == 1:
        return (words[at] & T.uint32(0xFFFF)) * T.uint32(e.column_bytes)
    return words[at]


def value_of(e: Extents, words: tirx.Buffer, at: Any) -> tirx.PrimExpr:
    """An entry's value."""
    return value_in(e.dtype, words[at], 1) if e.words == 1 else T.reinterpret("float32", words[at + 1])


# fmt: off
def take_units(e: Extents) -> Phase:
    """Deal the slots out: to the blocks equally many neighbours, to a block's groups in turn; the phase is (s, io,
    block).

    Neighbouring groups so have neighbouring slots, which the host has given rows of similar lengths.

    Reads: `units`, `row_start`.
    Writes: `first`, `count`, `unit`, `rounds`. A group without a slot has rows without entries.
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
                s.length[0] = io.row_start[slot * e.gates + g + 1] - io.row_start[slot * e.gates + g]
                if u * e.groups + s.group >= s.count[0]:
                    s.length[0] = 0
                s.rounds[u * e.gates + g] = T.Cast("int32", T.call_extern(
                    "uint32", "__reduce_max_sync", T.uint32(FULL_WARP),
                    T.Cast("uint32", (s.length[0] + (e.lanes - 1)) // e.lanes)))

    return phase


def find_row(e: Extents) -> Phase:
    """Reads: `row_start`. Writes: `begin`, `length` of a row, 0 for a group without a slot. Barriers: none. The phase
    is (s, io, u, g)."""

    @T.inline
    def phase(s, io, u, g):
        slot: T.int32 = s.first[0] + T.min(u * e.groups + s.group, s.count[0] - 1)
        s.begin[0] = io.row_start[slot * e.gates + g]
        s.length[0] = io.row_start[slot * e.gates + g + 1] - s.begin[0]
        if u * e.groups + s.group >= s.count[0]:
            s.length[0] = 0

    return phase


def read_entry(e: Extents) -> Phase:
    """The lane's entry of a row, of some round; the phase is (s, io, r).

    Reads: `begin`, `length`, the entries. Writes: `word`. Barriers: none.
    After: `word` is the entry, or refers to the column behind the last.
    """
    absent = e.hidden if e.words == 1 else e.hidden * e.column_bytes

    @T.inline
    def phase(s, io, r):
        s.word[0] = T.uint32(absent)
        s.word[1] = T.uint32(0)
        if r * e.lanes + s.lane < s.length[0]:
            if e.words == 1:
                s.word[0] = T.reinterpret("uint32", io.entries[s.begin[0] + r * e.lanes + s.lane, 0])
            else:
                s.word[0] = T.Cast("uint32", io.entries[s.begin[0] + r * e.lanes + s.lane, 1]) * T.uint32(
                    e.column_bytes)
                s.word[1] = T.reinterpret("uint32", io.entries[s.begin[0] + r * e.lanes + s.lane, 0])

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
            read(s, io, r)
            if (s.word[where] & T.uint32(special)) == T.uint32(special):
                s.zeros[row] = T.reinterpret("float32", T.uint32(NAN))
        for h in T.unroll(e.lanes.bit_length() - 1):
            s.zeros[row] = s.zeros[row] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.zeros[row], 1 << h, 32, 32)

    return phase


def load_weights(e: Extents) -> Phase:
    """Bring the group's weights on chip; the phase is (s, io).

    Reads: the entries. Writes: `weights`, `kept`, `zeros`.
    Barriers: none: a lane reads of `kept` what it wrote. All lanes of a warp take part.
    """
    find, read, add_zeros = find_row(e), read_entry(e), sum_of_zeros(e)

    @T.inline
    def phase(s, io):
        for u in T.unroll(e.units):
            for g in T.unroll(e.gates):
                find(s, io, u, g)
                for r in T.unroll(e.registers):
                    read(s, io, r)
                    for w in T.unroll(e.words):
                        s.weights[((u * e.gates + g) * e.registers + r) * e.words + w] = s.word[w]
                if e.shared > 0:
                    if u * e.groups + s.group < s.count[0]:
                        for r in T.serial(e.shared):
                            read(s, io, e.registers + r)
                            for w in T.unroll(e.words):
                                s.kept[kept_at(e, s, u, g, r) + w] = s.word[w]
                if e.resets:
                    add_zeros(s, io, u * e.gates + g)

    return phase
# fmt: on


def kept_at(e: Extents, s: Any, u: Any, g: Any, r: Any) -> tirx.PrimExpr:
    """Where in `kept` the lane's entry of a round is."""
    slot = u * e.groups + s.group
    return (((slot * e.gates + g) * e.shared + r) * e.lanes + s.lane) * e.words
