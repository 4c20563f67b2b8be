"""What softmax and logsumexp make of a row's pair (m, d): probabilities of all elements, or one value a row."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.arithmetic import LOG2_E
from ...rows.cut import Extents
from ...rows.hold import fence_tile, load_tile, take_tile, value
from ...rows.sum import scaled


# fmt: off
@T.inline
def result(s, logit, log):
    """Reads: `top`, the row's maximum, and `d`, made into a divisor or subtrahend by `normalise`.

    After: `power` is the result for one logit. `log` is known when the kernel is generated.
    """
    if log:
        s.power = logit - s.top - s.d
    else:
        T.ptx.ex2.approx.ftz.f32(s.power, (logit - s.top) * T.float32(LOG2_E))
        s.power = s.power * s.d


@phase
def store_vectors(ext, /, s, elements, base, inside, log):
    """Store a tile's results; `inside` vectors of each thread lie in the row for certain."""
    for u in T.unroll(ext.vectors):
        for v in T.unroll(ext.width):
            if ext.in_place:
                s.out[v] = (value(ext, s.raw, u * ext.width + v) - s.shift) * s.scale + s.offset
            else:
                result(s, value(ext, s.raw, u * ext.width + v), log)
                s.out[v] = T.Cast(ext.out_dtype, s.power)
        if u < inside or base + u * ext.threads + s.t < s.count:
            for n in T.unroll(ext.stores):
                for v in T.vectorized(ext.width // ext.stores):
                    elements[
                        (s.first + T.Cast("int64", base + u * ext.threads + s.t)) * ext.width
                        + n * (ext.width // ext.stores) + v
                    ] = s.out[n * (ext.width // ext.stores) + v]


@phase
def store_tile(ext, /, s, elements, base, inside, log):
    """Reads: `raw`, and what `normalise` wrote. Writes: the probabilities of the tile's vectors; `out`, `power`.

    Barriers: none. `base` and `inside`: as in `load_tile`.
    """
    # Two loops, and not a branch in one: the compiler would first work out, for all elements, what both share.
    if ext.in_place:
        store_vectors(ext)(s, elements, base, inside, False)
    elif log != 0:
        store_vectors(ext)(s, elements, base, inside, True)
    else:
        store_vectors(ext)(s, elements, base, inside, False)


@phase
def normalise(ext, /, s, log):
    """Reads: (top, d), the row's pair, and `m`, this thread's. Writes: `d`, `scale`, `shift`, `offset`. Barriers: none.

    After: `d` is the logarithm of the row's sum for log-probabilities, else its reciprocal. Exponentials in registers
    are relative to `m`, which `scale` makes good.
    """
    if log != 0:
        s.d = T.log(s.d)
        if ext.in_place:
            s.shift = s.top
            s.scale = T.float32(1)
            s.offset = -s.d
    else:
        s.d = T.float32(1) / s.d
        if ext.in_place:
            s.shift = T.float32(0)
            s.scale = T.exp2(scaled(s, s.m - s.top)) * s.d
            s.offset = T.float32(0)


def write(ext: Extents) -> Phase:
    """Reads: the part's vectors from where they are, and what `normalise` wrote. Writes: their probabilities.

    Barriers: none.
    """
    return {"registers": _write_held, "shared": _write_staged, "nowhere": _write_streamed}[ext.keep](ext)


@phase
def _write_held(ext, /, s, views, block, log):
    fence_tile(ext)(s)
    store_tile(ext)(s, views.elements, 0, ext.certain, log)


@phase
def _write_staged(ext, /, s, views, block, log):
    for i in T.serial(ext.full_tiles + ext.other_tiles):
        take_tile(ext)(s, block.stage, i * ext.tile)
        store_tile(ext)(s, views.elements, i * ext.tile, 0, log)


@phase
def _write_streamed(ext, /, s, views, block, log):
    load, store = T.meta_var(load_tile(ext)), T.meta_var(store_tile(ext))
    # Backwards: what was read last is likeliest to be in a cache.
    for i in T.serial(ext.other_tiles):
        load(s, views.words, (ext.full_tiles + i) * ext.tile, 0)
        store(s, views.elements, (ext.full_tiles + i) * ext.tile, 0, log)
    for i in T.serial(ext.full_tiles):
        load(s, views.words, (ext.full_tiles - 1 - i) * ext.tile, ext.vectors)
        store(s, views.elements, (ext.full_tiles - 1 - i) * ext.tile, ext.vectors, log)


@phase
def write_edge(ext, /, s, out, log):
    """Reads: `edge`, and what `normalise` wrote. Writes: the probability of the ragged element. Barriers: none."""
    computed = T.meta_var(result)
    if ext.ragged:
        if s.edge_at >= 0:
            if log != 0:
                computed(s, s.edge, True)
            else:
                computed(s, s.edge, False)
            out[s.row, s.edge_at] = T.Cast(ext.out_dtype, s.power)


@T.inline
def write_value(s, out):
    """Reads: (top, d), the row's pair. Writes: the row's logsumexp, by one thread. Barriers: none."""
    if s.part == 0 and s.t == 0:
        out[s.row] = s.top + T.log(s.d)
# fmt: on
