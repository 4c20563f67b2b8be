"""`csr_linear` as a custom operator of PyTorch, with its gradients."""

from __future__ import annotations

from typing import Any

import torch

from tvm_sparse.operators.bsr_matmul.torch_op import dense_product
from tvm_sparse.operators.nhot_lookup.rows import CsrRows
from tvm_sparse.operators.nhot_lookup.torch_op import parts_of
from tvm_sparse.runtime import custom

from . import call

__all__ = ["csr_linear"]

# Elements that are gathered at once for the gradient of values.
GATHERED = 2**26


def _call(x: Any, indptr: Any, indices: Any, values: Any, validate: bool) -> Any:
    return call.csr_linear(x, (indptr, indices, values), validate=validate)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, grad: Any) -> Any:
    """x's gradient is the product with the transposed weight; a value's the product of a column of g and one of x."""
    x, indptr, indices, values = ctx.saved_tensors
    places = torch.arange(indices.shape[0], device=indices.device, dtype=indptr.dtype)
    rows = torch.searchsorted(indptr, places, right=True).to(indptr.dtype) - 1
    of_x = of_values = None
    if ctx.needs_input_grad[0]:
        columns, order = torch.sort(indices, stable=True)
        starts = torch.arange(x.shape[-1] + 1, device=indices.device, dtype=indptr.dtype)
        turned = torch.searchsorted(columns, starts).to(indptr.dtype)
        of_x = _OPERATOR(grad, turned, rows.index_select(0, order), values.index_select(0, order), False)
    if ctx.needs_input_grad[3]:
        g, v = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        # A symbolic extent would become a constant of the graph through the number of loop steps.
        known = type(g.shape[0]) is int and type(places.shape[0]) is int
        some = max(1, GATHERED // max(1, g.shape[0])) if known else places.shape[0]
        found = []
        for first in range(0, places.shape[0], max(some, 1)):
            part = slice(first, first + some)
            products = g.index_select(1, rows[part]).float() * v.index_select(1, indices[part]).float()
            found.append(products.sum(0).to(values.dtype))
        of_values = torch.cat(found) if found else torch.zeros_like(values)
    return of_x, None, None, of_values, None


def _batched(info: Any, in_dims: Any, x: Any, *args: Any) -> Any:
    """Leading dimensions are handled by the operator itself."""
    custom.unbatched("csr_linear", in_dims[1:4], ("indptr", "indices", "values"))
    return _OPERATOR(x.movedim(in_dims[0], 0), *args), 0


_OPERATOR = custom.define(
    "csr_linear(Tensor x, Tensor indptr, Tensor indices, Tensor values, bool validate=False) -> Tensor",
    _call,
    _batched,
    _backward,
    _setup,
)


def csr_linear(x: Any, weight: Any, *, out: Any = None, validate: bool = False, dense: bool | None = None) -> Any:
    """The public function as torch.compile traces it."""
    parts = parts_of("weight", weight, "indptr, indices, values")
    if parts[2] is None:
        raise ValueError("weight: expected values, got None")
    if isinstance(weight, CsrRows) and not torch.jit.is_tracing() and x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: expected {weight.shape[1]} columns, as the weight has, got shape {tuple(x.shape)}")
    if dense:
        if validate:
            CsrRows(parts, columns=x.shape[-1], validate=True)
        indptr, indices, values = parts
        return custom.written(dense_product(x, (values.reshape(-1, 1, 1), indices, indptr)), out)
    return custom.written(_OPERATOR(x, *parts, validate), out)
