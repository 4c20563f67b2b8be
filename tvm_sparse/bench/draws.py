"""Random test cases, a different set for every candidate.

A *block* is a few distinct rows with their reference in float64; its structure, settings, magnitudes and data are drawn
at random. Blocks come in pairs of one shape. They are reused for all candidates of a problem, and replaced by new ones
as time allows. A *case* arranges rows of a block, some more than once, as a batch that the library serves, so that its
reference is only a copy, whatever the batch. The alignment of its arrays is drawn too, as far as public calls leave it
open. Steps of a recurrence depend on each other, so there a block is a case.

A case is named by three numbers, as in "draw 1742-53-64": block, arrangement, batch. `again` reproduces it.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..core import drawing
from ..core.problem import Problem, numpy_dtype
from .verification import Case, case_of, reference, row_elements

# Most distinct rows of a block, and most bytes of them.
BLOCK_ROWS, BLOCK_BYTES = 16, 1 << 22
# Pairs of blocks of a problem: one for each structure, but at least this many. A large problem has each structure once.
LEAST_PAIRS = 6
# Pairs of cases for a candidate; half as many for a large problem. Both cases of a pair have the same batch, and the
# second is called with the arrays where the first one's were.
PAIRS = 10
# Factor for the number of cases drawn for the winner of a final.
PROOFS = 10
# A winner is checked at all batches up to the first number; and at batches beyond 64, for which a grid or a tile may be
# specialised, up to MANY, whatever the batch of the problem.
EVERY, MANY = 40, 160
# Most bytes of a case, of all cases of a candidate, and of the longest case of a winner.
CASE_BYTES, ALL_BYTES, LONG_BYTES = 1 << 24, 3 << 23, 1 << 28
# Most seconds for new blocks, for a candidate and for a winner.
FRESH, FRESH_PROOF = 0.005, 3.0


def block_of(problem: Problem, number: int, kind: str = "llvm") -> Case:
    """The block with this number, whose remainder modulo twice the number of structures selects the structure."""
    structures = problem.verified
    pair, second = divmod(number, 2)
    of_pair, own = np.random.default_rng([pair, 1]), np.random.default_rng([number, 2])
    least = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes(problem)))
    rows = _steps(problem, of_pair) if problem.sequential else least
    few = problem.smaller(rows).redrawn(of_pair)
    structure = structures[(pair + second) % len(structures)]
    settings = few.draw_settings(own)
    if own.random() < 0.25:
        settings = dict(problem.settings[own.integers(len(problem.settings))])
    inputs = few.generate(number, structure, settings)
    said: tuple[str, ...] = ()
    if not (problem.sequential and structure == "special"):
        # An infinite weight multiplies the state, which must not be so small that its sign is lost in rounding.
        inputs, said = drawing.magnified(few, inputs, own, kind)
    return case_of(few, few.altered(inputs, own), structure, settings, (*said, f"draw {number}"), place=(number, 0))


def _steps(problem: Problem, rng: np.random.Generator) -> int:
    """Number of steps of a sequence: one, few, or up to 67, and up to twice the timed number where that is no more
    work.
    """
    most = min(2 * problem.batch_extent, BLOCK_BYTES // row_bytes(problem))
    return _log_uniform(rng, max(67, most))


def row_bytes(problem: Problem) -> int:
    """Bytes of one row of the batch, over all arguments."""
    return max(1, row_elements(problem) * numpy_dtype(problem.axes.get("dtype", "int32")).itemsize)


def arranged(block: Case, number: int, batch: int) -> Case:
    """A case made of rows of a block."""
    rng, held = np.random.default_rng([number, batch]), block.problem.batch_extent
    rows = rng.permutation(held)[:batch] if batch <= held and rng.random() < 0.5 else rng.integers(held, size=batch)
    problem = block.problem.with_batch(batch)
    inputs = block.problem.sample(block.inputs, rows)
    if problem.counts_rows:
        inputs = inputs[: len(problem.kernel_inputs)]
        expected, bounds = reference(problem, inputs)
    else:
        expected = [array[rows] for array in block.expected]
        bounds = [None if bound is None else bound[rows] for bound in block.tolerance]
    said, _, first = block.name.rpartition(", ")
    said = said.rpartition(", ")[0]
    assert block.place is not None
    return Case(
        problem,
        f"{said}, {problem.batch_axis} {batch}, {first}-{number}-{batch}",
        inputs,
        expected,
        bounds,
        (block.place[0], number + 1),
    )


def again(problem: Problem, name: str, kind: str = "llvm") -> Case:
    """Reproduce the case that a failure named, from "draw 1742-53-64" or a message that contains it.

    Parameters
    ----------
    kind
        The machine's kind: "llvm" or "cuda".
    """
    found = re.search(r"(\d+)-(\d+)-(\d+)", name)
    if not found:
        raise ValueError(f"name: expected a draw like 1742-53-64, got {name!r}")
    block, number, batch = map(int, found.groups())
    return _arranged(block_of(problem, block, kind), number, batch)


def _arranged(block: Case, number: int, batch: int) -> Case:
    if not block.problem.sequential:
        return arranged(block, number, batch)
    assert block.place is not None
    return Case(
        block.problem,
        f"{block.name}-{number}-{block.problem.batch_extent}",
        block.inputs,
        block.expected,
        block.tolerance,
        (block.place[0], number + 1),
    )


class Pool:
    """The blocks of a problem, in pairs, from which cases are drawn; some blocks are replaced from time to time."""

    def __init__(self, problem: Problem, seed: int, kind: str = "llvm") -> None:
        self._problem, self._kind = problem, kind
        self._rng = np.random.default_rng([seed, 3])
        self._credit = 0.0  # seconds available for new blocks
        begun = time.perf_counter()
        self.pairs = [self._pair(0)]
        self._cost = time.perf_counter() - begun
        self.large = self.pairs[0][0].large
        count = len(problem.verified)
        least = max(count, PAIRS if problem.sequential else LEAST_PAIRS)  # a case for each block, or several
        places = range(2, count, 2) if self.large else range(1, least)
        self.pairs += map(self._pair, places)
        self._turns = itertools.cycle(range(len(self.pairs)))

    def _pair(self, place: int, rng: np.random.Generator | None = None) -> tuple[Case, Case]:
        """Two blocks, one of the structure with this number and one of the next."""
        count = len(self._problem.verified)
        pair = int((rng or self._rng).integers(1 << 24)) * count + place % count
        one, other = (block_of(self._problem, number, self._kind) for number in (2 * pair, 2 * pair + 1))
        return one, other

    def renew(self, seconds: float, rng: np.random.Generator) -> None:
        """Replace the oldest blocks by new ones for about `seconds`; unused time is kept for the next call."""
        self._credit += seconds
        for _ in self.pairs:
            if self._credit < self._cost:
                break
            begun, turn = time.perf_counter(), next(self._turns)
            place = 2 * turn if self.large else turn
            self.pairs[turn] = self._pair(place, rng)
            self._cost = time.perf_counter() - begun
            self._credit -= self._cost

    def draw(self, seed: int) -> list[Case]:
        """The cases for a candidate."""
        rng = np.random.default_rng([seed, 4])
        if not self.large:
            self.renew(FRESH, np.random.default_rng([seed, 6]))
        return self._cases(rng, PAIRS // 2 if self.large else PAIRS, ())

    def proof(self, seed: int) -> Iterator[list[Case]]:
        """The cases for a winner, in portions."""
        rng, renewing = np.random.default_rng([seed, 5]), np.random.default_rng([seed, 7])
        every = iter(rng.permutation(np.arange(1, EVERY + 1)))
        long = self._problem.batch_extent * row_bytes(self._problem) > CASE_BYTES
        for turn in range(PROOFS):
            self.renew(FRESH_PROOF / PROOFS, renewing)
            these = [self._long(rng), *map(int, itertools.islice(every, EVERY // PROOFS))]
            if long and turn % 4 == 0:
                most = max(1, LONG_BYTES // row_bytes(self._problem))
                yield self._cases(rng, 0, [min(most, self._long(rng))], shrink=False)
            yield self._cases(rng, PAIRS // 2 if self.large else PAIRS, these)

    def _cases(
        self, rng: np.random.Generator, count: int, batches: Sequence[int], *, shrink: bool = True
    ) -> list[Case]:
        """Cases of `count` pairs, with the given batches among them."""
        batches = [*batches, *self._batches(rng, count - len(batches))]
        order = itertools.chain.from_iterable(rng.permutation(len(self.pairs)) for _ in itertools.count())
        if self._problem.sequential:
            chosen = [self.pairs[turn] for turn in range(len(self.pairs))]
            batches = [0] * len(chosen)
        else:
            chosen = [self.pairs[turn] for turn in itertools.islice(order, len(batches))]
        if shrink:
            batches = _shrunk(batches, row_bytes(self._problem))
        numbers = rng.integers(1 << 16, size=(len(chosen), 2))
        return [
            _arranged(block, int(number), batch)
            for pair, batch, both in zip(chosen, batches, numbers, strict=True)
            for block, number in zip(pair, both, strict=True)
        ]

    def _batches(self, rng: np.random.Generator, count: int) -> list[int]:
        """Batches of one and two rows, a long one, and random ones up to `EVERY`, mostly different."""
        drawn = [1, 2, self._long(rng)]
        while len(drawn) < count:
            drawn.append(next((b for b in (_log_uniform(rng, EVERY) for _ in range(4)) if b not in drawn), EVERY))
        return drawn[: max(0, count)]

    def _long(self, rng: np.random.Generator) -> int:
        """A batch of up to twice the timed one, or, in half of the draws, beyond 64 rows."""
        timed = self._problem.batch_extent
        ranges = ((timed - 1, timed + 1), (timed // 2, 2 * timed + 1), (65, MANY), (65, MANY))
        low, high = ranges[rng.integers(len(ranges))]
        return int(rng.integers(max(1, low), high + 1))


def _log_uniform(rng: np.random.Generator, most: int) -> int:
    """A log-uniform integer from 1 to `most`: equally likely to be below 8 as from there to 64, and so on."""
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))


def _shrunk(batches: Sequence[int], size: int) -> list[int]:
    """These batches, with the largest ones cut so that two arrangements of each fit into the memory for cases."""
    most = max(2, CASE_BYTES // size)
    found = [min(batch, most) for batch in batches]
    while sum(found) * 2 * size > ALL_BYTES and max(found) > 2:
        largest = found.index(max(found))
        found[largest] = max(2, found[largest] * 2 // 3)
    return found


__all__ = ["Pool", "again", "arranged", "block_of"]
