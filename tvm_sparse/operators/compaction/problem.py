"""Stream compaction: the words of a bitmap, as a list of fixed capacity.

Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2.3 and Figure 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import Argument, Cost, Problem, ProblemError, Settings, require_positive
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import BITS, bitmap_words, pack_bits, unpack_bits

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

BITMAP = "ceil(vocab / 32)"
# Probability that a word is chosen, by structure.
CHANCE = {"sparse": 0.001, "empty": 0.0, "full": 1.0}
OUTPUTS = (
    Argument("candidates", ("lists", "capacity"), "int32", "Words of each list in ascending order, then -1."),
    Argument("counts", ("lists",), "int32", "How many words each list has, also those beyond capacity."),
)


def compacted(chosen: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Candidates and counts of `(lists, vocab)` booleans."""
    import numpy as np

    candidates = np.full((len(chosen), capacity), -1, np.int32)
    for row, mask in zip(candidates, chosen, strict=True):
        words = np.flatnonzero(mask)[:capacity]
        row[: len(words)] = words
    return [candidates, chosen.sum(axis=1).astype(np.int32)]


@dataclass(frozen=True)
class Compaction(Problem):
    """The words of each list's bitmap in ascending order, followed by -1, and their number.

    If there are more than `capacity` words, the first ones are kept; `counts` is the number of all words, so the
    overflow is max(0, counts - capacity).
    """

    lists: int
    vocab: int
    capacity: int

    operator: ClassVar[str] = "compaction"
    batch_axis: ClassVar[str] = "lists"
    data_axes: ClassVar[tuple[str, ...]] = ("capacity",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("chosen", ("lists", BITMAP), "int32", "Bitmap of each list's words; bits beyond vocab are ignored."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = OUTPUTS
    structures: ClassVar[tuple[str, ...]] = ("random", "sparse", "runs", "empty", "full")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"lists": 2, "vocab": 3000, "capacity": 512}
    source: ClassVar[str] = "Shi, Xu & Knight 2018, Figure 5"

    def __post_init__(self) -> None:
        require_positive(self, "lists", "vocab", "capacity")
        if self.lists * max(self.vocab, self.capacity) >= 2**31:
            raise ProblemError("compaction: arrays must have fewer than 2^31 elements")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        vocab = distribution.whole(rng, 1000, 256_000)
        return {
            "lists": distribution.whole(rng, 1, 1024),
            "vocab": vocab,
            "capacity": distribution.whole(rng, 256, vocab),
        }

    def extent(self, name: str | int) -> int:
        return bitmap_words(self.vocab) if name == BITMAP else super().extent(name)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with room for a few words, for about as many as before, or for more."""
        return replace(self, capacity=max(1, int(self.capacity * rng.choice([0.02, 0.5, 1, 1.5]))))

    def definition(self) -> tirx.PrimFunc:
        """The function that processes all words of a list at once."""
        return self.by_slices(ceildiv(self.vocab, BITS) * BITS)

    def by_slices(self, counted: int) -> tirx.PrimFunc:
        """The function that processes `counted` words at a time, a multiple of 32, after counting those before them."""
        from types import SimpleNamespace

        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function

        from .definition import compact

        write, slices, words = compact(self.vocab, counted), ceildiv(self.vocab, counted), bitmap_words(self.vocab)

        # fmt: off
        @T.inline
        def body(io):
            for n in range(io.lists * slices):
                with T.sblock("slice"):
                    part = T.axis.spatial(io.lists * slices, n)
                    T.reads(io.chosen[part // slices, 0:words])
                    T.writes(io.candidates[part // slices, 0:io.capacity], io.counts[part // slices])
                    s = T.meta_var(SimpleNamespace(
                        count=T.sblock_alloc_buffer((1,), "int32"), bits=T.sblock_alloc_buffer((1,), "uint32")))
                    write(io, io.chosen, part // slices, part // slices, part % slices * counted, s)
        # fmt: on
        return function(self, body, blocks=True, packed=True)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Bitmaps whose bits beyond the vocabulary are set. The chosen words of a list are

        `random`: each with a probability drawn for the list, about half of the capacity; `sparse`: one in a thousand;
        `runs`: some runs of neighbours; `empty`: none; `full`: all.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.vocab, self.capacity])
        shape = (self.lists, self.vocab)
        chance = np.minimum(1.0, self.capacity / self.vocab * rng.uniform(0.25, 0.75, (self.lists, 1)))
        if structure in CHANCE:
            chance[:] = CHANCE[structure]
        mask = rng.random(shape) < chance
        if structure == "runs":
            place = np.arange(self.vocab) / self.vocab
            mask = np.sin(place * rng.uniform(3, 60, (self.lists, 1)) + rng.uniform(0, 6, (self.lists, 1))) > 0.5
        bitmap = pack_bits(mask)
        if self.vocab % BITS:
            bitmap[:, -1] |= np.int32(-1 << self.vocab % BITS)
        return [bitmap]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        return compacted(unpack_bits(inputs[0], self.vocab), self.capacity)

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [None, None]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Operations are tests of a bit."""
        return Cost(4 * self.lists * (bitmap_words(self.vocab) + self.capacity + 1), self.lists * self.vocab)


PROBLEM = Compaction
