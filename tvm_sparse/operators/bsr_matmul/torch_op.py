"""`bsr_matmul` as a custom operator of PyTorch, with its gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.calls import refuse_gradient
from tvm_sparse.runtime.dispatch import dispatcher

from . import call
from .weight import INSTEAD, BsrWeight, balanced

__all__ = ["Turned", "bsr_matmul", "product", "turned"]

# Elements of x and of the gradient that are gathered at a time for the gradient of stored blocks.
GATHERED = 2**26


class Turned(NamedTuple):
    """The structure of a transposed weight, whose block b is the transposed block `places[b]`.

    `order`, `long` and `pattern` are those of `BsrWeight`; nothing at all is known where there is no place.
    """

    places: Any = None
    indices: Any = None
    indptr: Any = None
    order: Any = None
    long: int = -1
    pattern: str = "uniform"


def turned(indices: Any, indptr: Any, block_columns: int, block_bytes: int | None = None) -> Turned:
    """The structure of the transposed matrix, on the device, by PyTorch's operators.

    Parameters
    ----------
    indices, indptr
        Of the matrix, int32.
    block_columns
        How many it has.
    block_bytes
        Of a block, to look at the structure as `BsrWeight` does, which waits for a GPU; None: not to.
    """
    columns, places = torch.sort(indices, stable=True)
    starts = torch.arange(block_columns + 1, device=indices.device, dtype=indices.dtype)
    found = torch.searchsorted(columns, starts, out_int32=True)
    rows = _block_rows(indices, indptr).index_select(0, places)
    if block_bytes is None:
        return Turned(places, rows, found)
    return Turned(places, rows, found, *balanced(found, block_bytes))


def _block_rows(indices: Any, indptr: Any) -> Any:
    """The block row of each block, int32."""
    blocks = torch.arange(indices.shape[0], device=indices.device, dtype=indptr.dtype)
    return torch.searchsorted(indptr, blocks, right=True, out_int32=True) - 1


def _call(
    x: Any,
    data: Any,
    indices: Any,
    indptr: Any,
    order: Any,
    long: int,
    pattern: str,
    constant: bool,
    columns: int,
    bias: Any,
    activation: str,
    places: Any,
    turned_indices: Any,
    turned_indptr: Any,
    turned_order: Any,
    turned_long: int,
    turned_pattern: str,
    validate: bool,
) -> Any:
    parts, options = (data, indices, indptr), {"bias": bias, "activation": activation or None}
    if order is None:
        weight = BsrWeight(parts, columns=columns, validate=validate, balance=False)
        return call.bsr_matmul(x, weight, **options)
    # As of a BsrWeight, but for all weights of these shapes.
    given, what = (x, *parts, order, bias), ("bsr_matmul", activation, pattern)
    before = (x, *parts, order, long, int(constant), *(() if bias is None else (bias,)))
    found = repeat.again(dispatcher.launchers, what, given, before, None)
    if found is not None:
        return found
    weight = BsrWeight.assembled(parts, columns, order, long, pattern, constant)
    y = call.bsr_matmul(x, weight, validate=validate, **options)
    kept = repeat.repeated(weight.launchers.of(dispatcher.launchers), activation or None, (x, bias))
    if kept is not None:  # of x under other dimensions there is one of its rows alone
        repeat.put_down(dispatcher.launchers, what, given, kept)
    return y


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, data, indices, indptr, *_, columns, bias, activation = inputs[:11]
    ctx.save_for_backward(x, data, indices, indptr, inputs[4], bias, *inputs[11:15])
    ctx.known, ctx.columns, ctx.activation = (inputs[5], inputs[6], False), columns, activation
    ctx.turned = inputs[15:17]


def _backward(ctx: Any, grad: Any) -> Any:
    x, data, indices, indptr, order, bias, *structure = ctx.saved_tensors
    if ctx.activation:
        before = product(x, (data, indices, indptr), ctx.columns, order, *ctx.known, bias=bias)
        grad = _through(grad, before, ctx.activation)
    of_x = of_data = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = _of_x(grad, data, indices, indptr, ctx.columns, Turned(*structure, *ctx.turned))
    if ctx.needs_input_grad[1]:
        of_data = _of_blocks(grad, x, data, indices, indptr)
    if bias is not None and ctx.needs_input_grad[9]:
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return of_x, of_data, *[None] * 7, of_bias, *[None] * 8


def _through(grad: Any, before: Any, activation: str) -> Any:
    """The gradient in front of an activation."""
    if activation == "relu":
        return torch.where(before > 0, grad, 0)
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}
    return backward[activation](grad, before)


def _of_x(grad: Any, data: Any, indices: Any, indptr: Any, columns: int, given: Turned) -> Any:
    """dx = g @ W, as a product with the transposed weight."""
    rows, cols = data.shape[1:]
    if given.places is None:
        given = turned(indices, indptr, columns // cols)
    blocks = data.index_select(0, given.places).transpose(1, 2).contiguous()
    parts, n = (blocks, given.indices, given.indptr), (indptr.shape[0] - 1) * rows
    return product(grad, parts, n, given.order, given.long, given.pattern, False)


def _of_blocks(grad: Any, x: Any, data: Any, indices: Any, indptr: Any) -> Any:
    """dW[b] = g[:, rows of b].T @ x[:, columns of b] for each stored block."""
    blocks, rows, cols = data.shape
    g = grad.reshape(-1, grad.shape[-1] // rows, rows)
    v = x.reshape(-1, x.shape[-1] // cols, cols)
    at = _block_rows(indices, indptr)
    if not blocks:
        return torch.zeros_like(data)
    # An extent that is a symbol of a graph would be fixed by the number of steps.
    some = max(1, GATHERED // max(1, len(g) * (rows + cols))) if type(g.shape[0]) is int else blocks
    found = []
    for first in range(0, blocks, some):
        left = g.index_select(1, at[first : first + some]).permute(1, 2, 0)
        right = v.index_select(1, indices[first : first + some]).permute(1, 0, 2)
        found.append(left @ right)
    return torch.cat(found)


def _batched(info: Any, in_dims: Any, x: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    names = ("weight",) * 3 + ("order", "long", "pattern", "constant", "columns", "bias")
    custom.unbatched("bsr_matmul", in_dims[1:10], names)
    return _OPERATOR(x.movedim(in_dims[0], 0), *args), 0


_OPERATOR = custom.define(
    "bsr_matmul(Tensor x, Tensor data, Tensor indices, Tensor indptr, Tensor? order, int long_rows, str pattern,"
    " bool constant, int columns, Tensor? bias=None, str activation='', Tensor? turned_places=None,"
    " Tensor? turned_indices=None, Tensor? turned_indptr=None, Tensor? turned_order=None, int turned_long_rows=-1,"
    " str turned_pattern='uniform', bool validate=False) -> Tensor",
    _call,
    _batched,
    _backward,
    _setup,
)
_UNKNOWN = Turned()


def product(
    x: Any,
    parts: tuple[Any, Any, Any],
    columns: int,
    order: Any,
    long: int,
    pattern: str,
    constant: bool,
    *,
    bias: Any = None,
    activation: str | None = None,
    backward: Turned | None = None,
    validate: bool = False,
) -> Any:
    """The custom operator, with what is known of the weight as `BsrWeight.assembled` takes it.

    Parameters
    ----------
    backward
        The structure of the transposed weight, if it is known; else a backward pass finds it.
    """
    rest = () if backward is None and not validate else (*(backward or _UNKNOWN), validate)
    return _OPERATOR(x, *parts, order, long, pattern, constant, columns, bias, activation or "", *rest)


def bsr_matmul(
    x: Any, weight: Any, *, bias: Any = None, activation: str | None = None, out: Any = None, validate: bool = False
) -> Any:
    """The public function, as it stands in a graph."""
    options = {"bias": bias, "activation": activation, "validate": validate}
    if isinstance(weight, BsrWeight):
        parts, columns = (weight.data, weight.indices, weight.indptr), weight.shape[1]
        known = (weight.order, weight.long, weight.pattern, weight.constant)
        if torch.is_grad_enabled() and x.requires_grad and weight.turned is None and not _traced(x):
            block_bytes = math.prod(weight.block_shape) * numpy_dtype(weight.dtype).itemsize
            block_columns = columns // weight.block_shape[1]
            weight.turned = turned(weight.indices, weight.indptr, block_columns, block_bytes)
        if x.requires_grad:
            options["backward"] = weight.turned
    else:
        columns, known = x.shape[-1], (None, -1, "uniform", False)
        if isinstance(weight, (tuple, list)):
            if len(weight) != 3:
                raise ValueError(f"weight: expected (data, indices, indptr), got {len(weight)} items")
            data, indices, indptr = weight
        elif isinstance(weight, torch.Tensor) and weight.layout is torch.sparse_bsr:
            refuse_gradient("weight", weight, INSTEAD)
            data, indices, indptr = weight.values(), weight.col_indices(), weight.crow_indices()
        else:
            raise TypeError(
                "weight: expected a BsrWeight, a torch.sparse_bsr tensor or (data, indices, indptr),"
                f" got {type(weight).__name__}"
            )
        parts = data, indices.to(torch.int32), indptr.to(torch.int32)
    dtype, device = parts[0].dtype, x.device.type
    if x.dtype != dtype and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype:
        x = x.to(dtype)
        options["bias"] = None if bias is None else bias.to(dtype)
    return custom.written(product(x, parts, columns, *known, **options), out)


def _traced(x: Any) -> bool:
    return torch.compiler.is_compiling() or arrays.is_fake(x)
