"""Sparse matrices in files: `.smtx` of the Deep Learning Matrix Collection, Matrix Market (`.mtx`), SciPy's `.npz`.

    .smtx   three lines: rows, columns and number of entries; row starts; columns of the entries. It has no values.
    .mtx    coordinates from 1 on, an entry a line; real, integer or pattern; general, symmetric or skew-symmetric
    .npz    as `scipy.sparse.save_npz` writes it, in CSR or BSR format

Files may be somebody else's: reading runs no code, takes memory in proportion to the file's bytes, and everything that
the arrays claim is checked.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..core import npz_files, plain_files
from .compressed import check_compressed

SUFFIXES = (".smtx", ".mtx", ".npz")
# Largest file, longest line of a header, and most rows, which a Matrix Market file may claim without having entries.
MOST_BYTES, MOST_LINE, MOST_ROWS = 1 << 33, 1 << 10, 1 << 26
FIELDS = {"real": 3, "integer": 3, "pattern": 2}  # numbers of an entry
SYMMETRIES = {"general": 0, "symmetric": 1, "skew-symmetric": -1}  # the sign of a mirrored entry


@dataclass(frozen=True)
class MatrixFile:
    """A sparse matrix in CSR format, or in BSR format if there is a `block`.

    Attributes
    ----------
    shape
        Rows and columns of the matrix.
    indptr, indices
        int64: starts of rows or block rows, and columns or block columns.
    values
        `(nnz,)`, or `(nnzb, *block)`; None for a file without values.
    block
        Rows and columns of a block.
    """

    shape: tuple[int, int]
    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None
    block: tuple[int, int] | None = None

    def filled(self, dtype: np.dtype) -> np.ndarray:
        """The values in a dtype: ones for a file without."""
        if self.values is None:
            return np.ones(len(self.indices), dtype)
        with np.errstate(over="ignore"):
            return self.values.astype(dtype)

    def in_blocks(
        self, block: tuple[int, int] | None, dtype: np.dtype, name: object
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(data, indices, indptr)` of the stored blocks: those of a file in BSR format, others as `blocks`. `name` is
        what messages call the file.

        Raises
        ------
        ValueError
            If the file is in blocks of another shape, or in none and `block` is None; as `blocks`.
        """
        if self.block is None:
            if block is None:
                raise ValueError(f"block: {name} is not in blocks; expected the rows and columns of a block")
            return self.blocks(block, dtype)
        if block is not None and block != self.block:
            own, asked = ("x".join(map(str, one)) for one in (self.block, block))
            raise ValueError(f"block: {name} is in blocks of {own}, got {asked}")
        return self.filled(dtype), self.indices, self.indptr

    def blocks(self, block: tuple[int, int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(data, indices, indptr)` of the blocks that have an entry, of a matrix in CSR format. Repeated entries are
        added.

        Raises
        ------
        ValueError
            If blocks do not divide the matrix, or have 2^31 elements or more.
        """
        (rows, cols), (n, k) = block, self.shape
        if n % rows or k % cols:
            raise ValueError(f"block: blocks of {rows}x{cols} do not divide the matrix's shape ({n}, {k})")
        at = np.repeat(np.arange(n), np.diff(self.indptr))
        places = at // rows * (k // cols) + self.indices // cols
        found, which = np.unique(places, return_inverse=True)
        if len(found) * rows * cols >= 2**31:
            raise ValueError(
                f"block: {len(found):,} blocks of {rows}x{cols} have 2^31 elements or more; choose smaller ones"
            )
        data = np.zeros((len(found), rows, cols), np.float32)
        np.add.at(data, (which, at % rows, self.indices % cols), self.filled(np.dtype(np.float32)))
        indptr = np.searchsorted(found, np.arange(n // rows + 1) * (k // cols))
        with np.errstate(over="ignore"):
            return data.astype(dtype), found % (k // cols), indptr


def read(path: Path) -> MatrixFile:
    """Read a file in the format of its suffix.

    Raises
    ------
    ValueError
        Naming the file and what is wrong: another suffix, no plain file, a malformed or unsupported content, an entry
        outside of the matrix.
    OSError
        If it cannot be opened.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    try:
        file = plain_files.opened(path, MOST_BYTES)
    except plain_files.NotPlain as error:
        raise ValueError(str(error)) from None
    try:
        with file:
            return {".smtx": _read_smtx, ".mtx": _read_market, ".npz": _read_npz}[path.suffix](file)
    except Exception as error:  # a damaged file may raise anything
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {said[:500]}") from error


def _numbers(text: bytes, kind: type, count: int, what: str) -> np.ndarray:
    """Numbers separated by white space. Raises ValueError if these are not `count`, or something else is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found: np.ndarray = np.fromstring(text.decode("ascii"), kind, sep=" ")
        except (DeprecationWarning, UnicodeDecodeError, ValueError):
            raise ValueError(f"{what}: expected numbers, separated by white space") from None
    if len(found) != count:
        raise ValueError(f"{what}: expected {count:,} numbers, got {len(found):,}")
    return found


def _line(file: BinaryIO) -> str:
    found = file.readline(MOST_LINE)
    if not found:
        raise ValueError("it ends within its header")
    if len(found) == MOST_LINE:
        raise ValueError(f"a line of its header has {MOST_LINE} bytes or more")
    return found.decode("ascii").strip()


def _sizes(text: str) -> tuple[int, int, int]:
    """Rows, columns and number of entries."""
    try:
        rows, columns, entries = (int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise ValueError(f"expected a line with rows, columns and number of entries, got {text[:80]!r}") from None
    if not (0 <= rows <= MOST_ROWS and 0 <= columns < 2**31 and 0 <= entries):
        raise ValueError(
            f"expected at most {MOST_ROWS:,} rows, fewer than 2^31 columns, and no negative number, got {text[:80]!r}"
        )
    return rows, columns, entries


def _checked(found: MatrixFile) -> MatrixFile:
    rows, cols = found.block or (1, 1)
    grid = found.shape[0] // rows, found.shape[1] // cols
    item = "block" if found.block else ""
    check_compressed(found.indptr, found.indices, len(found.indices), grid, item=item, stored_in=item or "value")
    return found


def _read_smtx(file: BinaryIO) -> MatrixFile:
    rows, columns, entries = _sizes(_line(file))
    starts, _, rest = file.read().partition(b"\n")
    indptr = _numbers(starts, np.int64, rows + 1, "row starts")
    return _checked(MatrixFile((rows, columns), indptr, _numbers(rest, np.int64, entries, "columns"), None))


def _read_market(file: BinaryIO) -> MatrixFile:
    banner = _line(file).lower().split()
    if len(banner) != 5 or banner[:2] != ["%%matrixmarket", "matrix"]:
        raise ValueError("it does not begin with a line like '%%MatrixMarket matrix coordinate real general'")
    layout, field, symmetry = banner[2:]
    if layout != "coordinate" or field not in FIELDS or symmetry not in SYMMETRIES:
        raise ValueError(
            f"expected coordinates, of {', '.join(FIELDS)}, {', '.join(SYMMETRIES)}, got {layout} {field} {symmetry}"
        )
    while (line := _line(file)).startswith("%") or not line:
        pass
    rows, columns, entries = _sizes(line)
    each = FIELDS[field]
    found = _numbers(file.read(), np.float64, entries * each, "entries").reshape(entries, each)
    row, column = (
        _indices(found[:, i], extent, name) for i, (extent, name) in enumerate(((rows, "row"), (columns, "column")))
    )
    values = found[:, 2] if each == 3 else None
    if sign := SYMMETRIES[symmetry]:
        if rows != columns:
            raise ValueError(f"a {symmetry} matrix has as many rows as columns, got {rows} and {columns}")
        other = row != column
        row, column = np.concatenate([row, column[other]]), np.concatenate([column, row[other]])
        values = None if values is None else np.concatenate([values, sign * values[other]])
    order = np.lexsort((column, row))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return MatrixFile((rows, columns), indptr, column[order], None if values is None else values[order])


def _indices(given: np.ndarray, extent: int, name: str) -> np.ndarray:
    """Indices from 1 on, as those from 0 on."""
    wrong = ~((given >= 1) & (given <= extent) & (given == np.floor(given)))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"entry {at + 1}: expected a {name} from 1 to {extent}, got {given[at]:g}")
    return given.astype(np.int64) - 1


def _read_npz(file: BinaryIO) -> MatrixFile:
    arrays = npz_files.read(file)
    missing = [name for name in ("format", "shape", "data", "indices", "indptr") if name not in arrays]
    kind = arrays["format"].item() if "format" in arrays and arrays["format"].shape == () else b""
    text = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    if missing or text not in ("csr", "bsr"):
        raise ValueError(f"expected CSR or BSR format as scipy.sparse.save_npz writes it, got {text[:20]!r}")
    data, indices, indptr, shape = (arrays[name] for name in ("data", "indices", "indptr", "shape"))
    for name, array in (("indices", indices), ("indptr", indptr), ("shape", shape)):
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(f"{name}: expected one dimension of integers, got {array.dtype} of shape {array.shape}")
    if data.dtype.kind not in "fiub" or data.ndim != (1 if text == "csr" else 3) or len(data) != len(indices):
        raise ValueError(f"data: expected a number for each of {len(indices)} indices, got {data.dtype} {data.shape}")
    block = (int(data.shape[1]), int(data.shape[2])) if text == "bsr" else None
    sizes = [int(extent) for extent in shape]
    if len(sizes) != 2 or min(sizes) < 0 or max(sizes) >= 2**31:
        raise ValueError(f"shape: expected two numbers below 2^31, got {sizes[:4]}")
    if block and (min(block) < 1 or sizes[0] % block[0] or sizes[1] % block[1]):
        raise ValueError(f"blocks of {block[0]}x{block[1]} do not divide shape ({sizes[0]}, {sizes[1]})")
    of = MatrixFile((sizes[0], sizes[1]), indptr.astype(np.int64), indices.astype(np.int64), data, block)
    return _checked(of)
