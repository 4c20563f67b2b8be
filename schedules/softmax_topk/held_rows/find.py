"""All of a block's share that can be among the row's k best: what reaches its bound, and the ways out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from .agreement import take_agreed
from .bound import bound_columns, bound_equals, find_bound, find_first_reached, find_firsts, find_tops
from .keys import clear_behind, put_reached, put_single, select_keys
from .listed import list_steps, put_listed
from .space import Layout


# fmt: off
@phase
def bound_anew(layout, /, s):
    """A bound with a column up to which its equals are wanted, where too many reach it.

    A bound on which blocks have agreed of all of the row stays, and each has a column of its own. Else the bound is
    that of all of the block's share.

    Reads, writes: as `find_first_reached` and `bound_columns`, or `find_tops`, `find_bound`, `find_firsts` and
        `bound_equals`.
    Barriers: several.
    After: `bound` and `until` are the same in all threads.
    """
    if layout.late:
        find_first_reached(layout)(s)
        bound_columns(layout)(s)
    else:
        # With an early bound, the block has no tops of its own yet.
        if layout.early:
            find_tops(layout)(s)
            find_bound(layout)(s, s.tops)
        find_firsts(layout)(s)
        bound_equals(layout)(s, s.tops, s.firsts)


def find_keys(layout: Layout, meanwhile: Callable[..., Any] | None) -> Phase:
    """All of the block's share that can be among the row's k best. The phase is (s).

    `meanwhile`: a phase (s) for the time until all warps have found theirs.

    Reads: `raw`, `top`, `tops`; where blocks agree on a bound what `take_agreed`, `list_steps` and `put_listed` do, and
        `tops`, which come as 0; `firsts`, `last` and `count`, which come as the number of columns and 0.
    Writes: `found_keys`, `size`, at most `Layout.room`; `until` and scratch.
    Barriers: several, the last at the end.
    """
    bound, another, select = find_bound(layout), bound_anew(layout), select_keys(layout)
    most_equals = layout.row_groups // 2

    def put_from(limited: bool) -> Phase:
        """Append the keys of what reaches the bound."""
        if layout.late and not limited:
            return put_single(layout)
        if not layout.early:
            return put_reached(layout, limited)
        listed, put = list_steps(layout, limited), put_listed(layout)

        @T.inline
        def phase(s):
            listed(s)
            T.cuda.cta_sync()
            put(s)

        return phase

    def too_many(s: Any) -> Any:
        """Whether more keys reach the bound than there is room for."""
        found = s.count[0] > layout.room
        return T.Or(found, s.listed[0] > layout.reached_room) if layout.early else found

    put, put_limited = put_from(False), put_from(True)

    @T.inline
    def put_anew(s):
        """Append the keys anew, with a column for the bound; if that is not enough, select the k best."""
        T.cuda.cta_sync()
        if s.t == 0:
            s.count[0] = 0
            if layout.early:
                s.listed[0] = 0
        another(s)
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
        if layout.agreed:
            take_agreed(layout, s)
        else:
            bound(s, s.tops)
        s.until[0] = layout.vocab
        # In a row with few distinct values it is known beforehand that too many elements reach the bound.
        if s.equals[0] <= most_equals:
            put(s)
        if meanwhile is not None:
            meanwhile(s)
        T.cuda.cta_sync()
        s.size[0] = s.count[0]
        if too_many(s) or s.equals[0] > most_equals:
            put_anew(s)

    return phase
# fmt: on
