"""Look-up of candidate words by the band codes of hidden states.

Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", Algorithm 1, equations 9, 10 and 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import Argument, Cost, Problem, Settings, require_positive
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import BITS, bitmap_words, pack_bits

from .tables import (
    BITMAP,
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

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class LshLookup(Problem):
    """Bitmaps of the words of each list: those with enough hits of a row of its beam, and those that are always chosen.

    L[i, j] = number of bands w in which word j has the code codes[l, i, w]; word j is chosen for list l if
    L[i, j] >= threshold for some row i of its beam, or if its bit in `always` is set.

    `table`: "direct", starts of the buckets of all 2^bits codes, or "cuckoo"; see `formats.wta`.
    """

    lists: int
    beam: int
    vocab: int
    bands: int = 500
    table: str = "direct"
    bits: int = 12

    operator: ClassVar[str] = "lsh_lookup"
    batch_axis: ClassVar[str] = "lists"
    data_axes: ClassVar[tuple[str, ...]] = ("beam", "bands")
    counted: ClassVar[tuple[str, ...]] = ("slots",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("codes", ("lists", "beam", "bands"), "int32", "Band codes of each row, in [0, 2^bits)."),
        *TABLES,
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("chosen", ("lists", BITMAP), "int32", "Bitmap of each list's words; bits beyond vocab are 0."),
    )
    structures: ClassVar[tuple[str, ...]] = STRUCTURES
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = STRUCTURES
    settings: ClassVar[tuple[Settings, ...]] = SETTINGS
    example: ClassVar[Mapping[str, Any]] = {"lists": 1, "beam": 4, "vocab": 2000, "bands": 40, "bits": 8}
    source: ClassVar[str] = "Shi, Xu & Knight 2018, Algorithm 1, equations 9, 10, 3"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "beam", "vocab", "bands", "bits")
        require_tables(self, self.bits)

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        cuckoo = distribution.flag(rng, 0.3)
        return {
            "lists": distribution.whole(rng, 1, 64),
            "beam": distribution.whole(rng, 1, 48),
            "vocab": distribution.whole(rng, 1000, 256_000),
            "bands": distribution.whole(rng, 50, 1000),
            "table": "cuckoo" if cuckoo else "direct",
            "bits": rng.randrange(10, 21) if cuckoo else rng.randrange(6, 17),
        }

    @property
    def buckets(self) -> int:
        """Buckets of a band: codes that it can have."""
        return 1 << self.bits

    def extent(self, name: str | int) -> int:
        found = table_extent(self, self.bits, name)
        return super().extent(name) if found is None else found

    def smaller(self, extent: int) -> Problem:
        few = min(self.beam, FEW_ROWS), min(self.bands, FEW_BANDS)
        return dataclasses.replace(self, lists=extent, beam=few[0], bands=few[1])

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with other numbers of rows in a beam and of bands."""
        beam, bands = int(rng.integers(1, self.beam + 1)), int(rng.integers(1, self.bands + 1))
        return dataclasses.replace(self, beam=beam, bands=bands)

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return draw_threshold(rng, self.bands)

    def definition(self) -> tirx.PrimFunc:
        """The function that processes all words of a list at once."""
        return self.by_slices(ceildiv(self.vocab, BITS) * BITS)

    def by_slices(self, counted: int) -> tirx.PrimFunc:
        """The function that counts the hits of `counted` words at a time, a multiple of 32.

        Each slice scans all buckets.
        """
        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function

        from .definition import alloc_scratch, look_up_list

        @T.inline
        def set_code(io, row, i, band, s):
            s.code[0] = io.codes[row, i, band]

        look_up = look_up_list(self.vocab, counted, self.table == "cuckoo", set_code)
        slices, words = ceildiv(self.vocab, counted), bitmap_words(self.vocab)

        # fmt: off
        @T.inline
        def body(io):
            for n in range(io.lists * slices):
                with T.sblock("slice"):
                    part = T.axis.spatial(io.lists * slices, n)
                    T.reads(io.codes[part // slices, 0:io.beam, 0:io.bands], io.words[0:io.bands, 0:self.vocab])
                    T.writes(io.chosen[part // slices, 0:words])
                    s = T.meta_var(alloc_scratch(counted))
                    look_up(io, part // slices, part % slices * counted, io.chosen, part // slices, s)
        # fmt: on
        return function(self, body, blocks=True, packed=True)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Uniformly drawn codes of rows, and words by structure, see `tables.word_codes`.

        `nothing`: as `unseen`, and without words that are always chosen.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.bits])

        def draw(shape: tuple[int, ...]) -> np.ndarray:
            return rng.integers(self.buckets, size=shape, dtype=np.int32)

        codes = draw((self.lists, self.beam, self.bands))
        words = word_codes(rng, structure, codes.reshape(-1, self.bands), self.vocab, draw)
        return [codes, *make_tables(self, rng, structure, words, self.bits, chosen["threshold"])]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        codes, *tables = inputs
        return [pack_bits(choose_words(codes, tables, self.vocab))]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [None]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Bytes of the tables are those looked up; operations are increments and comparisons of hit counts."""
        rows = self.lists * self.beam
        looked_up = bucket_bytes(self.vocab, rows, self.bands, self.buckets, self.table)
        increments = rows * self.bands * max(1, self.vocab >> self.bits)
        if inputs is not None:
            from tvm_sparse.formats.wta import find_buckets

            codes, _, table, *multipliers = inputs[:-2]
            increments = int(find_buckets(codes, table, *multipliers)[1].sum())
            looked_up = rows * self.bands * (8 if self.table == "direct" else 16) + 4 * increments
        bitmaps = (self.lists + 1) * bitmap_words(self.vocab) * 4
        return Cost(rows * self.bands * 4 + looked_up + bitmaps, increments + rows * self.vocab)


PROBLEM = LshLookup
