"""What the phases of hashing, look-up and compaction keep, in registers and in shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from ..device.state import named, register
from .extents import WARP, CompactExtents, CountExtents, HashExtents, Room


def alloc_state(
    hashing: HashExtents | None = None,
    count: CountExtents | None = None,
    compact: CompactExtents | None = None,
    pool: Any = None,
    pool_at: int = 0,
) -> SimpleNamespace:
    """Allocate, within a kernel, the buffers and registers of the phases that it has.

    A kernel has the phases whose extents are given. Their dynamic shared memory is part of `pool`, a uint64 buffer,
    from byte `pool_at` on; without `pool` it is allocated here. It contains:

    ``row``     the row as float32, the copies of an element side by side
    ``places``  for each unit of a tile of bands, the place of its largest element
    ``codes``   the codes of a tile of bands
    ``spans``   buckets of all thread blocks of a cluster: the end in the high half, the beginning in the low one
    ``cells``   hit counts of words (`buckets` says how they are packed)
    ``bitmap``  a bit for each word of a list
    """
    room = Room.of(hashing, count, compact)
    if pool is None:
        pool = T.alloc_buffer([max(1, room.bytes // 8)], "uint64", scope="shared.dyn")
    kinds = {
        "spans": "uint64", "cells": "uint32", "row": "float32", "places": "int32", "codes": "int32", "bitmap": "uint32",
    }  # fmt: skip
    found: dict[str, Any] = {
        name: T.decl_buffer(
            [size],
            kinds[name],
            data=pool.data,
            elem_offset=room.at(name) + pool_at // (8 if name == "spans" else 4),
            scope="shared.dyn",
        )
        for name, size in vars(room).items()
        if size
    }
    if hashing:
        found |= {
            "raw": T.alloc_local([hashing.vectors * hashing.vector_words], "uint32"),
            "columns": T.alloc_local([hashing.ahead * hashing.column_loads * hashing.column_words], "uint32"),
            "vector": T.alloc_local([hashing.vec], "float32"),
            "small": T.alloc_local([1], "uint16"),
            "unit": register(),
            "place": T.alloc_local([hashing.ahead], "int32"),
            "best": T.alloc_local([hashing.ahead], "float32"),
            "value": register("float32"),
        }
    if count:
        found |= {
            "band": T.alloc_local([count.loads], "int32"),  # of the buckets in flight; -1 for none
            "code": T.alloc_local([count.loads], "int32"),
            "first": T.alloc_local([count.loads], "int32"),  # where a bucket begins, in all bands' words
            "last": T.alloc_local([count.loads], "int32"),  # where it ends
            "word": T.alloc_local([count.loads], "int32"),
            "entry": T.alloc_local([count.loads * 8 if count.cuckoo else 1], "int32"),
            "settled": T.alloc_shared([1], "int32"),  # whether the list's last cluster is at work
            "row_of": register(),
            "slot": register(),
            "base": register(),
            "local": register(),
            "owner": register(),
            "next": register(),
            "begin": register(),  # the first band of a tile
            "many": register(),  # bands of it
            "ticket": register(),
            "span": register("uint64"),
            "cell": register("uint32"),
            "low": register("uint32"),
            "high": register("uint32"),
        }
    if compact:
        found |= {
            "totals": T.alloc_shared([2 * WARP], "int32"),
            "counts": T.alloc_shared([2 * WARP], "int32"),
            "mine": T.alloc_local([2], "int32"),
            "other": T.alloc_local([1], "int32"),
            "before": register(),  # words before those that come next
            "total": register(),
        }
    loads = compact.loads if compact else 1
    found |= {
        "bits": T.alloc_local([1], "uint32"),
        "held": T.alloc_local([loads], "uint32"),  # of a bitmap
        "extra": T.alloc_local([loads], "uint32"),
        "at": register(),
    }
    return named(SimpleNamespace(**found))
