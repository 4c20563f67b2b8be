"""Programs of softmax_sample. Loads the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_sparse.core.arguments import Body, beside
from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from .. import interface


def gpu_program(
    problem: SoftmaxSample, body: Body, workspaces: Sequence[Workspace] = (), *, overlapped: bool = False
) -> Program:
    """As `schedules.interface.gpu_program`, for a body over `arguments`."""
    return interface.gpu_program(problem, _over_arguments(body), workspaces, overlapped=overlapped)


def cpu_program(problem: SoftmaxSample, body: Body) -> Program:
    """As `schedules.interface.cpu_program`, for a body over `arguments`."""
    return interface.cpu_program(problem, _over_arguments(body))


def arguments(io: Any) -> Any:
    """The arguments of a kernel by name (`core.arguments.function`), and what kernels of softmax_topk read beside them.

    More attributes: `scale`, the inverse temperature of the row in hand (`softmax_topk.ending.Ending.own`), or any
    number before one is known; `log`: values are log-probabilities; `per_row`: whether each row has temperature and
    filters of its own; `seeded`: what uniform numbers are made of (`SoftmaxSample.seeded`), 0 where they are given.
    """
    return beside(io, {"scale": 1.0, "log": 1, "per_row": bool(io.problem.per_row), "seeded": io.problem.seeded})


@phase
def _over_arguments(body, /, io):
    body(arguments(io))
