"""Sparse rows, checked once for many lookups."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tvm_sparse.core.given import described, integer
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import float_dtype, index_as, refuse_gradient
from tvm_sparse.runtime.dense import DenseCopy, densified

from .problem import INDEX, NhotLookup, typical

# Entries that int32 row starts can count.
MOST_INT32 = 2**31 - 1


class CsrRows(DenseCopy):
    """Sparse rows `(rows, columns)`, checked once, for many calls of `nhot_lookup` or `csr_linear`.

    Parameters
    ----------
    csr
        A `scipy.sparse.csr_array` or `csr_matrix`, a torch tensor of layout `torch.sparse_csr`, or
        `(indptr, indices, values)` with None for values that are all 1.
    columns
        Number of columns, for rows given by their arrays, which do not determine it. For rows of several tables, those
        of the first table first, a sequence of each table's number of rows (`EmbeddingTables.sizes`).
    validate
        Also check indptr and indices on a GPU; on the host they are always checked.
    checked
        A promise that indptr and indices are valid, so that they are not checked. Invalid ones cause reads out of
        bounds.
    constant
        A promise that nobody writes the arrays, as in inference: `csr_linear` then keeps a dense copy where the product
        with that is faster.

    Attributes
    ----------
    indptr, indices, values
        The arrays for kernels: row starts `(rows + 1,)`, columns `(nnz,)`, both int32 or both int64, and values
        `(nnz,)` or None. If their dtypes differed, indptr is a copy in the dtype of indices (with 2^31 or more int32
        indices, these are a copy in int64). Unless the rows are `constant`, the arrays may be changed in place, as long
        as indptr and indices stay valid.
    sizes
        Numbers of rows of several tables, or ().
    shape, dtype, nnz, index, device
        Properties of the rows; `dtype` is that of the values or None, `index` that of indptr and indices.
    constant
        As promised.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `nhot_lookup`, naming the argument.

    Notes
    -----
    A `CsrRows` can be copied and pickled.
    """

    def __init__(
        self,
        csr: Any,
        *,
        columns: Any = None,
        validate: bool = False,
        checked: bool = False,
        constant: bool = False,
    ) -> None:
        indptr, indices, values, shape = _csr_parts(csr)
        known = arrays.facts("indptr", indptr)
        if len(known.shape) != 1 or known.dtype not in INDEX:
            raise ValueError(
                f"indptr: expected one dimension of int32 or int64, got {known.dtype} of shape {known.shape}"
            )
        if known.shape[0] < 1:
            raise ValueError("indptr: expected at least 1 entry (rows + 1), got 0")
        theirs = arrays.facts("indices", indices)
        if len(theirs.shape) != 1 or theirs.dtype not in INDEX:
            raise ValueError(
                f"indices: expected one dimension of int32 or int64, got {theirs.dtype} of shape {theirs.shape}"
            )
        [self.nnz] = theirs.shape
        others = [("indices", indices, theirs)]
        if values is not None:
            others.append(("values", values, arrays.facts("values", values)))
            facts = others[-1][2]
            if facts.dtype not in FLOATS:
                raise ValueError(f"values: expected dtype {', '.join(FLOATS)}, got {facts.dtype}")
            if facts.shape != (self.nnz,):
                raise ValueError(f"values: expected shape ({self.nnz},), one for each of indices, got {facts.shape}")
            refuse_gradient("values", values)
        for name, _, facts in others:
            if (facts.device, facts.index) != (known.device, known.index):
                raise ValueError(
                    f"{name}: expected an array on {known.device}:{known.index}, as indptr is, got one on"
                    f" {facts.device}:{facts.index}"
                )
        self.sizes: tuple[int, ...] = ()
        if isinstance(columns, (tuple, list)):
            if shape is not None:
                raise ValueError("columns: rows for several tables come as (indptr, indices, values)")
            self.sizes = tuple(integer("columns", size) for size in columns)
            if not self.sizes or min(self.sizes) < 1 or (known.shape[0] - 1) % len(self.sizes):
                raise ValueError(
                    f"indptr: expected as many rows for each of {len(self.sizes)} tables, of at least 1 row each, got"
                    f" {known.shape[0] - 1} in all for tables of {self.sizes} rows"
                )
            shape = known.shape[0] - 1, max(self.sizes)
        if shape is None:
            if columns is None:
                raise ValueError("columns: rows given as (indptr, indices, values) need their number of columns")
            if not hasattr(columns, "__index__") or isinstance(columns, bool) or columns < 0:
                raise ValueError(f"columns: expected an integer of at least 0, got {columns!r}")
            shape = (known.shape[0] - 1, columns)
        self.shape = shape
        if known.shape[0] != self.shape[0] + 1:
            raise ValueError(f"indptr: expected {self.shape[0] + 1} entries (rows + 1), got {known.shape[0]}")
        self.index, self.device, self.device_index = index_of(theirs), known.device, known.index
        self.dtype = others[-1][2].dtype if values is not None else None
        if (known.device == "cpu" or validate) and not (checked or arrays.is_fake(indptr)):
            self._check(indptr, indices)
        self.indptr = index_as("indptr", indptr, known, self.index)
        self.indices = index_as("indices", indices, theirs, self.index)
        self.values = None if values is None else arrays.ready("values", values, others[-1][2])
        given = (self.indptr, self.indices) if values is None else (self.indptr, self.indices, self.values)
        self.arguments = tuple(map(arrays.argument, given))
        self.launchers = repeat.Own()
        self.constant = constant

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: Any = "float32",
        device: Any = None,
        constant: bool = False,
    ) -> CsrRows:
        """Sparse rows from a file: `.smtx` of the Deep Learning Matrix Collection, `.mtx` (Matrix Market), or `.npz` as
        `scipy.sparse.save_npz` writes it, in CSR format.

        Parameters
        ----------
        path
            The file; its suffix tells the format. Rows of a file without values (`.smtx`, `pattern`) have none.
        dtype
            That of the values: float32, float16 or bfloat16, as a name or a dtype.
        device
            A device of PyTorch, for tensors there; None: NumPy arrays.
        constant
            As in the class.

        Raises
        ------
        ValueError
            Naming the file and what is wrong with it, or the argument.
        OSError
            If the file cannot be opened.
        """
        from tvm_sparse.formats import matrix_files

        kind = float_dtype(dtype)
        found = matrix_files.read(Path(path))
        if found.block is not None:
            raise ValueError(f"path: {path} is in blocks of {found.block[0]}x{found.block[1]}; use BsrWeight.from_file")
        index = "int64" if len(found.indices) > MOST_INT32 else "int32"
        given = (found.indptr.astype(index), found.indices.astype(index))
        values = None if found.values is None else arrays.on_device(found.filled(kind), device)
        placed = (*(arrays.on_device(array, device) for array in given), values)
        return cls(placed, columns=found.shape[1], checked=True, constant=constant)

    def validate(self) -> None:
        """Check indptr and indices again on any device; on a GPU this costs a synchronisation.

        Raises
        ------
        ValueError
            Naming the first invalid entry.
        """
        self._check(self.indptr, self.indices)

    def to_dense(self) -> Any:
        """The dense matrix `(rows, columns)`, as an array of the library, dtype and device of the values.

        Duplicate entries are added, in float32.

        Raises
        ------
        ValueError
            For rows without values.
        TypeError
            For arrays on a GPU that are not PyTorch's.
        """
        if self.values is None:
            raise ValueError("values: rows without values have no dtype for a dense matrix, got None")
        return densified(self.values.reshape(-1, 1, 1), self.indices, self.indptr, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        # Neither a kernel nor its prepared arguments can be copied.
        parts = self.indptr, self.indices, self.values
        return {"csr": parts, "columns": self.sizes or self.shape[1], "constant": self.constant}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CsrRows.__init__(self, **state)

    def _check(self, indptr: Any, indices: Any) -> None:
        from tvm_sparse.formats.compressed import check_compressed

        starts, columns = arrays.as_numpy(indptr), arrays.as_numpy(indices)
        check_compressed(starts, columns, self.nnz, self.shape, stored_in="value")
        each = self.shape[0] // max(1, len(self.sizes))
        for table, size in enumerate(self.sizes):
            first, last = starts[table * each], starts[(table + 1) * each]
            beyond = (columns[first:last] >= size).nonzero()[0]
            if len(beyond):
                place = first + beyond[0]
                raise ValueError(f"indices[{place}]={columns[place]} is outside [0, {size}), the rows of table {table}")

    def problem(self, width: int, dtype: str) -> NhotLookup:
        """The problem of a look-up in a table of `width` columns."""
        (rows, vocab), weighted, tables = self.shape, int(self.dtype is not None), max(1, len(self.sizes))
        value = "float32" if self.dtype == "float32" != dtype else ""
        each, vocab = typical(self.nnz, rows), sum(self.sizes) or vocab
        return NhotLookup(rows // tables, vocab, width, each, dtype, weighted, self.index, value, tables=tables)

    def __repr__(self) -> str:
        return (
            f"CsrRows(shape={self.shape}, nnz={self.nnz}, dtype={self.dtype}, index={self.index}, device={self.device})"
        )


def index_of(indices: Facts) -> str:
    """The dtype in which kernels take indptr and indices: that of the indices, if it can count them."""
    return "int64" if indices.shape[0] > MOST_INT32 else indices.dtype


def _csr_parts(csr: Any) -> tuple[Any, Any, Any, tuple[int, int] | None]:
    """indptr, indices, values, and the shape if the rows have one."""
    if isinstance(csr, (tuple, list)):
        if len(csr) != 3:
            raise ValueError(f"csr: expected (indptr, indices, values or None), got {len(csr)} items")
        return csr[0], csr[1], csr[2], None
    if arrays.is_torch(csr):
        torch = sys.modules["torch"]
        if csr.layout is not torch.sparse_csr:
            raise TypeError(f"csr: expected layout torch.sparse_csr, got {csr.layout}; use csr.to_sparse_csr()")
        if csr.dim() != 2:
            raise ValueError(f"csr: expected 2 dimensions, got shape {tuple(csr.shape)}")
        refuse_gradient("csr", csr)
        csr = csr.detach()
        return csr.crow_indices(), csr.col_indices(), csr.values(), tuple(csr.shape)
    layout = getattr(csr, "format", None)
    if layout == "csr":
        if len(csr.shape) != 2:
            raise ValueError(f"csr: expected 2 dimensions, got shape {csr.shape}")
        return csr.indptr, csr.indices, csr.data, (int(csr.shape[0]), int(csr.shape[1]))
    if isinstance(layout, str):
        raise TypeError(f"csr: expected a SciPy matrix in CSR format, got {layout}; use csr.tocsr()")
    raise TypeError(
        "csr: expected a CsrRows, a scipy.sparse.csr_array, a torch.sparse_csr tensor or (indptr, indices, values or"
        f" None), got {described(csr)}"
    )
