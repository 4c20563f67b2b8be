"""Softmax and logsumexp on a GPU, close to the memory's speed: a row to a warp, a block, or a cluster of blocks.

All memory is read and written by vectors of 16 bytes. The whole vectors of a row are divided among its threads, and the
few elements at its ends that share a vector with another row are one more for as many threads (`rows.cut`). Then

1. each thread finds the pair (m, d) of its own elements: their maximum, and the sum of their exponentials relative to
   it (Algorithm 3 of Milakov & Gimelshein, with one rescaling for all vectors in hand instead of one an element);
2. the pairs are joined across the row's threads (equation 4), first the maxima, then the sums: by shuffles in a warp,
   through shared memory in a block; in a cluster each warp writes its pair into every block of the row, so that one
   barrier is all that they wait for;
3. each thread turns its elements into probabilities and writes them, or one thread writes the row's logsumexp.

Templates differ in where the elements stay from 1 to 3. `softmax_held`: in registers; of float32 the exponentials stay,
each computed once. `softmax_staged`: in shared memory, where asynchronous copies put them. `softmax_streamed`, for rows
of any length: nowhere, they are read again, as a rule from L2; it also maps the paper's Algorithms 1 and 2.
`logsumexp_streamed` has no step that needs them again.

`space` has the decisions, and loads no compiler. `kernel` puts together the phases of `schedules/rows/` and those of
`write`; it is imported when a program is built.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template

from ..problems import RowProblem
from . import space


def build_held(problem: RowProblem, decisions: Decisions) -> Program:
    from .kernel import build

    return build(problem, decisions, "registers")


def build_staged(problem: RowProblem, decisions: Decisions) -> Program:
    from .kernel import build

    return build(problem, decisions, "shared")


def build_streamed(problem: RowProblem, decisions: Decisions) -> Program:
    from .kernel import build

    return build(problem, decisions, "nowhere")


softmax_held = Template(
    name="softmax_held",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row in the registers of a warp, a block or a cluster: one read, vectors of 16 bytes",
    space=space.held_space,
    default=space.held_default,
    program=build_held,
    allowed=space.held_allowed,
    features=space.held_features,
    launch=space.held_launch,
    explicit_threads=True,
)

softmax_staged = Template(
    name="softmax_staged",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row in the shared memory of a block or a cluster: one read, by asynchronous copies",
    space=space.staged_space,
    default=space.staged_default,
    program=build_staged,
    allowed=space.staged_allowed,
    features=space.staged_features,
    launch=space.staged_launch,
    explicit_threads=True,
)

softmax_streamed = Template(
    name="softmax_streamed",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row of any length to a warp, a block or a cluster: as many reads as the algorithm has",
    space=space.streamed_space,
    default=space.streamed_default,
    program=build_streamed,
    allowed=space.streamed_allowed,
    features=space.streamed_features,
    launch=space.streamed_launch,
    explicit_threads=True,
)

logsumexp_streamed = Template(
    name="logsumexp_streamed",
    version=1,
    operator="logsumexp",
    kind="cuda",
    summary="a row to a warp, a block or a cluster: one read, vectors of 16 bytes",
    space=space.streamed_space,
    default=space.streamed_default,
    program=build_streamed,
    allowed=space.streamed_allowed,
    features=space.streamed_features,
    launch=space.streamed_launch,
    explicit_threads=True,
)
