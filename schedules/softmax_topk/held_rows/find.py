"""All of a block's share that can be among the row's k best: what reaches its bound, and the ways out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .bound import bound_equals, find_bound, find_firsts, find_tops
from .early import take_early
from .keys import clear_behind, put_reached, select_keys
from .listed import list_steps, put_listed
from .space import Layout


# fmt: off
def find_keys(layout: Layout, meanwhile: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """All of the block's share that can be among the row's k best. The phase is (s).

    `meanwhile`: a phase (s) for the time until all warps have found theirs.

    Reads: `raw`, `top`, `tops`; with an early bound what `list_steps`, `put_listed` and `take_early` do, and `tops`,
        which come as 0; `firsts`, `last` and `count`, which come as the number of columns and 0.
    Writes: `found_keys`, `size`, at most `Layout.room`; `until` and scratch.
    Barriers: several, the last at the end.
    """
    bound, firsts, equals, select, tops = (
        find_bound(layout), find_firsts(layout), bound_equals(layout), select_keys(layout), find_tops(layout))
    most_equals = (layout.early_groups if layout.early else layout.groups) // 2

    def put_from(limited: bool) -> Callable[..., Any]:
        """The keys of what reaches the bound."""
        if not layout.early:
            return put_reached(layout)
        listed, put = list_steps(layout, limited), put_listed(layout)

        @T.inline
        def phase(s):
            listed(s)
            T.cuda.cta_sync()
            put(s)

        return phase

    def too_many(s: Any) -> Any:
        """Whether there was no room for all."""
        found = s.count[0] > layout.room
        return T.Or(found, s.listed[0] > layout.reached_room) if layout.early else found

    put, put_limited = put_from(False), put_from(True)

    @T.inline
    def put_anew(s):
        """With a column for the bound; else the k best."""
        T.cuda.cta_sync()
        if s.t == 0:
            s.count[0] = 0
            if layout.early:
                s.listed[0] = 0
        firsts(s)
        equals(s, s.tops, s.firsts)
        put_limited(s)
        T.cuda.cta_sync()
        if too_many(s):
            T.cuda.cta_sync()
            select(s)
        s.size[0] = s.count[0]
        if layout.cluster == 1:
            clear_behind(layout, s)

    @T.inline
    def phase(s):
        if layout.early:
            take_early(layout, s)
        else:
            bound(s, s.tops)
        s.until[0] = layout.vocab
        # Of few distinct values it is known beforehand that too many reach the bound.
        if s.equals[0] <= most_equals:
            put(s)
        if meanwhile is not None:
            meanwhile(s)
        T.cuda.cta_sync()
        s.size[0] = s.count[0]
        if too_many(s) or s.equals[0] > most_equals:
            if layout.early:
                # The bound of all of the block's share.
                tops(s)
                bound(s, s.tops)
            put_anew(s)

    return phase
# fmt: on
