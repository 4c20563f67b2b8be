"""What the phases of the first kernel of `fused_step` share: buffers and registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.overlap import wait_for_producer
from ...device.state import named, register
from .space import LISTED, PER_CELL, PER_JOB, WARP, Extents


@T.inline
def wait_late(overlap: Any):
    """Wait for the producer kernel, where that was not done at the beginning."""
    if overlap == 2:
        wait_for_producer()


def alloc_state(e: Extents, block: Any, t: Any) -> SimpleNamespace:
    """Within the kernel.

    Where a thread is:

    ``t``, ``warp``, ``lane``   the thread, its warp and its lane
    ``group``, ``member``       in a fragment its row or word, of eight, and its vector of a chunk, of four
    ``block``                   of those of the group of lists
    ``first_list``, ``first_row``, ``rows``   of the group
    ``begin``, ``mine``         the first of the thread block's frequent words, and how many it has

    Of the thread block, in shared memory:

    ``states``  hidden states, `pitch` vectors apart
    ``sums``    parts of scores, `[row][word][part]`, of `tile` frequent words or of `rest` that were won
    ``names``   words of the former
    ``won``, ``places``, ``owners``   words with hits enough: the word, where its keys go, and its list, of the group
    ``listed``  how many of these there are, and of those for which there is no room
    ``odd``     whether a float32 hidden state has an infinity or NaN
    ``best``    ordered bits of the largest score of each row, of words with places of the block's own;
                ``exponentials``: the sum of their powers
    """
    found: dict[str, Any] = {"block": register(), "t": t, "warp": t // WARP, "lane": t % WARP}
    found |= {"group": t % WARP // 4, "member": t % 4}
    found |= {name: register() for name in ("first_list", "first_row", "rows", "begin", "mine")}
    pool = T.alloc_buffer([e.pool_bytes // 8], "uint64", scope="shared.dyn")
    after = e.state_bytes // 4
    bands = after + ceildiv(e.hidden, 4) * 4
    for name, kind, at, size in (
        ("states", "uint32", 0, after),
        ("sums", "float32", after, e.sum_bytes // 4),
        ("row", "float32", after, e.hidden),
        ("upto", "int32", bands, e.band_tile),
        ("offset", "int32", bands + e.band_tile, e.band_tile),
        ("unit_places", "int32", bands + 2 * e.band_tile, e.band_tile * e.units),
        ("counts", "uint32", after + e.row_bytes // 4, e.slice // PER_CELL),
    ):
        found[name] = T.decl_buffer([size], kind, data=pool.data, elem_offset=at, scope="shared.dyn")
    found |= {
        "names": T.alloc_shared([e.tile], "int32"),
        "won": T.alloc_shared([LISTED], "int32"),
        "places": T.alloc_shared([LISTED], "int32"),
        "owners": T.alloc_shared([LISTED], "int32"),
        "listed": T.alloc_shared([1], "int32"),
        "odd": T.alloc_shared([1], "int32"),
        "best": T.alloc_shared([e.rows], "uint32"),
        "exponentials": T.alloc_shared([e.rows], "float64"),
        # The product: words of the jobs in hand, and of hidden states of two steps in turn; sums; which word a lane
        # loads; the number of a job; `odd`.
        "hand": T.alloc_local([e.depth * PER_JOB * 4], "uint32"),
        "state": T.alloc_local([2 * 8 * e.halves], "uint32"),
        **{name: T.alloc_local([4], "uint32") for name in ("b_high", "b_low", "b_finite") if e.halves == 2},
        "chains": T.alloc_local([e.chains * e.fragments * 4], "float32"),
        "word": T.alloc_local([e.depth], "int32"),
        "job": register(),
        "round": register(),
        "is_odd": register(),
        # Of a lane: a score, its ordered bits and key, and the largest of these bits.
        "score": T.alloc_local([1], "float32"),
        "key": T.alloc_local([1], "uint64"),
        "largest": T.alloc_local([1], "uint32"),
        "bits": T.alloc_local([1], "uint32"),
        # Scores of a lane, a power of one, and the sum of these.
        "held": T.alloc_local([ceildiv(max(e.tile, e.rest), WARP)], "float32"),
        "rest_power": T.alloc_local([1], "float32"),
        "d": T.alloc_local([1], "float64"),
    }
    return named(SimpleNamespace(**found))


def alloc_hash_state(e: Extents, s: SimpleNamespace) -> SimpleNamespace:
    """Within a thread block that looks words up: what `schedules.lsh` and the look-up need beside `s`.

    In shared memory, where sums will be:

    ``row``               the row
    ``places``            of units, of the bands in hand
    ``upto``, ``offset``  words of these bands' buckets as one list: how many up to a band's, and its offset to where
                          they lie
    ``totals``            words of each warp's bands
    ``counts``            hits of the slice's words, two in a cell
    """
    h = e.hashing
    more: dict[str, Any] = {
        **{name: getattr(s, name) for name in ("row", "upto", "offset", "counts")},
        "places": s.unit_places,
        "totals": T.alloc_shared([e.warps], "int32"),
        "raw": T.alloc_local([h.vectors * h.vector_words], "uint32"),
        "columns": T.alloc_local([h.ahead * h.column_loads * h.column_words], "uint32"),
        "vector": T.alloc_local([h.vec], "float32"),
        "small": T.alloc_local([1], "uint16"),
        "place": T.alloc_local([h.ahead], "int32"),
        "best": T.alloc_local([h.ahead], "float32"),
        "value": register("float32"),
        "band": T.alloc_local([1], "int32"),
        "code": T.alloc_local([1], "int32"),
        "first": T.alloc_local([1], "int32"),
        "last": T.alloc_local([1], "int32"),
        "entry": T.alloc_local([8 if e.cuckoo else 1], "int32"),
        # Words of a thread's bands and those before; words of the buckets: the band, the word, what its counts were,
        # its bits in `always`, and the ballot of those that were won.
        "sum": T.alloc_local([1], "int32"),
        "other": T.alloc_local([1], "int32"),
        "which": T.alloc_local([e.loads], "int32"),
        "word": T.alloc_local([e.loads], "int32"),
        "old": T.alloc_local([e.loads], "uint32"),
        "anyway": T.alloc_local([e.loads], "uint32"),
        "winners": T.alloc_local([e.loads], "uint32"),
        "rank": T.alloc_local([e.loads], "int32"),
        "left": register("uint32"),
    }
    more |= {
        name: register()
        for name in (
            "unit", "row_of", "slot", "from_band", "many", "list", "total", "item", "first_word", "winner", "slot_at",
            "place_at", "beyond", "lone_word",
        )
    }  # fmt: skip
    return named(SimpleNamespace(
        **more, t=s.t, lane=s.lane, warp=s.warp, block=s.block, first_row=s.first_row, first_list=s.first_list,
        block_state=s))  # fmt: skip
