"""Comparison with other libraries that do the same work: all in one process, checked, and timed in turn.

A peer is a name and a function that prepares one call. Its result is compared with the reference before it is timed, to
the accuracy of its dtype; a wrong peer gets no time. Libraries are imported when a peer is prepared, and a missing one
is listed as absent.

By default inputs are hot: data that fit into a GPU's L2 cache are read from there, by all contenders alike. `timing`
describes the measurement.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import commands, registry
from ..core.machine import Machine
from ..core.problem import Mismatch, Problem, Settings
from .contenders import Call, Peer, torch_tensor
from .timing import MOST_CALLS, ROUNDS, clock, time_cpu, time_cuda

# Calls from Python that are timed for the host's cost: fewer than a GPU's queue holds.
HOST_CALLS = 200
# Rows that are compared with the reference, spread over the batch: the reference is in float64 and sorts, and would
# take minutes for a batch of 4000 by 25000.
CHECKED_ROWS = 64
# Allowed difference of a peer's result, relative to the largest value: other libraries sum in other orders, and some
# round intermediate results to half precision. It is enough to tell a different computation.
PEER_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Timing:
    """One contender's line: its times, or the reason why there are none."""

    name: str
    seconds: tuple[float, ...] = ()  # of one call, one entry for each round
    how: str = ""  # "graph" or "eager"
    correct: bool | None = None
    note: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Comparison:
    """All contenders on one problem; ours is the first."""

    problem: Problem
    machine: Machine
    timings: tuple[Timing, ...]
    host_seconds: float | None  # of one call of our function from Python; on the CPU, without the kernel's own
    how: str  # how our kernel was chosen: one of `lookup.HOW`
    kernel: str  # our candidate
    threads: str  # of the CPU's libraries
    rotated: bool = False  # whether inputs rotate through more memory than the GPU's L2 cache

    @property
    def ours(self) -> Timing:
        return self.timings[0]

    @property
    def best_peer(self) -> Timing | None:
        """The fastest peer with a right result."""
        timed = [t for t in self.timings[1:] if t.median is not None]
        return min(timed, key=lambda t: t.median or 0.0, default=None)


NAME = "tvm_sparse"


def compare(
    problem: Problem,
    machine: Machine,
    *,
    seed: int = 0,
    structure: str | None = None,
    settings: Settings | None = None,
    peers: Sequence[Peer] | None = None,
    host: bool = True,
    rotated: bool = False,
    rounds: int | None = None,
) -> Comparison:
    """Check and time our public function and the peers on one problem, with inputs of one of its structures, and with
    other `settings` than the problem's first ones where they are given.

    `host` also times the Python overhead of our call. `rotated`, for GPUs, gives successive calls different copies of
    the inputs, together twice the size of the L2 cache (or one for each call of a graph), so that each call reads
    device memory. `rounds` is the number of rounds in which contenders take turns; the default suffices for steady
    medians.

    Raises
    ------
    Mismatch
        If our own result is wrong.
    ModuleNotFoundError
        On CUDA without PyTorch, which provides the arrays there.
    """
    from ..runtime.dispatch import dispatcher

    device, known = machine.device, registry.find(problem.operator).peers
    if device == "cuda" and not has_torch("cuda"):
        raise ModuleNotFoundError(
            f"comparing on CUDA needs PyTorch with CUDA: {commands.install('torch')}", name="torch"
        )
    inputs = problem.generate(seed, structure, settings)
    copies = 1
    if rotated:
        size = sum(array.nbytes for array in inputs if hasattr(array, "nbytes"))
        copies = min(math.ceil(2 * _l2_bytes() / size), MOST_CALLS)
    sample = Sample(problem, inputs)
    with_torch = has_torch(device)

    def convert(argument: Any) -> Any:
        # PyTorch's arrays if it is installed: they are what users and peers pass.
        return torch_tensor(argument, device) if with_torch and hasattr(argument, "dtype") else argument

    ours, called = known.ours(problem, inputs, convert)
    others = [known.ours(problem, inputs, convert)[0] for _ in range(copies - 1)]
    problem.check(sample.inputs, sample.expected, sample.of(as_numpy(ours())))
    calls: dict[str, Call] = {NAME: in_turn([ours, *others])}
    lines: dict[str, Timing] = {NAME: Timing(NAME, correct=True)}
    for peer in known.PEERS if peers is None else peers:
        if device not in peer.devices:
            continue
        lines[peer.name], call = admit(peer, problem, inputs, sample, device)
        if call is not None:
            calls[peer.name] = in_turn([call, *(peer.prepare(problem, inputs, device) for _ in range(copies - 1))])

    rounds = ROUNDS[device] if rounds is None else rounds
    timed = time_cuda(calls, rounds) if device == "cuda" else time_cpu(calls, rounds)
    for name, (how, seconds) in timed.items():
        line = lines[name]
        if isinstance(seconds, str):
            lines[name] = Timing(name, correct=line.correct, note=seconds)
        else:
            lines[name] = Timing(name, tuple(seconds), how, line.correct)
    explained = dispatcher.explain(called, machine)
    return Comparison(
        problem,
        machine,
        tuple(lines.values()),
        _host_seconds(called, machine, ours, inputs, min(rounds, 9)) if host else None,
        explained.how,
        explained.candidate,
        _threads(device),
        rotated,
    )


def _l2_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties().L2_cache_size)


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that runs these calls one after the other, cyclically, one each time."""
    if len(calls) == 1:
        return calls[0]
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


class Sample:
    """Some rows of a problem, including the first and the last, with their reference.

    If rows depend on each other (`Problem.sequential`), it has all rows.
    """

    def __init__(self, problem: Problem, inputs: Sequence[Any]) -> None:
        import numpy as np

        self._whole = problem.sequential
        if self._whole:
            self.inputs, self.expected = list(inputs), problem.reference(inputs)
            return
        self._rows = np.unique(np.linspace(0, problem.batch_extent - 1, CHECKED_ROWS).astype(int))
        self.inputs = problem.sample(inputs, self._rows)
        self.expected = problem.with_batch(len(self._rows)).reference(self.inputs)

    def of(self, outputs: Sequence[Any]) -> list[Any]:
        return list(outputs) if self._whole else [array[self._rows] for array in outputs]


def has_torch(device: str) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return device == "cpu" or torch.cuda.is_available()


def admit(
    peer: Peer, problem: Problem, inputs: Sequence[Any], sample: Sample, device: str
) -> tuple[Timing, Call | None]:
    """Prepare a peer and compare its result with the reference; returns its line, and its call if it is right."""
    if importlib.util.find_spec(peer.needs) is None:
        return Timing(peer.name, note=f"absent: {peer.needs} is not installed"), None
    try:
        call = peer.prepare(problem, inputs, device)
        outputs = peer.formed(problem, as_numpy(call()))
    except Exception as error:  # anything that another library does not support
        reason = str(error).strip().partition("\n")[0] or repr(error)
        return Timing(peer.name, note=f"not available: {reason[:120]}"), None
    try:
        agree(problem, sample.inputs, sample.expected, sample.of(outputs))
    except Mismatch as error:
        return Timing(peer.name, correct=False, note=str(error)), None
    return Timing(peer.name, correct=True), call


def as_numpy(outputs: Any) -> list[Any]:
    """The outputs of a call as NumPy arrays; half precision as float32, which every library can convert to."""
    import numpy as np

    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    arrays = []
    for array in outputs:
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            array = (array.float() if array.is_floating_point() else array).numpy()
        arrays.append(np.asarray(array))
    return arrays


def agree(problem: Problem, inputs: Sequence[Any], expected: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise `Mismatch` unless a peer's outputs match within its dtype's accuracy; ties may be broken either way."""
    import numpy as np

    if problem.admits(inputs, outputs) is None and all(one.dtype.kind == "i" for one in expected):
        problem.check(inputs, expected, outputs)
        return
    tolerance = PEER_TOLERANCE[problem.axes["dtype"]]
    if (admitted := problem.admits(inputs, outputs)) is not None:
        if not admitted:
            raise Mismatch(f"{problem.kernel_outputs[0].name} are not among those that may be drawn")
        return
    values, wanted = np.asarray(outputs[0]).astype(np.float64), expected[0]
    if len(outputs) != (count := problem.peer_outputs or len(expected)):
        raise Mismatch(f"{len(outputs)} outputs, expected {count}")
    if values.shape != wanted.shape:
        raise Mismatch(f"shape {values.shape}, expected {wanted.shape}")
    worst = float(np.max(np.abs(values - wanted), initial=0.0)) / max(float(np.max(np.abs(wanted), initial=0.0)), 1e-30)
    if not worst <= tolerance:
        raise Mismatch(f"{problem.kernel_outputs[0].name} differ by {worst:.1e} of the largest")
    if len(outputs) > 1:
        columns = (np.asarray(indices).astype(np.int64) for indices in (outputs[1], expected[1]))
        (chosen, slack), (best, _) = (problem.ranked_by(inputs, c) for c in columns)
        # Where sums are rounded, words whose scores differ by less may change places.
        near = np.maximum(slack, tolerance * np.abs(best)) if np.any(slack) else 0.0
        if not np.all((chosen == best) | (np.abs(chosen - best) <= near)):
            raise Mismatch("indices are not those of the largest logits")


def _host_seconds(problem: Problem, machine: Machine, ours: Call, inputs: Sequence[Any], rounds: int) -> float | None:
    """Python overhead of one call of ours.

    A GPU works asynchronously, so there it is the time of the call itself. On the CPU the kernel's own time is
    subtracted, measured by calling the kernel directly in turn with the public function.
    """
    if machine.device == "cuda":
        import torch

        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            times.append(clock(ours, HOST_CALLS) / HOST_CALLS)
            torch.cuda.synchronize()
        return statistics.median(times)
    import numpy as np

    from ..runtime import arrays
    from ..runtime.dispatch import dispatcher

    kernel = dispatcher.kernel(problem, machine)
    given = (*inputs, *problem.empty_outputs())
    arguments = [arrays.argument(a) if isinstance(a, np.ndarray) else a for a in given]
    timed = time_cpu({"public": ours, "kernel": lambda: kernel.function(*arguments)}, rounds)
    public, bare = (statistics.median(timed[name][1]) for name in ("public", "kernel"))
    return max(public - bare, 0.0)


def _threads(device: str) -> str:
    if device == "cuda":
        return ""
    import os

    counts = [f"tvm {os.environ.get('TVM_NUM_THREADS', '?')}"]
    if has_torch("cpu"):
        import torch

        counts.append(f"torch {torch.get_num_threads()}")
    return ", ".join(counts)
