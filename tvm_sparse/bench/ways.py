"""Timing an operator's ways to its result, for operators with others than their kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..core import commands, registry
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from .compare import Sample, agree, as_numpy, has_torch
from .contenders import Call
from .timing import time_cpu, time_cuda


def ways_of(problem: Problem) -> Callable[[Problem, Sequence[Any], Machine], dict[str, Call]]:
    """A function that returns a call for each way, by name. Raises `ProblemError` if the operator has one way only."""
    ways = getattr(registry.find(problem.operator).peers, "ways", None)
    if ways is None:
        raise ProblemError(f"record: {problem.operator} has no other way to its result than its kernel")
    return ways


def time_ways(problem: Problem, machine: Machine, *, seed: int = 0) -> dict[str, float]:
    """Seconds per call with torch tensors by each way, checked against the reference and timed in turn.

    Raises
    ------
    ProblemError
        If the operator has one way only, or a way cannot be timed.
    Mismatch
        If a way's result is wrong.
    ModuleNotFoundError
        Without PyTorch.
    """
    ways = ways_of(problem)
    if not has_torch(machine.device):
        raise ModuleNotFoundError(f"the ways are those of torch tensors: {commands.install('torch')}", name="torch")
    inputs = problem.generate(seed)
    calls, sample = ways(problem, inputs, machine), Sample(problem, inputs)
    for call in calls.values():
        outputs = as_numpy(call())[: problem.peer_outputs or None]
        agree(problem, sample.inputs, sample.expected, sample.of(outputs))
    timed = time_cuda(calls) if machine.device == "cuda" else time_cpu(calls)
    found = {}
    for name, (_, seconds) in timed.items():
        if isinstance(seconds, str):
            raise ProblemError(f"record: {name}: {seconds}")
        found[name] = statistics.median(seconds)
    return found
