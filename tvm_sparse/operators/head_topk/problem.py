"""The exact output layer: softmax and top-k of `hidden @ embedding.T`, without the logits in between.

The product that makes the logits, followed by softmax + top-k (Milakov & Gimelshein 2018, Algorithm 4): the
full-vocabulary softmax with which Shi, Xu & Knight 2018 compare their LSH head (equations 1 and 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution, drawing, parts
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Mismatch,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.formats.quantized import STORED, as_float32, stored_scales, stored_values, word_number
from tvm_sparse.operators.softmax_topk.problem import (
    ABSOLUTE_LOG,
    CAP,
    RELATIVE,
    TINY,
    SoftmaxTopk,
    off_exponent,
    require_extras,
)
from tvm_sparse.operators.softmax_topk.reference import best_and_asked, row_scales
from tvm_sparse.operators.softmax_topk.rows import asked, temperatures

from . import scores

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Rows of the smallest tile of the kernels' product, of one fragment, and of the tiles that come in any number.
EIGHT, SIXTEEN = 8, 16
TILES = (EIGHT, SIXTEEN, 32, 64)
# Words of the vocabulary with which kernels are verified: programs read their number at run time. Where they write all
# scores, rows of scores are whole tiles.
FEW_WORDS, FEW_WHOLE_WORDS = 3001, 3008
# Words of which a vocabulary must be a multiple, for a kernel with tensor cores to write all scores: the largest tile.
WHOLE_WORDS = 32
# Structures whose scores are exact sums. Scales of an embedding in eight bits are powers of two there.
EXACT = ("ties", "constant", "ascending")


@dataclass(frozen=True)
class HeadTopk(Problem):
    """`values, indices = topk(softmax(scale * (hidden @ embedding.T + bias), -1), k)`, with the normaliser.

    Extras, absent by default: `bias` = 1 for a row that is added to every row of the scores; `ids` = n for n given
    words per row whose probabilities are also returned, whatever their rank; `stored`, the dtype of an embedding in
    eight bits whose rows have scales: the score of word w is `scales[w] * (hidden @ embedding[w])`; only with `stored`,
    `logits` = 1 for the scores of all words as another output, and `groups` = g for g scales of a row, each of as many
    neighbouring columns, whose sum it multiplies; `per_row` = 1 for a temperature of each row, whose inverse is the
    row's scale; and `capped` = 1 for products that become cap * tanh(product / cap) before the bias is added.
    """

    batch: int
    vocab: int
    hidden: int
    k: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)
    ids: int = field(default=0, metadata=OPTIONAL)
    stored: str = field(default="", metadata=OPTIONAL)
    logits: int = field(default=0, metadata=OPTIONAL)
    per_row: int = field(default=0, metadata=OPTIONAL)
    capped: int = field(default=0, metadata=OPTIONAL)
    groups: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "head_topk"
    batch_axis: ClassVar[str] = "batch"
    added_axes: ClassVar[tuple[str, ...]] = ("stored", "logits", "per_row", "capped", "groups")
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("hidden", ("batch", "hidden"), "dtype", "Hidden states."),
        Argument("embedding", ("vocab", "hidden"), "dtype", "Output embedding, a row a word; as uint8 if `stored`."),
        *SoftmaxTopk.inputs[1:4],
        Argument(
            "constant", (), "int32", "1 if nobody writes `embedding` while kernels that read it are queued, else 0."
        ),
        dataclasses.replace(CAP, doc="Soft cap of the products, above 0."),
        Argument("bias", ("vocab",), "float32", "Added to every row of the scores; -inf masks a word.", when="bias"),
        Argument("ids", ("batch", "ids"), "int64", "Words whose probabilities are wanted.", when="ids"),
        Argument("scales", ("vocab",), "float32", "What the sum of each word is multiplied by.", when="row_scales"),
        Argument("group_scales", ("vocab", "groups"), "float32", "The same of groups of columns.", when="groups"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("values", ("batch", "k"), "float32", "Probabilities, or their logarithms, descending."),
        Argument("indices", ("batch", "k"), "int64", "Words of the values, in [0, vocab)."),
        Argument("normaliser", ("batch",), "float32", "Logarithm of the sum of exponentials of the scaled scores."),
        Argument("given", ("batch", "ids"), "float32", "Those of `ids`; NaN for one outside [0, vocab).", when="ids"),
        Argument("logits", ("batch", "vocab"), "float32", "Scores of all words.", when="logits"),
    )
    peer_outputs: ClassVar[int | None] = 2  # without the normaliser
    structures: ClassVar[tuple[str, ...]] = scores.STRUCTURES
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = scores.STRUCTURES
    # With a constant embedding and another one in turn.
    settings: ClassVar[tuple[Settings, ...]] = tuple(
        {**setting, "constant": 1 - i % 2} for i, setting in enumerate(SoftmaxTopk.settings)
    )
    alike: ClassVar[tuple[str, ...]] = ("per_row", "capped")
    example: ClassVar[Mapping[str, Any]] = {"batch": 4, "vocab": 8000, "hidden": 256, "k": 5}
    most_drawn_bytes: ClassVar[int] = 1 << 30  # the embedding of a large vocabulary
    source: ClassVar[str] = "Shi, Xu & Knight 2018, equations 1 and 2; Milakov & Gimelshein 2018, Algorithm 4"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "vocab", "hidden", "k")
        require_dtype(self)
        scores.require_extents(self.operator, self.batch, self.hidden, self.vocab, self.vocab)
        if self.k > self.vocab:
            raise ProblemError(f"head_topk: k must be at most vocab ({self.vocab}), got {self.k}")
        require_extras(self)
        if self.stored and self.stored not in STORED:
            raise ProblemError(f"head_topk: stored must be empty or one of {', '.join(STORED)}, got {self.stored!r}")
        if self.logits not in (0, 1) or self.logits and not self.stored:
            raise ProblemError(f"head_topk: logits must be 0, or 1 of a stored embedding, got {self.logits!r}")
        if self.groups and (not self.stored or self.groups < 2 or self.hidden % self.groups):
            raise ProblemError(
                f"head_topk: groups must be 0, or of a stored embedding a divisor of its {self.hidden} columns above 1,"
                f" got {self.groups!r}"
            )

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab = distribution.whole(rng, 1000, 256_000)
        return {
            "batch": distribution.batch(rng),
            "vocab": vocab,
            "hidden": distribution.whole(rng, 64, 8192, 64 if distribution.flag(rng, 0.8) else 1),
            "k": min(vocab, distribution.whole(rng, 1, 128)),
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.2),
            "ids": distribution.flag(rng, 0.1) * distribution.whole(rng, 1, 16),
            "per_row": distribution.flag(rng, 0.1),
            "capped": distribution.flag(rng, 0.1),
        }

    def extent(self, name: str | int) -> int:
        if name == "row_scales":
            return int(bool(self.stored) and not self.groups)
        return 1 - self.per_row if name == "shared" else super().extent(name)

    def as_tuned(self) -> Problem:
        """With one temperature, as a kernel loads one number more for each row of its own; and without a soft cap, of
        which a head takes a few instructions for each score.
        """
        return replace(self, per_row=0, capped=0)

    def dtype_of(self, argument: Argument) -> str:
        return "uint8" if self.stored and argument.name == "embedding" else super().dtype_of(argument)

    def distance(self, other: Problem) -> float | None:
        """Octaves summed over all sizes; None for a problem with other columns, and for one whose rows need a smaller
        tile.

        Columns determine how a word is divided among warps, and a template's default is computed for them: on an H200
        at (1, 256000, 4608) it takes 512 microseconds, but 818 with the decisions for 2560 columns. With a smaller tile
        all words would be read twice: (10, 151936, 4096) takes 565 microseconds with the decisions for one row, and 299
        with its own; (32, 128256, 4096) takes 487 with those for ten rows, and 254 with its own.
        """
        if not isinstance(other, HeadTopk) or divided_otherwise(self, other):
            return None
        return super().distance(other)

    @property
    def run_time_extents(self) -> tuple[str, ...]:
        return (*super().run_time_extents, "vocab")

    def smaller(self, extent: int) -> Problem:
        few = FEW_WHOLE_WORDS if self.logits else FEW_WORDS
        return replace(self, batch=extent, vocab=max(self.k, min(self.vocab, few)))

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden", ("group_scales" if self.groups else "scales") if self.stored else "embedding", "bias")

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return {"scale": 1 / drawing.temperature(rng), "log": int(rng.integers(2)), "constant": int(rng.integers(2))}

    def definition(self) -> tirx.PrimFunc:
        """Each row's scores are computed, summed, and inserted in order, one by one."""
        from tvm.script import tirx as T

        from tvm_sparse.operators.softmax_topk import definition

        hidden, k, dtype, n, stored = self.hidden, self.k, self.dtype, self.ids, self.stored
        with_bias, with_ids, with_logits = bool(self.bias), bool(n), bool(self.logits)
        with_scales, groups = bool(stored) and not self.groups, self.groups
        columns = hidden // max(groups, 1)
        per_row, with_cap = bool(self.per_row), bool(self.capped)
        take, (words_dtype, align) = definition.take(k), ("uint8", 1) if stored else (dtype, 2)

        # fmt: off
        @T.inline
        def score(s, H, E, B, S, C, cap, row, j):
            s.x[0] = T.float32(0)
            for h in range(hidden):
                if groups > 0:
                    s.x[0] = s.x[0] + T.Cast("float32", H[row, h]) * (word_number(stored, E[j, h]) * C[j, h // columns])
                else:
                    s.x[0] = s.x[0] + T.Cast("float32", H[row, h]) * word_number(stored, E[j, h])
            if with_scales:
                s.x[0] = s.x[0] * S[j]
            if with_cap:
                s.x[0] = definition.soft_capped(s.x[0], s.x[0] / cap, cap)
            if with_bias:
                s.x[0] = s.x[0] + B[j]

        @T.prim_func(s_tir=True)
        def main(
            hidden_h: T.handle, embedding_h: T.handle, shared: T.float32, temperatures_h: T.handle, log: T.int32,
            constant: T.int32, cap: T.float32, bias_h: T.handle, ids_h: T.handle, scales_h: T.handle,
            group_scales_h: T.handle, values_h: T.handle, indices_h: T.handle, normaliser_h: T.handle,
            given_h: T.handle, logits_h: T.handle
        ):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            vocab = T.int64()
            H = T.match_buffer(hidden_h, (batch, T.int64(hidden)), dtype, align=2)
            E = T.match_buffer(embedding_h, (vocab, T.int64(hidden)), words_dtype, align=align)
            temperatures = T.match_buffer(temperatures_h, (batch,), "float32", align=4)
            B = T.match_buffer(bias_h, (vocab,), "float32", align=4)
            Q = T.match_buffer(ids_h, (batch, T.int64(n)), "int64", align=8)
            S = T.match_buffer(scales_h, (vocab,), "float32", align=4)
            C = T.match_buffer(group_scales_h, (vocab, T.int64(groups)), "float32", align=4)
            V = T.match_buffer(values_h, (batch, T.int64(k)), "float32", align=4)
            Z = T.match_buffer(indices_h, (batch, T.int64(k)), "int64", align=8)
            N = T.match_buffer(normaliser_h, (batch,), "float32", align=4)
            G = T.match_buffer(given_h, (batch, T.int64(n)), "float32", align=4)
            L = T.match_buffer(logits_h, (batch, vocab), "float32", align=4)
            for b in range(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(H[row, 0:hidden], E[0:vocab, 0:hidden])
                    T.writes(V[row, 0:k], Z[row, 0:k], N[row])
                    s = T.meta_var(definition.Best.alloc(k))
                    scale = T.meta_var(definition.inverse(temperatures[row]) if per_row else shared)
                    definition.begin(s)
                    for j in range(vocab):
                        score(s, H, E, B, S, C, cap, row, j)
                        if with_logits:
                            L[row, j] = s.x[0]
                        take(s, scale, j, j)
                    for i in range(k):
                        Z[row, i] = s.p[i]
                        definition.write(V, [row, i], s, s.u[i], scale, log)
                    N[row] = s.m[0] * scale + T.log(s.d[0])
                    if with_ids:
                        for i in range(n):
                            if Q[row, i] >= T.int64(0) and Q[row, i] < vocab:
                                score(s, H, E, B, S, C, cap, row, Q[row, i])
                                definition.write(G, [row, i], s, s.x[0], scale, log)
                            else:
                                G[row, i] = T.float32("nan")
        # fmt: on
        return self.trimmed(main)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Hidden states and embedding by structure, see `scores.embedded`; one in eight of the ids is out of range.
        Temperatures of rows are as those of `softmax_topk`.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.k])
        states, words = scores.embedded(rng, self.batch, self.vocab, self.hidden, structure, self.dtype)
        held, scales = self._in_eight_bits(words, structure) if self.stored else (words, None)
        inputs: list[Any] = [states, held, chosen["scale"], chosen["log"], chosen["constant"]]
        if self.bias:
            inputs.append(scores.word_bias(rng, self.vocab, structure))
        if self.ids:
            inputs.append(asked(rng, (self.batch, self.ids), self.vocab))
        if self.per_row:
            inputs[2] = temperatures(rng, self.batch, 1 / chosen["scale"], structure == self.tuned)
        if self.capped:
            inputs.insert(5, 30.0 if structure == self.tuned else float(np.float32(2 ** rng.uniform(-1, 6))))
        return inputs if scales is None else [*inputs, scales]

    def _in_eight_bits(self, words: np.ndarray, structure: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes `(vocab, hidden)` and scales `(vocab,)` or `(vocab, groups)` of words; infinities and NaN become 0."""
        import numpy as np

        groups = max(1, self.groups)
        held, scales = np.empty(words.shape, np.uint8), np.empty((len(words), groups), np.float32)

        def convert(begin: int, end: int) -> None:
            wide = np.nan_to_num(as_float32(words[begin:end]), nan=0, posinf=0, neginf=0)
            some = stored_scales(wide, self.stored, self.hidden // groups)
            some = np.exp2(np.ceil(np.log2(some))) if structure in EXACT else some
            held[begin:end] = stored_values(wide, some, self.stored).view(np.uint8)
            scales[begin:end] = some

        parts.of_rows(words, convert)
        return held, scales if self.groups else scales[:, 0].copy()

    def extras(self, inputs: Sequence[Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The bias and the ids among the inputs; None for absent ones."""
        after = 5 + self.capped
        return inputs[after] if self.bias else None, inputs[after + self.bias] if self.ids else None

    def cap(self, inputs: Sequence[Any]) -> float | None:
        """The soft cap among the inputs; None for an absent one."""
        return inputs[5] if self.capped else None

    def words(self, inputs: Sequence[Any]) -> np.ndarray:
        """The embedding among the inputs; float32 if it is stored in eight bits."""
        import numpy as np

        if not self.stored:
            return inputs[1]
        found = as_float32(np.asarray(inputs[1]).view(numpy_dtype(self.stored)))
        of_groups = found.reshape(len(found), max(1, self.groups), -1)
        of_groups *= np.asarray(inputs[-1]).reshape(len(found), -1, 1)
        return found

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        states, words, (scale, log) = inputs[0], self.words(inputs), inputs[2:4]
        bias, ids = self.extras(inputs)
        found = scores.scores(states, words, bias, self.cap(inputs))
        (values, indices, *given), normaliser = best_and_asked(found, self.k, ids, scale, log)
        return [values, indices, normaliser, *given, *([found] if self.logits else [])]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        slack = scores.rounding(inputs[0], self.words(inputs), self.extras(inputs)[0], self.cap(inputs))
        return tolerances(self.kernel_outputs, slack, inputs[2], inputs[3], expected)

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """Compare values as `Problem.agree`; the word at each rank must have the reference's score, see `scores`."""
        import numpy as np

        scores.compare_ranked(self.kernel_outputs, expected, tolerance, outputs)
        states, words = inputs[0], self.words(inputs)
        bias, _ = self.extras(inputs)
        found, wanted = np.asarray(outputs[1]), expected[1]
        if found.min() < 0 or found.max() >= len(words):
            raise Mismatch(f"indices: {found.min()} to {found.max()} leave [0, {len(words)})")
        scores.compare_words(self.outputs[1], states, words, bias, found, wanted, self.cap(inputs))

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        states, words = inputs[0], self.words(inputs)
        bias, _ = self.extras(inputs)
        cap = self.cap(inputs)
        found = scores.pair_scores(states, words[indices], None if bias is None else bias[indices], cap)
        return found, scores.rounding(states, words, bias, cap)[:, None]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        size = numpy_dtype(self.dtype).itemsize
        small = self.batch * (self.k * 12 + 4 + self.ids * 12 + self.per_row * 4) + self.vocab * 4 * (
            self.bias + (self.groups or bool(self.stored))
        )
        read = self.hidden * (self.batch * size + self.vocab * word_size(self))
        return Cost(read + small, (2 * self.hidden + 3) * self.batch * self.vocab)


def word_size(problem: Problem) -> int:
    """Bytes of a number of the embedding."""
    return 1 if problem.axes.get("stored") else numpy_dtype(problem.axes["dtype"]).itemsize


def tolerances(
    arguments: Sequence[Argument],
    slack: np.ndarray,
    scale: float | np.ndarray,
    log: int,
    expected: Sequence[np.ndarray],
) -> list[np.ndarray | None]:
    """Tolerances of values and normalisers, for scores with an error of up to `slack` per row, which the exponential
    propagates. `scale` is one factor, or the temperatures of rows.
    """
    import numpy as np

    own = isinstance(scale, np.ndarray)
    factor = row_scales(scale) if isinstance(scale, np.ndarray) else scale

    def bound(argument: Argument, wanted: np.ndarray) -> np.ndarray:
        size, after = np.abs(wanted), (1,) * (wanted.ndim - slack.ndim)
        if argument.name == "logits":
            return (2.0 * slack).reshape(slack.shape + after) + 1e-6 * size
        off = (2.0 * factor * slack).reshape(slack.shape + after)
        if log or argument.name == "normaliser":
            return ABSOLUTE_LOG + off + 1e-6 * size
        return TINY + (RELATIVE + np.expm1(np.minimum(off, 80.0)) + off_exponent(size) * own) * size

    with np.errstate(invalid="ignore"):
        return [
            None if a.name == "indices" else bound(a, wanted) for a, wanted in zip(arguments, expected, strict=True)
        ]


def divided_otherwise(own: Any, other: Any) -> bool:
    """Whether decisions for the other problem are for other columns, or for rows that a smaller tile holds."""
    columns_differ: bool = other.hidden != own.hidden
    return columns_differ or any(other.batch <= rows < own.batch for rows in TILES)


PROBLEM = HeadTopk
