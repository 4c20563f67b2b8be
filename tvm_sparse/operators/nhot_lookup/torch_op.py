"""`nhot_lookup` as custom operators of PyTorch: sums for bare arrays, and for those of a `CsrRows`, which are not
checked again; and the other modes, and padding.

There are three, because every argument costs PyTorch time, even if it has its default.
"""

from __future__ import annotations

from typing import Any

import torch

from tvm_sparse.formats.quantized import QuantizedEmbedding
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.calls import refuse_gradient

from . import call
from .rows import CsrRows
from .tables import EmbeddingTables

__all__ = ["nhot_lookup"]


def _call(indptr: Any, indices: Any, values: Any, table: Any, validate: bool) -> Any:
    return call.nhot_lookup((indptr, indices, values), table, validate=validate)


def _call_rows(indptr: Any, indices: Any, values: Any, table: Any) -> Any:
    csr = indptr, indices, values
    if arrays.is_fake(table):
        return call.nhot_lookup(csr, table)
    found = call.repeated_lookup(csr, table, torch, checked=True)
    if found is not None:
        return found
    launchers, rows = call.dispatcher.launchers, CsrRows(csr, columns=table.shape[0], checked=True)
    found = call.nhot_lookup(rows, table)
    parts = (*_parts(csr), table)
    kept = repeat.repeated(rows.launchers.of(launchers), None, parts)
    if kept is not None:
        what, free = call.lookup_key(parts[:-1]), call.entries_of(parts[:-1])
        repeat.remember(launchers, what, parts, kept.function, (found,), single=True, free=free)
    return found


def _parts(csr: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    return csr if csr[2] is not None else csr[:2]


def _launched(launchers: Any, indptr: Any, indices: Any, values: Any, table: Any) -> tuple[Any, tuple[Any, ...]]:
    parts = _parts((indptr, indices, values))
    arguments = (*parts, table)
    return repeat.repeated(launchers, call.lookup_key(parts), arguments, call.entries_of(parts)), arguments


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _rows_of(indptr: Any, indices: Any) -> Any:
    """The row of each entry."""
    places = torch.arange(indices.shape[0], device=indices.device, dtype=indptr.dtype)
    return torch.searchsorted(indptr, places, right=True).to(indptr.dtype) - 1


def _gradients(
    ctx: Any, grad: Any, indptr: Any, indices: Any, values: Any, table: Any, real: Any = None, scales: Any = None
) -> tuple[Any, Any]:
    """Gradients of values and table, where they are wanted, of a sum of the `real` entries; None: of all.

    `scales` `(vocab, 1)`: of the rows of a table in eight bits, which has no gradient.

    The table's gradient csr.T @ g is a look-up; a value's is the product of a row of g and a row of the table.
    """
    rows = _rows_of(indptr, indices)
    of_values = of_table = None
    if ctx.needs_input_grad[2]:
        products = grad.index_select(0, rows).float() * table.index_select(0, indices).float()
        products = products if scales is None else products * scales.index_select(0, indices)
        of_values = products.sum(1).to(values.dtype)
        of_values = of_values if real is None else of_values.where(real, 0)
    if ctx.needs_input_grad[3]:
        # Entries that do not count get a column beyond the table, which sorting puts last.
        some = indices if real is None else indices.where(real, table.shape[0])
        columns, order = torch.sort(some, stable=True)
        starts = torch.arange(table.shape[0] + 1, device=indices.device, dtype=indptr.dtype)
        turned = torch.searchsorted(columns, starts).to(indptr.dtype)
        given = None if values is None else values.index_select(0, order)
        of_table = _ROWS(turned, rows.index_select(0, order), given, grad)
    return of_values, of_table


def _backward(ctx: Any, grad: Any) -> Any:
    return None, None, *_gradients(ctx, grad, *ctx.saved_tensors), None


def _batched(info: Any, in_dims: Any, indptr: Any, indices: Any, values: Any, table: Any, *rest: Any) -> Any:
    """Tables side by side."""
    custom.unbatched("nhot_lookup", in_dims[:3], ("indptr", "indices", "values"))
    for place, name in ((8, "scales"), (11, "first_rows")):
        custom.unbatched("nhot_lookup", in_dims[place : place + 1], (name,) * len(in_dims[place : place + 1]))
    table = table.movedim(in_dims[3], 1)
    operator = {0: _ROWS, 1: _OPERATOR}.get(len(rest), _BAGS)
    found = operator(indptr, indices, values, table.flatten(1), *rest)
    if len(rest) > 1 and rest[-1]:
        return found.unflatten(1, (len(rest[-1]), *table.shape[1:])).movedim(2, 0).flatten(2), 0
    return found.unflatten(1, table.shape[1:]), 1


def _call_bags(
    indptr: Any,
    indices: Any,
    values: Any,
    table: Any,
    mode: str,
    padding_idx: Any,
    checked: bool,
    validate: bool,
    scales: Any,
    stored: str,
    dtype: str | None,
    first_rows: Any,
    sizes: list[int],
) -> Any:
    csr: Any = (indptr, indices, values)
    if checked and not arrays.is_fake(table):
        csr = CsrRows(csr, columns=tuple(sizes) or table.shape[0], checked=True)
    table = QuantizedEmbedding.of_octets(table, scales, stored) if stored else table
    table = EmbeddingTables(table, sizes, first_rows) if sizes else table
    return call.nhot_lookup(csr, table, mode=mode, padding_idx=padding_idx, dtype=dtype, validate=validate)


def _setup_bags(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output if inputs[4] == "max" else None, inputs[8], inputs[11])
    ctx.mode, ctx.padding_idx, ctx.stored, ctx.sizes = inputs[4], inputs[5], inputs[9], tuple(inputs[12])


def _backward_bags(ctx: Any, grad: Any) -> Any:
    """A mean is a sum weighted by shares. A maximum's gradient goes to its first entry, in float32 sums."""
    indptr, indices, values, table, output, scales, first_rows = ctx.saved_tensors
    if ctx.stored:
        table = table.view(getattr(torch, ctx.stored))
    real = None
    if ctx.padding_idx is not None:
        real = indices != call.padding_of(ctx.padding_idx, table.shape[0], ctx.sizes)
    if ctx.sizes:
        batch = (indptr.shape[0] - 1) // len(ctx.sizes)
        indices = indices + first_rows.index_select(0, _rows_of(indptr, indices) // batch).to(indices.dtype)
        grad = _one_below_another(grad, len(ctx.sizes))
        output = None if output is None else _one_below_another(output, len(ctx.sizes))
    if ctx.mode == "max":
        of_values, of_table = None, _of_largest(grad, indptr, indices, table, output, real)
    else:
        shares = _shares(indptr, indices, real) if ctx.mode == "mean" else values
        of_values, of_table = _gradients(ctx, grad, indptr, indices, shares, table, real, scales)
    return None, None, of_values, of_table, *[None] * 9


def _one_below_another(results: Any, tables: int) -> Any:
    """Results `(batch, tables * width)` as rows for each table in turn, `(tables * batch, width)`."""
    return results.unflatten(1, (tables, -1)).transpose(0, 1).flatten(0, 1)


def _of_largest(grad: Any, indptr: Any, indices: Any, table: Any, output: Any, real: Any) -> Any:
    """The table's gradient of a maximum."""
    rows, columns = _rows_of(indptr, indices).long(), indices.long()
    chosen = output.index_select(0, rows)
    found = table.index_select(0, columns)
    largest = (found == chosen) | (found.isnan() & chosen.isnan())
    if real is not None:
        largest = largest & real[:, None]
    places = torch.arange(indices.shape[0], device=indices.device)[:, None]
    none = indices.shape[0]
    first = torch.full(grad.shape, none, device=grad.device, dtype=torch.int64)
    places = places.where(largest, none)
    first = first.scatter_reduce(0, rows[:, None].expand_as(places), places, "amin")
    # A row without entries has no first one: a table row that is added, and left out.
    columns = torch.cat([columns, columns.new_full((1,), table.shape[0])])
    added = grad.new_zeros((table.shape[0] + 1, grad.shape[1]), dtype=torch.float32)
    return added.scatter_add(0, columns[first], grad.float())[:-1].to(table.dtype)


def _shares(indptr: Any, indices: Any, real: Any) -> Any:
    """For each entry, the inverse of its row's number of `real` entries, in float32."""
    rows = _rows_of(indptr, indices)
    if real is None:
        counts = indptr.diff()
    else:
        counts = torch.zeros(indptr.shape[0] - 1, dtype=torch.int64, device=rows.device)
        counts = counts.index_add(0, rows.long(), real.long())
    return counts.clamp(min=1).float().reciprocal().index_select(0, rows)


_ARGUMENTS = "Tensor indptr, Tensor indices, Tensor? values, Tensor table"
_OPERATOR = custom.define(
    f"nhot_lookup({_ARGUMENTS}, bool validate=False) -> Tensor", _call, _batched, _backward, _setup
)
_BAGS = custom.define(
    f"nhot_lookup_bags({_ARGUMENTS}, str mode, SymInt? padding_idx, bool checked, bool validate, Tensor? scales=None,"
    " str stored='', str? dtype=None, Tensor? first_rows=None, int[] sizes=[]) -> Tensor",
    _call_bags,
    _batched,
    _backward_bags,
    _setup_bags,
)
_ROWS = custom.define(f"nhot_lookup_rows({_ARGUMENTS}) -> Tensor", _call_rows, _batched, _backward, _setup, _launched)


def parts_of(name: str, rows: Any, items: str) -> tuple[Any, Any, Any]:
    """indptr, indices and values of sparse rows, an argument `name` in a graph; `items` names those of a tuple."""
    if isinstance(rows, CsrRows):
        return rows.indptr, rows.indices, rows.values
    if isinstance(rows, (tuple, list)):
        if len(rows) != 3:
            raise ValueError(f"{name}: expected ({items}), got {len(rows)} items")
        return rows[0], rows[1], rows[2]
    if isinstance(rows, torch.Tensor) and rows.layout is torch.sparse_csr:
        refuse_gradient(name, rows)
        return rows.crow_indices(), rows.col_indices(), rows.values()
    raise TypeError(f"{name}: expected a CsrRows, a torch.sparse_csr tensor or a tuple, got {type(rows).__name__}")


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
    """The public function as torch.compile traces it."""
    parts = parts_of("csr", csr, "indptr, indices, values or None")
    checked = isinstance(csr, CsrRows) and not validate
    name = None if dtype is None else arrays.dtype_name(dtype)
    several: tuple[Any, ...] = ()
    if isinstance(table, EmbeddingTables):
        several, table = (table.first_rows, table.sizes), table.table
    stored: tuple[Any, ...] = (None, "", name)
    if isinstance(table, QuantizedEmbedding):
        stored, table = (table.scales, table.stored, name or "float32"), table.octets
    if mode != "sum" or padding_idx is not None or name is not None or several:
        options = (mode, padding_idx, checked, validate, *stored, *several)
        return custom.written(_BAGS(*parts, table, *options), out)
    return custom.written(_ROWS(*parts, table) if checked else _OPERATOR(*parts, table, validate), out)
