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

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ...rows.cut import Keep
from ..problems import RowProblem
from . import space


def _template(operator: str, name: str, keep: Keep, summary: str) -> Template:
    def build(problem: RowProblem, decisions: Decisions) -> Program:
        from .kernel import build

        return build(problem, decisions, keep)

    table, default, allowed = space.BY_KEEP[keep]
    return Template(
        name=name,
        version=1,
        operator=operator,
        kind="cuda",
        summary=summary,
        space=table,
        default=default,
        program=build,
        allowed=allowed,
        features=partial(space.features, keep),
        launch=partial(space.launch, keep),
        declines=lambda problem, machine: keep == "registers" and space.held_declines(problem, machine),
        explicit_threads=True,
    )


softmax_held = _template(
    "softmax",
    "softmax_held",
    "registers",
    "a row in the registers of a warp, a block or a cluster: one read, vectors of 16 bytes",
)
softmax_staged = _template(
    "softmax",
    "softmax_staged",
    "shared",
    "a row in the shared memory of a block or a cluster: one read, by asynchronous copies",
)
softmax_streamed = _template(
    "softmax",
    "softmax_streamed",
    "nowhere",
    "a row of any length to a warp, a block or a cluster: as many reads as the algorithm has",
)
logsumexp_streamed = _template(
    "logsumexp",
    "logsumexp_streamed",
    "nowhere",
    "a row to a warp, a block or a cluster: one read, vectors of 16 bytes",
)
