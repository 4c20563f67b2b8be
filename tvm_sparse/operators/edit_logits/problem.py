"""Edits of few words in each row of logits: sparse biases, and penalties of the words that a request has seen.

Keskar et al. 2019, "CTRL: a conditional transformer language model for controllable generation", section 4.1
(repetition penalty); the presence and frequency penalties are those of OpenAI's API.

The words of a row stand in rectangular arrays `(batch, n)`, with -1 in spare places: their shapes stay while requests
grow, as a CUDA graph requires.
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
from tvm_sparse.core.rounding import ROUNDING, SMALLEST
from tvm_sparse.operators.softmax_topk.reference import soft_capped

from .penalties import PENALTIES

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Words of a row that programs are made for: numbers in calls are rounded up to powers of two from this one on.
LEAST = 32


@dataclass(frozen=True)
class EditLogits(Problem):
    """Rows of logits `(batch, vocab)`, of which few words are changed, after a soft cap of all if there is one.

    `words` is the number of places for words in a row of each list, typically. `bias` is 1 if words have biases,
    `penalties` if words have penalties, `per_row` if each row has penalties of its own, and `capped` if all logits have
    a soft cap.
    """

    batch: int
    vocab: int
    words: int
    dtype: str = "float32"
    bias: int = field(default=0, metadata=OPTIONAL)
    penalties: int = field(default=1, metadata=OPTIONAL)
    per_row: int = field(default=0, metadata=OPTIONAL)
    capped: int = field(default=0, metadata=OPTIONAL)

    operator: ClassVar[str] = "edit_logits"
    batch_axis: ClassVar[str] = "batch"
    added_axes: ClassVar[tuple[str, ...]] = ("capped",)
    # Programs read at run time how many places there are.
    data_axes: ClassVar[tuple[str, ...]] = ("words",)
    counted: ClassVar[tuple[str, ...]] = ("biased", "seen")
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument(
            "logits",
            ("batch", "vocab"),
            "dtype",
            "Unnormalised scores, row-major; not read if copied and capped are 0.",
        ),
        Argument("copied", (), "int32", "1: all words are copied first; 0: edited is the array of the logits."),
        Argument("bias_ids", ("batch", "biased"), "int32", "Words with a bias, each once in a row; -1: none.", "bias"),
        Argument("bias_values", ("batch", "biased"), "float32", "Biases of these words.", when="bias"),
        Argument("seen_ids", ("batch", "seen"), "int32", "Words with penalties; -1: none.", when="penalties"),
        Argument("generated", ("batch", "seen"), "int32", "How often each was generated.", when="penalties"),
        Argument("repetition", (), "float32", "Divides a score above 0, multiplies others.", when="shared"),
        Argument("presence", (), "float32", "Subtracted if the word was generated.", when="shared"),
        Argument("frequency", (), "float32", "Subtracted as often as the word was generated.", when="shared"),
        Argument("repetitions", ("batch",), "float32", "The same of each row.", when="own"),
        Argument("presences", ("batch",), "float32", "The same of each row.", when="own"),
        Argument("frequencies", ("batch",), "float32", "The same of each row.", when="own"),
        Argument("cap", (), "float32", "Soft cap of all logits, above 0.", when="capped"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (Argument("edited", ("batch", "vocab"), "dtype", "The logits, edited."),)
    structures: ClassVar[tuple[str, ...]] = ("random", "full", "spare", "special", "neighbours")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"batch": 8, "vocab": 25000, "words": 64}
    source: ClassVar[str] = "Keskar et al. 2019, section 4.1"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "vocab", "words")
        require_dtype(self)
        for name in ("bias", "penalties", "per_row", "capped"):
            if self.axes[name] not in (0, 1):
                raise ProblemError(f"edit_logits: {name} must be 0 or 1, got {self.axes[name]!r}")
        if self.per_row and not self.penalties:
            raise ProblemError("edit_logits: per_row says whose penalties they are, and penalties is 0")
        for name in ("vocab", "words"):
            if self.axes[name] >= 2**31:
                raise ProblemError(f"edit_logits: {name} must be below 2^31, got {self.axes[name]}")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "batch": distribution.whole(rng, 1, 1024),
            "vocab": distribution.vocab(rng),
            "words": distribution.whole(rng, 1, 4096),
            "dtype": distribution.dtype(rng),
            "bias": distribution.flag(rng, 0.3),
            "per_row": distribution.flag(rng, 0.5),
            "capped": distribution.flag(rng, 0.2),
        }

    def as_called(self) -> Problem:
        """With the number of places rounded up to a power of two, see `places`."""
        return dataclasses.replace(self, words=places(self.words))

    def extent(self, name: str | int) -> int:
        if name == "shared":
            return int(self.penalties and not self.per_row)
        if name == "own":
            return int(self.penalties and self.per_row)
        # As `generate` makes them; programs take any number.
        if name == "seen":
            return self.words
        if name == "biased":
            return -(-self.words // 4)
        return super().extent(name)

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("logits", "bias_values")

    @property
    def shifted(self) -> tuple[str, ...]:
        return ("logits",)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """With half to twice as many places, and one in a fifth of all cases."""
        words = max(1, round(self.words * 2 ** rng.uniform(-1, 1))) if rng.random() < 0.8 else 1
        return dataclasses.replace(self, words=words)

    def definition(self) -> tirx.PrimFunc:
        """One row after another: words are copied or capped, then biases are added, then penalties are taken off."""
        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function

        from .definition import edit_row

        edit = edit_row(self)

        @T.inline
        def body(io):
            for row in range(io.batch):
                edit(io, row)

        return function(self, body, blocks=True, packed=True, index="int64")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Standard normal logits, biases of standard deviation 5, and counts from 0 to 4; penalties of random rows;
        a soft cap from 0.5 to 8.

        A row's words are different ones; in places without a word is -1. `random`: half of the places have a word,
        `full`: all, as far as there are words; `spare`: none or one; `neighbours`: all, side by side; `special`: half,
        with NaN, infinities and zeros among logits and biases, and words outside of [0, vocab), which are ignored.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.batch, self.vocab, self.words])
        logits = drawing.normal(rng, (self.batch, self.vocab), self.dtype)
        if structure == "special":
            for value in (np.nan, np.inf, -np.inf, 0.0):
                logits[rng.random(logits.shape) < 0.05] = value

        def words(number: int) -> np.ndarray:
            found = np.full((self.batch, number), -1, np.int32)
            most = min(number, self.vocab)
            for row in found:
                count = most if structure in ("full", "neighbours") else -(-most // 2)
                count = int(rng.integers(0, 2)) if structure == "spare" else count
                if structure == "neighbours":
                    chosen = rng.integers(0, self.vocab - count + 1) + np.arange(count)
                else:
                    chosen = rng.choice(self.vocab, count, replace=False)
                row[rng.permutation(number)[:count]] = chosen
                if structure == "special":
                    row[row < 0] = rng.choice(np.array([-1, -5, self.vocab, 2**31 - 1], np.int32), number - count)
            return found

        inputs: list[Any] = [logits, 1]
        if self.bias:
            count = self.extent("biased")
            values = (5 * rng.standard_normal((self.batch, count))).astype(np.float32)
            if structure == "special":
                values[rng.random(values.shape) < 0.2] = -np.inf
            inputs += [words(count), values]
        if self.penalties:
            inputs += [words(self.words), rng.integers(0, 5, (self.batch, self.words), dtype=np.int32)]
            rows = self.batch if self.per_row else 1
            penalties = [rng.uniform(low, high, rows).astype(np.float32) for low, high in ((0.5, 2), (-2, 2), (-2, 2))]
            neutral = rng.random((3, rows)) < 0.2
            penalties = [
                np.where(off, np.float32(one == 0), penalty)
                for one, (off, penalty) in enumerate(zip(neutral, penalties, strict=True))
            ]
            inputs += penalties if self.per_row else [float(penalty[0]) for penalty in penalties]
        if self.capped:
            inputs.append(float(np.float32(2 ** rng.uniform(-1, 3))))
        return inputs

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """In float64, rounded to the logits' dtype after the soft cap and the biases, as kernels store them there."""
        import numpy as np

        given = dict(zip((argument.name for argument in self.kernel_inputs), inputs, strict=True))
        dtype = given["logits"].dtype
        found = self._capped(given)

        def edits(name: str) -> Any:
            for row, place in np.argwhere((given[name] >= 0) & (given[name] < self.vocab)):
                yield row, place, given[name][row, place]

        with np.errstate(invalid="ignore", over="ignore"):
            found = found.astype(dtype).astype(np.float64)
            for row, place, word in edits("bias_ids") if self.bias else ():
                biased = np.float32(found[row, word]) + given["bias_values"][row, place]
                found[row, word] = np.float64(biased.astype(dtype))
            for row, place, word in edits("seen_ids") if self.penalties else ():
                penalties = [given[many][row] if self.per_row else given[one] for one, many in PENALTIES.items()]
                repetition, presence, frequency = map(np.float64, penalties)
                x, count = found[row, word], int(given["generated"][row, place])
                x = x / repetition if x > 0 else x * repetition
                found[row, word] = x - frequency * count - presence * (count > 0)
        return [found]

    def _capped(self, given: Mapping[str, Any]) -> np.ndarray:
        """The logits in float64 after the soft cap, before they are rounded."""
        found: np.ndarray = given["logits"].astype("float64")
        return soft_capped(found, given["cap"]) if self.capped else found

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Three float32 roundings of the largest number on the way, which is at most the logit plus all penalties, and
        one to the logits' dtype. A capped logit is off by some float32 roundings of the cap, by which it may be rounded
        to a neighbour, and a repetition penalty may double that.
        """
        import numpy as np

        wanted = np.abs(expected[0])
        given = dict(zip((argument.name for argument in self.kernel_inputs), inputs, strict=True))
        with np.errstate(invalid="ignore"):
            size = np.where(np.isfinite(wanted), wanted, 0.0)
            plain = np.abs(given["logits"].astype(np.float64))
            size = size + np.where(np.isfinite(plain), 2 * plain, 0.0) + 50.0 * self.penalties
            if self.bias:
                values = np.abs(given["bias_values"].astype(np.float64))
                size = size + 2 * np.where(np.isfinite(values), values, 0.0).max(axis=1, keepdims=True)
            edited = 4 * 2.0**-24 * size + 2 * ROUNDING[self.dtype] * wanted + SMALLEST[self.dtype]
            if self.capped:
                return [edited + 16 * 2.0**-24 * given["cap"] + 4 * ROUNDING[self.dtype] * np.abs(self._capped(given))]
            return [np.where(expected[0] == given["logits"].astype(np.float64), 0.0, edited)]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """What calls in place touch: the places, and a sector of 32 bytes, read and written, for each word."""
        seen, biased = self.batch * self.words * self.penalties, self.batch * self.extent("biased") * self.bias
        words = seen + biased
        if inputs is not None:
            given = dict(zip((argument.name for argument in self.kernel_inputs), inputs, strict=True))
            words = sum(int((given[name] >= 0).sum()) for name in ("bias_ids", "seen_ids") if name in given)
        copied = 2 * self.batch * self.vocab * numpy_dtype(self.dtype).itemsize
        return Cost(
            copied + 8 * (seen + biased) + 64 * words + 12 * self.batch * self.per_row,
            6 * seen + biased + 4 * self.batch * self.vocab * self.capped,
        )


def places(count: int) -> int:
    """The number of places that programs are looked up for: a power of two from `LEAST` on."""
    return max(LEAST, 1 << (count - 1).bit_length())


PROBLEM = EditLogits
