"""What the phases of the first two kernels of `fused_step` share, each its own: buffers and registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.template import ceildiv

from ...device.state import Buffers, local, pooled, scalar, shared
from .space import FINISHED, OCTET, PER_VECTOR, SEGMENTS, WARP, Extents


def _hashed(name: str, dtype: str = "uint32", size: int = 4) -> Any:
    """An array in the dynamic shared memory of the kernel that hashes, of elements of `size` bytes."""

    def at(e: Extents) -> int:
        before = list(e.hash_arrays)[: list(e.hash_arrays).index(name)]
        return sum(e.hash_arrays[one] for one in before) * 4 // size

    return pooled(dtype, lambda e: e.hash_arrays[name] * 4 // size, at)


def _rounds(e: Extents) -> int:
    """Number of 32-bit words of votes that a thread has."""
    return ceildiv(e.votes, e.hash_threads)


@dataclass
class HashState(Buffers):
    """Within the kernel that hashes: what `schedules.lsh` needs, and what is described here.

    Attributes
    ----------
    work_row, work_list, slice, rank
        Which row of all lists, which list and which slice are the thread block's, and which of its cluster it is.
    t, warp, lane
        The thread, its warp and its lane.
    spans
        Shared: pieces of buckets: where they begin and, in the high half, end.
    sent
        Shared: hits of the thread block's part that others have found, as tokens of it, in segments, some for each of
        these.
    cells
        Shared: how often tokens of its part were hit.
    row, places
        See `schedules.lsh.hashing`.
    votes
        Shared: tokens of the part that reach the threshold, as bits.
    first, last, upcoming, word
        The ends of the pieces in flight, a lane's place in them, and its tokens.
    listed
        Shared: how many tokens go to the list, and where.
    further
        Shared: how many pieces there are beside the first of each band.
    many_sent, many_got
        Shared: how many hits the thread block sent, by the segments of others that it has; and how many each of its own
        segments has, or would have, had it room.
    reached, before, anyway
        A thread's words of votes, of the bitmap as it was, and of `always`.
    upto, other
        How many tokens a lane has, and another one.
    share, from_band, bands
        Bands of a thread block, the first of its own, and how many these are.
    begin, many
        The first of these bands whose places are in shared memory, and how many they are.
    base
        The first token of the thread block's part.
    stride
        Tokens of a piece of a bucket.
    """

    work_row: Any
    work_list: Any
    slice: Any
    rank: Any
    t: Any
    warp: Any
    lane: Any
    spans: Any = _hashed("spans", "uint64", 8)
    sent: Any = _hashed("sent", "uint16", 2)
    cells: Any = _hashed("cells")
    row: Any = _hashed("row", "float32")
    places: Any = _hashed("places", "int32")
    votes: Any = _hashed("votes")
    raw: Any = local("uint32", lambda e: e.hashing.vectors * e.hashing.vector_words)
    columns: Any = local("uint32", lambda e: e.hashing.ahead * e.hashing.column_loads * e.hashing.column_words)
    vector: Any = local("float32", lambda e: e.hashing.vec)
    small: Any = local("uint16")
    place: Any = local("int32", lambda e: e.hashing.ahead)
    best: Any = local("float32", lambda e: e.hashing.ahead)
    value: Any = scalar("float32")
    band: Any = local("int32")
    code: Any = local("int32")
    first: Any = local("int32", lambda e: e.loads)
    last: Any = local("int32", lambda e: e.loads)
    upcoming: Any = local("int32", lambda e: e.loads)
    entry: Any = local("int32", lambda e: 8 if e.cuckoo else 1)
    listed: Any = shared("int32", 2)
    further: Any = shared("int32")
    many_sent: Any = shared("int32", SEGMENTS)
    many_got: Any = shared("int32", SEGMENTS)
    span: Any = scalar("uint64")
    word: Any = local("int32", lambda e: e.loads * PER_VECTOR)
    reached: Any = local("uint32", _rounds)
    before: Any = local("uint32", _rounds)
    anyway: Any = local("uint32", _rounds)
    upto: Any = local("int32")
    other: Any = local("int32")
    share: Any = scalar()
    from_band: Any = scalar()
    bands: Any = scalar()
    begin: Any = scalar()
    many: Any = scalar()
    base: Any = scalar()
    unit: Any = scalar()
    row_of: Any = scalar()
    slot: Any = scalar()
    at: Any = scalar()
    next: Any = scalar()
    more: Any = scalar()
    going: Any = scalar()
    local: Any = scalar()
    place_at: Any = scalar()
    stride: Any = scalar()


@dataclass
class ProductState(Buffers):
    """Within the kernel of the product.

    Attributes
    ----------
    t, warp, lane
        The thread, its warp and its lane.
    group, member
        In a fragment its row or token, of eight, and its vector of a chunk, of four.
    block
        Which thread block of the group of lists it is.
    first_list, first_row, rows
        The group's first list, its first row, and how many rows it has.
    begin
        The first of the thread block's frequent tokens.
    part, many
        0 for frequent tokens, 1 for those that reach the threshold; how many of them it has.
    states
        Shared: hidden states, `pitch` vectors apart, unless warps keep them.
    sums
        Shared: parts of scores of `tile` tokens, `[part][row][token]`, rows `sum_pitch` apart.
    names, name
        Shared: these tokens, and those of the tile that follows; a thread's one.
    best, exponentials
        Shared: ordered bits of the largest score of each row; the sum of the powers of its scores.
    firsts, upto
        Where the thread block's first token that reaches the threshold stands in each of the group's lists, and how
        many it has up to that list.
    hand
        Tokens of the job in hand.
    state
        Hidden states, of two steps in turn or of all the warp's part.
    high, low
        The parts of tokens of a chunk, of float32.
    chains
        Sums.
    base, at
        The embedding's address, and those of the tokens of the job that is requested next.
    passed, asked, job
        A register from another lane; whether a job is requested; the number of a job.
    score, key, bits, largest, other_bits
        A lane's score, its key and ordered bits, the largest of these bits, and another lane's.
    keys, own_from, own_to
        Where the first token's key is to be, and which of the tokens are the row's.
    some_names, held
        Names of tokens that a lane finishes together; its scores.
    rest_power, d
        A power of a score, and the sum of these.
    """

    t: Any
    warp: Any
    lane: Any
    group: Any
    member: Any
    block: Any = scalar()
    first_list: Any = scalar()
    first_row: Any = scalar()
    rows: Any = scalar()
    begin: Any = scalar()
    part: Any = scalar()
    many: Any = scalar()
    states: Any = pooled("uint32", lambda e: e.state_bytes // 4, 0, when=lambda e: e.state_bytes)
    sums: Any = pooled("float32", lambda e: e.tile_bytes // 4, lambda e: e.state_bytes // 4)
    names: Any = shared("int32", lambda e: 2 * e.tile + WARP)
    name: Any = local("int32")
    best: Any = shared("uint32", lambda e: e.octets * OCTET)
    exponentials: Any = shared("float64", lambda e: e.octets * OCTET)
    firsts: Any = local("int32", lambda e: e.group_lists)
    upto: Any = local("int32", lambda e: e.group_lists)
    hand: Any = local("uint32", lambda e: e.hand)
    state: Any = local("uint32", lambda e: e.state_held)
    high: Any = local("uint32", 8, when=lambda e: e.halves == 2)
    low: Any = local("uint32", 8, when=lambda e: e.halves == 2)
    chains: Any = local("float32", lambda e: e.chains * e.chain)
    base: Any = scalar("uint64")
    at: Any = local("uint64", 4)
    passed: Any = scalar("uint32")
    asked: Any = scalar()
    job: Any = scalar()
    score: Any = local("float32")
    key: Any = local("uint64")
    keys: Any = scalar("uint64")
    own_from: Any = scalar()
    own_to: Any = scalar()
    largest: Any = local("uint32")
    other_bits: Any = local("uint32")
    bits: Any = local("uint32")
    some_names: Any = local("int32", FINISHED)
    held: Any = local("float32", lambda e: ceildiv(e.tile, e.row_lanes))
    rest_power: Any = local("float32")
    d: Any = local("float64")

    @classmethod
    def of_thread(cls, e: Extents, t: Any) -> ProductState:
        place = {"warp": t // WARP, "lane": t % WARP, "group": t % WARP // 4, "member": t % 4}
        return cls.alloc(e, e.product_bytes, t=t, **place)
