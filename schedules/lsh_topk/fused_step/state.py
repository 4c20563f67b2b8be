"""What the phases of the first kernel of `fused_step` share: buffers and registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from ...device.overlap import wait_for_producer
from ...device.state import named, register
from .space import LISTED, PER_JOB, REST, WARP, Extents


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
    ``spare``                   how many of these are yet to be multiplied beside words that it won

    Of the thread block, in shared memory:

    ``states``  hidden states, `pitch` vectors apart
    ``sums``    parts of scores of `tile` frequent words, `[row][word][part]`; ``rest``: of `REST` others
    ``names``   words of the former
    ``won``, ``places``, ``owners``   words with hits enough: the word, where its keys go, and its list, of the group
    ``listed``  how many of these there are, and of those for which there is no room
    ``odd``     whether a float32 hidden state has an infinity or NaN
    ``best``    ordered bits of the largest score of each row, of words with places of the block's own;
                ``exponentials``: the sum of their powers
    """
    found: dict[str, Any] = {"block": register(), "t": t, "warp": t // WARP, "lane": t % WARP}
    found |= {"group": t % WARP // 4, "member": t % 4}
    found |= {name: register() for name in ("first_list", "first_row", "rows", "begin", "mine", "spare")}
    pool = T.alloc_buffer([e.pool_bytes // 8], "uint64", scope="shared.dyn")
    at = 0
    for name, size in (("states", e.state_bytes), ("sums", e.tile_bytes), ("rest", e.rest_bytes)):
        kind = "uint32" if name == "states" else "float32"
        found[name] = T.decl_buffer([size // 4], kind, data=pool.data, elem_offset=at // 4, scope="shared.dyn")
        at += size
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
        "held": T.alloc_local([max(e.tile, REST) // WARP + 1], "float32"),
        "rest_power": T.alloc_local([1], "float32"),
        "d": T.alloc_local([1], "float64"),
    }
    return named(SimpleNamespace(**found, pool=pool, pool_at=at))


def alloc_hash_state(e: Extents, s: SimpleNamespace) -> SimpleNamespace:
    """Within the warps that hash: `s` with what `schedules.lsh` and the look-up need, each warp with its own part of
    shared memory. `look` is the warp's number among them."""
    h = e.hashing
    look = s.warp - e.product_warps
    width = (e.hidden + 3) // 4 * 4
    places = s.pool_at // 4 + e.hash_warps * width
    more: dict[str, Any] = {
        "look": look,
        "row": T.decl_buffer(
            [e.hidden], "float32", data=s.pool.data, elem_offset=s.pool_at // 4 + look * width, scope="shared.dyn"
        ),
        "places": T.decl_buffer(
            [WARP], "int32", data=s.pool.data, elem_offset=places + look * WARP, scope="shared.dyn"
        ),
        "raw": T.alloc_local([h.vectors * h.vector_words], "uint32"),
        "columns": T.alloc_local([h.column_loads * h.column_words], "uint32"),
        "vector": T.alloc_local([h.vec], "float32"),
        "small": T.alloc_local([1], "uint16"),
        "place": T.alloc_local([1], "int32"),
        "best": T.alloc_local([1], "float32"),
        "value": register("float32"),
        "band": T.alloc_local([1], "int32"),
        "code": T.alloc_local([1], "int32"),
        "first": T.alloc_local([1], "int32"),
        "last": T.alloc_local([1], "int32"),
        "entry": T.alloc_local([8 if e.cuckoo else 1], "int32"),
        # Words of the buckets as one list: how many up to a lane's, its offset to where they lie, and what a lane has
        # of them: the word, what its counts were, its bits in `always`, and the ballot of those that were won.
        "upto": T.alloc_local([1], "int32"),
        "other": T.alloc_local([1], "int32"),
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
            "unit", "row_of", "slot", "at", "from_band", "many", "member_row", "list", "total", "offset", "item",
            "which", "slot_at", "place_at", "beyond", "lone_word",
        )
    }  # fmt: skip
    return named(SimpleNamespace(**more, t=s.t, lane=s.lane, block=s.block, rows=s.rows, first_row=s.first_row,
                                 first_list=s.first_list, block_state=s))  # fmt: skip
