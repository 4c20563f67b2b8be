"""Embeddings in eight bits: a number is its stored value times its row's scale, or that of its group of columns.

`quantize_embedding` makes one. `stored_scales` and `stored_values` are the rule, for rows of float32 numbers in NumPy
and PyTorch alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..core.given import integer
from ..core.libraries import library
from ..core.problem import FLOATS, numpy_dtype

# Dtypes of stored values, each with the largest magnitude that is used.
STORED = {"int8": 127.0, "float8_e4m3fn": 448.0}
# The smallest scale: dividing by it, and multiplying with it, leaves normal numbers.
LEAST_SCALE = 2.0**-126
# Elements that are in float32 at a time.
AT_ONCE = 1 << 21


def as_float32(array: Any) -> Any:
    """Numbers of any floating or stored dtype as float32."""
    space = library(array)
    if space.__name__ == "torch":
        return array.to(space.float32)
    return array.astype(space.float32)


def stored_scales(rows: Any, stored: str, group: int) -> Any:
    """Scales `(rows, columns / group)` of float32 `rows`: the largest magnitude of each group of columns, which the
    largest stored value stands for.
    """
    space = library(rows)
    grouped = abs(rows.reshape(rows.shape[0], -1, group))
    largest = grouped.amax(-1) if space.__name__ == "torch" else grouped.max(-1)
    return (largest / STORED[stored]).clip(LEAST_SCALE, None)


def stored_values(rows: Any, scales: Any, stored: str) -> Any:
    """Float32 `rows` over their scales `(rows, groups)`, rounded to nearest even, magnitudes saturated."""
    space, most = library(rows), STORED[stored]
    over = rows.reshape(*scales.shape, -1) / scales[:, :, None]
    over = (space.round(over) if stored == "int8" else over).clip(-most, most).reshape(rows.shape)
    if space.__name__ == "torch":
        return over.to(getattr(space, stored))
    return over.astype(numpy_dtype(stored))


def word_number(stored: str, number: Any) -> Any:
    """The float32, as an expression of a program, of a floating number, or of a byte of an embedding that is `stored`.

    Exponents of float8_e4m3fn are biased by 7, those of float32 by 127. A number without an exponent counts units of
    2^-9; its bits in the place of a float32's would be a subnormal number, which a GPU may take for 0.
    """
    from tvm.script import tirx as T

    if not stored:
        return T.Cast("float32", number)
    if stored == "int8":
        return T.Cast("float32", T.Cast("int8", number))
    bits = T.Cast("uint32", number)
    size = bits & T.uint32(0x7F)
    normal = T.reinterpret("float32", (size << T.uint32(20)) + T.uint32(120 << 23))
    found = T.Select(size < T.uint32(8), T.Cast("float32", size) * T.float32(2.0**-9), normal)
    return T.Select(bits < T.uint32(0x80), found, -found)


def check_dense(name: str, array: Any) -> None:
    """Check that it is a torch tensor with data and without a sparse layout, or a NumPy array."""
    space = library(array)
    if space.__name__ == "torch":
        if array.layout is not space.strided or array.device.type == "meta":
            what = "meta" if array.device.type == "meta" else str(array.layout)
            raise ValueError(f"{name}: expected a dense tensor with data, got a {what} one")
    elif type(array).__module__ != "numpy" or not hasattr(array, "view"):
        raise TypeError(f"{name}: expected a torch tensor or a NumPy array, got {type(array).__name__}")


@dataclass(frozen=True, eq=False)
class QuantizedEmbedding:
    """An output embedding in eight bits, as `quantize_embedding` returns it: row w is `values[w] * scales[w]`.

    Attributes
    ----------
    values
        `(vocab, hidden)` int8 or float8_e4m3fn (in NumPy that of ml_dtypes), contiguous.
    scales
        `(vocab, groups)` float32, above 0: each of a row's columns, or of `hidden / groups` neighbouring ones.
    octets
        The values' bytes `(vocab, hidden)` uint8, the same memory.
    factors
        The scales, the same memory: `(vocab,)` if a row has one.
    stored
        The name of the values' dtype.
    """

    values: Any
    scales: Any
    octets: Any = field(init=False, repr=False)
    factors: Any = field(init=False, repr=False)
    stored: str = field(init=False)

    def __post_init__(self) -> None:
        check_dense("values", self.values)
        check_dense("scales", self.scales)
        stored = str(self.values.dtype).removeprefix("torch.")
        if stored not in STORED:
            raise ValueError(f"values: expected {' or '.join(STORED)}, got {stored}")
        if len(self.values.shape) != 2 or len(self.scales.shape) != 2 or len(self.values) != len(self.scales):
            raise ValueError(
                f"expected values (vocab, hidden) and scales (vocab, groups), got {tuple(self.values.shape)} and"
                f" {tuple(self.scales.shape)}"
            )
        if self.scales.shape[1] == 0 or self.values.shape[1] % self.scales.shape[1]:
            raise ValueError(
                f"scales: {self.scales.shape[1]} groups do not divide the {self.values.shape[1]} columns of values"
            )
        if str(self.scales.dtype).removeprefix("torch.") != "float32":
            raise ValueError(f"scales: expected float32, got {self.scales.dtype}")
        object.__setattr__(self, "stored", stored)
        object.__setattr__(self, "octets", self.values.view(library(self.values).uint8))
        object.__setattr__(self, "factors", self.scales[:, 0] if self.groups == 1 else self.scales)

    @classmethod
    def of_octets(cls, octets: Any, scales: Any, stored: str) -> QuantizedEmbedding:
        """The embedding of these `octets` and `scales` or `factors`."""
        space = library(octets)
        dtype = getattr(space, stored) if space.__name__ == "torch" else numpy_dtype(stored)
        return cls(octets.view(dtype), scales.reshape(len(octets), -1))

    @property
    def shape(self) -> tuple[int, int]:
        """`(vocab, hidden)`."""
        vocab, hidden = self.values.shape
        return vocab, hidden

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        vocab, hidden = self.shape
        return vocab * (hidden + 4 * self.groups)

    def __getitem__(self, rows: slice) -> QuantizedEmbedding:
        """Some rows, the same memory."""
        return QuantizedEmbedding(self.values[rows], self.scales[rows])

    def dequantized(self) -> Any:
        """All rows `(vocab, hidden)` in float32."""
        wide = as_float32(self.values)
        return (wide.reshape(*self.scales.shape, -1) * self.scales[:, :, None]).reshape(wide.shape)

    def parts(self, elements: int = AT_ONCE) -> Iterator[tuple[slice, QuantizedEmbedding]]:
        """Neighbouring rows of some millions of elements, each with the slice that they are."""
        vocab, hidden = self.shape
        step = max(1, elements // max(1, hidden))
        for first in range(0, vocab, step):
            rows = slice(first, min(first + step, vocab))
            yield rows, self[rows]

    def to(self, *where: Any, **options: Any) -> QuantizedEmbedding:
        """Torch tensors on another device, as `Tensor.to` does it; dtypes stay as they are."""
        return QuantizedEmbedding(self.values.to(*where, **options), self.scales.to(*where, **options))


def quantize_embedding(embedding: Any, dtype: str = "float8_e4m3fn", group: int | None = None) -> QuantizedEmbedding:
    """An output embedding in eight bits, which `head_topk`, `head_sample` and `LmHead` take instead of one in 16 or 32.

    With a_g the largest magnitude of row w in group g of columns, and c = 127 for int8 or 448 for float8_e4m3fn:

        scales[w, g] = a_g / c            values[w, j] = round(embedding[w, j] / scales[w, j // group])

    rounded to nearest, ties to even; no magnitude exceeds c.

    Parameters
    ----------
    embedding
        `(vocab, hidden)` float32, float16 or bfloat16: a torch tensor on any device, or a NumPy array. All numbers must
        be finite. Rows are converted some millions of elements at a time.
    dtype
        `"int8"`, whose errors are at most half a scale everywhere, or `"float8_e4m3fn"` (four bits of exponent, three
        of mantissa), whose errors are at most a sixteenth of the number.
    group
        Columns with a scale of their own, which divide `hidden`; None: a scale a row. Kernels for GPUs read eight bits
        of groups of whole 64 columns; others are dequantised in parts.

    Raises
    ------
    TypeError
        If the embedding is neither a torch tensor nor a NumPy array, or `group` is not an integer.
    ValueError
        For a sparse layout, a meta tensor, another rank or dtype, a group that does not divide the columns, or a row
        that is not finite.
    """
    check_dense("embedding", embedding)
    embedding = embedding.detach() if hasattr(embedding, "detach") else embedding
    if dtype not in STORED:
        raise ValueError(f"dtype: expected {' or '.join(STORED)}, got {dtype!r}")
    if len(embedding.shape) != 2 or 0 in embedding.shape:
        raise ValueError(f"embedding: expected shape (vocab, hidden) without a zero, got {tuple(embedding.shape)}")
    if (given := str(embedding.dtype).removeprefix("torch.")) not in FLOATS:
        raise ValueError(f"embedding: expected one of {', '.join(FLOATS)}, got {given}")
    vocab, hidden = embedding.shape
    columns = hidden if group is None else integer("group", group)
    if columns < 1 or hidden % columns:
        raise ValueError(f"group: expected a divisor of the {hidden} columns, got {group}")
    space = library(embedding)
    if space.__name__ == "torch":
        values = space.empty((vocab, hidden), dtype=getattr(space, dtype), device=embedding.device)
        scales = space.empty((vocab, hidden // columns), dtype=space.float32, device=embedding.device)
    else:
        values = space.empty((vocab, hidden), numpy_dtype(dtype))
        scales = space.empty((vocab, hidden // columns), space.float32)
    found = QuantizedEmbedding(values, scales)
    for rows, part in found.parts():
        wide = as_float32(embedding[rows])
        if not (finite := space.isfinite(wide)).all():
            first = rows.start + int((~finite).any(1).nonzero()[0][0])
            raise ValueError(f"embedding: expected finite numbers, got NaN or infinity in row {first}")
        part.scales[...] = stored_scales(wide, dtype, columns)
        part.values[...] = stored_values(wide, part.scales, dtype)
    return found
