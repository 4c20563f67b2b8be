"""The output layer on a GPU for lists of one row each: words streamed through registers, without tensor cores.

A list's words are of no use to another row, so that each of them is read for one product: two operations a number,
which the GPU's cores do while memory brings the next words. Nothing is put together for tensor cores, whose operand of
eight columns one hidden state would fill to an eighth.

**First kernel: the scores.** `reduce_threads` lanes of a warp share a word, and have `tile_n` words in hand, `vectors`
16-byte vectors of each. As soon as a vector has been multiplied, the one `vectors` later is asked for in its place. The
hidden state is in shared memory, and each vector of it is read for all words in hand. Thread blocks are many and small:
what one waits for, others have.

**Second kernel: the best**, of all scores of a list (`best`, with `direct`).

All numbers are multiplied and added in float32.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..words import OutputLayer
from .space import Extents, allowed, default, launch, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, Extents.of(problem, decisions))


streams = partial(
    Template,
    kind="cuda",
    summary="lists of one row each: words streamed through registers; the best words of all",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    launch=launch,
    explicit_threads=True,
)
