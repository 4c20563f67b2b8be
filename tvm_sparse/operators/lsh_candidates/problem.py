"""Candidate words of hidden states by locality sensitive hashing: hash, look-up and compaction.

Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", sections 4.2.1 to 4.2.3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import (
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats import wta
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.operators.compaction.problem import OUTPUTS, compacted
from tvm_sparse.operators.lsh_lookup.tables import (
    FEW_BANDS,
    FEW_ROWS,
    SETTINGS,
    STRUCTURES,
    TABLES,
    bucket_bytes,
    choose_words,
    draw_threshold,
    make_tables,
    require_tables,
    table_extent,
    word_codes,
)
from tvm_sparse.operators.wta_hash.problem import WtaHash, hidden_states, random_codes, require_hash

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class LshCandidates(Problem):
    """For each list, the words with enough hits of a hidden state of its beam, and the words that are always
    candidates.

    `compaction(lsh_lookup(wta_hash(hidden)))`; see these operators for the equations.
    """

    lists: int
    beam: int
    hidden: int
    vocab: int
    k: int = 16
    units: int = 3
    bands: int = 500
    table: str = "direct"
    capacity: int = 8192
    dtype: str = "float32"

    operator: ClassVar[str] = "lsh_candidates"
    batch_axis: ClassVar[str] = "lists"
    data_axes: ClassVar[tuple[str, ...]] = ("beam", "bands", "capacity")
    counted: ClassVar[tuple[str, ...]] = ("slots",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("hidden", ("lists", "beam", "hidden"), "dtype", "Hidden states of each list's beam."),
        WtaHash.inputs[1],
        *TABLES,
    )
    outputs: ClassVar[tuple[Argument, ...]] = OUTPUTS
    structures: ClassVar[tuple[str, ...]] = (*STRUCTURES, "special")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    settings: ClassVar[tuple[Settings, ...]] = SETTINGS
    example: ClassVar[Mapping[str, Any]] = {
        "lists": 1, "beam": 4, "hidden": 64, "vocab": 2000, "k": 8, "units": 2, "bands": 40, "capacity": 512,
    }  # fmt: skip
    source: ClassVar[str] = "Shi, Xu & Knight 2018, Algorithm 1, equations 3-10, Figure 5"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "beam", "hidden", "vocab", "k", "units", "bands", "capacity")
        require_dtype(self)
        require_hash(self)
        require_tables(self, self.bits)
        if self.lists * max(self.beam * self.hidden, self.capacity) >= 2**31:
            raise ProblemError("lsh_candidates: arrays must have fewer than 2^31 elements")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "lists": distribution.whole(rng, 1, 64),
            "beam": distribution.whole(rng, 1, 48),
            "hidden": distribution.whole(rng, 64, 4096, 8),
            "vocab": distribution.whole(rng, 1000, 256_000),
            "k": rng.choice((8, 16)),
            "units": rng.choice((2, 3, 4)),
            "bands": distribution.whole(rng, 50, 1000),
            "table": "cuckoo" if distribution.flag(rng, 0.3) else "direct",
            "capacity": distribution.whole(rng, 1024, 1 << 15),
            "dtype": distribution.dtype(rng),
        }

    @property
    def bits(self) -> int:
        """Bits of a band code."""
        return wta.code_bits(self.k, self.units)

    @property
    def buckets(self) -> int:
        """Buckets of a band: codes that it can have."""
        return self.k**self.units

    def extent(self, name: str | int) -> int:
        found = table_extent(self, self.bits, name)
        return super().extent(name) if found is None else found

    def smaller(self, extent: int) -> Problem:
        few = min(self.beam, FEW_ROWS), min(self.bands, FEW_BANDS)
        return dataclasses.replace(self, lists=extent, beam=few[0], bands=few[1])

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden",)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with other numbers of rows in a beam, of bands, and of places in a list."""
        beam, bands = int(rng.integers(1, self.beam + 1)), int(rng.integers(1, self.bands + 1))
        capacity = max(1, int(self.capacity * rng.choice([0.02, 0.5, 1, 1.5])))
        return dataclasses.replace(self, beam=beam, bands=bands, capacity=capacity)

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return draw_threshold(rng, self.bands)

    def definition(self) -> tirx.PrimFunc:
        """One list after another."""
        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function
        from tvm_sparse.operators.compaction.definition import compact
        from tvm_sparse.operators.lsh_lookup.definition import alloc_scratch, look_up_list
        from tvm_sparse.operators.wta_hash.definition import hash_code

        code = hash_code(self.k, self.units, lambda io, row, column: io.hidden[row[0], row[1], column])

        @T.inline
        def set_code(io, row, i, band, s):
            code(io, (row, i), band, s)

        words, every = bitmap_words(self.vocab), ceildiv(self.vocab, BITS) * BITS
        look_up = look_up_list(self.vocab, every, self.table == "cuckoo", set_code)
        write = compact(self.vocab, every)

        # fmt: off
        @T.inline
        def body(io):
            for n in range(io.lists):
                with T.sblock("list"):
                    row = T.axis.spatial(io.lists, n)
                    T.reads(io.hidden[row, 0:io.beam, 0:self.hidden], io.words[0:io.bands, 0:self.vocab])
                    T.writes(io.candidates[row, 0:io.capacity], io.counts[row])
                    s = T.meta_var(alloc_scratch(every))
                    bitmap = T.sblock_alloc_buffer((1, words), "int32")
                    look_up(io, row, 0, bitmap, 0, s)
                    write(io, bitmap, 0, row, 0, s)
        # fmt: on
        return function(self, body, blocks=True, packed=True)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Standard normal rows, and words by structure, see `lsh_lookup.tables.word_codes`.

        `nothing`: as `unseen`, and without words that are always candidates. `special`: rows with NaN and infinities.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.hidden, self.k])
        hidden = hidden_states(rng, (self.lists, self.beam, self.hidden), self.dtype, structure)
        permutations = wta.permutations(self.hidden, self.k, self.units, self.bands, seed)

        draw = functools.partial(random_codes, rng, self.k, self.units)
        rows = wta.hash_rows(hidden.reshape(-1, self.hidden), permutations)
        words = word_codes(rng, structure, rows, self.vocab, draw)
        tables = make_tables(self, rng, structure, words, self.bits, chosen["threshold"])
        return [hidden, permutations, *tables]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        hidden, permutations, *tables = inputs
        rows = self.lists * self.beam
        hashing = WtaHash(rows, self.hidden, self.k, self.units, self.bands, self.dtype)
        [codes] = hashing.reference([hidden.reshape(rows, -1), permutations])
        chosen = choose_words(codes.reshape(self.lists, self.beam, -1), tables, self.vocab)
        return compacted(chosen, self.capacity)

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [None, None]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Bytes of the tables are those looked up if words are spread evenly; operations are comparisons and
        increments.
        """
        rows, looked_at = self.lists * self.beam, self.bands * self.units * self.k
        looked_up = bucket_bytes(self.vocab, rows, self.bands, self.buckets, self.table)
        lists = self.lists * (self.capacity + 1) * 4 + bitmap_words(self.vocab) * 4
        size = rows * self.hidden * numpy_dtype(self.dtype).itemsize + looked_at * 2 + looked_up + lists
        return Cost(size, rows * (looked_at + self.bands * self.vocab // self.buckets + self.vocab))


PROBLEM = LshCandidates
