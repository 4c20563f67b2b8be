"""Fused softmax and top-k: one read of each logit, k values and k indices written.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 4; Argueta & Chiang 2019, section 4.2.
Instead of the paper's insertion after every element any selection may be used: the order is total (value descending,
index ascending), so that every kernel returns the same indices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution, drawing
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.formats.bitmap import bitmap_words, unpack_bits

from .reference import best_and_asked, row_scales, same_ranks, soft_capped
from .rows import asked, bitmaps, mixed, temperatures

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Relative error of probabilities: float32 sums of up to 2^18 terms in at least 16 partial sums, and one exponential.
RELATIVE = 2e-5
# Absolute error of log-probabilities: that of a logarithm is the relative error of its sum.
ABSOLUTE_LOG = 2e-5
# Probabilities below this are subnormal in float32 and may be flushed to zero.
TINY = 1.2e-38
# Error of a capped logit, relative to the cap or the row's largest logit, whichever is less.
CAPPED = 2.0**-20
# Relative error of the quotient 1 / temperature in a kernel, by which a row's exponents are off.
QUOTIENT = 2.0**-22
SCALE = Argument("scale", (), "float32", "Inverse temperature, above 0: multiplies logits + bias.")
LOG = Argument("log", (), "int32", "Nonzero for log-probabilities.")
CAP = Argument("cap", (), "float32", "Soft cap of the logits, above 0.", when="capped")
TEMPERATURES = Argument(
    "temperatures", ("batch",), "float32", "Of each row; below 1e-5 it counts as 1, above 2^90 as 2^90.", when="per_row"
)


@dataclass(frozen=True)
class SoftmaxTopk(Problem):
    """`values, indices = topk(softmax(scale * (logits + bias), -1), k)` for logits `(batch, vocab)`.

    Extras, absent by default: `bias` = 1 for a row that is added to every row of the logits, `ids` = n for n given
    columns per row whose probabilities are also returned, whatever their rank, `allowed` = 1 for a bitmap of each row:
    columns whose bit is 0 count as minus infinity, `per_row` = 1 for a temperature of each row, whose inverse is the
    row's scale, and `capped` = 1, not beside a bias, for logits that become cap * tanh(logits / cap) before all else.
    """

    batch: int
    vocab: int
    k: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)
    ids: int = field(default=0, metadata=OPTIONAL)
    allowed: int = field(default=0, metadata=OPTIONAL)
    per_row: int = field(default=0, metadata=OPTIONAL)
    capped: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "softmax_topk"
    batch_axis: ClassVar[str] = "batch"
    added_axes: ClassVar[tuple[str, ...]] = ("per_row", "capped")
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("logits", ("batch", "vocab"), "dtype", "Unnormalised scores, row-major."),
        dataclasses.replace(SCALE, when="shared"),
        TEMPERATURES,
        LOG,
        CAP,
        Argument("bias", ("vocab",), "float32", "Added to every row; -inf masks a column.", when="bias"),
        Argument("allowed", ("batch", "bitmap"), "int32", "Bit j % 32 of word j / 32 allows column j.", when="allowed"),
        Argument("ids", ("batch", "ids"), "int64", "Columns whose probabilities are wanted.", when="ids"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("values", ("batch", "k"), "float32", "Probabilities, or their logarithms, descending."),
        Argument("indices", ("batch", "k"), "int64", "Columns of the values, in [0, vocab)."),
        Argument("given", ("batch", "ids"), "float32", "Those of `ids`; NaN for one outside [0, vocab).", when="ids"),
    )
    structures: ClassVar[tuple[str, ...]] = (
        "random", "ties", "masked", "special", "ascending", "constant", "zipf", "mixed",
    )  # fmt: skip
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = (*structures, "mixed")  # twice, since it has most kinds of rows
    settings: ClassVar[tuple[Settings, ...]] = (
        {"scale": 1.0, "log": 0},
        {"scale": 1.0, "log": 1},
        {"scale": 0.625, "log": 0},
        {"scale": 1.7, "log": 1},
    )
    # They add little to what a kernel reads.
    alike: ClassVar[tuple[str, ...]] = ("allowed", "per_row", "capped")
    example: ClassVar[Mapping[str, Any]] = {"batch": 10, "vocab": 25000, "k": 5}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithm 4; Argueta & Chiang 2019, 4.2"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "vocab", "k")
        require_dtype(self)
        if self.k > self.vocab:
            raise ProblemError(f"softmax_topk: k must be at most vocab ({self.vocab}), got {self.k}")
        if self.vocab >= 2**31:
            raise ProblemError(f"softmax_topk: vocab must be below 2^31, got {self.vocab}")
        require_extras(self)
        if self.capped and self.bias:
            raise ProblemError("softmax_topk: capped must be 0 beside a bias: edit_logits caps such logits first")

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("logits", "bias")

    @property
    def shifted(self) -> tuple[str, ...]:
        return ("logits",)

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return {"scale": 1 / drawing.temperature(rng), "log": int(rng.integers(2))}

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab = distribution.vocab(rng)
        drawn: dict[str, Any] = {
            "batch": distribution.batch(rng),
            "vocab": vocab,
            "k": min(vocab, distribution.whole(rng, 1, 1000)),
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.2),
            "ids": distribution.flag(rng, 0.2) * distribution.whole(rng, 1, 16),
            "allowed": distribution.flag(rng, 0.2),
            "per_row": distribution.flag(rng, 0.1),
        }
        return drawn | {"capped": distribution.flag(rng, 0.1) * (1 - drawn["bias"])}

    def extent(self, name: str | int) -> int:
        if name == "shared":
            return 1 - self.per_row
        return bitmap_words(self.vocab) if name == "bitmap" else super().extent(name)

    def as_tuned(self) -> Problem:
        """With one temperature, as a kernel loads one number more for each row of its own; and without a soft cap."""
        return dataclasses.replace(self, per_row=0, capped=0)

    def definition(self) -> tirx.PrimFunc:
        """Algorithm 4 as written, one row after another, with NaN first as in torch.topk."""
        from tvm.script import tirx as T

        from . import definition

        vocab, k, dtype, n = self.vocab, self.k, self.dtype, self.ids
        with_bias, with_ids, with_bitmap = bool(self.bias), bool(n), bool(self.allowed)
        words, per_row, with_cap = self.extent("bitmap"), bool(self.per_row), bool(self.capped)
        take = definition.take(k)

        # fmt: off
        @T.inline
        def load(s, X, B, A, cap, row, j):
            s.x[0] = T.Cast("float32", X[row, j])
            if with_cap:
                s.x[0] = definition.soft_capped(s.x[0], s.x[0] / cap, cap)
            if with_bias:
                s.x[0] = s.x[0] + B[j]
            if with_bitmap:
                s.x[0] = definition.masked(A, row, j, s.x[0])

        @T.prim_func(s_tir=True)
        def main(
            logits_h: T.handle, shared: T.float32, temperatures_h: T.handle, log: T.int32, cap: T.float32,
            bias_h: T.handle, allowed_h: T.handle, ids_h: T.handle, values_h: T.handle, indices_h: T.handle,
            given_h: T.handle
        ):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=2)
            temperatures = T.match_buffer(temperatures_h, (batch,), "float32", align=4)
            B = T.match_buffer(bias_h, (T.int64(vocab),), "float32", align=4)
            A = T.match_buffer(allowed_h, (batch, T.int64(words)), "int32", align=4)
            Q = T.match_buffer(ids_h, (batch, T.int64(n)), "int64", align=8)
            V = T.match_buffer(values_h, (batch, T.int64(k)), "float32", align=4)
            Z = T.match_buffer(indices_h, (batch, T.int64(k)), "int64", align=8)
            G = T.match_buffer(given_h, (batch, T.int64(n)), "float32", align=4)
            for b in range(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(V[row, 0:k], Z[row, 0:k])
                    s = T.meta_var(definition.Best.alloc(k))
                    scale = T.meta_var(definition.inverse(temperatures[row]) if per_row else shared)
                    definition.begin(s)
                    for j in range(vocab):
                        load(s, X, B, A, cap, row, j)
                        take(s, scale, j, j)
                    for i in range(k):
                        Z[row, i] = s.p[i]
                        definition.write(V, [row, i], s, s.u[i], scale, log)
                    if with_ids:
                        for i in range(n):
                            if Q[row, i] >= 0 and Q[row, i] < vocab:
                                load(s, X, B, A, cap, row, Q[row, i])
                                definition.write(G, [row, i], s, s.x[0], scale, log)
                            else:
                                G[row, i] = T.float32("nan")
        # fmt: on
        return self.trimmed(main)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Logits by structure. A bias is normal with a tenth at -inf; one in eight of the ids is out of range.

        `random`: standard normal. `ties`: a handful of distinct values. `masked`: half, nine tenths or all but about k
        of a row's entries are -inf, and all of one row. `special`: NaN, +inf and -0.0 among normal values. `ascending`:
        each entry above the previous one, the worst case for a threshold. `constant`: all equal. `zipf`: a few large
        values, a long tail. `mixed`: rows of different kinds, see `rows.mixed`. In what is `tuned` all rows have the
        temperature that is chosen, else any (`rows.temperatures`). A soft cap is 30, or else from 0.5 to 64.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.k])
        shape = (self.batch, self.vocab)
        x = drawing.normal(rng, shape, "float32")
        if structure == "ties":
            x = np.round(x)
        elif structure == "masked":
            x[rng.random(shape) < rng.choice([0.5, 0.9, 1 - self.k / self.vocab], (self.batch, 1))] = -np.inf
            x[rng.integers(self.batch)] = -np.inf
        elif structure == "special":
            for value, share in ((np.nan, 0.3), (np.inf, 0.3), (-np.inf, 0.3), (-0.0, 1.0)):
                rows = np.flatnonzero(rng.random(self.batch) < share)
                x[rows, rng.integers(self.vocab, size=len(rows))] = value
        elif structure == "ascending":
            x = np.sort(x, axis=1)
        elif structure == "constant":
            x[:] = x[:, :1]
        elif structure == "mixed":
            mixed(rng, x, self.k, self.dtype)
        elif structure == "zipf":
            x = -np.log(rng.permuted(np.tile(np.arange(1, self.vocab + 1, dtype=np.float32), (self.batch, 1)), axis=1))
        inputs: list[Any] = [x.astype(numpy_dtype(self.dtype)), chosen["scale"], chosen["log"]]
        if self.bias:
            bias = rng.standard_normal(self.vocab, dtype=np.float32)
            inputs.append(np.where(rng.random(self.vocab) < 0.1, np.float32(-np.inf), bias))
        if self.allowed:
            inputs.append(bitmaps(rng, self.batch, self.vocab))
        if self.ids:
            inputs.append(asked(rng, (self.batch, self.ids), self.vocab))
        if self.per_row:
            inputs[1] = temperatures(rng, self.batch, 1 / chosen["scale"], structure == self.tuned)
        if self.capped:
            inputs.insert(3, 30.0 if structure == self.tuned else float(np.float32(2 ** rng.uniform(-1, 6))))
        return inputs

    def scores(self, inputs: Sequence[Any]) -> np.ndarray:
        """What ranks the columns of each row, `(batch, vocab)`: a float32 number, in float64."""
        import numpy as np

        x, extras = np.asarray(inputs[0]).astype(np.float32), inputs[3 + self.capped :]
        if self.capped:
            x = soft_capped(x.astype(np.float64), inputs[3]).astype(np.float32)
        if self.bias:  # rounded to float32, since the order of the elements is that of the sums
            with np.errstate(invalid="ignore"):
                x = x + extras[0]
        if self.allowed:
            x = np.where(unpack_bits(extras[self.bias], self.vocab), x, -np.inf)
        return x.astype(np.float64)

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        ids = inputs[-1] if self.ids else None
        return best_and_asked(self.scores(inputs), self.k, ids, inputs[1], inputs[2])[0]

    def slack(self, inputs: Sequence[Any]) -> np.ndarray:
        """Error of the scores of each row, `(batch,)`."""
        import numpy as np

        if not self.capped:
            return np.zeros(len(inputs[0]))
        size = np.abs(np.asarray(inputs[0]).astype(np.float64))
        return CAPPED * np.minimum(np.where(np.isfinite(size), size, np.inf).max(axis=1), inputs[3])

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Equal indices, since the order is total; values within float32 rounding, and that of capped logits."""
        import numpy as np

        scale = row_scales(inputs[1]) if self.per_row else inputs[1]
        off = np.minimum(2 * scale * self.slack(inputs), 80.0)[:, None]

        def bound(wanted: np.ndarray) -> np.ndarray:
            size = np.abs(wanted)
            if inputs[2]:
                return ABSOLUTE_LOG + 1e-6 * size + off
            return TINY + (RELATIVE + off_exponent(size) * self.per_row + np.expm1(off)) * size

        return [
            None if argument.name == "indices" else bound(wanted)
            for argument, wanted in zip(self.kernel_outputs, expected, strict=True)
        ]

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """As `Problem.agree`. Columns whose capped logits differ by less than their rounding may be in either order."""
        if self.capped:
            found = same_ranks(self.scores(inputs), expected[1], outputs[1], 2 * self.slack(inputs))
            outputs = [outputs[0], found, *outputs[2:]]
        super().agree(inputs, expected, tolerance, outputs)

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        small = self.batch * (self.k * 12 + self.ids * 12 + self.per_row * 4) + self.vocab * 4 * self.bias
        small += self.batch * self.extent("bitmap") * 4 * self.allowed
        return Cost(logits * numpy_dtype(self.dtype).itemsize + small, 3 * logits)


def off_exponent(probabilities: np.ndarray) -> np.ndarray:
    """Relative error of probabilities that the rounding of a row's own scale makes."""
    import numpy as np

    return QUOTIENT * np.abs(np.log(np.maximum(probabilities, TINY)))


def require_extras(problem: Problem) -> None:
    """Raise `ProblemError` unless `bias`, `allowed` and `per_row` are absent, 0 or 1, and `ids` is absent or an integer
    of at least 0.
    """
    bias, ids, allowed = problem.axes["bias"], problem.axes.get("ids", 0), problem.axes.get("allowed", 0)
    if bias not in (0, 1):
        raise ProblemError(f"{problem.operator}: bias must be 0 or 1 (rows that are added), got {bias!r}")
    if allowed not in (0, 1):
        raise ProblemError(f"{problem.operator}: allowed must be 0 or 1 (bitmaps of rows), got {allowed!r}")
    if problem.axes.get("capped", 0) not in (0, 1):
        raise ProblemError(f"{problem.operator}: capped must be 0 or 1 (soft caps), got {problem.axes['capped']!r}")
    if problem.axes.get("per_row", 0) not in (0, 1):
        raise ProblemError(
            f"{problem.operator}: per_row must be 0 or 1 (temperatures), got {problem.axes['per_row']!r}"
        )
    if not isinstance(ids, int) or isinstance(ids, bool) or ids < 0:
        raise ProblemError(f"{problem.operator}: ids must be an integer of at least 0, got {ids!r}")


PROBLEM = SoftmaxTopk
