"""The public call of the N-hot lookup."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tvm_sparse.core.problem import FLOATS
from tvm_sparse.formats.quantized import STORED, QuantizedEmbedding
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    TORCH_ALONE,
    check_floats,
    facts_beside,
    fill,
    index_as,
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
    whole_number,
    without_gradient,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Absent, Array, Number, Output, Signature, Stored, Structure, Text

from .problem import INDEX, MODES, typical
from .rows import CsrRows, index_of
from .tables import EmbeddingTables

SIGNATURES = {
    "nhot_lookup": Signature(
        ("csr", Structure(("CsrRows", "scipy.sparse.csr_array", "torch.sparse_csr", "(indptr, indices, values)"))),
        (
            "table",
            Array(("vocab", "width"), FLOATS, gradient=True),
            Stored(tuple(STORED)),
            Structure(("EmbeddingTables",)),
        ),
        ("mode", Text(MODES)),
        ("padding_idx", Absent(), Number("int", 0, "vocab")),
        ("dtype", Absent(), Text(FLOATS)),
        ("validate", Number("bool")),
        outputs=(Output("out"),),
    )
}

__all__ = ["CsrRows", "EmbeddingTables", "nhot_lookup"]


def nhot_lookup(
    csr: Any,
    table: Any,
    *,
    mode: str = "sum",
    padding_idx: int | None = None,
    dtype: Any = None,
    out: Any = None,
    validate: bool = False,
) -> Any:
    """csr @ table: for each sparse row, the weighted sum, mean or maximum of the table rows that it selects.

    out[r, j] = sum_e values[e] * table[indices[e], j],  e = indptr[r] ... indptr[r + 1] - 1,

    or the sum over the number of these entries, or the largest term, each without entries whose index is padding_idx.

    Parameters
    ----------
    csr
        Shape `(rows, vocab)`, with a few nonzeros in each row: a `CsrRows` (prepared once, the fastest to call with), a
        `scipy.sparse.csr_array`, a torch tensor of layout `torch.sparse_csr`, or `(indptr, indices, values)` with
        indptr `(rows + 1,)`, indices `(nnz,)` in [0, vocab), each int32 or int64, and values `(nnz,)` of the table's
        dtype or float32, or None if all are 1. Rows may be empty; columns need not be sorted, and duplicates are added.
        On the device of `table`. Kernels require equal dtypes of indptr and indices: otherwise indptr is copied, at
        every call unless they are in a `CsrRows`.
    table
        Shape `(vocab, width)`; float32, float16 or bfloat16, accumulated in float32. Copied first if it is not
        contiguous, or not aligned to 16 bytes on a GPU. Or a `QuantizedEmbedding` with a scale a row
        (`quantize_embedding`), which stands for `table.dequantized()` and is read in eight bits; values are then of the
        result's dtype or float32. Or several tables, `EmbeddingTables`, all looked up by one launch: `csr` has
        `tables * batch` rows, those for the first table first, each with indices in [0, rows of its table), as
        `(indptr, indices, values)` or a `CsrRows` made with `columns=tables.sizes`.
    mode
        "sum", "mean" or "max" (of each column; NaN where a selected number is). Means and maxima are of table rows as
        they are: values must be None.
    padding_idx
        Entries with this index contribute nothing, whatever that table row holds, and do not count for a mean, as in
        `torch.nn.functional.embedding_bag`. An integer in [-vocab, vocab); a negative one counts from the table's end.
        With several tables it is one index for all, at least 0.
    dtype
        The dtype of the result, which is that of the table; for a table in eight bits float32 (the default), float16 or
        bfloat16.
    out
        `(rows, width)` array of the result's dtype to write into, contiguous, on the device of the table and of its
        kind; it must not overlap with an input.
    validate
        Also check indptr and indices on a GPU, which costs a synchronisation; on the host they are always checked, for
        a `CsrRows` when it is made. Invalid indices that are not checked cause reads out of bounds.

    Returns
    -------
    out
        `(rows, width)` of the result's dtype; zeros for a row without entries that count. Sums have a fixed order, so
        results are deterministic. With several tables `(batch, tables * width)`: row b has the results of row b for
        each table side by side.

    Raises
    ------
    TypeError
        If `csr`, `table` or `padding_idx` has another type.
    ValueError
        For another rank, dtype or mode, values beside a mean or a maximum, a padding_idx out of range, shapes that do
        not fit, a malformed structure (naming the first invalid entry), arrays on different devices, or an `out` that
        does not fit.
    RuntimeError
        If `out`, scales of the table, or the values of a `CsrRows` or of a sparse tensor require a gradient.

    Notes
    -----
    The result is differentiable in the table, with the gradient csr.T @ g by this same look-up, and in values given as
    `(indptr, indices, values)`, by PyTorch's operators on copies of the selected table rows, `(nnz, width)`. The
    gradient of a maximum goes to the first of a row's entries that has it, by such copies, too.

    When not to use it: if more than a few percent of the columns are nonzero, a dense product is as fast.

    Source: Argueta & Chiang 2019, "Accelerating Sparse Matrix Operations in Neural Networks on Graphics Processing
    Units", section 4.1.
    """
    if mode != "sum" and mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    torch = sys.modules.get("torch")
    given_table, scales, stored, tables = table, None, "", None
    if isinstance(table, EmbeddingTables):
        tables, table = table, table.table
    if isinstance(table, QuantizedEmbedding):
        table, scales, stored = table.octets, table.factors, table.stored
        dtype = "float32" if dtype is None else arrays.dtype_name(dtype)
        refuse_gradient("table (scales)", scales)
    table = without_gradient(table) if torch is not None and type(table) is not torch.Tensor else table
    sizes = () if tables is None else tables.sizes
    how = None if mode == "sum" and not stored and not sizes else (mode, stored, dtype, sizes)
    if validate and isinstance(csr, CsrRows):
        csr.validate()
    elif torch is not None and type(table) is torch.Tensor and not validate:
        more = () if scales is None else (scales,)
        more = more if tables is None else (*more, tables.first_rows)
        if padding_idx is not None and table.dim() == 2:
            more = (*more, padding_of(padding_idx, table.shape[0], sizes))
        fits = csr.sizes == sizes if isinstance(csr, CsrRows) else not sizes or type(csr) is tuple
        found = repeated_lookup(csr, table, torch, out, how=how, more=more) if fits else None
        if found is not None:
            return found

    if custom.transformed(table, scales, *_arrays_of(csr), differentiable=True):
        traced = custom.module_of("nhot_lookup").nhot_lookup
        options = {"mode": mode, "padding_idx": padding_idx, "dtype": dtype}
        return traced(csr, given_table, **options, out=out, validate=validate)
    known = arrays.facts("table", table)
    written = _result_dtype(dtype, known, stored)
    refuse_gradient("table", table, TORCH_ALONE)
    vocab, width = known.shape
    more = () if scales is None else (_ready_scales(scales, known),)
    more = more if tables is None else (*more, tables.first_rows)
    more = more if padding_idx is None else (*more, padding_of(padding_idx, vocab, sizes))
    given = csr
    if not isinstance(csr, CsrRows):
        csr = CsrRows(csr, columns=sizes or vocab, validate=validate)
    rows, columns = csr.shape
    if csr.sizes != sizes:
        made = f"for tables of {csr.sizes} rows" if csr.sizes else "for one table"
        raise ValueError(f"csr: expected a CsrRows made with columns={sizes or vocab}, got one {made}")
    if columns != vocab and not sizes:
        raise ValueError(f"csr: expected {vocab} columns, as the table has rows, got shape ({rows}, {columns})")
    if csr.dtype not in (None, "float32", written):
        other = "" if written == "float32" else " or float32,"
        raise ValueError(f"values: expected dtype {written}, as the result has,{other} got {csr.dtype}")
    if csr.dtype is not None and mode != "sum":
        raise ValueError(f"values: expected None for mode={mode!r}, got {csr.dtype}")
    if (csr.device, csr.device_index) != (known.device, known.index):
        raise ValueError(
            f"csr: expected arrays on {known.device}:{known.index}, as the table is,"
            f" got {csr.device}:{csr.device_index}"
        )
    if not arrays.is_fake(table) and (max(rows, vocab, width) >= 2**31 or rows * width >= 2**34):
        raise ValueError(
            f"csr: expected extents below 2^31 and a product of fewer than 2^34 elements, got rows={rows},"
            f" vocab={vocab}, width={width}"
        )
    side_by_side = max(1, len(sizes))
    [result] = outputs_for(out, (("out", (rows // side_by_side, side_by_side * width), written),), table, known)
    SIGNATURES["nhot_lookup"].refuse_overlap(
        out, csr=_arrays_of(csr), table=(table, scales, tables and tables.first_rows)
    )
    if arrays.is_fake(table):
        return result
    if rows and width:
        if csr.nnz == 0:
            fill(result, 0)
        else:
            prepared = arrays.ready("table", table, known)
            launchers = dispatcher.launchers
            kept: Any = None
            what: Any = None
            free = 0
            if given is csr:
                kept, what = csr.launchers.of(launchers), how
            elif type(table) is getattr(torch, "Tensor", None) and known.device == "cuda":
                parts = _csr_tensors(given, table, torch)
                if parts is not None:
                    kept, what, free = launchers, lookup_key(parts, how), entries_of(parts)
            axes = {"mode": mode, "padded": int(padding_idx is not None), "stored": stored}
            problem = dataclasses.replace(csr.problem(width, written), **axes)
            where = machine_of("table", known)
            arguments = (*csr.arguments, prepared, *more)
            launch(dispatcher, problem, where, what, arguments, (result,), single=True, kept=kept, free=free)
    return out if out is not None else arrays.returned(result, table)


def _arrays_of(csr: Any) -> tuple[Any, ...]:
    """The arrays of sparse rows in any of their forms."""
    if isinstance(csr, CsrRows):
        return csr.indptr, csr.indices, csr.values
    return tuple(csr) if isinstance(csr, (tuple, list)) else (csr,)


def _result_dtype(dtype: Any, known: Facts, stored: str) -> str:
    """The dtype of the result, checked, with that of the table."""
    if not stored:
        check_floats("table", known, rank=2)
        if dtype is not None and arrays.dtype_name(dtype) != known.dtype:
            raise ValueError(f"dtype: expected {known.dtype}, as the table has, got {arrays.dtype_name(dtype)}")
        return known.dtype
    if dtype not in FLOATS:
        raise ValueError(f"dtype: expected one of {', '.join(FLOATS)}, got {dtype}")
    return dtype


def _ready_scales(scales: Any, known: Facts) -> Any:
    """The scales of a table in eight bits, checked, as kernels take them."""
    if len(scales.shape) != 1:
        raise ValueError(f"table: expected a scale a row, got {scales.shape[1]}; quantize it without a group")
    name, facts, array = facts_beside("table (scales)", scales, (known.shape[0],), "float32", known, "its values are")
    return arrays.ready(name, array, facts)


def padding_of(padding_idx: Any, vocab: Any, sizes: tuple[int, ...] = ()) -> Any:
    """An index that is padding, checked, and counted from the table's begin."""
    found = whole_number("padding_idx", padding_idx)
    if sizes:
        if not 0 <= found < max(sizes):
            raise ValueError(f"padding_idx: expected an integer from 0 to {max(sizes) - 1}, got {padding_idx}")
        return found
    if not -vocab <= found < vocab:
        raise ValueError(f"padding_idx: expected an integer from {-vocab} to {vocab - 1}, got {padding_idx}")
    return found + vocab if found < 0 else found


def repeated_lookup(
    csr: Any,
    table: Any,
    torch: Any,
    out: Any = None,
    checked: bool = False,
    how: Any = None,
    more: tuple[Any, ...] = (),
) -> Any:
    """The result of a look-up by the launcher of an earlier one, or None.

    `how`: what its kernel depends on beside its arguments. `more`: those after the table.
    """
    launchers = dispatcher.launchers
    if type(csr) is CsrRows:
        return repeat.again(csr.launchers.of(launchers), how, (*csr.arguments, table, *more), out)
    # Structures on the host are checked at every call, except those known to be `checked`.
    parts = _csr_tensors(csr, table, torch) if checked or table.is_cuda else None
    if parts is None:
        return None
    return repeat.again(launchers, lookup_key(parts, how), (*parts, table, *more), out, entries_of(parts))


def _csr_tensors(csr: Any, table: Any, torch: Any) -> tuple[Any, ...] | None:
    """indptr, indices and, if present, values, if all are tensors on the table's device that fit
    each other; else None.
    """
    if type(csr) is tuple and len(csr) == 3:
        parts = csr if csr[2] is not None else csr[:2]
    elif type(csr) is torch.Tensor and csr.layout is torch.sparse_csr and not csr.requires_grad:
        if csr.dim() != 2 or csr.shape[1] != table.shape[0]:
            return None
        parts = csr.crow_indices(), csr.col_indices(), csr.values()
    else:
        return None
    device = table.device
    if not all([type(part) is torch.Tensor and part.device == device and part.dim() == 1 for part in parts]):
        return None
    rows, entries = parts[0].shape[0] - 1, parts[1].shape
    if not (rows > 0 and entries[0] and parts[-1].shape == entries):
        return None
    return parts if parts[0].dtype is parts[1].dtype else _one_dtype(parts)


def _one_dtype(parts: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The tensors with indptr and indices converted to one dtype, as in `CsrRows`; None if they are not integers."""
    pair = [(name, part, arrays.facts(name, part)) for name, part in zip(("indptr", "indices"), parts, strict=False)]
    if not all(known.dtype in INDEX for _, _, known in pair):
        return None
    index = index_of(pair[1][2])
    return (*[index_as(*one, index) for one in pair], *parts[2:])


def entries_of(parts: tuple[Any, ...]) -> int:
    """Bits of the arguments with one element per entry, as for `repeat.kinds_of`: a kernel takes any number of entries,
    and `lookup_key` has the typical number in a row.
    """
    return sum(1 << i for i in range(1, len(parts)))


def lookup_key(parts: tuple[Any, ...], how: Any = None) -> tuple[Any, ...]:
    """Everything beside the table on which the choice of a look-up's kernel depends."""
    indptr, indices, *values = parts
    nonzeros = typical(indices.shape[0], indptr.shape[0] - 1)
    return ("nhot_lookup", nonzeros, len(values), how)
