"""Prepared objects: host work done once, kernels held."""

from __future__ import annotations

import math
import sys
from typing import Any

from .operators.bsr_matmul import BsrMatmul
from .operators.nhot_lookup import INDEX, NhotLookup, typical
from .operators.problem import FLOATS, numpy_dtype
from .runtime import arrays

# What `formats.bsr.skew` gives, beyond which a pattern counts as skewed: patterns drawn evenly stay below.
SKEWED = 4.0


class BsrWeight:
    """A block-sparse weight `(n, k)`, checked and converted once, for many calls of `bsr_matmul`.

    Parameters
    ----------
    weight
        A `scipy.sparse.bsr_array`, a torch tensor of layout `torch.sparse_bsr`, or `(data, indices, indptr)`.
    columns
        k, for a weight given by its arrays (which do not tell how many block columns are empty at the end).
    validate
        Also check indices and indptr that lie on a GPU; those on the host are always checked.
    balance
        Look at indptr, which of tensors on a GPU costs a synchronisation. Kernels then begin with the block rows that
        hold most blocks, share out those that hold far more than others, and read the structure while the kernel before
        is at its end. Arrays of other libraries on a GPU are taken as they are.
    constant
        A promise that `data` is not written any more, as at inference: kernels may then load blocks while the kernel
        before is at its end, which makes products of few rows faster. Only where `balance` has looked at indptr, which
        waits for what the current stream has still to write.

    Attributes
    ----------
    data, indices, indptr
        The arrays that kernels take: blocks `(nnzb, block_rows, block_cols)`, int32 block columns `(nnzb,)`, int32 row
        starts `(n / block_rows + 1,)`. `data` may be changed in place unless it is `constant`, the structure may not.
    shape, dtype, nnzb, block_shape, device
        Of the matrix.
    pattern
        `"skewed"` if some block rows were found to hold far more blocks than others, else `"uniform"`.

    Raises
    ------
    TypeError, ValueError
        As `bsr_matmul`, naming the argument; if it is to be constant without balance.
    """

    def __init__(
        self,
        weight: Any,
        *,
        columns: int | None = None,
        validate: bool = False,
        balance: bool = True,
        constant: bool = False,
    ) -> None:
        if constant and not balance:
            raise ValueError("constant: a constant weight is looked at: expected balance=True, got False")
        data, indices, indptr, shape = _parts(weight)
        known = arrays.facts("data", data)
        if len(known.shape) != 3:
            raise ValueError(f"data: expected 3 dimensions (nnzb, block_rows, block_cols), got shape {known.shape}")
        if known.dtype not in FLOATS:
            raise ValueError(f"data: expected dtype {', '.join(FLOATS)}, got {known.dtype}")
        if arrays.is_torch(data) and data.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise RuntimeError(
                "weight: requires a gradient, and there is no backward pass; call it under torch.no_grad()"
            )
        self.nnzb, *block = known.shape
        rows, cols = self.block_shape = tuple(block)
        if rows < 1 or cols < 1:
            raise ValueError(f"data: expected blocks of at least 1x1, got {rows}x{cols}")
        entries = {}
        for name, array in (("indices", indices), ("indptr", indptr)):
            theirs = arrays.facts(name, array)
            if len(theirs.shape) != 1 or theirs.dtype not in ("int32", "int64"):
                raise ValueError(
                    f"{name}: expected one dimension of int32 or int64, got {theirs.dtype} of shape {theirs.shape}"
                )
            if (theirs.device, theirs.index) != (known.device, known.index):
                raise ValueError(
                    f"{name}: expected an array on {known.device}:{known.index}, as data is, got one on"
                    f" {theirs.device}:{theirs.index}"
                )
            [entries[name]] = theirs.shape
        if entries["indices"] != self.nnzb:
            raise ValueError(f"indices: expected {self.nnzb} entries (one a block of data), got {entries['indices']}")
        if entries["indptr"] < 1:
            raise ValueError("indptr: expected at least 1 entry (block rows + 1), got 0")
        block_rows = entries["indptr"] - 1
        if shape is None:
            shape = (block_rows * rows, columns if columns is not None else _no_columns())
        n, k = shape
        if k % cols or n % rows:
            raise ValueError(f"weight: blocks of {rows}x{cols} do not divide shape ({n}, {k})")
        if max(n * k, self.nnzb * rows * cols) >= 2**31:
            raise ValueError(f"weight: expected fewer than 2^31 elements, got shape ({n}, {k})")
        self.shape = (int(n), int(k))
        self.dtype, self.device, self.device_index = known.dtype, known.device, known.index
        if known.device == "cpu" or validate:
            self._check(indptr, indices)
        self.data = arrays.ready("data", data, known)
        self.indices, self.indptr = _as_int32("indices", indices), _as_int32("indptr", indptr)
        self.pattern, long = "uniform", -1
        if balance and (known.device == "cpu" or arrays.is_torch(self.indptr)):
            order, long = self._balance()
        else:
            order = _unread((block_rows, 3), self.indptr, known)
        given = (self.data, self.indices, self.indptr, order)
        self.arguments = (*map(arrays.argument, given), long, int(constant))
        # Launchers of calls that were made before, by what they depend on; see `bsr_matmul`.
        self.kernels: dict[tuple, Any] = {}
        self._problems: dict[tuple[int, int, str], BsrMatmul] = {}

    def validate(self) -> None:
        """Check indices and indptr again, wherever they lie, which on a GPU costs a synchronisation.

        Raises
        ------
        ValueError
            Naming the first entry that is wrong.
        """
        self._check(self.indptr, self.indices)

    def _check(self, indptr: Any, indices: Any) -> None:
        from .formats.bsr import check_structure

        rows, cols = self.block_shape
        grid = self.shape[0] // rows, self.shape[1] // cols
        check_structure(_to_numpy(indptr), _to_numpy(indices), self.nnzb, grid)

    def _balance(self) -> tuple[Any, int]:
        """The block rows in order, on the weight's device, and how many are long."""
        from .formats.bsr import fullest_first, skew

        starts = _to_numpy(self.indptr)
        if skew(starts) > SKEWED:
            self.pattern = "skewed"
        order, long = fullest_first(starts, math.prod(self.block_shape) * numpy_dtype(self.dtype).itemsize)
        if arrays.is_torch(self.indptr):
            order = sys.modules["torch"].from_numpy(order).to(self.indptr.device)
        return order, long

    def problem(self, m: int, bias: int = 0, activation: str = "") -> BsrMatmul:
        """The problem of a product with `m` rows of x."""
        key = m, bias, activation
        if key not in self._problems:
            self._problems[key] = self._problem(*key)
        return self._problems[key]

    def _problem(self, m: int, bias: int, activation: str) -> BsrMatmul:
        (n, k), (rows, cols) = self.shape, self.block_shape
        sparsity = 1 - self.nnzb / max(1, (n // rows) * (k // cols))
        sparsity = min(max(sparsity, 0.0), 1.0)
        return BsrMatmul(m, k, n, f"{rows}x{cols}", sparsity, self.pattern, self.dtype, bias, activation)

    def __repr__(self) -> str:
        rows, cols = self.block_shape
        return (
            f"BsrWeight(shape={self.shape}, block={rows}x{cols}, nnzb={self.nnzb},"
            f" dtype={self.dtype}, device={self.device})"
        )


class CsrRows:
    """Sparse rows `(rows, columns)`, checked once, for many calls of `nhot_lookup`.

    Parameters
    ----------
    csr
        A `scipy.sparse.csr_array` or `csr_matrix`, a torch tensor of layout `torch.sparse_csr`, or
        `(indptr, indices, values)` with None for values that are all 1.
    columns
        Of rows given by their arrays, which do not tell it.
    validate
        Also check indptr and indices that lie on a GPU; those on the host are always checked.

    Attributes
    ----------
    indptr, indices, values
        The arrays that kernels take: row starts `(rows + 1,)`, columns `(nnz,)`, both int32 or both int64 as they were
        given, and values `(nnz,)` or None. Changing them in place is allowed, as long as indptr and indices stay valid.
    shape, dtype, nnz, index, device
        Of the rows; `dtype` is that of the values or None, `index` that of indptr and indices.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `nhot_lookup`, naming the argument.
    """

    def __init__(self, csr: Any, *, columns: int | None = None, validate: bool = False) -> None:
        indptr, indices, values, shape = _csr_parts(csr)
        known = arrays.facts("indptr", indptr)
        if len(known.shape) != 1 or known.dtype not in INDEX:
            raise ValueError(
                f"indptr: expected one dimension of int32 or int64, got {known.dtype} of shape {known.shape}"
            )
        if known.shape[0] < 1:
            raise ValueError("indptr: expected at least 1 entry (rows + 1), got 0")
        theirs = arrays.facts("indices", indices)
        if len(theirs.shape) != 1 or theirs.dtype != known.dtype:
            raise ValueError(
                f"indices: expected one dimension of {known.dtype}, as indptr has, got {theirs.dtype} of shape"
                f" {theirs.shape}"
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
            if arrays.is_torch(values) and values.requires_grad and sys.modules["torch"].is_grad_enabled():
                raise RuntimeError(
                    "values: requires a gradient, and there is no backward pass; call it under torch.no_grad()"
                )
        for name, _, facts in others:
            if (facts.device, facts.index) != (known.device, known.index):
                raise ValueError(
                    f"{name}: expected an array on {known.device}:{known.index}, as indptr is, got one on"
                    f" {facts.device}:{facts.index}"
                )
        if shape is None:
            if columns is None:
                raise ValueError("columns: rows given as (indptr, indices, values) need their number of columns")
            shape = (known.shape[0] - 1, columns)
        self.shape = (int(shape[0]), int(shape[1]))
        if known.shape[0] != self.shape[0] + 1:
            raise ValueError(f"indptr: expected {self.shape[0] + 1} entries (rows + 1), got {known.shape[0]}")
        self.index, self.device, self.device_index = known.dtype, known.device, known.index
        self.dtype = others[-1][2].dtype if values is not None else None
        if known.device == "cpu" or validate:
            self._check(indptr, indices)
        self.indptr = arrays.ready("indptr", indptr, known)
        self.indices = arrays.ready("indices", indices, theirs)
        self.values = None if values is None else arrays.ready("values", values, others[-1][2])
        given = (self.indptr, self.indices) if values is None else (self.indptr, self.indices, self.values)
        self.arguments = tuple(map(arrays.argument, given))
        # Launchers of calls that were made before, by what they depend on; see `nhot_lookup`.
        self.kernels: dict[tuple, Any] = {}

    def validate(self) -> None:
        """Check indptr and indices again, wherever they lie, which on a GPU costs a synchronisation.

        Raises
        ------
        ValueError
            Naming the first entry that is wrong.
        """
        self._check(self.indptr, self.indices)

    def _check(self, indptr: Any, indices: Any) -> None:
        from .formats.compressed import check_compressed

        check_compressed(_to_numpy(indptr), _to_numpy(indices), self.nnz, self.shape, stored_in="value")

    def problem(self, width: int, dtype: str) -> NhotLookup:
        """The problem of a look-up in a table of `width` columns."""
        (rows, vocab), weighted = self.shape, int(self.dtype is not None)
        return NhotLookup(rows, vocab, width, typical(self.nnz, rows), dtype, weighted, self.index)

    def __repr__(self) -> str:
        return (
            f"CsrRows(shape={self.shape}, nnz={self.nnz}, dtype={self.dtype}, index={self.index}, device={self.device})"
        )


def _csr_parts(csr: Any) -> tuple[Any, Any, Any, tuple[int, int] | None]:
    """indptr, indices, values, and the shape where the rows tell it."""
    if isinstance(csr, (tuple, list)):
        if len(csr) != 3:
            raise ValueError(f"csr: expected (indptr, indices, values or None), got {len(csr)} items")
        return (*csr, None)
    if arrays.is_torch(csr):
        torch = sys.modules["torch"]
        if csr.layout is not torch.sparse_csr:
            raise TypeError(f"csr: expected layout torch.sparse_csr, got {csr.layout}; use csr.to_sparse_csr()")
        if csr.dim() != 2:
            raise ValueError(f"csr: expected 2 dimensions, got shape {tuple(csr.shape)}")
        if csr.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("csr: requires a gradient, and there is no backward pass; call it under torch.no_grad()")
        csr = csr.detach()
        return csr.crow_indices(), csr.col_indices(), csr.values(), tuple(csr.shape)
    if getattr(csr, "format", None) == "csr":
        return csr.indptr, csr.indices, csr.data, csr.shape
    if getattr(csr, "format", None) is not None:
        raise TypeError(f"csr: expected a SciPy matrix in CSR format, got {csr.format}; use csr.tocsr()")
    raise TypeError(
        "csr: expected a CsrRows, a scipy.sparse.csr_array, a torch.sparse_csr tensor or (indptr, indices, values or"
        f" None), got {type(csr).__name__}"
    )


def _no_columns() -> int:
    raise ValueError("columns: a weight given as (data, indices, indptr) needs its number of columns")


def _parts(weight: Any) -> tuple[Any, Any, Any, tuple[int, int] | None]:
    """data, indices, indptr, and the shape where the weight tells it."""
    if isinstance(weight, (tuple, list)):
        if len(weight) != 3:
            raise ValueError(f"weight: expected (data, indices, indptr), got {len(weight)} items")
        return (*weight, None)
    if arrays.is_torch(weight):
        torch = sys.modules["torch"]
        if weight.layout is not torch.sparse_bsr:
            raise TypeError(
                f"weight: expected layout torch.sparse_bsr, got {weight.layout}; use weight.to_sparse_bsr(block)"
            )
        if weight.dim() != 2:
            raise ValueError(f"weight: expected 2 dimensions, got shape {tuple(weight.shape)}")
        return weight.values(), weight.col_indices(), weight.crow_indices(), tuple(weight.shape)
    if getattr(weight, "format", None) == "bsr":
        return weight.data, weight.indices, weight.indptr, weight.shape
    if getattr(weight, "format", None) is not None:
        raise TypeError(
            f"weight: expected a SciPy matrix in BSR format, got {weight.format}; use weight.tobsr(blocksize=...)"
        )
    raise TypeError(
        "weight: expected a BsrWeight, a scipy.sparse.bsr_array, a torch.sparse_bsr tensor or (data, indices, indptr),"
        f" got {type(weight).__name__}"
    )


def _to_numpy(array: Any) -> Any:
    import numpy as np

    if arrays.is_torch(array):
        return array.cpu().numpy()
    return array if arrays.is_numpy(array) else np.from_dlpack(array)


def _unread(shape: tuple[int, ...], like: Any, known: arrays.Facts) -> Any:
    """An int32 array in the place of one that kernels take and do not read, on the device of the facts."""
    torch = sys.modules.get("torch")
    if torch is not None:
        device = f"cuda:{known.index}" if known.device == "cuda" else "cpu"
        return torch.empty(shape, dtype=torch.int32, device=device)
    try:
        return arrays.empty(shape, "int32", like, known)
    except TypeError:
        raise TypeError(
            f"weight: {type(like).__name__} offers no way to make arrays on a GPU, where kernels take one more; import"
            " torch, or pass arrays of a library of the array API"
        ) from None


def _as_int32(name: str, array: Any) -> Any:
    if arrays.is_torch(array):
        return array.to(sys.modules["torch"].int32).contiguous()
    known = arrays.facts(name, array)
    if known.device == "cpu":
        import numpy as np

        return np.array(_to_numpy(array), np.int32)
    if known.dtype != "int32":
        raise ValueError(
            f"{name}: expected int32 of another library's array on a GPU, got {known.dtype}; convert it first"
        )
    return arrays.ready(name, array, known)
