"""A step of beam search with an LSH head: from hidden states to the best of their candidate words, without a list.

Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2 and figure 2, as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
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
    compare,
    require_dtype,
    require_positive,
)
from tvm_sparse.formats import bitmap, wta
from tvm_sparse.operators.candidate_topk.problem import CandidateTopk
from tvm_sparse.operators.compaction.problem import OUTPUTS, compacted
from tvm_sparse.operators.head_topk import scores
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates
from tvm_sparse.operators.lsh_lookup import tables
from tvm_sparse.operators.wta_hash.problem import random_codes

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Frequent words of a problem that is cheap to check.
FEW_FREQUENT = 300
# Number of words that fills the lists of survivors in thread blocks' shared memory more than once.
MANY_FREQUENT = 2500
NEAR = 0.35  # octaves within which another problem's decisions are used


@dataclass(frozen=True)
class LshTopk(Problem):
    """`candidate_topk` over the words that `lsh_candidates` finds; see these operators for the equations.

    There is no list, and so no limit on the number of candidates. `frequent` words are always candidates. `bias` is 1
    if there is one, else 0. If there are fewer than n candidates, the rest are -1, with a probability of 0.
    """

    lists: int
    beam: int
    hidden: int
    vocab: int
    frequent: int
    n: int
    k: int = 16
    units: int = 3
    bands: int = 500
    table: str = "direct"
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "lsh_topk"
    batch_axis: ClassVar[str] = "lists"
    data_axes: ClassVar[tuple[str, ...]] = ("frequent", "bands")
    counted: ClassVar[tuple[str, ...]] = ("slots",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        LshCandidates.inputs[0],
        CandidateTopk.inputs[1],
        LshCandidates.inputs[1],
        *tables.TABLES,
        Argument("ids", ("frequent",), "int32", "The words whose bits are set in `always`, each once."),
        *CandidateTopk.inputs[4:7],
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        *(dataclasses.replace(one, shape=tuple("n" if e == "k" else e for e in one.shape))
          for one in CandidateTopk.outputs),
        dataclasses.replace(OUTPUTS[1], doc="How many candidates each list has."),
    )  # fmt: skip
    peer_outputs: ClassVar[int | None] = CandidateTopk.peer_outputs
    structures: ClassVar[tuple[str, ...]] = ("random", "skewed", "every", "ties", "masked", "special", "constant")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    settings: ClassVar[tuple[Settings, ...]] = tuple(
        {**hits, **how} for hits, how in zip(tables.SETTINGS, CandidateTopk.settings[:3], strict=True)
    )
    alike: ClassVar[tuple[str, ...]] = ("bias",)
    example: ClassVar[Mapping[str, Any]] = {
        "lists": 1, "beam": 4, "hidden": 64, "vocab": 2000, "frequent": 100, "n": 5, "k": 8, "units": 2, "bands": 40,
    }  # fmt: skip
    source: ClassVar[str] = "Shi, Xu & Knight 2018, section 4.2, equations 3-10, figures 2, 4 and 5"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "beam", "hidden", "vocab", "frequent", "n", "k", "units", "bands")
        require_dtype(self)
        if self.frequent > self.vocab:
            raise ProblemError(f"lsh_topk: frequent={self.frequent} exceeds vocab={self.vocab}")
        _ = self.hashing, self.ranking

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab = distribution.whole(rng, 1000, 256_000)
        return {
            "lists": distribution.whole(rng, 1, 64),
            "beam": distribution.whole(rng, 1, 48),
            "hidden": distribution.whole(rng, 64, 4096, 8),
            "vocab": vocab,
            "frequent": distribution.whole(rng, 100, min(vocab, 8192)),
            "n": distribution.whole(rng, 1, 64),
            "k": rng.choice((8, 16)),
            "units": rng.choice((2, 3, 4)),
            "bands": distribution.whole(rng, 50, 1000),
            "table": "cuckoo" if distribution.flag(rng, 0.3) else "direct",
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.2),
        }

    @property
    def hashing(self) -> LshCandidates:
        """Hashing and look-up, as a problem of their own whose list has room for the whole vocabulary."""
        return LshCandidates(
            self.lists, self.beam, self.hidden, self.vocab, self.k, self.units, self.bands, self.table, self.vocab,
            self.dtype,
        )  # fmt: skip

    @property
    def ranking(self) -> CandidateTopk:
        """The second half."""
        return CandidateTopk(
            self.lists, self.beam, self.vocab, self.hidden, self.vocab, self.n, self.dtype, bias=self.bias
        )

    @property
    def bits(self) -> int:
        """Bits of a band code."""
        return wta.code_bits(self.k, self.units)

    def extent(self, name: str | int) -> int:
        found = tables.table_extent(self, self.bits, name)
        return super().extent(name) if found is None else found

    def distance(self, other: Problem) -> float | None:
        """Octaves summed over all sizes; None for another beam, dtype or kind of table, and beyond `NEAR`.

        Decisions say how many thread blocks hash a row, and how many rows a product has. Those for another beam work,
        but a template's default, computed for this beam, is faster: on an H200 with 48 rows by a factor of 1.4.
        """
        if not isinstance(other, LshTopk) or self.beam != other.beam:
            return None
        octaves = super().distance(other)
        return None if octaves is None or octaves > NEAR else octaves

    def smaller(self, extent: int) -> Problem:
        """The problem with about `extent` rows, and with at least two lists if there were several."""
        lists = min(extent, 1 + -(-extent // self.beam))
        few = min(self.bands, tables.FEW_BANDS), min(self.frequent, FEW_FREQUENT)
        return dataclasses.replace(self, lists=lists, bands=few[0], frequent=few[1])

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden", "embedding", "bias")

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with other numbers of bands, and of frequent words: one, some, or `MANY_FREQUENT`."""
        most = min(self.vocab, MANY_FREQUENT)
        frequent = int(rng.choice([1, int(rng.integers(1, min(self.vocab, FEW_FREQUENT) + 1)), most]))
        return dataclasses.replace(self, bands=int(rng.integers(1, self.bands + 1)), frequent=frequent)

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        how = {"scale": 1 / drawing.temperature(rng), "log": int(rng.integers(2)), "constant": int(rng.integers(2))}
        drawn = {**how, **tables.draw_threshold(rng, self.bands)}
        return {name: drawn[name] for name in self.settings[0]}

    def definition(self) -> tirx.PrimFunc:
        """A list's words, as a bitmap; then each row's scores are computed, summed, and inserted in
        order, one by one.
        """
        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function
        from tvm_sparse.core.template import ceildiv
        from tvm_sparse.operators.lsh_lookup.definition import alloc_scratch, look_up_list
        from tvm_sparse.operators.softmax_topk import definition
        from tvm_sparse.operators.wta_hash.definition import hash_code

        n, vocab, hidden, with_bias = self.n, self.vocab, self.hidden, bool(self.bias)
        code = hash_code(self.k, self.units, lambda io, row, column: io.hidden[row[0], row[1], column])

        @T.inline
        def set_code(io, row, i, band, s):
            code(io, (row, i), band, s)

        every = ceildiv(vocab, bitmap.BITS) * bitmap.BITS
        look_up, take = look_up_list(vocab, every, self.table == "cuckoo", set_code), definition.take(n)

        # fmt: off
        @T.inline
        def rank(io, row, b, bitmap_of, s, best):
            definition.begin(best)
            s.count[0] = 0
            for e in range(n):
                best.p[e] = T.int64(-1)
            for j in range(vocab):
                if (T.reinterpret("uint32", bitmap_of[0, j // 32]) >> T.Cast("uint32", j % 32)) & T.uint32(1) != 0:
                    best.x[0] = T.float32(0)
                    for h in range(hidden):
                        best.x[0] = best.x[0] + T.Cast("float32", io.hidden[row, b, h]) * T.Cast(
                            "float32", io.embedding[j, h])
                    if with_bias:
                        best.x[0] = best.x[0] + io.bias[j]
                    take(best, io.scale, s.count[0], j)
                    s.count[0] = s.count[0] + 1
            for e in range(n):
                io.indices[row, b, e] = best.p[e]
                if best.p[e] < T.int64(0):
                    io.values[row, b, e] = T.Select(io.log != 0, T.float32("-inf"), T.float32(0))
                else:
                    definition.write(io.values, [row, b, e], best, best.u[e], io.scale, io.log)
            io.normaliser[row, b] = best.m[0] * io.scale + T.log(best.d[0])

        @T.inline
        def body(io):
            for i in range(io.lists):
                with T.sblock("list"):
                    row = T.axis.spatial(io.lists, i)
                    T.reads(io.hidden[row, 0:self.beam, 0:hidden], io.words[0:io.bands, 0:vocab],
                            io.embedding[0:vocab, 0:hidden])
                    T.writes(io.values[row, 0:self.beam, 0:n], io.indices[row, 0:self.beam, 0:n],
                             io.normaliser[row, 0:self.beam], io.counts[row])
                    s = T.meta_var(alloc_scratch(every))
                    best = T.meta_var(definition.Best.alloc(n))
                    bitmap_of = T.sblock_alloc_buffer((1, bitmap.bitmap_words(vocab)), "int32")
                    look_up(io, row, 0, bitmap_of, 0, s)
                    for b in range(self.beam):
                        rank(io, row, b, bitmap_of, s, best)
                    io.counts[row] = s.count[0]
        # fmt: on
        return function(self, body, blocks=True, packed=True)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Hidden states and embedding as in `head_topk`, and codes of words by structure, see
        `lsh_lookup.tables.word_codes`.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.k])
        rows = self.lists * self.beam
        states, words = scores.embedded(rng, rows, self.vocab, self.hidden, structure, self.dtype)
        permutations = wta.permutations(self.hidden, self.k, self.units, self.bands, seed)

        draw = functools.partial(random_codes, rng, self.k, self.units)
        codes = tables.word_codes(rng, structure, wta.hash_rows(states, permutations), self.vocab, draw)
        *found, always, threshold = tables.make_tables(self, rng, structure, codes, self.bits, chosen["threshold"])
        ids = np.sort(rng.choice(self.vocab, self.frequent, replace=False)).astype(np.int32)
        spare = always[-1] & np.int32(-1 << self.vocab % bitmap.BITS) if self.vocab % bitmap.BITS else np.int32(0)
        always = bitmap.pack_bits(np.isin(np.arange(self.vocab), ids))
        always[-1] |= spare
        bias = [scores.word_bias(rng, self.vocab, structure)] if self.bias else []
        states = states.reshape(self.lists, self.beam, self.hidden)
        return [
            states, words, permutations, *found, always, threshold, ids, chosen["scale"], chosen["log"], *bias,
        ]  # fmt: skip

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        listed = self.listed(inputs)
        return [*self.ranking.reference(listed), listed[3]]

    def listed(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of `ranking`, with lists of the candidates."""
        by_name = dict(zip((one.name for one in self.kernel_inputs), inputs, strict=True))
        hidden, permutations = by_name["hidden"], by_name["permutations"]
        found = [by_name[one.name] for one in tables.TABLES if one.name in by_name]
        codes = wta.hash_rows(hidden.reshape(-1, self.hidden), permutations)
        chosen = tables.choose_words(codes.reshape(len(hidden), self.beam, -1), found, self.vocab)
        bias = [by_name["bias"]] if self.bias else []
        return [
            hidden, by_name["embedding"], *compacted(chosen, self.vocab), by_name["scale"], by_name["log"], *bias,
        ]  # fmt: skip

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [*self.ranking.tolerance(self.listed(inputs), expected[:3]), None]

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """As in `candidate_topk`; numbers of candidates must be equal."""
        import numpy as np

        compare(self.outputs[3:], expected[3:], tolerance[3:], outputs[3:])
        if np.array_equal(outputs[1], expected[1]):  # equal words need no look-up
            scores.compare_ranked(self.ranking.kernel_outputs, expected[:3], tolerance[:3], outputs[:3])
        else:
            self.ranking.agree(self.listed(inputs), expected[:3], tolerance[:3], outputs[:3])

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        return self.ranking.ranked_by(self.listed(inputs), indices)

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Hashing and look-up as in `lsh_candidates`, without the list; the candidates' embeddings, read once, and a
        product of each with every row of its beam. Without inputs, only frequent words count as candidates.
        """
        hashing, rows = self.hashing.cost(), self.lists * self.beam
        lists = self.lists * (self.vocab + 1) * 4
        if inputs is None:
            ranking = dataclasses.replace(self.ranking, m=max(self.frequent, self.n)).cost()
        else:
            ranking = self.ranking.cost(self.listed(inputs))
        return Cost(hashing.bytes - lists + ranking.bytes + rows * 4, hashing.operations + ranking.operations)


PROBLEM = LshTopk
