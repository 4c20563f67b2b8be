"""Softmax and top-k over candidate words: a gathered product, its normaliser and the k best in one.

The last steps of Shi, Xu & Knight 2018 (figure 2): the product of hidden states with the candidates' embeddings and the
softmax over these alone. Candidates have the three forms in use: one list for all rows of a beam (the paper's union,
equation 3), one list per row, and blocks of neighbouring words (clustered heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    require_dtype,
    require_positive,
)
from tvm_sparse.operators.head_topk import scores
from tvm_sparse.operators.head_topk.problem import HeadTopk, tolerances
from tvm_sparse.operators.softmax_topk.problem import LOG, SCALE, require_extras
from tvm_sparse.operators.softmax_topk.reference import best_and_asked

from . import lists

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class CandidateTopk(Problem):
    """`topk(softmax(scale * (hidden @ embedding[words].T + bias[words])), k)` over the words of a list.

    Rows of hidden states that share a list are its beam: `lists` of `beam` rows each. A candidate c stands for `block`
    words from c * block on. If there are fewer than k words, the rest are -1, with a probability of 0. `bias` is 1 if
    there is one, else 0.
    """

    lists: int
    beam: int
    vocab: int
    hidden: int
    m: int
    k: int
    dtype: str = "float32"
    block: int = field(default=1, metadata=OPTIONAL)
    bias: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "candidate_topk"
    batch_axis: ClassVar[str] = "lists"
    row_axes: ClassVar[tuple[str, ...]] = ("beam",)
    data_axes: ClassVar[tuple[str, ...]] = ("vocab",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("hidden", ("lists", "beam", "hidden"), "dtype", "Hidden states, the rows of a list side by side."),
        Argument("embedding", ("vocab", "hidden"), "dtype", "Output embedding, a row a word."),
        Argument("candidates", ("lists", "m"), "int32", "Candidates of each list, in [0, vocab / block)."),
        Argument("counts", ("lists",), "int32", "How many candidates of each list count: the first min(count, m)."),
        *(SCALE, LOG),
        Argument("bias", ("vocab",), "float32", "Added to the words' scores; -inf masks a word.", when="bias"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("values", ("lists", "beam", "k"), "float32", "Probabilities over the list, or their logarithms."),
        Argument("indices", ("lists", "beam", "k"), "int64", "Words of the values; -1 where there are none left."),
        Argument("normaliser", ("lists", "beam"), "float32", "Logarithm of the sum of exponentials of scaled scores."),
    )
    peer_outputs: ClassVar[int | None] = HeadTopk.peer_outputs
    structures: ClassVar[tuple[str, ...]] = (*scores.STRUCTURES, "few")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    settings: ClassVar[tuple[Settings, ...]] = HeadTopk.settings
    example: ClassVar[Mapping[str, Any]] = {"lists": 1, "beam": 4, "vocab": 8000, "hidden": 256, "m": 1000, "k": 5}
    most_drawn_bytes: ClassVar[int] = 1 << 30  # the embedding of a large vocabulary
    source: ClassVar[str] = "Shi, Xu & Knight 2018, section 4.2 and figure 2"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "beam", "vocab", "hidden", "m", "k", "block")
        require_dtype(self)
        scores.require_extents(self.operator, self.lists * self.beam, self.hidden, self.vocab, self.words)
        if self.k > self.words:
            raise ProblemError(
                f"candidate_topk: k must be at most the {self.words} words of a list (m={self.m}, block={self.block}),"
                f" got {self.k}"
            )
        if self.vocab % self.block:
            raise ProblemError(f"candidate_topk: block {self.block} does not divide vocab={self.vocab}")
        if self.words >= 2**31:
            raise ProblemError(f"candidate_topk: a list must have fewer than 2^31 words, got {self.words}")
        require_extras(self)

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab, block = distribution.whole(rng, 1000, 256_000, 8), rng.choice((1, 1, 8))
        m = distribution.whole(rng, 16, 1 << 14) // block or 1
        return {
            "lists": distribution.whole(rng, 1, 4096),
            "beam": distribution.whole(rng, 1, 48),
            "vocab": vocab,
            "hidden": distribution.whole(rng, 64, 4096, 8),
            "m": m,
            "k": min(m * block, distribution.whole(rng, 1, 64)),
            "dtype": distribution.dtype(rng),
            "block": block,
            "bias": distribution.flag(rng, 0.2),
        }

    @property
    def words(self) -> int:
        """Number of words of a full list."""
        return self.m * self.block

    def smaller(self, extent: int) -> Problem:
        return replace(self, lists=extent, vocab=min(self.vocab, -(-lists.FEW_WORDS // self.block) * self.block))

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden", "embedding", "bias")

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        drawn = {"scale": 1 / drawing.temperature(rng), "log": int(rng.integers(2)), "constant": 0}
        return {name: drawn[name] for name in self.settings[0]}

    def definition(self) -> tirx.PrimFunc:
        """Each row's scores are computed, summed, and inserted in order, one by one."""
        from tvm.script import tirx as T

        from tvm_sparse.operators.softmax_topk import definition

        hidden, beam, m, k, dtype, block = self.hidden, self.beam, self.m, self.k, self.dtype, self.block
        with_bias = bool(self.bias)
        take = definition.take(k)

        # fmt: off
        @T.prim_func(s_tir=True)
        def main(
            hidden_h: T.handle, embedding_h: T.handle, candidates_h: T.handle, counts_h: T.handle, scale: T.float32,
            log: T.int32, bias_h: T.handle, values_h: T.handle, indices_h: T.handle, normaliser_h: T.handle
        ):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            lists = T.int64()
            vocab = T.int64()
            H = T.match_buffer(hidden_h, (lists, T.int64(beam), T.int64(hidden)), dtype, align=2)
            E = T.match_buffer(embedding_h, (vocab, T.int64(hidden)), dtype, align=2)
            C = T.match_buffer(candidates_h, (lists, T.int64(m)), "int32", align=4)
            K = T.match_buffer(counts_h, (lists,), "int32", align=4)
            B = T.match_buffer(bias_h, (vocab,), "float32", align=4)
            V = T.match_buffer(values_h, (lists, T.int64(beam), T.int64(k)), "float32", align=4)
            Z = T.match_buffer(indices_h, (lists, T.int64(beam), T.int64(k)), "int64", align=8)
            N = T.match_buffer(normaliser_h, (lists, T.int64(beam)), "float32", align=4)
            for i0, b0 in T.grid(lists, T.int64(beam)):
                with T.sblock("row"):
                    i, b = T.axis.remap("SS", [i0, b0])
                    T.reads(H[i, b, 0:hidden], E[0:vocab, 0:hidden], C[i, 0:m], K[i])
                    T.writes(V[i, b, 0:k], Z[i, b, 0:k], N[i, b])
                    word = T.sblock_alloc_buffer((1,), "int64")
                    s = T.meta_var(definition.Best.alloc(k))
                    definition.begin(s)
                    for e in range(k):
                        s.p[e] = T.int64(-1)
                    for j in range(T.max(T.min(K[i], m), 0) * block):
                        word[0] = T.int64(C[i, j // block]) * T.int64(block) + T.int64(j % block)
                        s.x[0] = T.float32(0)
                        for h in range(hidden):
                            s.x[0] = s.x[0] + T.Cast("float32", H[i, b, h]) * T.Cast("float32", E[word[0], h])
                        if with_bias:
                            s.x[0] = s.x[0] + B[word[0]]
                        take(s, scale, j, word[0])
                    for e in range(k):
                        Z[i, b, e] = s.p[e]
                        if s.p[e] < T.int64(0):
                            V[i, b, e] = T.Select(log != 0, T.float32("-inf"), T.float32(0))
                        else:
                            definition.write(V, [i, b, e], s, s.u[e], scale, log)
                    N[i, b] = s.m[0] * scale + T.log(s.d[0])
        # fmt: on
        return self.trimmed(main)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Hidden states and embedding as in `head_topk`; lists from `lists.draw`."""
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.m, self.k])
        states, words = scores.embedded(rng, self.lists * self.beam, self.vocab, self.hidden, structure, self.dtype)
        candidates, counts = lists.draw(rng, self.lists, self.m, self.vocab // self.block, structure)
        bias = [scores.word_bias(rng, self.vocab, structure)] if self.bias else []
        states = states.reshape(self.lists, self.beam, self.hidden)
        return [states, words, candidates, counts, chosen["scale"], chosen["log"], *bias]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        states, words, candidates, counts, scale, log, *bias = inputs
        shape = (len(states), self.beam)
        values = np.full((*shape, self.k), -np.inf if log else 0.0)
        indices, normaliser = np.full((*shape, self.k), -1, np.int64), np.full(shape, -np.inf)
        for i, of_list in enumerate(lists.of_lists(candidates, counts, self.block)):
            if len(of_list):
                found = scores.scores(states[i], words[of_list], bias[0][of_list] if bias else None)
                many = min(self.k, len(of_list))
                (values[i, :, :many], best), normaliser[i] = best_and_asked(found, many, None, scale, log)
                indices[i, :, :many] = of_list[best]
        return [values, indices, normaliser]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return tolerances(self.kernel_outputs, self._slack(inputs), inputs[4], inputs[5], expected)

    def _slack(self, inputs: Sequence[Any]) -> np.ndarray:
        states, words = inputs[:2]
        bias = inputs[6] if self.bias else None
        return scores.rounding(states.reshape(-1, self.hidden), words, bias).reshape(states.shape[:2])

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
        states, words, candidates, counts, _, _, *bias = inputs
        found, wanted = (np.asarray(a).reshape(-1, self.k) for a in (outputs[1], expected[1]))
        for i, of_list in enumerate(lists.of_lists(candidates, counts, self.block)):
            rows = found[i * self.beam : (i + 1) * self.beam]
            if not np.isin(rows[rows != -1], of_list).all():
                raise Mismatch(f"indices[{i}] has words that are no candidates")
        flat = states.reshape(-1, self.hidden)
        scores.compare_words(self.outputs[1], flat, words, bias[0] if bias else None, found, wanted)

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        states, words, _, _, _, _, *bias = inputs
        flat = indices.reshape(-1, self.k)
        found = scores.pair_scores(states.reshape(-1, self.hidden), words[flat], bias[0][flat] if bias else None)
        return found, self._slack(inputs).reshape(-1, 1)

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        read, products = lists.work(self.lists, self.beam, self.hidden, self.words, self.vocab, self.dtype, inputs)
        rows = self.lists * self.beam
        return Cost(read + rows * (self.k * 12 + 4), 2 * products + 3 * rows * self.words)


PROBLEM = CandidateTopk
