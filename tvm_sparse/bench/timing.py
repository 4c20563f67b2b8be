"""Timing calls of contenders in turn, or of a kernel alone, by CUDA graphs on a GPU and by the wall clock on the CPU.

On a GPU calls are captured in a CUDA graph, so that no Python time is counted; a contender that cannot be captured is
timed eagerly and marked so. On the CPU a call is timed from Python, including the allocation of the result, as users
experience it. All calls have the same inputs, so data that fit into a cache are read from there. Only a kernel alone
may be timed after a producer (`bench.producer`), which rewrites the inputs before every call.

Graphs are recorded by PyTorch for contenders, whose arrays it owns, and through the driver for a kernel alone, since
machines without PyTorch are tuned too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = Callable[[], Any]
Replay = Callable[[], float]  # replays a graph; returns seconds
Launch = Callable[[int], Any]  # on a driver's stream, given by its handle

ROUNDS = {"cpu": 15, "cuda": 30}
# Rounds for a kernel alone: enough for a median, and few, since many candidates wait.
ALONE_ROUNDS = {"llvm": 5, "cuda": 10}
# Length of a round on the CPU in seconds: many calls of a short function, one of a long one.
ROUND_SECONDS = 0.02
REST_SECONDS = 0.06
# Length of a CUDA graph in seconds, and bounds on its calls. A graph of a kernel alone allocates nothing, so it can
# have more calls in less time.
GRAPH_SECONDS, ALONE_GRAPH_SECONDS = 0.001, 0.0005
FEWEST_CALLS, MOST_CALLS = 10, 50
ALONE_MOST_CALLS = 200
# With a producer, which takes tens of microseconds, a call's time is a difference, so rounds are longer and more
# numerous.
BEHIND_GRAPH_SECONDS, BEHIND_MOST_CALLS, BEHIND_ROUNDS = 0.0015, 40, 20
Times = dict[str, tuple[str, Any]]  # by name: how it was timed, and seconds or the reason why there are none


def clock(call: Call, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def time_kernel(
    kind: str,
    function: Any,
    arguments: Sequence[Any],
    *,
    undisturbed: bool = False,
    producer: Launch | None = None,
) -> list[float]:
    """Seconds per call of a kernel alone, one value for each round.

    Parameters
    ----------
    undisturbed
        On a CPU, take the fastest twentieth of each round instead of its mean: on a shared machine other processes
        interrupt most rounds.
    producer
        On a GPU, a kernel launched before every call. The time of a call is then the difference between a graph of both
        and a graph of the producer alone (`added_seconds`).

    Raises
    ------
    RuntimeError
        If the driver fails, or the difference is lost in the noise.
    """
    call = functools.partial(function, *arguments)
    if kind == "cuda":
        record = _driver_recorder()
        if producer is not None:
            return _time_behind(record, producer, call)
        replay, calls = _graph(lambda n: record(lambda _: call(), n), ALONE_GRAPH_SECONDS, 1, ALONE_MOST_CALLS)
        for _ in range(3):
            replay()
        return [replay() / calls for _ in range(ALONE_ROUNDS[kind])]
    # In parts of a round, so that it ends in time even if other processes take the cores and thousands of short calls
    # would last minutes.
    part = 1
    while clock(call, part) < ROUND_SECONDS / 20 and part < 1 << 16:
        part *= 2
    reduce = min if undisturbed else statistics.fmean
    _round(call, part)  # warm-up
    return [reduce(_round(call, part)) for _ in range(ALONE_ROUNDS[kind])]


def time_launch(launch: Launch) -> list[float]:
    """Seconds per launch on a driver's stream, one value for each round."""
    record = _driver_recorder()
    replay, calls = _graph(lambda n: record(launch, n), ALONE_GRAPH_SECONDS, 1, ALONE_MOST_CALLS)
    for _ in range(3):
        replay()
    return [replay() / calls for _ in range(ALONE_ROUNDS["cuda"])]


def _time_behind(record: Callable[[Launch, int], Replay], producer: Launch, call: Call) -> list[float]:
    def both(stream: int) -> None:
        producer(stream)
        call()

    behind, calls = _graph(lambda n: record(both, n), BEHIND_GRAPH_SECONDS, 1, BEHIND_MOST_CALLS)
    alone = record(producer, calls)
    for _ in range(3):
        alone()
        behind()
    return added_seconds(behind, alone, calls, BEHIND_ROUNDS)


def added_seconds(behind: Replay, alone: Replay, calls: int, rounds: int) -> list[float]:
    """Seconds that a call adds to the kernel before it, one positive value for each round.

    Both graphs are replayed in every round. Rounds that noise makes negative are left out, together with equally many
    of the largest, so that the median is unchanged.

    Parameters
    ----------
    behind, alone
        Replays of `calls` times the preceding kernel and the call, and of `calls` times the preceding kernel.

    Raises
    ------
    RuntimeError
        If half of the rounds or more are not positive, since the call is lost in the noise.
    """
    found = [(behind() - alone()) / calls for _ in range(rounds)]
    order = sorted(range(rounds), key=lambda number: found[number])
    bad = sum(seconds <= 0 for seconds in found)
    if 2 * bad >= rounds:
        raise RuntimeError(
            f"no time can be told behind a producer: in {bad} of {rounds} rounds {calls} calls added nothing to it"
        )
    return [found[number] for number in sorted(order[bad : rounds - bad])]


def _round(call: Call, part: int) -> list[float]:
    """Seconds per call in each part of a round, parts of `part` calls filling the round."""
    parts: list[float] = []
    while sum(parts) < ROUND_SECONDS:
        parts.append(clock(call, part))
    return [seconds / part for seconds in parts]


def time_cpu(contenders: Mapping[str, Call], rounds: int = ROUNDS["cpu"]) -> Times:
    """Seconds per call by wall clock, in rounds in which every contender takes a turn."""
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
                # Libraries' threads spin after their work, OpenBLAS's for 2^26 cycles: wait, so that each contender
                # begins at rest.
                time.sleep(REST_SECONDS)
                call()
                # The round's median call: on a shared machine some calls wait for a core that was taken away.
                times[name].append(statistics.median(clock(call, 1) for _ in range(counts[name])))
    finally:
        if collecting:
            gc.enable()
    return {name: ("eager", seconds) for name, seconds in times.items()}


def time_cuda(contenders: Mapping[str, Call], rounds: int = ROUNDS["cuda"], *, fewest: int = FEWEST_CALLS) -> Times:
    """Seconds per call by events around replays of a graph of many calls, in rounds, each after a warm-up.

    `fewest`: the least number of calls in a graph; 1 if calls of milliseconds are compared.
    """
    import torch

    torch.cuda.synchronize()  # preparations on the default stream
    stream = torch.cuda.Stream()
    result: Times = {}
    runs: dict[str, tuple[Replay, int]] = {}
    for name, call in contenders.items():
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        stream.synchronize()
        try:
            runs[name] = _graph(_torch_recorder(call, stream), GRAPH_SECONDS, fewest, MOST_CALLS)
            result[name] = ("graph", [])
        except Exception:  # a library that synchronises or allocates by itself cannot be captured
            torch.cuda.synchronize()
            _end_capture()
            runs[name] = _torch_eager(call, fewest, stream), fewest
            result[name] = ("eager", [])
    for _ in range(rounds):
        for name, (replay, calls) in runs.items():
            replay()
            result[name][1].append(replay() / calls)
    return result


def _graph(record: Callable[[int], Replay], seconds: float, fewest: int, most: int) -> tuple[Replay, int]:
    """A graph of as many calls as take about `seconds`, and their number."""
    single = record(1)
    once = min(single() for _ in range(5))
    calls = max(fewest, min(most, int(seconds / max(once, 1e-7))))
    return record(calls), calls


def _torch_recorder(call: Call, stream: Any) -> Callable[[int], Replay]:
    import torch

    def record(calls: int) -> Replay:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                results = [call() for _ in range(calls)]  # all kept at once, so that each call writes to other memory
        except Exception:
            # PyTorch ends the process, at the latest when it exits, if memory of a graph that failed is still reserved.
            with contextlib.suppress(Exception):
                vars(torch._C)["_cuda_endAllocateToPool"](torch.cuda.current_device(), graph.pool())
            raise
        del results
        return functools.partial(_torch_seconds, graph.replay, stream)

    return record


def _end_capture() -> None:
    """After a failed capture PyTorch refuses random numbers, as if it were still capturing, until another capture has
    ended without an error.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass


def _torch_eager(call: Call, calls: int, stream: Any) -> Replay:
    def run() -> None:
        for _ in range(calls):
            call()

    return functools.partial(_torch_seconds, run, stream)


def _torch_seconds(run: Call, stream: Any) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def driver_result(result: tuple[Any, ...]) -> Any:
    """The result of a call of the driver's bindings. Raises `RuntimeError` with the driver's code if it failed."""
    if int(result[0]):
        raise RuntimeError(f"the driver: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def _driver_recorder() -> Callable[[Launch, int], Replay]:
    """A recorder of graphs of a number of launches on a stream, which is TVM's current one while it records."""
    import tvm
    import tvm_ffi
    from cuda.bindings import driver

    checked = driver_result
    stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))
    tvm.cuda(0).sync()  # preparations on the default stream

    def record(launch: Launch, calls: int) -> Replay:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode))
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), int(stream)):
            for _ in range(calls):
                launch(int(stream))
        graph = checked(driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(stream)), 0))

        def replay() -> float:
            checked(driver.cuEventRecord(begin, stream))
            checked(driver.cuGraphLaunch(graph, stream))
            checked(driver.cuEventRecord(end, stream))
            checked(driver.cuEventSynchronize(end))
            return checked(driver.cuEventElapsedTime(begin, end)) / 1e3

        return replay

    return record
