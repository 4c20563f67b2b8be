"""Winner-take-all hashing of hidden states.

Yagnik et al. 2011, "The power of comparative reasoning"; Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for
Beam Search on GPU", equations 4 to 8.
"""

from __future__ import annotations

import dataclasses
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
from tvm_sparse.formats import wta

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

# Bands of a problem that is cheap to check.
FEW_BANDS = 48


def require_hash(problem: Problem) -> None:
    """Raise `ProblemError` for a hash that is not possible for any hidden states."""
    try:
        wta.check_parameters(*(problem.axes[name] for name in ("hidden", "k", "units", "bands")))
    except ValueError as error:
        raise ProblemError(f"{problem.operator}: {error}") from None


def hidden_states(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, structure: str) -> np.ndarray:
    """Rows by structure: `random` (and any other name) standard normal; `ties` a few different values; `special` with
    NaN, infinities and zeros of both signs, and a row of nothing but NaN."""
    import numpy as np

    x = rng.standard_normal(shape, dtype=np.float32)
    if structure == "ties":
        x = np.round(x)
    elif structure == "special":
        for value, share in ((np.nan, 0.1), (np.inf, 0.02), (-np.inf, 0.3), (0.0, 0.05), (-0.0, 0.05)):
            x[rng.random(shape) < share] = value
        rows = x.reshape(-1, shape[-1])
        rows[rng.integers(len(rows))] = np.nan
    return x.astype(numpy_dtype(dtype))


def random_codes(rng: np.random.Generator, k: int, units: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random band codes, int32, each of whose units is uniform."""
    import numpy as np

    codes = np.zeros(shape, np.int32)
    for _ in range(units):
        codes = codes << wta.index_bits(k) | rng.integers(k, size=shape, dtype=np.int32)
    return codes


@dataclass(frozen=True)
class WtaHash(Problem):
    """Band codes of rows `(batch, hidden)`: concatenations of `units` indices, each that of the largest of k columns.

    codes[i, w] = sum_u I[i, w, u] * 2^(bits * (units - 1 - u)),  bits = ceil(log2(k)),
    I[i, w, u] = arg max_j hidden[i, permutations[w, u, j]], the first of equals; NaN counts as -inf.
    """

    batch: int
    hidden: int
    k: int = 16
    units: int = 3
    bands: int = 500
    dtype: str = "float32"

    operator: ClassVar[str] = "wta_hash"
    batch_axis: ClassVar[str] = "batch"
    data_axes: ClassVar[tuple[str, ...]] = ("bands",)
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("hidden", ("batch", "hidden"), "dtype", "Rows to hash."),
        Argument("permutations", ("bands", "units", "k"), "int16", "Columns of each unit, in [0, hidden)."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (Argument("codes", ("batch", "bands"), "int32", "Band codes."),)
    structures: ClassVar[tuple[str, ...]] = ("random", "ties", "special")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"batch": 12, "hidden": 256, "k": 8, "units": 3, "bands": 64}
    source: ClassVar[str] = "Shi, Xu & Knight 2018, equations 4-8"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "hidden", "k", "units", "bands")
        require_dtype(self)
        require_hash(self)
        if max(self.batch * max(self.bands, self.hidden), self.bands * self.units * self.k) >= 2**31:
            raise ProblemError("wta_hash: arrays must have fewer than 2^31 elements")

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "batch": distribution.whole(rng, 1, 4096),
            "hidden": distribution.whole(rng, 64, 8192, 8),
            "k": rng.choice((4, 8, 16, 32)),
            "units": rng.choice((2, 3, 4)),
            "bands": distribution.whole(rng, 50, 1000),
            "dtype": distribution.dtype(rng),
        }

    def smaller(self, extent: int) -> Problem:
        return dataclasses.replace(self, batch=extent, bands=min(self.bands, FEW_BANDS))

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("hidden",)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        return dataclasses.replace(self, bands=int(rng.integers(1, self.bands + 1)))

    def definition(self) -> tirx.PrimFunc:
        from types import SimpleNamespace

        from tvm.script import tirx as T

        from tvm_sparse.core.arguments import function

        from .definition import hash_code

        code = hash_code(self.k, self.units, lambda io, row, column: io.hidden[row, column])

        # fmt: off
        @T.inline
        def body(io):
            for i, w in T.grid(io.batch, io.bands):
                with T.sblock("codes"):
                    row, band = T.axis.remap("SS", [i, w])
                    T.reads(io.hidden[row, 0:self.hidden], io.permutations[band, 0:self.units, 0:self.k])
                    T.writes(io.codes[row, band])
                    s = T.meta_var(SimpleNamespace(
                        code=T.sblock_alloc_buffer((1,), "int32"), place=T.sblock_alloc_buffer((1,), "int32"),
                        best=T.sblock_alloc_buffer((1,), "float32"), value=T.sblock_alloc_buffer((1,), "float32")))
                    code(io, row, band, s)
                    io.codes[row, band] = s.code[0]
        # fmt: on
        return function(self, body, blocks=True, packed=True)

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Rows by structure, see `hidden_states`, and permutations from the seed."""
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.hidden, self.k])
        rows = hidden_states(rng, (self.batch, self.hidden), self.dtype, structure)
        return [rows, wta.permutations(self.hidden, self.k, self.units, self.bands, seed)]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The codes in float64, which are exact: every dtype of the rows is contained in it."""
        import numpy as np

        hidden, permutations = (np.asarray(a) for a in inputs)
        x = hidden.astype(np.float64)
        x = np.where(np.isnan(x), -np.inf, x)
        codes = np.zeros((len(x), len(permutations)), np.int32)
        for unit in range(self.units):
            places = x[:, permutations[:, unit]].argmax(axis=2).astype(np.int32)
            codes = codes << wta.index_bits(self.k) | places
        return [codes]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        return [None]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Operations are comparisons."""
        looked_at = self.bands * self.units * self.k
        rows = self.batch * (self.hidden * numpy_dtype(self.dtype).itemsize + self.bands * 4)
        return Cost(rows + looked_at * 2, self.batch * looked_at)


PROBLEM = WtaHash
