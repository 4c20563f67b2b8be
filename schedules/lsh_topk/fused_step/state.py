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
    """Within the kernel that hashes: what `schedules.lsh` needs, and what is described here."""

    # Which row of all lists, which list and which slice are the thread block's, and which of its cluster it is.
    work_row: Any
    work_list: Any
    slice: Any
    rank: Any
    # The thread, its warp and its lane.
    t: Any
    warp: Any
    lane: Any
    # Shared: pieces of buckets: where they begin and, in the high half, end.
    spans: Any = _hashed("spans", "uint64", 8)
    # Shared: hits of the thread block's part that others have found, as tokens of it, in segments, some for each of
    # these.
    sent: Any = _hashed("sent", "uint16", 2)
    # Shared: how often tokens of its part were hit.
    cells: Any = _hashed("cells")
    # See `schedules.lsh.hashing`.
    row: Any = _hashed("row", "float32")
    places: Any = _hashed("places", "int32")
    # Shared: tokens of the part that reach the threshold, as bits.
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
    # The ends of the pieces in flight, a lane's place in them, and its tokens.
    first: Any = local("int32", lambda e: e.loads)
    last: Any = local("int32", lambda e: e.loads)
    upcoming: Any = local("int32", lambda e: e.loads)

    entry: Any = local("int32", lambda e: 8 if e.cuckoo else 1)
    # Shared: how many tokens go to the list, and where.
    listed: Any = shared("int32", 2)
    # Shared: how many pieces there are beside the first of each band.
    further: Any = shared("int32")
    # Shared: how many hits the thread block sent, by the segments of others that it has; and how many each of its own
    # segments has, or would have, had it room.
    many_sent: Any = shared("int32", SEGMENTS)
    many_got: Any = shared("int32", SEGMENTS)

    span: Any = scalar("uint64")
    # As `first`.
    word: Any = local("int32", lambda e: e.loads * PER_VECTOR)
    # A thread's words of votes, of the bitmap as it was, and of `always`.
    reached: Any = local("uint32", _rounds)
    before: Any = local("uint32", _rounds)
    anyway: Any = local("uint32", _rounds)
    # How many tokens a lane has, and another one.
    upto: Any = local("int32")
    other: Any = local("int32")
    # Bands of a thread block, the first of its own, and how many these are.
    share: Any = scalar()
    from_band: Any = scalar()
    bands: Any = scalar()
    # The first of these bands whose places are in shared memory, and how many they are.
    begin: Any = scalar()
    many: Any = scalar()
    # The first token of the thread block's part.
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
    # Tokens of a piece of a bucket.
    stride: Any = scalar()


@dataclass
class ProductState(Buffers):
    """Within the kernel of the product."""

    # The thread, its warp and its lane.
    t: Any
    warp: Any
    lane: Any
    # In a fragment its row or token, of eight, and its vector of a chunk, of four.
    group: Any
    member: Any
    # Which thread block of the group of lists it is.
    block: Any = scalar()
    # The group's first list, its first row, and how many rows it has.
    first_list: Any = scalar()
    first_row: Any = scalar()
    rows: Any = scalar()
    # The first of the thread block's frequent tokens.
    begin: Any = scalar()
    # 0 for frequent tokens, 1 for those that reach the threshold; how many of them it has.
    part: Any = scalar()
    many: Any = scalar()
    # Shared: hidden states, `pitch` vectors apart, unless warps keep them.
    states: Any = pooled("uint32", lambda e: e.state_bytes // 4, 0, when=lambda e: e.state_bytes)
    # Shared: parts of scores of `tile` tokens, `[part][row][token]`, rows `sum_pitch` apart.
    sums: Any = pooled("float32", lambda e: e.tile_bytes // 4, lambda e: e.state_bytes // 4)
    # Shared: these tokens, and those of the tile that follows; a thread's one.
    names: Any = shared("int32", lambda e: 2 * e.tile + WARP)
    name: Any = local("int32")
    # Shared: ordered bits of the largest score of each row; the sum of the powers of its scores.
    best: Any = shared("uint32", lambda e: e.octets * OCTET)
    exponentials: Any = shared("float64", lambda e: e.octets * OCTET)
    # Where the thread block's first token that reaches the threshold stands in each of the group's lists, and how many
    # it has up to that list.
    firsts: Any = local("int32", lambda e: e.group_lists)
    upto: Any = local("int32", lambda e: e.group_lists)
    # Tokens of the job in hand.
    hand: Any = local("uint32", lambda e: e.hand)
    # Hidden states, of two steps in turn or of all the warp's part.
    state: Any = local("uint32", lambda e: e.state_held)
    # The parts of tokens of a chunk, of float32.
    high: Any = local("uint32", 8, when=lambda e: e.halves == 2)
    low: Any = local("uint32", 8, when=lambda e: e.halves == 2)
    # Sums.
    chains: Any = local("float32", lambda e: e.chains * e.chain)
    # The embedding's address, and those of the tokens of the job that is requested next.
    base: Any = scalar("uint64")
    at: Any = local("uint64", 4)
    # A register from another lane; whether a job is requested; the number of a job.
    passed: Any = scalar("uint32")
    asked: Any = scalar()
    job: Any = scalar()
    # A lane's score, its key and ordered bits, the largest of these bits, and another lane's.
    score: Any = local("float32")
    key: Any = local("uint64")
    # Where the first token's key is to be, and which of the tokens are the row's.
    keys: Any = scalar("uint64")
    own_from: Any = scalar()
    own_to: Any = scalar()
    # As `score`.
    largest: Any = local("uint32")
    other_bits: Any = local("uint32")
    bits: Any = local("uint32")
    # Names of tokens that a lane finishes together; its scores.
    some_names: Any = local("int32", FINISHED)
    held: Any = local("float32", lambda e: ceildiv(e.tile, e.row_lanes))
    # A power of a score, and the sum of these.
    rest_power: Any = local("float32")
    d: Any = local("float64")

    @classmethod
    def of_thread(cls, e: Extents, t: Any) -> ProductState:
        place = {"warp": t // WARP, "lane": t % WARP, "group": t % WARP // 4, "member": t % 4}
        return cls.alloc(e, e.product_bytes, t=t, **place)
