"""Logits of candidate words: `hidden @ embedding[candidates].T` without a copy of the candidates' rows.

The matrix product of Shi, Xu & Knight 2018, section 4.2, without making their E_LSH: rows are read from the embedding
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Problem,
    Settings,
    require_dtype,
    require_positive,
)
from tvm_sparse.operators.candidate_topk import lists
from tvm_sparse.operators.candidate_topk.problem import CandidateTopk
from tvm_sparse.operators.head_topk import scores
from tvm_sparse.operators.softmax_topk.problem import require_extras

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class CandidateLogits(Problem):
    """`logits[l, b, i] = hidden[l, b] . embedding[candidates[l, i]] + bias[candidates[l, i]]`, -inf beyond the count.

    Rows of hidden states that share a list are its beam: `lists` of `beam` rows each. `bias` is 1 if there is one.
    """

    lists: int
    beam: int
    vocab: int
    hidden: int
    m: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "candidate_logits"
    batch_axis: ClassVar[str] = "lists"
    row_axes: ClassVar[tuple[str, ...]] = ("beam",)
    data_axes: ClassVar[tuple[str, ...]] = ("vocab",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        *CandidateTopk.inputs[:2],
        Argument("candidates", ("lists", "m"), "int32", "Words of each list, in [0, vocab)."),
        CandidateTopk.inputs[3],
        Argument("bias", ("vocab",), "float32", "Added to the words' logits.", when="bias"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("logits", ("lists", "beam", "m"), "float32", "In the order of the candidates; -inf beyond the count."),
    )
    structures: ClassVar[tuple[str, ...]] = ("random", "few", "special", "ties")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"lists": 1, "beam": 4, "vocab": 8000, "hidden": 256, "m": 1000}
    source: ClassVar[str] = "Shi, Xu & Knight 2018, section 4.2"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "beam", "vocab", "hidden", "m")
        require_dtype(self)
        scores.require_extents(self.operator, self.lists * self.beam, self.hidden, self.vocab, self.m)
        require_extras(self)

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "lists": distribution.whole(rng, 1, 4096),
            "beam": distribution.whole(rng, 1, 48),
            "vocab": distribution.whole(rng, 1000, 256_000),
            "hidden": distribution.whole(rng, 64, 4096, 8),
            "m": distribution.whole(rng, 16, 1 << 14),
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.2),
        }

    def smaller(self, extent: int) -> Problem:
        return replace(self, lists=extent, vocab=min(self.vocab, lists.FEW_WORDS))

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden", "embedding", "bias")

    def definition(self) -> tirx.PrimFunc:
        """One dot product for each row and candidate."""
        from tvm import te, tirx

        several, vocab = tirx.Var("lists", "int64"), tirx.Var("vocab", "int64")
        hidden = te.placeholder((several, self.beam, self.hidden), self.dtype, name="hidden")
        embedding = te.placeholder((vocab, self.hidden), self.dtype, name="embedding")
        candidates = te.placeholder((several, self.m), "int32", name="candidates")
        counts = te.placeholder((several,), "int32", name="counts")
        bias = [te.placeholder((vocab,), "float32", name="bias")] if self.bias else []
        step = te.reduce_axis((0, self.hidden), name="step")

        def word(i, j):  # positions beyond the count hold no word
            return te.if_then_else(j < counts[i], candidates[i, j], tirx.const(0, "int32"))

        total = te.compute(
            (several, self.beam, self.m),
            lambda i, b, j: te.sum(
                hidden[i, b, step].astype("float32") * embedding[word(i, j), step].astype("float32"), axis=[step]
            ),
            name="total",
        )
        logits = te.compute(
            (several, self.beam, self.m),
            lambda i, b, j: te.if_then_else(
                j < counts[i],
                total[i, b, j] + bias[0][word(i, j)] if bias else total[i, b, j],
                tirx.const(float("-inf"), "float32"),
            ),
            name="logits",
        )
        arguments = [hidden, embedding, candidates, counts, *bias, logits]
        return te.create_prim_func(arguments).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Hidden states and embedding as in `head_topk`; lists from `candidate_topk.lists.draw`."""
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.m])
        states, words = scores.embedded(rng, self.lists * self.beam, self.vocab, self.hidden, structure, self.dtype)
        candidates, counts = lists.draw(rng, self.lists, self.m, self.vocab, structure)
        bias = [scores.word_bias(rng, self.vocab, structure)] if self.bias else []
        return [states.reshape(self.lists, self.beam, self.hidden), words, candidates, counts, *bias]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        states, words, candidates, counts, *bias = inputs
        found = np.full((len(states), self.beam, self.m), -np.inf)
        for i, of_list in enumerate(lists.of_lists(candidates, counts, 1)):
            found[i, :, : len(of_list)] = scores.scores(states[i], words[of_list], bias[0][of_list] if bias else None)
        return [found]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error of a float32 sum, and of the bias."""
        import numpy as np

        states, words = inputs[:2]
        slack = scores.rounding(states.reshape(-1, self.hidden), words).reshape(len(states), self.beam, 1)
        with np.errstate(invalid="ignore"):
            return [slack + 1e-6 * np.abs(expected[0])]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        read, products = lists.work(self.lists, self.beam, self.hidden, self.m, self.vocab, self.dtype, inputs)
        return Cost(read + self.lists * self.beam * self.m * 4, 2 * products)


PROBLEM = CandidateLogits
