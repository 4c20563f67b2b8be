"""Several embedding tables in one array, for lookups in all of them by one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tvm_sparse.core.given import integer
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.formats.quantized import QuantizedEmbedding, check_dense
from tvm_sparse.runtime import arrays

if TYPE_CHECKING:
    import numpy as np


class EmbeddingTables:
    """Tables of one width and dtype, stored one after another, for `nhot_lookup` in all of them by one launch.

    Parameters
    ----------
    table
        `(vocab, width)`: the rows of all tables, those of the first table first; a torch tensor or a NumPy array of
        float32, float16 or bfloat16, or a `QuantizedEmbedding`. Not copied. `EmbeddingTables.of` makes it of a list of
        tables.
    sizes
        Number of rows of each table, at least 1; their sum is `vocab`.
    first_rows
        The attribute of that name, of tables of these sizes on this device, if it is there already.

    Attributes
    ----------
    table, sizes
        As given, `sizes` as a tuple.
    first_rows
        `(tables,)` int32 on the table's device, of its library: the row at which each table begins.

    Raises
    ------
    TypeError, ValueError
        If `sizes` are not such numbers, or for another table.

    Notes
    -----
    They are one array, not a list of pointers: a single parameter for optimisers and state dicts, no address of a
    replaced table in a captured CUDA graph, and no array of addresses to copy to the GPU. `tables[t]` is a view of one
    table. The tables can be copied and pickled.
    """

    def __init__(self, table: Any, sizes: Sequence[int], first_rows: Any = None) -> None:
        self.table = table
        self.sizes = tuple(integer("sizes", size) for size in sizes)
        self.octets = table.octets if isinstance(table, QuantizedEmbedding) else table
        if self.octets is table:
            check_dense("table", table)
            dtype = str(table.dtype).removeprefix("torch.")
            if dtype not in FLOATS:
                raise ValueError(f"table: expected one of {', '.join(FLOATS)}, or a QuantizedEmbedding, got {dtype}")
        if len(self.octets.shape) != 2:
            raise ValueError(f"table: expected 2 dimensions, got shape {tuple(self.octets.shape)}")
        rows = self.octets.shape[0]
        if not self.sizes or min(self.sizes) < 1 or sum(self.sizes) != rows:
            raise ValueError(
                f"sizes: expected numbers of at least 1 whose sum is {rows}, the rows of the table, got {self.sizes}"
            )
        self.first_rows = self._starts() if first_rows is None else first_rows

    @classmethod
    def of(cls, tables: Sequence[Any]) -> EmbeddingTables:
        """Copy tables `(vocab, width)` of one library, device and dtype into one array.

        Raises
        ------
        ValueError
            For an empty list.
        RuntimeError, ValueError, TypeError
            Where the library cannot concatenate them.
        """
        if not tables:
            raise ValueError("tables: expected at least one")
        sizes = [len(table.values if isinstance(table, QuantizedEmbedding) else table) for table in tables]
        if isinstance(tables[0], QuantizedEmbedding):
            octets, scales = (_joined([getattr(t, name) for t in tables]) for name in ("octets", "scales"))
            return cls(QuantizedEmbedding.of_octets(octets, scales, tables[0].stored), sizes)
        return cls(_joined(tables), sizes)

    def _starts(self) -> Any:
        starts = first_rows_of(self.sizes)
        if arrays.is_torch(self.octets):
            import torch

            return torch.from_numpy(starts).to(self.octets.device)
        return starts

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Any:
        """The rows of one table, the same memory."""
        size = self.sizes[number]
        first = sum(self.sizes[: number % len(self.sizes)])
        return self.table[first : first + size]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"EmbeddingTables({self.sizes}, width={self.octets.shape[1]})"


def first_rows_of(sizes: Sequence[int]) -> np.ndarray:
    """int32: the row at which each table begins."""
    import numpy as np

    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)


def _joined(given: Sequence[Any]) -> Any:
    if arrays.is_torch(given[0]):
        import torch

        return torch.cat([one.detach() for one in given])
    import numpy as np

    return np.concatenate(given)
