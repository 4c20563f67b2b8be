"""Softmax and logsumexp by schedule primitives alone, in the steps in which readers of the paper build them.

`thread`: one thread per row, which computes it as the definition does. `block`: the threads of a block share a row, and
its reductions are reductions across threads, through shared memory. `warp`: the same over 32 threads, where they become
shuffles. All three algorithms of Milakov & Gimelshein are mapped alike. Elements are read one at a time, as often as
the algorithm reads them: `vectors` gains on these by wide accesses and by rows that are read once.

`space` holds the decisions and loads no compiler; `schedules` does, and is imported when a program is built.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..problems import RowProblem
from . import space


def build_thread(problem: RowProblem, decisions: Decisions) -> Program:
    from . import schedules

    return schedules.build_thread(problem, decisions)


def build_shared_row(problem: RowProblem, decisions: Decisions) -> Program:
    from . import schedules

    return schedules.build_shared_row(problem, decisions)


def _templates(operator: str) -> tuple[Template, Template, Template]:
    common = partial(Template, version=1, operator=operator, kind="cuda")
    return (
        common(
            name=f"{operator}_thread",
            summary="a row to a thread, element by element",
            space=space.thread_space,
            default=space.thread_default,
            program=build_thread,
        ),
        common(
            name=f"{operator}_block",
            summary="a row to a block, reduced across threads through shared memory",
            space=space.block_space,
            default=space.block_default,
            launch=space.block_launch,
            program=build_shared_row,
        ),
        common(
            name=f"{operator}_warp",
            summary="a row to a warp, reduced by shuffles",
            space=space.warp_space,
            default=space.warp_default,
            launch=space.warp_launch,
            program=build_shared_row,
        ),
    )


softmax_thread, softmax_block, softmax_warp = _templates("softmax")
logsumexp_thread, logsumexp_block, logsumexp_warp = _templates("logsumexp")
