"""A block-sparse weight, prepared once for many calls."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tvm_sparse.core.given import block_of, described
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import float_dtype, index_as, refuse_gradient
from tvm_sparse.runtime.dense import DenseCopy, densified

from .pattern import pattern_of
from .problem import BsrMatmul

# For the message: how to get a gradient of the stored blocks.
INSTEAD = "call it under torch.no_grad(), or give bsr_matmul the parts (data, indices, indptr), or use tvm_sparse.nn"


class Structure(NamedTuple):
    """Properties of a prepared weight beside its arrays.

    `long`, `pattern` and `constant` are the attributes of `BsrWeight`, `columns` is k, and `tf32` says that a product
    may take float32 as tf32. Custom operators of PyTorch take it as one integer, because every argument costs time:
    bit 0 is set for a skewed pattern, bit 1 for a constant weight, bits 2 to 32 hold `columns`, bits 33 to 61
    `long + 1`, and bit 62 `tf32`.
    """

    columns: int
    long: int = -1
    pattern: str = "uniform"
    constant: bool = False
    tf32: bool = False

    def packed(self) -> int:
        """The properties as one integer."""
        flags = int(self.pattern == "skewed") + (int(self.constant) << 1) + (int(self.tf32) << 62)
        return flags + (self.columns << 2) + (self.long + 1 << 33)

    @classmethod
    def unpacked(cls, packed: int) -> Structure:
        """The properties from their integer."""
        pattern, constant = "skewed" if packed & 1 else "uniform", bool(packed & 2)
        return cls(packed >> 2 & 0x7FFFFFFF, (packed >> 33 & 0x1FFFFFFF) - 1, pattern, constant, bool(packed >> 62))


class BsrWeight(DenseCopy):
    """A block-sparse weight `(n, k)`, checked and converted once, for many calls of `bsr_matmul`.

    Parameters
    ----------
    weight
        A `scipy.sparse.bsr_array`, a torch tensor of layout `torch.sparse_bsr`, or `(data, indices, indptr)`.
    columns
        k, for a weight given by its arrays, which do not determine it if the last block columns are empty.
    validate
        Also check indices and indptr on a GPU; on the host they are always checked.
    balance
        Analyse indptr, which for tensors on a GPU costs a synchronisation. Kernels then begin with the fullest block
        rows, split very long ones among thread blocks, and read the structure before their producer kernel is done.
        Arrays of other libraries on a GPU are not analysed.
    constant
        A promise that `data` is no longer written, as in inference: kernels may then load blocks before their producer
        kernel is done, which makes products of few rows faster, and `bsr_matmul` keeps a dense copy where the product
        with that is faster. It requires `balance`, whose analysis waits for pending writes of the current stream.

    Attributes
    ----------
    data, indices, indptr
        The arrays for kernels: blocks `(nnzb, block_rows, block_cols)`, int32 block columns `(nnzb,)`, int32 row starts
        `(n / block_rows + 1,)`. `data` may be changed in place unless it is `constant`, the structure may not.
    shape, dtype, nnzb, block_shape, device
        Properties of the matrix.
    order, long
        Result of `balance`: the block rows as `(n / block_rows, 3)`, the fullest first, and the number of long ones; -1
        without an analysis.
    pattern
        `"skewed"` if some block rows have far more blocks than others, else `"uniform"`.
    constant
        As promised.
    structure
        `columns`, `long`, `pattern` and `constant` as the integer of `Structure.packed`.

    Raises
    ------
    TypeError, ValueError
        As in `bsr_matmul`, naming the argument; also for `constant` without `balance`.

    Notes
    -----
    Copies (`copy.copy`, which shares the arrays, and `copy.deepcopy`) and pickles are complete; the structure is
    analysed again when they are made.
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
        refuse_gradient("weight", data, INSTEAD)
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
        if not hasattr(k, "__index__") or isinstance(k, bool) or k < 0:
            raise ValueError(f"columns: expected an integer of at least 0, got {k!r}")
        if k % cols or n % rows:
            raise ValueError(f"weight: blocks of {rows}x{cols} do not divide shape ({n}, {k})")
        if max(n * k, self.nnzb * rows * cols) >= 2**31:
            raise ValueError(f"weight: expected fewer than 2^31 elements, got shape ({n}, {k})")
        self.shape = (n, k)
        self.dtype, self.device, self.device_index = known.dtype, known.device, known.index
        if (known.device == "cpu" or validate) and not arrays.is_fake(indptr):
            self._check(indptr, indices)
        self.data = arrays.ready("data", data, known)
        self.indices, self.indptr = as_int32("indices", indices), as_int32("indptr", indptr)
        self._options = {"balance": balance, "constant": constant}
        if balance and (known.device == "cpu" or arrays.is_torch(self.indptr)) and not arrays.is_fake(indptr):
            itemsize = numpy_dtype(self.dtype).itemsize
            self._hold(*balanced(self.indptr, self.indices, (rows, cols), k // cols, itemsize), constant)
        else:
            self._hold(unread_array((block_rows, 3), self.indptr, known), -1, "uniform", constant)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        block: int | tuple[int, int] | None = None,
        *,
        dtype: Any = "float32",
        device: Any = None,
        constant: bool = False,
    ) -> BsrWeight:
        """A weight from a file: `.smtx` of the Deep Learning Matrix Collection, `.mtx` (Matrix Market), or `.npz` as
        `scipy.sparse.save_npz` writes it, in CSR or BSR format.

        Parameters
        ----------
        path
            The file; its suffix tells the format. Entries of a file without values (`.smtx`, `pattern`) are ones.
        block
            Rows and columns of a block, or one number for both: blocks with an entry are stored. They divide the
            matrix. None: those of the file, for one in BSR format; another file needs it.
        dtype
            float32, float16 or bfloat16, as a name or a dtype.
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
        parts = found.in_blocks(None if block is None else block_of(block), kind, path)
        placed = tuple(arrays.on_device(array, device) for array in parts)
        return cls(placed, columns=found.shape[1], constant=constant)

    @classmethod
    def assembled(cls, parts: tuple[Any, Any, Any], order: Any, structure: int) -> BsrWeight:
        """A weight from tensors that `BsrWeight` has prepared before, without checks.

        Parameters
        ----------
        parts
            `(data, indices, indptr)`, the attributes of the weight.
        order, structure
            The attributes of these names.
        """
        self = cls.__new__(cls)
        self.data, self.indices, self.indptr = parts
        known = arrays.facts("data", self.data)
        self.dtype, self.device, self.device_index = known.dtype, known.device, known.index
        self.nnzb, rows, cols = known.shape
        self.block_shape = rows, cols
        columns, long, pattern, constant, _ = Structure.unpacked(structure)
        self.shape = ((self.indptr.shape[0] - 1) * rows, columns)
        self._options = {"balance": long >= 0, "constant": constant}
        self._hold(order, long, pattern, constant)
        return self

    def _hold(self, order: Any, long: int, pattern: str, constant: bool) -> None:
        """Store the properties of the structure, and the arguments for kernels."""
        self.order, self.long, self.pattern, self.constant = order, long, pattern, constant
        self.structure = Structure(self.shape[1], long, pattern, constant).packed()
        given = (self.data, self.indices, self.indptr, order)
        self.arguments = (*map(arrays.argument, given), long, int(constant))
        self.launchers = repeat.Own()
        self._problems: dict[tuple[int, int, str, str], BsrMatmul] = {}
        # For tensors: the transposed structure, computed at the first gradient of x; see `torch_op`.
        self.turned: Any = None

    def validate(self) -> None:
        """Check indices and indptr again on any device; on a GPU this costs a synchronisation.

        Raises
        ------
        ValueError
            Naming the first invalid entry.
        """
        self._check(self.indptr, self.indices)

    def to(self, device: Any = None, dtype: Any = None, *, non_blocking: bool = False) -> BsrWeight:
        """This weight on another device or in another dtype, as in `torch.Tensor.to`; itself if nothing changes.

        Parameters
        ----------
        device
            A device of PyTorch, such as "cuda:0"; or a dtype, if only that changes. Arrays of other libraries cannot be
            moved.
        dtype
            A dtype of torch or NumPy, or its name: float32, float16 or bfloat16.
        non_blocking
            As in `torch.Tensor.to`.

        Raises
        ------
        TypeError
            For a device, if the arrays are not PyTorch's; for a dtype, if they are neither PyTorch's nor NumPy's.
        ValueError
            For another dtype.
        """
        if dtype is None and (name := arrays.dtype_name(device)) in FLOATS:
            device, dtype = None, name
        wanted = self.dtype if dtype is None else arrays.dtype_name(dtype)
        if wanted not in FLOATS:
            raise ValueError(f"dtype: expected {', '.join(FLOATS)}, got {dtype!r}")
        kind = type(self.data).__name__
        if arrays.is_torch(self.data):
            torch = sys.modules["torch"]
            place = self.data.device if device is None else torch.device(device)
            data = self.data.to(place, getattr(torch, wanted), non_blocking=non_blocking)
            indices, indptr = (a.to(place, non_blocking=non_blocking) for a in (self.indices, self.indptr))
        elif device is not None:
            raise TypeError(f"device: only weights of torch tensors move, got a weight of {kind}")
        elif wanted == self.dtype:
            return self
        elif arrays.is_numpy(self.data):
            data, indices, indptr = self.data.astype(numpy_dtype(wanted)), self.indices, self.indptr
        else:
            raise TypeError(f"dtype: only weights of torch tensors and NumPy arrays are converted, got one of {kind}")
        if data is self.data:
            return self
        return BsrWeight((data, indices, indptr), columns=self.shape[1], **self._options)

    def half(self) -> BsrWeight:
        """This weight in float16."""
        return self.to(dtype="float16")

    def bfloat16(self) -> BsrWeight:
        """This weight in bfloat16."""
        return self.to(dtype="bfloat16")

    def float(self) -> BsrWeight:
        """This weight in float32."""
        return self.to(dtype="float32")

    def to_dense(self) -> Any:
        """The dense matrix `(n, k)`, as an array of the library, dtype and device of `data`.

        Duplicate blocks are added, in float32.

        Raises
        ------
        TypeError
            For arrays on a GPU that are not PyTorch's.
        """
        return densified(self.data, self.indices, self.indptr, self.shape)

    def __getstate__(self) -> dict[str, Any]:
        # Neither a kernel nor its prepared arguments can be copied.
        return {"parts": (self.data, self.indices, self.indptr), "columns": self.shape[1], **self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        BsrWeight.__init__(self, state.pop("parts"), **state)

    def _check(self, indptr: Any, indices: Any) -> None:
        from tvm_sparse.formats.bsr import check_structure

        rows, cols = self.block_shape
        grid = self.shape[0] // rows, self.shape[1] // cols
        check_structure(arrays.as_numpy(indptr), arrays.as_numpy(indices), self.nnzb, grid)

    def problem(self, m: int, bias: int = 0, activation: str = "", precision: str = "") -> BsrMatmul:
        """The problem of a product with `m` rows of x."""
        key = m, bias, activation, precision
        if key not in self._problems:
            self._problems[key] = self._problem(*key)
        return self._problems[key]

    def _problem(self, m: int, bias: int, activation: str, precision: str) -> BsrMatmul:
        (n, k), (rows, cols) = self.shape, self.block_shape
        sparsity = 1 - self.nnzb / max(1, (n // rows) * (k // cols))
        sparsity = min(max(sparsity, 0.0), 1.0)
        extras: dict[str, Any] = {"bias": bias, "activation": activation, "precision": precision}
        return BsrMatmul(m, k, n, f"{rows}x{cols}", sparsity, self.pattern, self.dtype, **extras)

    def __repr__(self) -> str:
        rows, cols = self.block_shape
        return (
            f"BsrWeight(shape={self.shape}, block={rows}x{cols}, nnzb={self.nnzb},"
            f" dtype={self.dtype}, device={self.device})"
        )


def balanced(indptr: Any, indices: Any, block: tuple[int, int], block_cols: int, itemsize: int) -> tuple[Any, int, str]:
    """From a structure: the block rows in order, on their device, the number of long ones, and the pattern."""
    from tvm_sparse.formats.bsr import analysed

    starts = arrays.as_numpy(indptr)
    order, long = analysed(starts, arrays.as_numpy(indices), block, block_cols, itemsize)
    if arrays.is_torch(indptr):
        order = sys.modules["torch"].from_numpy(order).to(indptr.device)
    return order, long, pattern_of(starts)


def _no_columns() -> int:
    raise ValueError("columns: a weight given as (data, indices, indptr) needs its number of columns")


def _parts(weight: Any) -> tuple[Any, Any, Any, tuple[int, int] | None]:
    """data, indices, indptr, and the shape if the weight has one."""
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
    layout = getattr(weight, "format", None)
    if layout == "bsr":
        return weight.data, weight.indices, weight.indptr, (int(weight.shape[0]), int(weight.shape[1]))
    if isinstance(layout, str):
        raise TypeError(f"weight: expected a SciPy matrix in BSR format, got {layout}; use weight.tobsr(blocksize=...)")
    raise TypeError(
        "weight: expected a BsrWeight, a scipy.sparse.bsr_array, a torch.sparse_bsr tensor or (data, indices, indptr),"
        f" got {described(weight)}"
    )


def unread_array(shape: tuple[int, ...], like: Any, known: arrays.Facts) -> Any:
    """An int32 array for an argument that kernels take but do not read, on the device of the facts."""
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


def as_int32(name: str, array: Any) -> Any:
    """Indices as int32, as kernels take them; on the host a copy, except for torch tensors."""
    known = arrays.facts(name, array)
    found = index_as(name, array, known, "int32")
    if known.device != "cpu" or arrays.is_torch(array):
        return found
    import numpy as np

    return np.array(found)
