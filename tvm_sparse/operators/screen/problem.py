"""Words that may be among the k best of a row, whose scores are known but for an error with a bound.

A step of `ScreenedHead`, without a public function. The bound of a word is a sum over groups of columns, of the length
of the row's hidden state times a number of the word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import Argument, Cost, Mismatch, Problem, ProblemError, Settings, require_positive
from tvm_sparse.formats.bitmap import BITS, bitmap_words, pack_bits, unpack_bits

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

BITMAP = "ceil(vocab / 32)"
# A kernel has a register for each group.
MOST_GROUPS = 32


@dataclass(frozen=True)
class Screen(Problem):
    """Bitmap of the words whose scores may be those of the k best: `scores + errors >= reached`.

    With errors[r, w] = sum_g norms[r, g] * bounds[g, w] and reached[r] = min_i (scores - errors)[r, best[r, i]] - added
    word w of row r is chosen unless scores[r, w] + errors[r, w] < reached[r]; so NaN is chosen, and chooses all words
    of its row if it is among the best.
    """

    rows: int
    vocab: int
    k: int
    groups: int

    operator: ClassVar[str] = "screen"
    batch_axis: ClassVar[str] = "rows"
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("scores", ("rows", "vocab"), "float32", "Scores of words."),
        Argument("best", ("rows", "k"), "int64", "Words in [0, vocab), whose smallest score less its error counts."),
        Argument("norms", ("rows", "groups"), "float32", "Lengths of a row's groups of columns."),
        Argument("bounds", ("groups", "vocab"), "float32", "Bounds of a word's errors per length."),
        Argument("added", (), "float32", "By how much less is enough."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("chosen", ("rows", BITMAP), "int32", "Bitmap of the words, 0 beyond vocab."),
    )
    structures: ClassVar[tuple[str, ...]] = ("random", "ties", "special", "masked")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    settings: ClassVar[tuple[Settings, ...]] = ({"added": 0.0}, {"added": 0.25})
    example: ClassVar[Mapping[str, Any]] = {"rows": 4, "vocab": 8000, "k": 5, "groups": 8}
    source: ClassVar[str] = "bounds by Cauchy and Schwarz"

    def __post_init__(self) -> None:
        require_positive(self, "rows", "vocab", "k", "groups")
        if self.k > self.vocab:
            raise ProblemError(f"screen: k must be at most vocab ({self.vocab}), got {self.k}")
        if self.groups > MOST_GROUPS:
            raise ProblemError(f"screen: groups must be at most {MOST_GROUPS}, got {self.groups}")
        if max(self.rows, self.groups) * self.vocab >= 2**31:
            raise ProblemError("screen: arrays must have fewer than 2^31 elements")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "rows": distribution.whole(rng, 1, 16),
            "vocab": distribution.whole(rng, 1000, 256_000),
            "k": distribution.whole(rng, 1, 256),
            "groups": distribution.whole(rng, 1, 8),
        }

    def extent(self, name: str | int) -> int:
        return bitmap_words(self.vocab) if name == BITMAP else super().extent(name)

    def definition(self) -> tirx.PrimFunc:
        return self.by_slices(bitmap_words(self.vocab))

    def by_slices(self, counted: int, parallel: bool = False) -> tirx.PrimFunc:
        """The function that fills `counted` words of a row's bitmap at a time, on all cores if `parallel`."""
        from types import SimpleNamespace

        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function

        vocab, k, groups, bits = self.vocab, self.k, self.groups, bitmap_words(self.vocab)
        slices, loop = -(-bits // counted), T.parallel if parallel else T.serial
        lowest, nothing = T.min_value("float32"), T.float32("-inf")

        # fmt: off
        @T.inline
        def sum_errors(io, s, row, word):
            s.error[0] = T.float32(0)
            for g in range(groups):
                s.error[0] = s.error[0] + io.norms[row, g] * io.bounds[g, word]

        @T.inline
        def body(io):
            for n in loop(io.rows * slices):
                with T.sblock("slice"):
                    part = T.axis.spatial(io.rows * slices, n)
                    T.reads([])
                    T.writes([])
                    s = T.meta_var(SimpleNamespace(**{
                        name: T.sblock_alloc_buffer((1,), dtype)
                        for name, dtype in (("error", "float32"), ("low", "float32"), ("reached", "float32"),
                                            ("word", "int32"))}))
                    row = T.meta_var(part // slices)
                    s.reached[0] = T.float32("inf")
                    for i in range(k):
                        sum_errors(io, s, row, io.best[row, i])
                        s.low[0] = io.scores[row, io.best[row, i]] - s.error[0]
                        s.reached[0] = T.min(s.reached[0], T.Select(s.low[0] >= lowest, s.low[0], nothing))
                    s.reached[0] = s.reached[0] - io.added
                    for j in range(counted):
                        if part % slices * counted + j < bits:
                            s.word[0] = 0
                            for b in range(BITS):
                                word = T.meta_var((part % slices * counted + j) * BITS + b)
                                if word < vocab:
                                    sum_errors(io, s, row, word)
                                    s.word[0] = s.word[0] | T.Select(
                                        io.scores[row, word] + s.error[0] < s.reached[0], T.int32(0),
                                        T.int32(1) << T.Cast("int32", b))
                            io.chosen[row, part % slices * counted + j] = s.word[0]
        # fmt: on
        return function(self, body, blocks=True, packed=True, index="int64")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Scores with a deviation of 3, and bounds of about a half. `ties`: whole numbers, and bounds that are
        multiples of a quarter. `special`: a NaN among the scores of a row, and in another an infinity. `masked`: nearly
        all scores of all rows but the first are -inf.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.k])
        scores: np.ndarray = 3 * rng.standard_normal((self.rows, self.vocab), dtype=np.float32)
        norms: np.ndarray = rng.uniform(0.5, 1.5, (self.rows, self.groups)).astype(np.float32)
        bounds: np.ndarray = rng.uniform(0, 1 / self.groups, (self.groups, self.vocab)).astype(np.float32)
        if structure == "ties":
            scores, norms, bounds = np.round(scores), np.round(norms * 2) / 2, np.round(bounds * 4) / 4
        elif structure == "special":
            scores[rng.integers(self.rows), rng.integers(self.vocab)] = np.nan
            scores[rng.integers(self.rows), rng.integers(self.vocab)] = np.inf
        elif structure == "masked":
            scores[1:][rng.random((self.rows - 1, self.vocab)) < 0.99] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self.k]
        return [scores, best.astype(np.int64), norms, bounds, chosen["added"]]

    def _sides(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """What each word may reach, and what the best reach, in float64."""
        import numpy as np

        scores, best, norms, bounds, added = inputs
        wide, errors = scores.astype(np.float64), norms.astype(np.float64) @ bounds.astype(np.float64)
        with np.errstate(invalid="ignore"):
            low = np.take_along_axis(wide - errors, best, axis=1)
            return wide + errors, np.where(np.isnan(low), -np.inf, low).min(1, keepdims=True) - added

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        highest, reached = self._sides(inputs)
        return [pack_bits(~(highest < reached))]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [None]

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """Words whose two sides differ by less than float32's rounding may be chosen or not."""
        import numpy as np

        highest, reached = self._sides(inputs)
        with np.errstate(invalid="ignore"):
            near = np.abs(highest - reached) <= 2.0**-20 * (np.abs(highest) + np.abs(reached))
        wrong = (unpack_bits(np.asarray(outputs[0]), self.vocab) != unpack_bits(expected[0], self.vocab)) & ~near
        if wrong.any():
            row, word = (int(i) for i in np.argwhere(wrong)[0])
            raise Mismatch(f"chosen[{row}] is wrong for word {word} ({np.count_nonzero(wrong)} words differ)")
        if self.vocab % BITS and (np.asarray(outputs[0])[:, -1].view(np.uint32) >> (self.vocab % BITS)).any():
            raise Mismatch("chosen has words beyond vocab")

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        read = 4 * self.vocab * (self.rows + self.groups) + self.rows * (8 * self.k + 4 * self.groups)
        return Cost(
            read + 4 * self.rows * bitmap_words(self.vocab), self.rows * (self.vocab + self.k) * (2 * self.groups + 2)
        )


PROBLEM = Screen
