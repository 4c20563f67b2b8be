"""The pair (m, d) of a thread's own elements: their maximum, and the sum of their exponentials relative to it."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ..device.arithmetic import LOG2_E
from .cut import Extents
from .hold import copy_part, fence_tile, load_tile, take_tile, value

# Maxima begin with the least finite number: with minus infinity, the first difference of a masked row would be NaN.
# Those of logsumexp are kept at most at the largest one, so that plus infinity makes the sum infinite and not NaN.
LOWEST, HIGHEST = T.min_value("float32"), T.max_value("float32")


def scaled(s: Any, difference: Any) -> Any:
    """An exponent of e as one of 2, which is what the hardware computes; of a row with a temperature, by its factor."""
    return difference * (s.factor if hasattr(s, "factor") else T.float32(LOG2_E))


# fmt: off
@phase
def begin_pair(ext, /, s):
    """Reads: `edge`. Writes: `m`, `d`, `tile`, `top_tile`. Barriers: none.

    After: `m` covers the ragged element, whose exponential is added last (`add_edge`), when `m` is final; `d` is 0.
    """
    s.m = T.max(LOWEST, s.edge)
    if ext.algorithm == "naive":
        s.m = T.float32(0)
    if not ext.writes:
        s.m = T.min(s.m, HIGHEST)
    s.d = T.float32(0)
    if ext.tempered:
        s.tile = 0
        s.top_tile = ext.full_tiles + ext.other_tiles


@phase
def raise_maximum(ext, /, s):
    """Reads: `raw`, `tile`. Writes: `m`, `d`, `top`, `top_tile`. Barriers: none.

    After: `m` covers `raw`, and `d` is relative to it.
    """
    s.top = s.m
    for e in T.unroll(ext.vectors * ext.width):
        s.top = T.max(s.top, value(ext, s.raw, e))
    if not ext.writes:
        s.top = T.min(s.top, HIGHEST)
    if s.top > s.m:
        s.d = s.d * T.exp2(scaled(s, s.m - s.top))
        s.m = s.top
        if ext.tempered:
            s.top_tile = s.tile


@phase
def absorb(ext, /, s, log):
    """Reads: `raw`. Writes: `m`, `d`, `top`, `power`, `tile`; `raw` where it is to hold exponentials. Barriers: none.

    After: (m, d) covers the elements of `raw`: the online algorithm, rescaled once for all of them. The others have
    their maximum before.
    """
    if ext.algorithm == "online":
        raise_maximum(ext)(s)
        fence_tile(ext)(s)
    for e in T.unroll(ext.vectors * ext.width):
        # Without the steps that exp2 takes for subnormal results, which add nothing to a sum of at least 1.
        T.ptx.ex2.approx.ftz.f32(s.power, scaled(s, value(ext, s.raw, e) - s.m))
        s.d = s.d + s.power
        if ext.in_place:
            s.raw[e] = T.Select(log != 0, s.raw[e], s.power)
    if ext.tempered:
        s.tile = s.tile + 1


def accumulate(ext: Extents) -> Phase:
    """Reads: the part's vectors. Writes: `m`, `d`, `raw`, `stage`, `top`, `power`. Barriers: none.

    After: (m, d) covers this thread's vectors. They are where the kernel keeps them: in `raw`, in `stage`, or nowhere.
    """
    return {"registers": _accumulate_held, "shared": _accumulate_staged, "nowhere": _accumulate_streamed}[ext.keep](ext)


@phase
def _accumulate_held(ext, /, s, words, block, log):
    load_tile(ext)(s, words, 0, ext.certain)
    absorb(ext)(s, log)


@phase
def _accumulate_staged(ext, /, s, words, block, log):
    copy_part(ext)(s, words, block.stage)
    for i in T.serial(ext.full_tiles + ext.other_tiles):
        take_tile(ext)(s, block.stage, i * ext.tile)
        absorb(ext)(s, log)


@phase
def _accumulate_streamed(ext, /, s, words, block, log):
    load, raised = T.meta_var(load_tile(ext)), T.meta_var(raise_maximum(ext))
    absorbed = T.meta_var(absorb(ext))
    if ext.algorithm == "safe":
        # The maximum of this thread's own elements; those of the row's threads are joined with their sums.
        for i in T.serial(ext.full_tiles):
            load(s, words, i * ext.tile, ext.vectors)
            raised(s)
        for i in T.serial(ext.other_tiles):
            load(s, words, (ext.full_tiles + i) * ext.tile, 0)
            raised(s)
    for i in T.serial(ext.full_tiles):
        load(s, words, i * ext.tile, ext.vectors)
        absorbed(s, log)
    for i in T.serial(ext.other_tiles):
        load(s, words, (ext.full_tiles + i) * ext.tile, 0)
        absorbed(s, log)


@phase
def add_edge(ext, /, s):
    """Reads: `edge`, `m`. Writes: `d`, `power`. Barriers: none. After: (m, d) covers all elements of this thread."""
    if ext.ragged:
        T.ptx.ex2.approx.ftz.f32(s.power, scaled(s, s.edge - s.m))
        s.d = s.d + s.power
# fmt: on
