"""Time of calls: contenders in turn, by CUDA graphs on a GPU and by the wall clock on the CPU.

On CUDA every contender is captured in a CUDA graph, so that no Python time is counted; what cannot be captured is timed
eagerly and says so. On the CPU a call is timed from Python, allocation of the result included, as its user sees it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]

ROUNDS = {"cpu": 15, "cuda": 30}
# On the CPU one round of a contender lasts about this long: many calls of a short one, one of a long one.
ROUND_SECONDS = 0.02
REST_SECONDS = 0.06
# Calls in one CUDA graph: about this long together, within the bounds.
GRAPH_SECONDS = 0.001
FEWEST_CALLS, MOST_CALLS = 10, 50
Times = dict[str, tuple[str, Any]]  # by name: how, and seconds or why there are none


def clock(call: Call, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def time_cpu(contenders: Mapping[str, Call], rounds: int = ROUNDS["cpu"]) -> Times:
    """Seconds a call by wall clock, in rounds that every contender takes part in."""
    counts = {}
    for name, call in contenders.items():
        calls, spent = 1, clock(call, 1)
        while spent < ROUND_SECONDS and calls < 1 << 20:
            calls = max(calls * 2, int(calls * ROUND_SECONDS / max(spent, 1e-7)))
            spent = clock(call, calls)
        counts[name] = calls
    times: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in contenders.items():
                # The libraries' threads spin after their work, OpenBLAS's for 2^26 cycles: each begins at rest.
                time.sleep(REST_SECONDS)
                call()
                # The median call of the round: on a shared machine one in many waits for a core that was taken away.
                times[name].append(statistics.median(clock(call, 1) for _ in range(counts[name])))
    finally:
        if collecting:
            gc.enable()
    return {name: ("eager", seconds) for name, seconds in times.items()}


def time_cuda(contenders: Mapping[str, Call], rounds: int = ROUNDS["cuda"]) -> Times:
    """Seconds a call by events around replays of a graph of many calls, in rounds, each after one that warms up."""
    import torch

    torch.cuda.synchronize()  # what was prepared on the default stream
    stream = torch.cuda.Stream()
    result: Times = {}
    runs: dict[str, tuple[Call, int]] = {}
    for name, call in contenders.items():
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        stream.synchronize()
        try:
            single, _kept = _captured(call, 1, stream)
            once = min(_replay(single.replay, stream) for _ in range(5))
            calls = max(FEWEST_CALLS, min(MOST_CALLS, int(GRAPH_SECONDS / max(once, 1e-7))))
            graph, _kept = _captured(call, calls, stream)
            result[name], runs[name] = ("graph", []), (graph.replay, calls)
        except Exception:  # a library that synchronises or allocates by itself cannot be captured
            torch.cuda.synchronize()

            def eager(call: Call = call) -> None:
                for _ in range(FEWEST_CALLS):
                    call()

            result[name], runs[name] = ("eager", []), (eager, FEWEST_CALLS)
    for _ in range(rounds):
        for name, (run, calls) in runs.items():
            _replay(run, stream)
            result[name][1].append(_replay(run, stream) / calls)
    return result


def _captured(call: Call, calls: int, stream: Any) -> tuple[Any, list[Any]]:
    """A graph of `calls` calls, and their results: memory of the graph's own that must outlive it."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(calls)]
    return graph, kept


def _replay(run: Call, stream: Any) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
