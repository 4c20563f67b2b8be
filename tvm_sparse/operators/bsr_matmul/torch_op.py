"""`bsr_matmul` as custom operators of PyTorch, with their gradients.

The product has three, each extending the arguments of the previous one, because every argument costs PyTorch time, even
if it has its default: the product, for inference; with bias and activation; and with the arguments of training and
`validate`. `bsr_sddmm` computes the gradient of stored blocks where its kernel is the fastest way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tvm_sparse.core.machine import gpu
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.bsr_sddmm.call import bsr_sddmm, choice_of, likely_faster
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.calls import most_rows, refuse_gradient

from . import call
from .dense import reads_turned
from .problem import PRECISIONS
from .weight import INSTEAD, BsrWeight, Structure, balanced

__all__ = [
    "Known",
    "Trained",
    "Turned",
    "bsr_matmul",
    "dense_matrix",
    "dense_product",
    "distinct_rows",
    "product",
    "turned",
]

# Elements of x and of the gradient that are gathered at once for the gradient of stored blocks.
GATHERED = 2**26
# Multiplications and additions in the time that a byte of memory takes on a GPU, by an element's bytes: 750 TFLOP/s and
# 4.47 TB/s on an H200 in 16 bits, 60 TFLOP/s in float32.
PER_BYTE = {2: 168, 4: 13}


def dense_matrix(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> torch.Tensor:
    """The dense matrix of stored blocks; gradients flow to the blocks. Duplicate blocks are added."""
    blocks, rows, cols = data.shape
    high, wide = shape[0] // rows, shape[1] // cols
    first = torch.arange(high, device=data.device) * wide
    at = first.repeat_interleave(indptr.diff(), output_size=blocks) + indices
    found = data.new_zeros((high * wide, rows, cols)).index_add(0, at, data)
    return found.view(high, wide, rows, cols).transpose(1, 2).reshape(shape)


def distinct_rows(indices: Any, indptr: Any) -> Any:
    """The block row of each block, int32; None if two blocks have the same place. It waits for the GPU."""
    high = _block_rows(indices, indptr)
    places = torch.stack([high, indices])
    return high if torch.unique(places, dim=1).shape[1] == places.shape[1] else None


def _in_blocks(matrix: Any, block: Any) -> Any:
    """A view of a dense matrix whose element [r, c] is the block in block row r and block column c."""
    (n, k), (rows, cols) = matrix.shape, block
    return matrix.view(n // rows, rows, k // cols, cols).transpose(1, 2)


class Densified(torch.autograd.Function):
    """The dense matrix of stored blocks with distinct places: blocks are written, and their gradients read, where they
    are, while `dense_matrix` adds them up and copies the matrix each way.
    """

    @staticmethod
    def forward(ctx: Any, data: Any, high: Any, indices: Any, shape: tuple[int, int]) -> Any:
        ctx.save_for_backward(high, indices)
        ctx.block = data.shape[1:]
        found = data.new_zeros(shape)
        _in_blocks(found, ctx.block)[high, indices] = data
        return found

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        high, indices = ctx.saved_tensors
        return _in_blocks(grad.contiguous(), ctx.block)[high, indices], None, None, None


class Turned(NamedTuple):
    """The structure of a transposed weight, whose block b is the transposed block `places[b]`.

    `order` and `structure` are those of a `BsrWeight`. Without `places` nothing is known.
    """

    places: Any = None
    indices: Any = None
    indptr: Any = None
    order: Any = None
    structure: int = 0


class Known(NamedTuple):
    """The structure of a weight whose blocks are trained, as a `BsrWeight` has it, and that of its transpose."""

    indices: Any
    indptr: Any
    order: Any
    structure: int
    turned: Turned


def turned(indices: Any, indptr: Any, columns: int, block: tuple[int, ...], itemsize: int | None = None) -> Turned:
    """The structure of the transposed matrix, on the device, by PyTorch's operators.

    Parameters
    ----------
    indices, indptr
        Structure of the matrix, int32.
    columns, block
        Number of its columns, and the shape of its blocks.
    itemsize
        Bytes of an element, for an analysis of the structure as in `BsrWeight`, which waits for the GPU; None to skip
        it.
    """
    rows, cols = block
    found, places = torch.sort(indices, stable=True)
    bounds = torch.arange(columns // cols + 1, device=indices.device, dtype=indices.dtype)
    starts = torch.searchsorted(found, bounds, out_int32=True)
    high = _block_rows(indices, indptr).index_select(0, places)
    block_rows = int(indptr.shape[0] - 1)
    order, long, pattern = None, -1, "uniform"
    if itemsize is not None:
        order, long, pattern = balanced(starts, high, (cols, rows), block_rows, itemsize)
    structure = Structure(block_rows * rows, long, pattern).packed()
    return Turned(places.int(), high, starts, order, structure)


def _block_rows(indices: Any, indptr: Any) -> Any:
    """The block row of each block, int32."""
    blocks = torch.arange(indices.shape[0], device=indices.device, dtype=indptr.dtype)
    return torch.searchsorted(indptr, blocks, right=True, out_int32=True) - 1


def _asked(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """From the arguments of any of the operators: those of the computation, as `bsr_matmul_epilogue` takes them, and
    whether to validate.
    """
    return (*args[:6], *(args[6:8] or (None, ""))), len(args) > 8 and args[-1]


def _call(*args: Any) -> Any:
    asked, validate = _asked(args)
    x, data, indices, indptr, order, structure, bias, activation = asked
    # The launcher serves any weight, and a dense copy one.
    known = Structure.unpacked(structure)
    precision = PRECISIONS[1] if known.tf32 else None
    parts = data, indices, indptr
    options = {"bias": bias, "activation": activation or None, "dense": False, "precision": precision}
    if order is None:
        columns = known.columns
        weight = BsrWeight(parts, columns=columns, validate=validate, balance=False)
        return call.bsr_matmul(x, weight, **options)
    launchers, weight = call.dispatcher.launchers, BsrWeight.assembled(parts, order, structure)
    y = call.bsr_matmul(x, weight, validate=validate, **options)
    arguments = (x, *weight.arguments, bias)
    what = call.asked(activation or None, False, precision)
    kept = repeat.repeated(weight.launchers.of(launchers), what, arguments)
    if kept is not None:  # for an x with other dimensions, the launcher for its rows
        repeat.remember(launchers, _any_weight(structure, activation), arguments, kept.function, (y,), single=True)
    return y


def _any_weight(structure: int, activation: str) -> tuple[Any, ...]:
    """The key under which the launchers of all weights with the same shapes are kept."""
    return "bsr_matmul of any weight", structure, activation


def _launched(launchers: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    asked, validate = _asked(args)
    *operands, structure, bias, activation = asked
    known = Structure.unpacked(structure)
    arguments = (*operands, known.long, int(known.constant), bias)
    # Validation must happen at every call.
    found = None if validate else repeat.repeated(launchers, _any_weight(structure, activation), arguments)
    return found, arguments


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, data, indices, indptr, order, structure, *beside = inputs
    bias, ctx.activation, *rest = beside or (None, "")
    *known, ctx.turned = rest[:-1] or _UNKNOWN
    ctx.save_for_backward(x, data, indices, indptr, order, bias, *known)
    ctx.structure, ctx.inputs = structure, len(inputs)


def _backward(ctx: Any, grad: Any) -> Any:
    x, data, indices, indptr, order, bias, *known = ctx.saved_tensors
    given = Known(indices, indptr, order, ctx.structure, Turned._make((*known, ctx.turned)))
    found: list[Any] = [None] * ctx.inputs
    needed = *ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[6]
    gradients = _gradients(needed, grad, x, data, bias, ctx.activation, given)
    for place, one in zip((0, 1, 6), gradients, strict=True):
        if one is not None:
            found[place] = one
    return tuple(found)


def _gradients(
    needed: tuple[bool, ...], grad: Any, x: Any, data: Any, bias: Any, activation: str, known: Known
) -> tuple[Any, Any, Any]:
    """The gradients of x, the stored blocks and the bias; None for those that are not needed."""
    indices, indptr, structure = known.indices, known.indptr, Structure.unpacked(known.structure)
    if activation:
        # Blocks that are trained are not constant.
        packed = structure._replace(constant=False).packed()
        grad = _through(grad, product(x, (data, indices, indptr), known.order, packed, bias=bias), activation)
    of_x, of_blocks, of_bias = needed
    return (
        _of_x(grad, data, indices, indptr, structure.columns, known.turned, structure.tf32) if of_x else None,
        _of_blocks(grad, x, data, indices, indptr, structure.pattern) if of_blocks else None,
        grad.reshape(-1, grad.shape[-1]).sum(0) if of_bias else None,
    )


class Trained(torch.autograd.Function):
    """A product of plain tensors with its gradients, for layers: without PyTorch's dispatcher and with few arguments
    for autograd, both of which take as long as the launches of a step.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, data: Any, bias: Any, activation: str, known: Known) -> Any:
        ctx.save_for_backward(x, data, bias)
        ctx.activation, ctx.known = activation, known
        parts, options = (data, known.indices, known.indptr), {"bias": bias, "activation": activation}

        def of_rows(rows: Any) -> Any:
            return product(rows, parts, known.order, known.structure, **options)

        return _by_rows(of_rows, x, Structure.unpacked(known.structure).columns)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, data, bias = ctx.saved_tensors
        shape = x.shape
        if x.dim() > 2:
            x, grad = x.flatten(0, -2), grad.flatten(0, -2)
        needed = ctx.needs_input_grad[:3]
        of_x, *others = _gradients(needed, grad, x, data, bias, ctx.activation, ctx.known)
        return None if of_x is None else of_x.view(shape), *others, None, None


def _by_rows(call: Callable[[Any], Any], x: Any, columns: int) -> Any:
    """A product with x `(..., columns)`, as one of its rows: eager calls with two dimensions are repeated quickly."""
    if x.dim() < 3 or x.shape[-1] != columns:  # the call refuses another number of columns
        return call(x)
    y = call(x.flatten(0, -2))
    return y.view(*x.shape[:-1], y.shape[-1])


def _through(grad: Any, before: Any, activation: str) -> Any:
    """The gradient of the value before an activation."""
    if activation == "relu":
        return torch.where(before > 0, grad, 0)
    if activation == "silu" and torch.is_grad_enabled():  # PyTorch's operator has no derivative
        gate = torch.sigmoid(before)
        return grad * gate * (1 + before * (1 - gate))
    backward = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}
    return backward[activation](grad, before)


def _of_x(grad: Any, data: Any, indices: Any, indptr: Any, columns: int, given: Turned, tf32: bool = False) -> Any:
    """dx = g @ W, as a product with the transposed weight."""
    if given.places is None:
        given = turned(indices, indptr, columns, data.shape[1:])
    if _reads_turned(grad, data, columns):
        known = given.indices, given.indptr, given.order, given.structure, given.places
        found = custom.call(_TURNED, grad.reshape(-1, grad.shape[-1]), data, *known)
        return found.view(*grad.shape[:-1], columns)
    blocks = data.transpose(1, 2).index_select(0, given.places)
    structure = with_precision(given.structure, tf32)
    return product(grad, (blocks, given.indices, given.indptr), given.order, structure)


def with_precision(structure: int, tf32: bool) -> int:
    """The packed structure for a product that may take float32 as tf32."""
    return Structure.unpacked(structure)._replace(tf32=True).packed() if tf32 else structure


def _reads_turned(grad: Any, data: Any, columns: int) -> bool:
    """Whether a kernel that reads the blocks as they are takes less time than one for a transposed copy of them."""
    n, (blocks, rows, cols) = grad.shape[-1], data.shape
    m = grad.numel() // max(n, 1)
    if not grad.is_cuda or type(blocks) is not int or type(m) is not int or not blocks or m > most_rows(columns, n):
        return False
    found = gpu()
    dtype = arrays.dtype_name(grad.dtype)
    return found is not None and reads_turned(m, n, columns, (cols, rows), blocks, dtype, found)


def _of_blocks(grad: Any, x: Any, data: Any, indices: Any, indptr: Any, pattern: str) -> Any:
    """dW[b] = g[:, rows of b].T @ x[:, columns of b] for each stored block."""
    blocks, rows, cols = data.shape
    if not blocks:
        return torch.zeros_like(data)
    if _sampled(blocks, rows, cols, grad, x):
        if x.dim() != 2:
            grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return custom.call(_SAMPLED, grad, x, indices, indptr, rows, cols, pattern)
    at = _block_rows(indices, indptr)
    if _all_at_once(blocks, rows, cols, grad, x):
        whole = grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        high, wide = whole.shape[0] // rows, whole.shape[1] // cols
        return whole.view(high, rows, wide, cols).transpose(1, 2)[at, indices].contiguous()
    g = grad.reshape(-1, grad.shape[-1] // rows, rows)
    v = x.reshape(-1, x.shape[-1] // cols, cols)
    # A symbolic extent would become a constant of the graph through the number of loop steps.
    some = max(1, GATHERED // max(1, len(g) * (rows + cols))) if type(g.shape[0]) is int else blocks
    found = []
    for first in range(0, blocks, some):
        left = g.index_select(1, at[first : first + some]).permute(1, 2, 0)
        right = v.index_select(1, indices[first : first + some]).permute(1, 0, 2)
        found.append(left @ right)
    return torch.cat(found)


def _sampled(blocks: Any, rows: int, cols: int, grad: Any, x: Any) -> bool:
    """Whether the kernel for the blocks' gradient takes less time than the dense product of g and x."""
    n, k, m = grad.shape[-1], x.shape[-1], x.numel() // max(x.shape[-1], 1)
    if not x.is_cuda or type(blocks) is not int or (type(m) is int and m > most_rows(k, n)):
        return False
    found = gpu()
    dtype = arrays.dtype_name(x.dtype)
    return found is not None and likely_faster(blocks * rows * cols / (n * k), (rows, cols), dtype, found)


def _all_at_once(blocks: Any, rows: int, cols: int, grad: Any, x: Any) -> bool:
    """Whether the dense product of g and x takes less time than what is gathered for the stored blocks: each has its
    columns of both written once and read twice.
    """
    operations = 2 * grad.shape[-1] * x.shape[-1]  # for each row of x
    gathered = 3 * blocks * (rows + cols) * x.element_size()
    return x.is_cuda and bool(operations < PER_BYTE[x.element_size()] * gathered)


def _batched(info: Any, in_dims: Any, x: Any, *args: Any) -> Any:
    """Leading dimensions are handled by the operator itself."""
    names = ("weight",) * 3 + ("order", "structure", "bias")
    custom.unbatched("bsr_matmul", in_dims[1 : len(names) + 1], names[: len(args)])
    return _OPERATORS[1 + len(args)](x.movedim(in_dims[0], 0), *args), 0


_ARGUMENTS = "Tensor x, Tensor data, Tensor indices, Tensor indptr, Tensor? order, int structure"
_BESIDE = f"{_ARGUMENTS}, Tensor? bias, str activation"
# By the number of their arguments.
_OPERATORS = {
    len(operator._schema.arguments): operator
    for schema in (
        f"bsr_matmul({_ARGUMENTS})",
        f"bsr_matmul_epilogue({_BESIDE})",
        f"bsr_matmul_full({_BESIDE}, Tensor? turned_places, Tensor? turned_indices, Tensor? turned_indptr,"
        " Tensor? turned_order, int turned_structure, bool validate)",
    )
    for operator in [custom.define(f"{schema} -> Tensor", _call, _batched, _backward, _setup, _launched)]
}
_UNKNOWN = Turned()


def _blocks_of(left: Any, right: Any, indices: Any, indptr: Any, rows: int, cols: int, pattern: str) -> Any:
    if arrays.is_fake(left):
        return left.new_empty((indices.shape[0], rows, cols))
    if not left.shape[0]:
        return left.new_zeros((indices.shape[0], rows, cols))
    return bsr_sddmm(left, right, indices, indptr, (rows, cols), pattern)


def _blocks_launched(launchers: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    *arguments, rows, cols, pattern = args
    what = choice_of(f"{rows}x{cols}", args[0].shape[1], args[1].shape[1], pattern)
    return repeat.repeated(launchers, what, tuple(arguments)), tuple(arguments)


def _setup_blocks(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward_blocks(ctx: Any, grad: Any) -> Any:
    """Products with the block-sparse matrix whose blocks are `grad`."""
    left, right, indices, indptr = ctx.saved_tensors
    structure = Structure(right.shape[-1]).packed()
    of_left = product(right, (grad, indices, indptr), None, structure) if ctx.needs_input_grad[0] else None
    of_right = _of_x(left, grad, indices, indptr, right.shape[-1], _UNKNOWN) if ctx.needs_input_grad[1] else None
    return of_left, of_right, None, None, None, None, None


def _batched_blocks(info: Any, in_dims: Any, *args: Any) -> Any:
    custom.unbatched("bsr_sddmm", in_dims[:4], ("left", "right", "indices", "indptr"))


_SAMPLED = custom.define(
    "bsr_sddmm(Tensor left, Tensor right, Tensor indices, Tensor indptr, int rows, int cols, str pattern) -> Tensor",
    _blocks_of,
    _batched_blocks,
    _backward_blocks,
    _setup_blocks,
    _blocks_launched,
)


def _turned(*args: Any) -> Any:
    x, data, _, indptr, *_ = args
    if arrays.is_fake(x):
        return x.new_empty((x.shape[0], (indptr.shape[0] - 1) * data.shape[2]))
    return call.turned_product(*args)


def _turned_launched(launchers: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    *operands, structure, places = args
    known = Structure.unpacked(structure)
    arguments = (*operands, known.long, int(known.constant), places)
    return repeat.repeated(launchers, call.turned_choice(structure), arguments), arguments


def _setup_turned(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.structure, places = inputs
    ctx.save_for_backward(*tensors, places)


def _backward_turned(ctx: Any, grad: Any) -> Any:
    """As of a product with a transposed copy of the blocks."""
    x, data, indices, indptr, _, places = ctx.saved_tensors
    structure = Structure.unpacked(ctx.structure)
    blocks = data.transpose(1, 2).index_select(0, places)
    of_x = _of_x(grad, blocks, indices, indptr, structure.columns, _UNKNOWN) if ctx.needs_input_grad[0] else None
    of_data = None
    if ctx.needs_input_grad[1]:
        of_blocks = _of_blocks(grad, x, blocks, indices, indptr, structure.pattern)
        of_data = torch.zeros_like(data).index_copy(0, places.long(), of_blocks.transpose(1, 2))
    return of_x, of_data, None, None, None, None, None


def _batched_turned(info: Any, in_dims: Any, *args: Any) -> Any:
    """Rows of all products are those of one."""
    names = ("data", "indices", "indptr", "order", "structure", "places")
    custom.unbatched("bsr_matmul_turned", in_dims[1:], names)
    x = args[0].movedim(in_dims[0], 0)
    return _TURNED(x.flatten(0, 1), *args[1:]).unflatten(0, x.shape[:2]), 0


_TURNED = custom.define(
    "bsr_matmul_turned(Tensor x, Tensor data, Tensor indices, Tensor indptr, Tensor? order, int structure,"
    " Tensor places) -> Tensor",
    _turned,
    _batched_turned,
    _backward_turned,
    _setup_turned,
    _turned_launched,
)


def product(
    x: Any,
    parts: tuple[Any, Any, Any],
    order: Any,
    structure: int,
    *,
    bias: Any = None,
    activation: str | None = None,
    backward: Turned | None = None,
    validate: bool = False,
) -> Any:
    """Call the custom operator with the fewest arguments that suffices; the weight is given as for
    `BsrWeight.assembled`.

    Parameters
    ----------
    backward
        The structure of the transposed weight, if it is known; otherwise a backward pass computes it.
    """
    args: tuple[Any, ...] = x, *parts, order, structure
    full = backward is not None or validate
    if full or bias is not None or activation:
        args += bias, activation or ""
    if full:
        args += *(backward or _UNKNOWN), validate
    return custom.call(_OPERATORS[len(args)], *args)


def bsr_matmul(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    validate: bool = False,
    dense: bool | None = None,
    precision: str | None = None,
) -> Any:
    """The public function as torch.compile traces it."""
    call.check_precision(precision)
    tf32 = precision is not None
    options = {"bias": bias, "activation": activation, "validate": validate}
    if isinstance(weight, BsrWeight):
        parts, known = (
            (weight.data, weight.indices, weight.indptr),
            (weight.order, with_precision(weight.structure, tf32)),
        )
        if not torch.jit.is_tracing() and x.shape[-1] != weight.shape[1]:
            raise ValueError(f"x: expected {weight.shape[1]} columns, as the weight has, got shape {tuple(x.shape)}")
        if torch.is_grad_enabled() and x.requires_grad and weight.turned is None and not _traced(x):
            itemsize = numpy_dtype(weight.dtype).itemsize
            weight.turned = turned(weight.indices, weight.indptr, weight.shape[1], weight.block_shape, itemsize)
        if x.requires_grad:
            options["backward"] = weight.turned
    else:
        known = None, Structure(x.shape[-1], tf32=tf32).packed()
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
    if dense:
        if validate:
            BsrWeight(parts, columns=x.shape[-1], validate=True, balance=False)
        return custom.written(dense_product(x, parts, options["bias"], activation), out)
    return custom.written(product(x, parts, *known, **options), out)


def dense_product(
    x: Any, parts: tuple[Any, Any, Any], bias: Any = None, activation: str | None = None, *, high: Any = None
) -> Any:
    """The product with a dense matrix made of the parts, through which gradients flow to them. `high`: the block rows
    of blocks with distinct places, for an eager call.
    """
    data, indices, indptr = parts
    shape = ((indptr.shape[0] - 1) * data.shape[1], x.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if high is None:
            matrix = dense_matrix(data, indices, indptr, shape)
        else:
            matrix = Densified.apply(data, high, indices, shape)
        y = torch.nn.functional.linear(x, matrix, bias)
        return y if activation is None else getattr(torch.nn.functional, activation)(y)


def _traced(x: Any) -> bool:
    return torch.compiler.is_compiling() or arrays.is_fake(x)
