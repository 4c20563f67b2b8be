"""A draw from the exact output layer: hidden states to tokens, in the order of the words, without filters.

The draw is that of `softmax_sample` without top-k, top-p and min-p: the inverse of the distribution function. Partial
sums of exponentials tell the slice of words in which the uniform number falls, and only that slice is multiplied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution, drawing
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Mismatch,
    Problem,
    ProblemError,
    Settings,
    compare,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.operators.head_topk import scores
from tvm_sparse.operators.head_topk.problem import FEW_WORDS, HeadTopk, divided_otherwise
from tvm_sparse.operators.softmax_sample.edges import numbers
from tvm_sparse.operators.softmax_sample.problem import SLACK, SoftmaxSample, row_numbers, uniforms_of
from tvm_sparse.operators.softmax_topk.problem import ABSOLUTE_LOG, QUOTIENT, SCALE, TEMPERATURES, require_extras
from tvm_sparse.operators.softmax_topk.reference import GREEDY, ranked, row_scales

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Arguments of `SoftmaxSample` that say where uniform numbers come from.
NUMBERS = ("uniforms", "seeds", "seed", "offset", "offsets")


@dataclass(frozen=True)
class HeadDraw(Problem):
    """A word of each row, drawn from p = softmax(scale * (hidden @ embedding.T + bias), -1) in the order of the words.

    With the row's uniform number u the word is the first one up to which the words have a probability above u.

    Extras, absent by default: `bias` = 1 for a row that is added to every row of the scores; `per_row` = 1 for a
    temperature of each row, where a greedy row gets its best word; `seeded` as for `SoftmaxSample`; and `capped` = 1
    for products that become cap * tanh(product / cap) before the bias is added.
    """

    batch: int
    vocab: int
    hidden: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)
    per_row: int = field(default=0, metadata=OPTIONAL)
    seeded: int = field(default=0, metadata=OPTIONAL)
    capped: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "head_draw"
    batch_axis: ClassVar[str] = "batch"
    inputs: ClassVar[tuple[Argument, ...]] = (
        *(argument for argument in HeadTopk.inputs if argument.name in ("hidden", "embedding")),
        replace(SCALE, when="shared"),
        TEMPERATURES,
        *(argument for argument in HeadTopk.inputs if argument.name in ("constant", "cap", "bias")),
        *(argument for argument in SoftmaxSample.inputs if argument.name in NUMBERS),
    )
    outputs: ClassVar[tuple[Argument, ...]] = SoftmaxSample.outputs[:2]
    structures: ClassVar[tuple[str, ...]] = scores.STRUCTURES
    tuned: ClassVar[str] = HeadTopk.tuned
    verified: ClassVar[tuple[str, ...]] = scores.STRUCTURES
    settings: ClassVar[tuple[Settings, ...]] = ({"scale": 1.0, "constant": 1}, {"scale": 0.5, "constant": 0})
    alike: ClassVar[tuple[str, ...]] = ("per_row", "seeded", "capped")
    example: ClassVar[Mapping[str, Any]] = {"batch": 4, "vocab": 8000, "hidden": 256}
    most_drawn_bytes: ClassVar[int] = HeadTopk.most_drawn_bytes
    source: ClassVar[str] = "Shi, Xu & Knight 2018, equations 1 and 2; Salmon et al. 2011"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "vocab", "hidden")
        require_dtype(self)
        scores.require_extents(self.operator, self.batch, self.hidden, self.vocab, self.vocab)
        require_extras(self)
        if self.seeded not in range(4):
            raise ProblemError(f"head_draw: seeded must be 0, 1, 2, 3, got {self.seeded!r}")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        drawn = HeadTopk.drawn_axes(rng)
        names = ("batch", "vocab", "hidden", "dtype", "bias", "per_row", "capped")
        return {name: drawn[name] for name in names} | {"seeded": distribution.whole(rng, 1, 4) - 1}

    @property
    def head(self) -> HeadTopk:
        """The problem of the best word, which has the same scores."""
        return HeadTopk(
            self.batch, self.vocab, self.hidden, 1, self.dtype, self.bias, per_row=self.per_row, capped=self.capped
        )

    @property
    def draw(self) -> SoftmaxSample:
        """The problem of a draw from ready scores, which has the same uniform numbers."""
        return SoftmaxSample(self.batch, self.vocab, 1, per_row=self.per_row, seeded=self.seeded)

    def extent(self, name: str | int) -> int:
        return super().extent(name) if name in self.axes or not isinstance(name, str) else self.draw.extent(name)

    def as_tuned(self) -> Problem:
        """As of `HeadTopk` and `SoftmaxSample`."""
        return replace(self, per_row=0, seeded=0, capped=0)

    def as_shipped(self) -> tuple[Problem, ...]:
        """Calls with uniform numbers, with seeds of rows, and with one seed or none."""
        return tuple(replace(self, seeded=seeded) for seeded in (0, 1, 2))

    def distance(self, other: Problem) -> float | None:
        """As for `HeadTopk`: None for a problem with other columns, and for one whose rows need a smaller tile."""
        if not isinstance(other, HeadDraw) or divided_otherwise(self, other):
            return None
        return super().distance(other)

    @property
    def run_time_extents(self) -> tuple[str, ...]:
        return (*super().run_time_extents, "vocab")

    def smaller(self, extent: int) -> Problem:
        return replace(self, batch=extent, vocab=min(self.vocab, FEW_WORDS))

    @property
    def counts_rows(self) -> bool:
        """Where a row's number makes its uniform number."""
        return self.draw.counts_rows

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """As of `SoftmaxSample`: where rows are counted, their numbers follow as one more input."""
        some = super().sample(inputs[: len(self.kernel_inputs)], rows)
        return [*some, row_numbers(self, inputs)[rows]] if self.counts_rows else some

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden", "embedding", "bias")

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return {"scale": 1 / drawing.temperature(rng), "constant": int(rng.integers(2))}

    def altered(self, inputs: list[Any], rng: np.random.Generator) -> list[Any]:
        return self.draw.altered(inputs, rng)

    def definition(self) -> tirx.PrimFunc:
        """Scores are computed three times: for the best word, for the sum in float64, and up to the word."""
        from tvm_sparse.core.arguments import function

        return function(self, self.by_rows(), blocks=True, packed=True, index="int64")

    def by_rows(self, simd: int = 1, parallel: bool = False) -> Callable[..., Any]:
        """The body of the definition, with `simd` partial sums of a score; its rows are on all cores if `parallel`."""
        from tvm.script import tirx as T

        from tvm_sparse.operators.softmax_sample import definition as sample
        from tvm_sparse.operators.softmax_topk import definition as topk

        hidden, per_row, seeded, capped = self.hidden, bool(self.per_row), self.seeded, bool(self.capped)
        take, loop = topk.take(1), T.parallel if parallel else T.serial

        # fmt: off
        @T.inline
        def score(io, s, part, row, j):
            s.x[0] = T.float32(0)
            if simd > 1:
                for i in T.vectorized(simd):
                    part[i] = T.float32(0)
                for h in range(hidden // simd):
                    for i in T.vectorized(simd):
                        part[i] = part[i] + T.Cast("float32", io.hidden[row, h * simd + i]) * T.Cast(
                            "float32", io.embedding[j, h * simd + i])
                for i in range(simd):
                    s.x[0] = s.x[0] + part[i]
            for i in range(hidden % simd if simd > 1 else hidden):
                h = T.meta_var(hidden // simd * simd + i if simd > 1 else i)
                s.x[0] = s.x[0] + T.Cast("float32", io.hidden[row, h]) * T.Cast("float32", io.embedding[j, h])
            if capped:
                s.x[0] = topk.soft_capped(s.x[0], s.x[0] / io.cap, io.cap)
            if io.bias is not None:
                s.x[0] = s.x[0] + io.bias[j]

        @T.inline
        def body(io):
            for b in loop(io.batch):
                with T.sblock("row"):
                    row = T.axis.spatial(io.batch, b)
                    T.reads(io.hidden[row, 0:hidden], io.embedding[0 : io.vocab, 0:hidden])
                    T.writes(io.tokens[row], io.logprobs[row])
                    s = T.meta_var(topk.Best.alloc(1))
                    d = T.meta_var(sample.Draw.alloc(1))
                    sums = T.sblock_alloc_buffer((3,), "float64")  # up to a word, of all, and what is aimed at
                    # The row's scale and uniform number; the score of the word; an exponential.
                    own = T.sblock_alloc_buffer((4,), "float32")
                    part = T.sblock_alloc_buffer((simd,), "float32")
                    found = T.sblock_alloc_buffer((2,), "int64")  # whether the word is found, and the word
                    if per_row:
                        own[0] = topk.inverse(io.temperatures[row])
                    else:
                        own[0] = io.scale
                    if seeded > 0:
                        at = T.meta_var(sample.counter_of(seeded, row, io.seeds, io.seed, io.offset, io.offsets))
                        sample.philox(d.words, d.high, d.key, at[0], at[1], at[2])
                        own[1] = sample.clamped(sample.uniform_of(d.words))
                    else:
                        own[1] = sample.clamped(io.uniforms[row])
                    topk.begin(s)
                    for j in range(io.vocab):
                        score(io, s, part, row, j)
                        take(s, own[0], j, j)
                    io.tokens[row] = T.Cast("int32", s.p[0])
                    io.logprobs[row] = T.float32("nan")
                    if s.d[0] > T.float32(0) and s.d[0] < T.infinity("float32"):
                        found[1] = s.p[0]
                        own[2] = s.u[0]
                        if per_row:
                            found[0] = T.Select(topk.is_greedy(io.temperatures[row]), T.int64(1), T.int64(0))
                        else:
                            found[0] = T.int64(0)
                        sums[1] = T.float64(0)
                        for turn in range(2):
                            sums[0] = T.float64(0)
                            sums[2] = T.Cast("float64", own[1]) * sums[1]
                            for j in range(io.vocab):
                                if found[0] == T.int64(0) or turn == 0:
                                    score(io, s, part, row, j)
                                    own[3] = T.exp((s.x[0] - s.m[0]) * own[0])
                                    sums[0] = sums[0] + T.Cast("float64", own[3])
                                    if turn == 1 and own[3] > T.float32(0):
                                        found[1] = T.Cast("int64", j)
                                        own[2] = s.x[0]
                                        if sums[0] > sums[2]:
                                            found[0] = T.int64(1)
                            if turn == 0:
                                sums[1] = sums[0]
                        io.tokens[row] = T.Cast("int32", found[1])
                        io.logprobs[row] = T.min((own[2] - s.m[0]) * own[0] - T.log(s.d[0]), T.float32(0))
        # fmt: on
        return body

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Hidden states, embedding, bias and soft cap of `HeadTopk`, uniform numbers and seeds of `SoftmaxSample`."""
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        states, words, heat, _, *others = self.head.generate(seed, structure, {**chosen, "log": 1})
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.seeded])
        return [states, words, heat, *others, *numbers(rng, self.seeded, self.batch, structure == self.tuned)]

    def extras(self, inputs: Sequence[Any]) -> tuple[np.ndarray | None, float | None]:
        """The bias and the soft cap among the inputs; None for absent ones."""
        return inputs[4 + self.capped] if self.bias else None, inputs[4] if self.capped else None

    def _scaled(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores `(rows, vocab)` in float64, the factor of each row, and which rows are greedy."""
        import numpy as np

        found, heat = scores.scores(inputs[0], inputs[1], *self.extras(inputs)), inputs[2]
        if not self.per_row:
            return found, np.full(len(found), float(np.float32(heat))), np.zeros(len(found), bool)
        return found, row_scales(heat), ~(np.asarray(heat) >= GREEDY)

    def _logarithms(self, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probabilities `(rows, vocab)`, of NaN in rows without a distribution; the word that a row gets without a
        draw; and which rows are greedy.
        """
        import numpy as np

        found, scale, greedy = self._scaled(inputs)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            top = found.max(axis=1, keepdims=True)
            shifted = scale[:, None] * (found - top)
            shifted = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        shifted[~np.isfinite(top[:, 0])] = np.nan
        return shifted, ranked(found, 1)[:, 0], greedy

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        logarithms, first, greedy = self._logarithms(inputs)
        chances = np.exp(logarithms)
        total = np.cumsum(chances, axis=1)
        reached = (total > uniforms_of(self, inputs)[:, None] * total[:, -1:]) & (chances > 0)
        last = chances.shape[1] - 1 - np.argmax((chances > 0)[:, ::-1], axis=1)
        tokens = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
        tokens = np.where(greedy | np.isnan(total[:, -1]), first, tokens)
        return [tokens.astype(np.int32), np.take_along_axis(logarithms, tokens[:, None], axis=1)[:, 0]]

    def _slack(self, inputs: Sequence[Any]) -> np.ndarray:
        """By how much exponents of a row may be off, `(rows,)`."""
        return self._scaled(inputs)[1] * 2 * scores.rounding(inputs[0], inputs[1], *self.extras(inputs))

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Log-probabilities within the rounding of scores; for tokens see `agree`."""
        import numpy as np

        return [None, ABSOLUTE_LOG + self._slack(inputs) + (1e-6 + QUOTIENT) * np.abs(expected[1])]

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """As `compare`; a token may be another one where the uniform number is within rounding of its bounds, or of a
        greedy row its score within rounding of the best. Its log-probability then is the one that has to be there.
        """
        import numpy as np

        tokens, wanted = np.asarray(outputs[0]), expected[0].copy()
        if tokens.min() < 0 or tokens.max() >= self.vocab:
            raise Mismatch(f"tokens: {tokens.min()} to {tokens.max()} leave [0, {self.vocab})")
        logarithms, first, greedy = self._logarithms(inputs)
        slack, rows = self._slack(inputs), np.arange(len(tokens))
        own = logarithms[rows, tokens]
        total = np.cumsum(np.exp(logarithms), axis=1)
        share = SLACK + np.expm1(np.minimum(slack, 1))
        aim, end = uniforms_of(self, inputs), total[rows, tokens]
        good = (aim >= end - np.exp(own) - share) & (aim <= end + share) & (own > -np.inf)
        good = np.where(greedy, logarithms[rows, first] - own <= slack, good)
        wanted[good] = tokens[good]
        logprobs = np.where(good, own, expected[1])
        bounds = self.tolerance(inputs, [wanted, logprobs])
        compare(self.kernel_outputs, [wanted, logprobs], bounds, outputs)

    def admits(self, inputs: Sequence[Any], outputs: Sequence[np.ndarray]) -> bool | None:
        """Whether all words are possible."""
        import numpy as np

        return bool((self._logarithms(inputs)[0][np.arange(len(outputs[0])), outputs[0]] > -np.inf).all())

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        size = numpy_dtype(self.dtype).itemsize
        numbers = (4, 16, 0, 8)[self.seeded]
        small = self.batch * (8 + numbers + 4 * self.per_row) + self.vocab * 4 * self.bias
        return Cost(
            self.hidden * (self.batch + self.vocab) * size + small, (2 * self.hidden + 3) * self.batch * self.vocab
        )


PROBLEM = HeadDraw
