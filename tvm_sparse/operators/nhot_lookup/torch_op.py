"""`nhot_lookup` as custom operators of PyTorch: for bare arrays, and for those of a `CsrRows`, which are not checked
again.

There are two, because every argument costs PyTorch time, even if it has its default.
"""

from __future__ import annotations

from typing import Any

import torch

from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.calls import refuse_gradient

from . import call
from .rows import CsrRows

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


def _backward(ctx: Any, grad: Any) -> Any:
    """The table's gradient csr.T @ g is a look-up; a value's is the product of a row of g and a row of the table."""
    indptr, indices, values, table = ctx.saved_tensors
    places = torch.arange(indices.shape[0], device=indices.device, dtype=indptr.dtype)
    rows = torch.searchsorted(indptr, places, right=True).to(indptr.dtype) - 1
    of_values = of_table = None
    if ctx.needs_input_grad[2]:
        products = grad.index_select(0, rows).float() * table.index_select(0, indices).float()
        of_values = products.sum(1).to(values.dtype)
    if ctx.needs_input_grad[3]:
        columns, order = torch.sort(indices, stable=True)
        starts = torch.arange(table.shape[0] + 1, device=indices.device, dtype=indptr.dtype)
        turned = torch.searchsorted(columns, starts).to(indptr.dtype)
        given = None if values is None else values.index_select(0, order)
        of_table = _ROWS(turned, rows.index_select(0, order), given, grad)
    return None, None, of_values, of_table, None


def _batched(info: Any, in_dims: Any, indptr: Any, indices: Any, values: Any, table: Any, *rest: Any) -> Any:
    """Tables side by side."""
    custom.unbatched("nhot_lookup", in_dims[:3], ("indptr", "indices", "values"))
    table = table.movedim(in_dims[3], 1)
    operator = _OPERATOR if rest else _ROWS
    found = operator(indptr, indices, values, table.flatten(1), *rest)
    return found.unflatten(1, table.shape[1:]), 1


_ARGUMENTS = "Tensor indptr, Tensor indices, Tensor? values, Tensor table"
_OPERATOR = custom.define(
    f"nhot_lookup({_ARGUMENTS}, bool validate=False) -> Tensor", _call, _batched, _backward, _setup
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


def nhot_lookup(csr: Any, table: Any, *, out: Any = None, validate: bool = False) -> Any:
    """The public function as torch.compile traces it."""
    parts = parts_of("csr", csr, "indptr, indices, values or None")
    checked = isinstance(csr, CsrRows) and not validate
    return custom.written(_ROWS(*parts, table) if checked else _OPERATOR(*parts, table, validate), out)
