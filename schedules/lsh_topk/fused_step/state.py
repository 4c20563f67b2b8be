"""What the phases of the first two kernels of `fused_step` share, each its own: buffers and registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.state import named, register
from .space import FINISHED, OCTET, PER_VECTOR, SEGMENTS, WARP, Extents


def alloc_hash_state(e: Extents, row: Any, slice: Any, rank: Any, t: Any) -> SimpleNamespace:
    """Within the kernel that hashes: what `schedules.lsh` needs, and

    ``work_row``, ``work_list``, ``slice``, ``rank``   which row of all lists, which list and which slice are the
                                                       thread block's, and which of its cluster it is
    ``share``, ``from_band``, ``bands``   bands of a thread block, the first of its own, and how many these are
    ``begin``, ``many``                   of them those whose places are in shared memory

    Of the thread block, in shared memory:

    ``cells``            how often words of its part were hit
    ``spans``            pieces of buckets: where they begin and, in the high half, end; ``further``: how many there are
                         beside the first of each band
    ``sent``             hits of its part that others have found, as words of it, in segments, some for each of these;
                         ``many_got``: how many each has, or would have, had it room; ``many_sent``: how many it sent
                         itself, by the segments of others that it has
    ``row``, ``places``  see `schedules.lsh.hashing`
    ``votes``            words of the thread block's part that reach the threshold, as bits
    ``listed``           how many words go to the list, and where

    Of all its threads:

    ``base``    the first word of its part
    ``stride``  words of a piece of a bucket
    """
    h = e.hashing
    rounds = ceildiv(e.votes, e.hash_threads)
    pool = T.alloc_buffer([e.hash_bytes // 8], "uint64", scope="shared.dyn")
    found: dict[str, Any] = {"work_row": row, "work_list": row // e.beam, "slice": slice, "rank": rank}
    found |= {"t": t, "warp": t // WARP, "lane": t % WARP}
    at = 0
    kinds = {"spans": ("uint64", 8), "sent": ("uint16", 2), "row": ("float32", 4), "places": ("int32", 4)}
    for name, words in e.hash_arrays.items():
        kind, size = kinds.get(name, ("uint32", 4))
        found[name] = T.decl_buffer(
            [words * 4 // size], kind, data=pool.data, elem_offset=at // size, scope="shared.dyn"
        )
        at += words * 4
    found |= {
        "raw": T.alloc_local([h.vectors * h.vector_words], "uint32"),
        "columns": T.alloc_local([h.ahead * h.column_loads * h.column_words], "uint32"),
        "vector": T.alloc_local([h.vec], "float32"),
        "small": T.alloc_local([1], "uint16"),
        "place": T.alloc_local([h.ahead], "int32"),
        "best": T.alloc_local([h.ahead], "float32"),
        "value": register("float32"),
        "band": T.alloc_local([1], "int32"),
        "code": T.alloc_local([1], "int32"),
        "first": T.alloc_local([e.loads], "int32"),
        "last": T.alloc_local([e.loads], "int32"),
        "upcoming": T.alloc_local([e.loads], "int32"),
        "entry": T.alloc_local([8 if e.cuckoo else 1], "int32"),
        "listed": T.alloc_shared([2], "int32"),
        "further": T.alloc_shared([1], "int32"),
        "many_sent": T.alloc_shared([SEGMENTS], "int32"),
        "many_got": T.alloc_shared([SEGMENTS], "int32"),
        "span": register("uint64"),
        # Of a thread: words in flight.
        "word": T.alloc_local([e.loads * PER_VECTOR], "int32"),
        # Words of votes, of the bitmap as it was, and of `always`; how many words a lane has, and another one.
        **{name: T.alloc_local([rounds], "uint32") for name in ("reached", "before", "anyway")},
        "upto": T.alloc_local([1], "int32"),
        "other": T.alloc_local([1], "int32"),
        **{
            name: register()
            for name in (
                "share", "from_band", "bands", "begin", "many", "base", "unit", "row_of", "slot", "at", "next",
                "more", "going", "local", "place_at", "stride",
            )
        },
    }  # fmt: skip
    return named(SimpleNamespace(**found))


def alloc_product_state(e: Extents, t: Any) -> SimpleNamespace:
    """Within the kernel of the product.

    Where a thread is:

    ``t``, ``warp``, ``lane``   the thread, its warp and its lane
    ``group``, ``member``       in a fragment its row or word, of eight, and its vector of a chunk, of four
    ``block``                   of those of the group of lists
    ``first_list``, ``first_row``, ``rows``   of the group
    ``begin``                   the first of the thread block's frequent words
    ``part``, ``many``          0 for frequent words, 1 for those that reach the threshold; how many of them it has
    ``firsts``, ``upto``        of the words that reach the threshold where the thread block's first one of each of the
                                group's lists stands, and how many it has up to that list

    Of the thread block, in shared memory:

    ``states``  hidden states, `pitch` vectors apart, unless warps keep them
    ``sums``    parts of scores of `tile` words, `[part][row][word]`, rows `sum_pitch` apart
    ``names``   these words, and those of the tile that follows
    ``best``    ordered bits of the largest score of each row; ``exponentials``: the sum of their powers
    """
    found: dict[str, Any] = {"block": register(), "t": t, "warp": t // WARP, "lane": t % WARP}
    found |= {"group": t % WARP // 4, "member": t % 4}
    found |= {name: register() for name in ("first_list", "first_row", "rows", "begin", "part", "many")}
    pool = T.alloc_buffer([e.product_bytes // 8], "uint64", scope="shared.dyn")
    at = 0
    for name, kind, size in (("states", "uint32", e.state_bytes), ("sums", "float32", e.tile_bytes)):
        if size:
            found[name] = T.decl_buffer([size // 4], kind, data=pool.data, elem_offset=at // 4, scope="shared.dyn")
        at += size
    found |= {
        "names": T.alloc_shared([2 * e.tile + WARP], "int32"),
        "name": T.alloc_local([1], "int32"),
        "best": T.alloc_shared([e.octets * OCTET], "uint32"),
        "exponentials": T.alloc_shared([e.octets * OCTET], "float64"),
        "firsts": T.alloc_local([e.group_lists], "int32"),
        "upto": T.alloc_local([e.group_lists], "int32"),
        # The product: words of the job in hand; hidden states, of two steps in turn or of all the warp's part; the
        # parts of words of a chunk; sums; where the embedding is, and words of the job that is asked for; what a lane
        # has from another one; whether a job is asked for; the number of a job.
        "hand": T.alloc_local([e.hand], "uint32"),
        "state": T.alloc_local([e.state_held], "uint32"),
        **{name: T.alloc_local([8], "uint32") for name in ("high", "low") if e.halves == 2},
        "chains": T.alloc_local([e.chains * e.chain], "float32"),
        "base": register("uint64"),
        "at": T.alloc_local([4], "uint64"),
        "passed": register("uint32"),
        "asked": register(),
        "job": register(),
        # Of a lane: a score, its ordered bits and key, and the largest of these bits and another lane's.
        "score": T.alloc_local([1], "float32"),
        # Where the first word's key is to be, and which of the words are the row's.
        "key": T.alloc_local([1], "uint64"),
        "keys": register("uint64"),
        **{name: register() for name in ("own_from", "own_to")},
        "largest": T.alloc_local([1], "uint32"),
        "other_bits": T.alloc_local([1], "uint32"),
        "bits": T.alloc_local([1], "uint32"),
        # Names of words that a lane finishes together; scores of a lane, a power of one, and the sum of these.
        "some_names": T.alloc_local([FINISHED], "int32"),
        "held": T.alloc_local([ceildiv(e.tile, e.row_lanes)], "float32"),
        "rest_power": T.alloc_local([1], "float32"),
        "d": T.alloc_local([1], "float64"),
    }
    return named(SimpleNamespace(**found))
