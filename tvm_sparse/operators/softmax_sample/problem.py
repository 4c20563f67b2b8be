"""Sampling of words: softmax of logits, filtered by top-k, top-p and min-p, and one word drawn of what is left.

Fan, Lewis & Dauphin 2018, "Hierarchical neural story generation" (top-k); Holtzman et al. 2020, "The curious case of
neural text degeneration" (top-p); Nguyen et al. 2024, "Turning up the heat: min-p sampling" (min-p). The word is drawn
by inverting the cumulative distribution of the words that are left: with a top-k in the order of `softmax_topk`, else
in the order of columns. So one uniform number gives the same word on every machine, but for rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution, drawing, parts
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    compare,
    numpy_dtype,
    width,
)
from tvm_sparse.operators.softmax_topk.problem import ABSOLUTE_LOG, CAP, SoftmaxTopk
from tvm_sparse.operators.softmax_topk.reference import normalised, ranked, same_ranks

from . import philox, reference

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# The most of a row's best words that a kernel keeps, as one warp draws among them: the largest of `WIDTHS`.
MAX_K = 1024
# How many are kept where nothing is said of top_k: most nuclei are smaller.
UNSAID = 128
# Sums of probabilities in float32 are as accurate as probabilities (`SoftmaxTopk.tolerance`), or a little less.
SLACK = 3e-5
# Uniform numbers that one of [0, 1) may happen to be.
UNIFORMS = (0.0, 2.0**-32, 0.25, 0.5, 0.75, 1 - 2.0**-24)
# The least soft cap of generated inputs. Where logits are saturated, rounding decides which of many words are left.
LEAST_CAP = 8.0
NAMES = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SoftmaxSample(Problem):
    """A word of each row of logits `(batch, vocab)`, drawn from what top-k, top-p and min-p leave of its softmax.

    `k` is how many of the best words are written, and bounds top_k unless `whole`. Extras, absent by default: `bias` =
    1 for a row that is added to every row of the logits; `per_row` = 1 for a temperature, top_k, top_p and min_p of
    each row; `seeded`, where uniform numbers are made in the kernel: 1 from a seed and an offset of each row, 2 from
    one seed, one offset and the row's number, 3 from one seed, each row's offset and its number; `whole` = 1 if a word
    may be drawn from the whole row, where top_k is 0 or less, or above k; `allowed` = 1 for a bitmap of each row:
    columns whose bit is 0 count as minus infinity; `capped` = 1, not beside a bias, for logits that become cap *
    tanh(logits / cap) before all else.
    """

    batch: int
    vocab: int
    k: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)
    per_row: int = field(default=0, metadata=OPTIONAL)
    seeded: int = field(default=0, metadata=OPTIONAL)
    whole: int = field(default=0, metadata=OPTIONAL)
    allowed: int = field(default=0, metadata=OPTIONAL)
    capped: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "softmax_sample"
    batch_axis: ClassVar[str] = "batch"
    added_axes: ClassVar[tuple[str, ...]] = ("capped",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("logits", ("batch", "vocab"), "dtype", "Unnormalised scores, row-major."),
        Argument("temperature", (), "float32", "Divides logits + bias; greedy below 1e-5.", when="shared"),
        Argument("top_k", (), "int32", "How many words count; 0: all k, or all of `whole`.", when="shared"),
        Argument("top_p", (), "float32", "Share of their probability that is left.", when="shared"),
        Argument("min_p", (), "float32", "Least probability, as a share of the best word's.", when="shared"),
        Argument("temperatures", ("batch",), "float32", "The same of each row.", when="per_row"),
        Argument("top_ks", ("batch",), "int32", "The same of each row.", when="per_row"),
        Argument("top_ps", ("batch",), "float32", "The same of each row.", when="per_row"),
        Argument("min_ps", ("batch",), "float32", "The same of each row.", when="per_row"),
        CAP,
        Argument("bias", ("vocab",), "float32", "Added to every row; -inf masks a column.", when="bias"),
        Argument("allowed", ("batch", "bitmap"), "int32", "Bit j % 32 of word j / 32 allows column j.", when="allowed"),
        Argument("uniforms", ("batch",), "float32", "Uniform numbers in [0, 1).", when="given"),
        Argument("seeds", ("batch", 2), "int64", "Seed and offset of Philox4x32-10.", when="own_seeds"),
        Argument("seed", (), "int64", "Seed of all rows, whose numbers stand in the counter.", when="one_seed"),
        Argument("offset", (), "int64", "Offset of all rows.", when="one_offset"),
        Argument("offsets", ("batch",), "int64", "Offset of each row.", when="own_offsets"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("tokens", ("batch",), "int32", "The words drawn, in [0, vocab)."),
        Argument("logprobs", ("batch",), "float32", "Their log-probabilities, before any filter."),
        Argument("values", ("batch", "k"), "float32", "Those of the k best words, descending."),
        Argument("indices", ("batch", "k"), "int64", "These words, in [0, vocab)."),
    )
    # How a row is read is softmax_topk's: these are what a word may have to be drawn from, and a long tail to time.
    structures: ClassVar[tuple[str, ...]] = ("random", "ties", "masked", "special", "mixed", "zipf")
    tuned: ClassVar[str] = SoftmaxTopk.tuned
    verified: ClassVar[tuple[str, ...]] = (*structures[:-1], "mixed")
    settings: ClassVar[tuple[Settings, ...]] = (
        {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 5.0, "top_k": 0, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.3, "top_k": 3, "top_p": 0.75, "min_p": 0.01},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.0},
    )
    # Where uniform numbers come from, a bitmap and a soft cap.
    alike: ClassVar[tuple[str, ...]] = ("seeded", "allowed", "capped")
    example: ClassVar[Mapping[str, Any]] = {"batch": 10, "vocab": 25000, "k": 32}
    source: ClassVar[str] = "Fan et al. 2018; Holtzman et al. 2020; Nguyen et al. 2024"

    def __post_init__(self) -> None:
        _ = self.best  # its axes are checked as those of softmax_topk
        if self.k > MAX_K:
            raise ProblemError(f"softmax_sample: k must be at most {MAX_K}, got {self.k}")
        for name, values in (("per_row", (0, 1)), ("seeded", (0, 1, 2, 3)), ("whole", (0, 1))):
            if self.axes[name] not in values:
                expected = " or ".join(map(str, values)) if len(values) == 2 else ", ".join(map(str, values))
                raise ProblemError(f"softmax_sample: {name} must be {expected}, got {self.axes[name]!r}")
        if self.whole and self.k == self.vocab:
            raise ProblemError(f"softmax_sample: whole is for a k below vocab, got k={self.k}, which is all")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab, whole = distribution.vocab(rng), distribution.flag(rng, 0.4)
        drawn: dict[str, Any] = {
            "batch": distribution.batch(rng),
            "vocab": vocab,
            "k": min(vocab, rng.choice((1, UNSAID)) if whole else distribution.whole(rng, 1, MAX_K)),
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.2),
            "per_row": distribution.flag(rng, 0.5),
            "seeded": rng.choice((0, 1, 2, 2)),  # mostly one seed, or none said
            "whole": whole * (vocab > UNSAID),
            "allowed": distribution.flag(rng, 0.2),
        }
        return drawn | {"capped": distribution.flag(rng, 0.1) * (1 - drawn["bias"])}

    call_words: ClassVar[Mapping[str, str]] = {
        "top_k": "a number, none or array",
        "max_top_k": "a number, beside top_k=array",
        **dict.fromkeys(("temperature", "top_p", "min_p"), "a number or array"),
        "seed": "a number, none or array",
        "offset": "a number or array",
        "uniforms": "array",
    }

    @classmethod
    def of_call(cls, words: Mapping[str, Any]) -> dict[str, Any]:
        """Beside axes: arguments of a call, as `top_k=50`, `temperature=array`, `seed=array`."""

        def number(name: str) -> int:
            try:
                return int(given[name])
            except (TypeError, ValueError):
                expected = cls.call_words[name]
                raise ProblemError(f"softmax_sample: {name} must be {expected}, got {given[name]!r}") from None

        given = {name: value for name, value in words.items() if name in cls.call_words}
        axes: dict[str, Any] = {name: value for name, value in words.items() if name not in given}
        if not given:
            return axes
        own = {name for name, value in given.items() if getattr(value, "shape", ()) or str(value) == "array"}
        said = {name for name, value in given.items() if name in own or str(value).lower() != "none"}
        follows: dict[str, int] = {}
        if given.keys() & {"top_k", "max_top_k"} or "k" not in axes:
            try:
                vocab = int(axes["vocab"])
            except (KeyError, TypeError, ValueError):
                raise ProblemError(
                    "softmax_sample: vocab must be given, a number, beside arguments of a call"
                ) from None
            top_k = None if "top_k" in own else number("top_k") if "top_k" in said else 0
            try:
                max_top_k = number("max_top_k") if "max_top_k" in said else None
                _, most, whole = width_of_call(top_k, max_top_k, vocab, alone=True)
            except ValueError as error:
                raise ProblemError(f"softmax_sample: {error}") from None
            follows |= {"k": most, "whole": int(whole)}
        if own & set(NAMES):
            follows["per_row"] = 1
        if given.keys() & {"seed", "offset", "uniforms"} or "seeded" not in axes:
            made = 1 if "seed" in own else 3 if "offset" in own else 2
            follows["seeded"] = 0 if "uniforms" in said else made
        if both := sorted(follows.keys() & axes.keys()):
            raise ProblemError(
                f"softmax_sample: {', '.join(both)} follow from {', '.join(given)}; give the axes or the arguments of a"
                " call"
            )
        return {**axes, **follows}

    def as_called(self) -> Problem:
        """With the k that calls keep: their top_k rounded up, and 1 or `UNSAID` where numbers leave the whole row.

        No call says `whole` where k is all of the vocabulary.
        """
        if self.alone:
            return self
        width = width_of(UNSAID if self.whole and not self.per_row else self.k, self.vocab)
        return dataclasses.replace(self, k=width, whole=self.whole if width < self.vocab else 0)

    @functools.cached_property
    def best(self) -> SoftmaxTopk:
        """The problem of the k best words, which are what a word is drawn from."""
        try:
            extras = {"allowed": self.allowed, "capped": self.capped}
            return SoftmaxTopk(self.batch, self.vocab, self.k, self.dtype, self.bias, **extras)
        except ProblemError as error:
            raise ProblemError(str(error).replace("softmax_topk", self.operator)) from None

    @property
    def words(self) -> int:
        """How many of the best words one may be drawn from, where top_k does not bound it."""
        return self.vocab if self.whole else self.k

    @property
    def alone(self) -> bool:
        """Whether a word is drawn from the whole row, and one best word is all that is wanted beside it."""
        return self.k == 1 and bool(self.whole)

    def extent(self, name: str | int) -> int:
        present = {
            "shared": not self.per_row,
            "given": self.seeded == 0,
            "own_seeds": self.seeded == 1,
            "one_seed": self.seeded in (2, 3),
            "one_offset": self.seeded == 2,
            "own_offsets": self.seeded == 3,
        }
        return (
            int(present[name])
            if name in present
            else self.best.extent(name)
            if name == "bitmap"
            else super().extent(name)
        )

    def distance(self, other: Problem) -> float | None:
        """As `Problem.distance`.

        A draw from the whole row that keeps one best word has kernels of its own, and nothing in common with others.
        """
        if isinstance(other, SoftmaxSample) and self.alone != other.alone:
            return None
        return super().distance(other)

    def as_shipped(self) -> tuple[Problem, ...]:
        """Calls with uniform numbers, with seeds of rows, and with one seed or none."""
        return tuple(dataclasses.replace(self, seeded=seeded) for seeded in (0, 1, 2))

    def as_tuned(self) -> Problem:
        """With uniform numbers that are given, as where they come from takes one warp of a row a few instructions; and
        without a soft cap.
        """
        return dataclasses.replace(self, seeded=0, capped=0)

    @property
    def counts_rows(self) -> bool:
        """Where a row's number makes its uniform number."""
        return self.seeded > 1

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """As of any problem; where rows are counted, their numbers follow as one more input, which the reference reads
        and kernels do not have."""
        some = super().sample(inputs[: len(self.kernel_inputs)], rows)
        return [*some, row_numbers(self, inputs)[rows]] if self.counts_rows else some

    @property
    def scaled(self) -> tuple[str, ...]:
        return () if self.capped else self.best.scaled

    @property
    def shifted(self) -> tuple[str, ...]:
        return () if self.capped else self.best.shifted

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        """Each filter is off as often as it is on."""
        import numpy as np

        on = rng.random(3) < 0.5
        return {
            "temperature": 0.0 if rng.random() < 0.1 else drawing.temperature(rng),
            "top_k": int(rng.choice([1, 2, int(rng.integers(1, self.k + 1)), self.k])) if on[0] else 0,
            "top_p": float(np.float32(rng.uniform(0.02, 1))) if on[1] else 1.0,
            "min_p": float(np.float32(10 ** rng.uniform(-4, 0))) if on[2] else 0.0,
        }

    def altered(self, inputs: list[Any], rng: np.random.Generator) -> list[Any]:
        """Uniform numbers at the ends of their range and in its middle, in a third of the rows."""
        import numpy as np

        if not self.seeded:
            own = rng.choice(UNIFORMS, size=self.batch).astype(np.float32)
            inputs[-1] = np.where(rng.random(self.batch) < 0.35, own, inputs[-1])
        return inputs

    def definition(self) -> tirx.PrimFunc:
        """Algorithm 4 of `softmax_topk` as written, then a word drawn of the best, one row after another."""
        from tvm.script import tirx as T

        from tvm_sparse.operators.softmax_topk import definition as topk

        from . import definition

        vocab, k, dtype, per_row, seeded = self.vocab, self.k, self.dtype, bool(self.per_row), self.seeded
        with_bias, with_bitmap, n, bitmap = bool(self.bias), bool(self.allowed), self.words, self.extent("bitmap")
        with_cap = bool(self.capped)
        take, draw = topk.take(n), definition.draw(n, vocab)

        # fmt: off
        @T.prim_func(s_tir=True)
        def main(
            logits_h: T.handle, temperature: T.float32, top_k: T.int32, top_p: T.float32, min_p: T.float32,
            temperatures_h: T.handle, top_ks_h: T.handle, top_ps_h: T.handle, min_ps_h: T.handle, cap: T.float32,
            bias_h: T.handle, allowed_h: T.handle, uniforms_h: T.handle, seeds_h: T.handle, seed: T.int64,
            offset: T.int64, offsets_h: T.handle, tokens_h: T.handle, logprobs_h: T.handle, values_h: T.handle,
            indices_h: T.handle
        ):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=2)
            temperatures = T.match_buffer(temperatures_h, (batch,), "float32", align=4)
            top_ks = T.match_buffer(top_ks_h, (batch,), "int32", align=4)
            top_ps = T.match_buffer(top_ps_h, (batch,), "float32", align=4)
            min_ps = T.match_buffer(min_ps_h, (batch,), "float32", align=4)
            B = T.match_buffer(bias_h, (T.int64(vocab),), "float32", align=4)
            A = T.match_buffer(allowed_h, (batch, T.int64(bitmap)), "int32", align=4)
            U = T.match_buffer(uniforms_h, (batch,), "float32", align=4)
            seeds = T.match_buffer(seeds_h, (batch, T.int64(2)), "int64", align=8)
            offsets = T.match_buffer(offsets_h, (batch,), "int64", align=8)
            tokens = T.match_buffer(tokens_h, (batch,), "int32", align=4)
            logprobs = T.match_buffer(logprobs_h, (batch,), "float32", align=4)
            V = T.match_buffer(values_h, (batch, T.int64(k)), "float32", align=4)
            Z = T.match_buffer(indices_h, (batch, T.int64(k)), "int64", align=8)
            for b in range(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(tokens[row], logprobs[row], V[row, 0:k], Z[row, 0:k])
                    s = T.meta_var(topk.Best.alloc(n))
                    d = T.meta_var(definition.Draw.alloc(n))
                    own_temperature = T.meta_var(temperatures[row] if per_row else temperature)
                    own_top_k = T.meta_var(top_ks[row] if per_row else top_k)
                    own_top_p = T.meta_var(top_ps[row] if per_row else top_p)
                    own_min_p = T.meta_var(min_ps[row] if per_row else min_p)
                    d.scale[0] = topk.inverse(own_temperature)
                    d.limit[0] = definition.limit_of(own_temperature, own_top_k, n)
                    topk.begin(s)
                    for j in range(vocab):
                        s.x[0] = T.Cast("float32", X[row, j])
                        if with_cap:
                            s.x[0] = topk.soft_capped(s.x[0], s.x[0] / cap, cap)
                        if with_bias:
                            s.x[0] = s.x[0] + B[j]
                        if with_bitmap:
                            s.x[0] = topk.masked(A, row, j, s.x[0])
                        take(s, d.scale[0], j, j)
                    for i in range(k):
                        Z[row, i] = s.p[i]
                        topk.write(V, [row, i], s, s.u[i], d.scale[0], 1)
                    for i in range(n):
                        topk.write(d.chance, [i], s, s.u[i], d.scale[0], 0)
                    if seeded > 0:
                        at = T.meta_var(definition.counter_of(seeded, row, seeds, seed, offset, offsets))
                        definition.philox(d.words, d.high, d.key, at[0], at[1], at[2])
                        draw(d, own_top_p, own_min_p, definition.uniform_of(d.words), definition.Columns(s.p))
                    else:
                        draw(d, own_top_p, own_min_p, U[row], definition.Columns(s.p))
                    tokens[row] = T.Cast("int32", s.p[d.place[0]])
                    topk.write(logprobs, [row], s, s.u[d.place[0]], d.scale[0], 1)
        # fmt: on
        return self.trimmed(main)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Logits, bias and bitmaps of `softmax_topk`, and uniform numbers or seeds at random.

        Of what is `tuned` uniform numbers are uniform, and with `per_row` one of four rows has all that was chosen, the
        others a temperature of 0, another top_p or another top_k. Other structures have uniform numbers at their bounds
        and seeds of every magnitude, and with `per_row` any filters beside any; of `masked` some rows have one to three
        finite logits or are padding (`edges.mask_rows`), and of `ties` some are in order.
        """
        import numpy as np

        from . import edges

        structure, chosen = self.chosen(structure, settings)
        logits, _, _, *extras = self.best.generate(seed, structure)
        if self.capped:
            extras[0] = max(extras[0], LEAST_CAP)
        rng = np.random.default_rng([seed, self.vocab, self.k, self.seeded])
        plain = structure == self.tuned
        if structure == "masked":
            edges.mask_rows(rng, logits)
        elif structure == "ties":
            edges.sort_rows(rng, logits)
        filters: list[Any] = [chosen[name] if name != "top_k" else int(chosen[name]) for name in NAMES]
        if self.per_row and plain:
            kinds = np.arange(self.batch) % 4
            for i, (kind, other) in enumerate(((1, 0.0), (2, 2), (3, 0.3), (0, chosen["min_p"]))):
                dtype = np.int32 if NAMES[i] == "top_k" else np.float32
                filters[i] = np.where(kinds == kind, other, filters[i]).astype(dtype)
        elif self.per_row:
            filters = edges.any_filters(rng, self.batch, filters, self.k, self.vocab)
        return [logits, *filters, *extras, *edges.numbers(rng, self.seeded, self.batch, plain)]

    def _scores(self, inputs: Sequence[Any]) -> np.ndarray:
        """Those of the k best words' problem."""
        return self.best.scores([inputs[0], 1.0, 1, *inputs[5:]])

    def _slack(self, inputs: Sequence[Any]) -> np.ndarray:
        """By how much scores of two words may differ that may be in either order, `(batch,)`."""
        return 2 * self.best.slack([inputs[0], 1.0, 1, *inputs[5:]])

    def _filters(self, inputs: Sequence[Any]) -> reference.Filters:
        import numpy as np

        def of_rows(given: Any, dtype: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(given, dtype), (len(inputs[0]),))

        kinds = (np.float32, np.int32, np.float32, np.float32)
        given = list(map(of_rows, inputs[1:5], kinds))
        temperature, top_p, min_p = (given[i].astype(np.float64) for i in (0, 2, 3))
        return reference.Filters(temperature, given[1].astype(np.int64), top_p, min_p)

    def _ranked(self, inputs: Sequence[Any], n: int, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The n best words of all rows, or of `rows`, and their log-probabilities."""
        import numpy as np

        scores, scale = self._scores(inputs), self._filters(inputs).scale
        if rows is not None:
            scores, scale = scores[rows], scale[rows]
        indices = ranked(scores, n)
        values = np.empty(indices.shape)

        def normalise(begin: int, end: int) -> None:
            for i in range(begin, end):
                values[i] = normalised(scores[i : i + 1], scores[i : i + 1, indices[i]], scale[i], 1)[0][0]

        parts.of_rows(scores, normalise)
        return indices, values

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        filters = self._filters(inputs)
        indices, values = self._ranked(inputs, self.words)
        limits, free = filters.limits(self.words), filters.free(self.words, self.vocab)
        uniforms, place = uniforms_of(self, inputs), np.empty((len(values), 1), np.int64)

        def draw(begin: int, end: int) -> None:
            rows = slice(begin, end)
            chances = np.exp(values[rows])
            left = reference.kept(chances, limits[rows], filters.top_p[rows], filters.min_p[rows])
            place[rows, 0] = reference.drawn(chances, left, uniforms[rows], indices[rows], free[rows])

        parts.of_rows(values, draw)
        tokens, logprobs = (np.take_along_axis(array, place, axis=1)[:, 0] for array in (indices, values))
        return [tokens.astype(np.int32), logprobs, values[:, : self.k], indices[:, : self.k]]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Equal indices, as the order is total; log-probabilities within float32 rounding, and that of capped logits;
        for tokens see `agree`.
        """
        import numpy as np

        off = ABSOLUTE_LOG + self._slack(inputs) * self._filters(inputs).scale

        def bound(wanted: np.ndarray) -> np.ndarray:
            # A logarithm as far below as padding of finfo.min may leave float32's range on the way.
            own = off.reshape(-1, *[1] * (wanted.ndim - 1)) + 1e-6 * np.abs(wanted)
            return np.where(wanted < -1e37, np.inf, own)

        return [None, *map(bound, expected[1:3]), None]

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """As `compare`; a token may be another one where the uniform number, or a filter's bound, is within rounding.

        Its log-probability then is the one that has to be there. Words whose capped logits differ by less than their
        rounding may be in either order.
        """
        import numpy as np

        slack = self._slack(inputs)
        if self.capped and len(outputs) > 3:
            outputs = [*outputs[:3], same_ranks(self._scores(inputs), expected[3], outputs[3], slack)]
        tokens, logprobs = np.asarray(outputs[0]), np.asarray(expected[1]).copy()
        wanted, bound = np.asarray(expected[0]).copy(), np.asarray(tolerance[1]).copy()
        rows = np.flatnonzero((tokens != wanted) & np.isfinite(expected[2][:, 0]))
        if len(rows):
            filters = self._filters(inputs).rows(rows)
            indices, values = self._ranked(inputs, self.words, rows)
            at, limits = indices == tokens[rows, None], filters.limits(self.words)
            ranks, chances = at.argmax(axis=1), np.where(np.arange(self.words) < limits[:, None], np.exp(values), 0)
            good = at.any(axis=1) & (ranks < limits)
            free = filters.free(self.words, self.vocab)
            apart = slack[rows] * filters.scale if self.capped else None
            good &= reference.possible(
                chances, ranks, filters, limits, uniforms_of(self, inputs)[rows], SLACK, indices, free, apart
            )
            off = (slack[rows] * filters.scale)[good]
            rows, logprob = rows[good], values[good, ranks[good]]
            wanted[rows], logprobs[rows] = tokens[rows], logprob
            bound[rows] = ABSOLUTE_LOG + off + 1e-6 * np.abs(logprob)
        told = len(outputs)  # a call that asks for no best words returns two
        found, bounds = [wanted, logprobs, *expected[2:]], [None, bound, *tolerance[2:]]
        compare(self.kernel_outputs[:told], found[:told], bounds[:told], outputs)

    def admits(self, inputs: Sequence[Any], outputs: Sequence[np.ndarray]) -> bool | None:
        """Whether all words are among those that the filters leave, which may differ by rounding."""
        import numpy as np

        indices, values = self._ranked(inputs, self.words)
        filters = self._filters(inputs)
        limits = filters.limits(self.words)
        left = reference.kept(np.exp(values), limits, filters.top_p + SLACK, filters.min_p - SLACK)
        return bool(((indices == outputs[0][:, None]) & (np.arange(self.words) < left[:, None])).any(axis=1).all())

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        numbers = (4, 16, 0, 8)[self.seeded]
        small = self.batch * (8 + numbers + self.k * 12 + 16 * self.per_row) + self.vocab * 4 * self.bias
        small += self.batch * self.extent("bitmap") * 4 * self.allowed
        return Cost(logits * numpy_dtype(self.dtype).itemsize + small, 3 * logits)


def row_numbers(problem: Problem, inputs: Sequence[Any]) -> np.ndarray:
    """The numbers of the rows that inputs have: those of a `sample`, or all."""
    import numpy as np

    return inputs[-1] if len(inputs) > len(problem.kernel_inputs) else np.arange(len(inputs[0]))


def uniforms_of(problem: Any, inputs: Sequence[Any]) -> np.ndarray:
    """The uniform number of each row in float64, of a problem with `seeded` whose last inputs make them."""
    import numpy as np

    given = inputs[: len(problem.kernel_inputs)]
    if problem.seeded == 0:
        uniform = np.asarray(given[-1])
    elif problem.seeded == 1:
        uniform = philox.uniforms(given[-1][:, 0], given[-1][:, 1])
    else:
        rows = row_numbers(problem, inputs)
        seed, offset = (np.asarray(one) + np.zeros(len(rows), np.int64) for one in given[-2:])
        uniform = philox.uniforms(seed, offset, rows)
    return np.clip(uniform.astype(np.float64), 0, reference.BELOW_ONE)


def width_of(top_k: int, vocab: int) -> int:
    """The k of the problem that a call with this top_k asks for."""
    return width(top_k, vocab)


def width_of_call(top_k: int | None, max_top_k: int | None, vocab: int, alone: bool = False) -> tuple[int, int, bool]:
    """How many of the best words the kernel keeps, how many may be asked for, and whether it has to draw from all.

    `top_k` is None for an array, and 0 for none. `alone`: no best words are wanted beside the token: where no top_k
    bounds the draw, one best word is enough then.
    """
    most = 1 if alone and top_k is not None else UNSAID
    if top_k is not None and max_top_k is not None:
        raise ValueError("max_top_k: comes with an array top_k, and top_k is none")
    if max_top_k is not None:
        most = index(max_top_k)
        if not 1 <= most <= MAX_K:
            raise ValueError(f"max_top_k: expected 1 <= max_top_k <= {MAX_K}, got {max_top_k}")
    bounded = top_k is not None and 0 < top_k <= MAX_K and top_k < vocab
    if bounded:
        most = top_k or 0
    width = most if most == 1 and not bounded else width_of(most, vocab)
    return width, min(most, vocab), width < vocab and not bounded


PROBLEM = SoftmaxSample
