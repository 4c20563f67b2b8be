"""The child that runs candidates: `python -m tvm_sparse.bench.measure`, started by `processes.Worker`.

For each library: run it on valid inputs and compare with the reference, on the structure that is timed and on the
hardest other one; run it again and see that neither outputs nor inputs have changed; only then time it. A process
that saw any error is renewed, so a spoilt GPU context costs one candidate.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from ..core.problem import Mismatch, Problem, numpy_dtype
from ..core.registry import add_plugins, parse
from ..workers.processes import serve

# Rows that are compared with the reference: all kinds of row occur, and the reference stays cheap at batch 4000.
CHECKED_ROWS = 64
REPEATS = 5
# A repeat lasts about this long, whatever one call takes.
REPEAT_SECONDS = {"llvm": 0.02, "cuda": 0.0005}
# Calls in one CUDA graph.
MOST_CALLS = 200


class Fatal(RuntimeError):
    """The device may be spoilt: the parent must not use this process again."""

    fatal = True


def handle(message: dict[str, Any]) -> dict[str, Any]:
    """Measure one library; `check_only` leaves the timing out."""
    add_plugins(message.get("plugins", ()))
    problem, kind = parse(message["problem"]), message["kind"]
    function = load(message["library"], kind)
    workspaces = message["workspaces"]
    small = problem.with_batch(min(problem.batch_extent, CHECKED_ROWS))
    for structure in (problem.structures[0], problem.structures[-1], problem.structures[1]):
        verify(function, small, kind, structure, message["seed"], workspaces)
    if message.get("check_only"):
        return {"seconds": []}
    arguments = on_device(kind, full_inputs(problem, message["seed"]), problem.empty_outputs(), problem, workspaces)
    timer = time_cuda_graph if kind == "cuda" else time_calls
    try:
        return {"seconds": timer(function, arguments)}
    except Exception as error:
        raise Fatal(str(error)) from error


def load(library: str, kind: str) -> Any:
    from ..runtime.loading import load_function

    return load_function(Path(library), kind, None)


@functools.lru_cache(maxsize=2)
def full_inputs(problem: Problem, seed: int) -> list[Any]:
    return problem.generate(seed)


@functools.lru_cache(maxsize=16)
def case(problem: Problem, structure: str, seed: int) -> tuple[list[Any], list[Any]]:
    """Inputs and the reference's outputs."""
    inputs = problem.generate(seed, structure)
    return inputs, problem.reference(inputs)


def verify(function: Any, problem: Problem, kind: str, structure: str, seed: int, workspaces: list[dict]) -> None:
    """Raise `Mismatch` unless two runs on poisoned outputs both agree with the reference and leave the inputs alone."""
    import numpy as np

    inputs, expected = case(problem, structure, seed)
    first = None
    for _ in range(2):
        arguments = on_device(kind, inputs, problem.empty_outputs(), problem, workspaces)
        try:
            function(*arguments)
            returned = [a.numpy() if hasattr(a, "numpy") else a for a in arguments]
        except Exception as error:
            raise Fatal(str(error)) from error
        outputs = returned[len(inputs) : len(inputs) + len(problem.kernel_outputs)]
        try:
            problem.check(inputs, expected, outputs)
        except Mismatch as error:
            raise Mismatch(f"{structure}: {error}") from None
        for argument, before, after in zip(problem.kernel_inputs, inputs, returned, strict=False):
            if isinstance(before, np.ndarray) and before.tobytes() != after.tobytes():
                raise Mismatch(f"{structure}: the input {argument.name} was changed")
        if first is not None and any(a.tobytes() != b.tobytes() for a, b in zip(first, outputs, strict=True)):
            raise Mismatch(f"{structure}: two runs on the same inputs differ")
        first = outputs


def on_device(kind: str, inputs: list[Any], outputs: list[Any], problem: Problem, workspaces: list[dict]) -> list[Any]:
    """The kernel's arguments in calling order, arrays copied to the device."""
    import numpy as np
    import tvm

    device = tvm.cuda(0) if kind == "cuda" else tvm.cpu(0)
    arrays = [*inputs, *outputs]
    for workspace in workspaces:
        shape = [problem.axes[extent] if isinstance(extent, str) else extent for extent in workspace["shape"]]
        dtype = numpy_dtype(workspace["dtype"])
        size = int(np.prod(shape)) * dtype.itemsize
        arrays.append(np.full(size, workspace["fill"], np.uint8).view(dtype).reshape(shape))
    return [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in arrays]


def time_calls(function: Any, arguments: list[Any]) -> list[float]:
    """Seconds a call on the CPU, one figure a repeat."""
    calls = _calls(lambda n: _clock(function, arguments, n), REPEAT_SECONDS["llvm"], most=1 << 20)
    return [_clock(function, arguments, calls) / calls for _ in range(REPEATS)]


def _clock(function: Any, arguments: list[Any], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    return time.perf_counter() - started


def _calls(run: Any, enough: float, most: int) -> int:
    """How many calls make a repeat of `enough` seconds; doubles from one, which also warms up."""
    calls, spent = 1, 0.0
    while spent < enough and calls < most:
        spent = run(calls)
        if spent < enough:
            calls = min(most, max(calls * 2, int(calls * enough / max(spent, 1e-9))) if spent > 0 else calls * 2)
    return calls


def time_cuda_graph(function: Any, arguments: list[Any]) -> list[float]:
    """Seconds a call inside a CUDA graph of many calls, one figure a replay, after replays that warm up.

    Inputs are not rotated: what fits into the L2 cache is read from there.
    """
    import tvm
    import tvm_ffi
    from cuda.bindings import driver

    def checked(result: tuple) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    begin, end = (checked(driver.cuEventCreate(0)) for _ in range(2))

    def record(calls: int) -> Any:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode))
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), int(stream)):
            for _ in range(calls):
                function(*arguments)
        graph = checked(driver.cuStreamEndCapture(stream))
        return checked(driver.cuGraphInstantiate(graph, 0))

    def replay(graph: Any) -> float:
        checked(driver.cuEventRecord(begin, stream))
        checked(driver.cuGraphLaunch(graph, stream))
        checked(driver.cuEventRecord(end, stream))
        checked(driver.cuEventSynchronize(end))
        return checked(driver.cuEventElapsedTime(begin, end)) / 1e3

    tvm.cuda(0).sync()
    single = record(1)
    replay(single)
    once = min(replay(single) for _ in range(3))
    calls = max(1, min(MOST_CALLS, int(REPEAT_SECONDS["cuda"] / once)))
    graph = record(calls)
    for _ in range(3):
        replay(graph)
    return [replay(graph) / calls for _ in range(2 * REPEATS)]


if __name__ == "__main__":
    serve(handle)
