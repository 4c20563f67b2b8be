"""The public call of the block-sparse product."""

from __future__ import annotations

import sys
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime import dense as dense_ways
from tvm_sparse.runtime.calls import (
    TORCH_ALONE,
    by_parts,
    by_rows,
    check_floats,
    fill,
    launch,
    machine_of,
    most_rows,
    outputs_for,
    refuse_gradient,
)
from tvm_sparse.runtime.dense import DENSE, run_dense
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import ROWS, Absent, Array, Number, Output, Signature, Structure, Text

from .dense import WARPS_TEMPLATE, likely_way, rows_in_cache
from .problem import ACTIVATIONS, PRECISIONS, BsrMatmul, activated
from .weight import BsrWeight, unread_array
from .weight import Structure as Prepared

SIGNATURES = {
    "bsr_matmul": Signature(
        ("x", Array((ROWS, "k"), FLOATS, gradient=True)),
        ("weight", Structure(("BsrWeight", "scipy.sparse.bsr_array", "torch.sparse_bsr", "(data, indices, indptr)"))),
        ("bias", Absent(), Array(("n",), gradient=True)),
        ("activation", Absent(), Text(ACTIVATIONS[1:])),
        ("validate", Number("bool")),
        ("dense", Absent(), Number("bool")),
        ("precision", Absent(), Text(PRECISIONS[1:])),
        outputs=(Output("y"),),
    )
}

__all__ = ["BsrWeight", "bsr_matmul", "check_precision"]


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
    """activation(x @ weight.T + bias) with a block-sparse weight.

    y[i, j] = activation(bias[j] + sum_k x[i, k] * weight[j, k]); only the stored blocks of the weight are read.

    Parameters
    ----------
    x
        Shape `(m, k)`, or `(..., k)` with any number of dimensions before; float32, float16 or bfloat16, accumulated in
        float32. Copied first if it is not contiguous. Under `torch.autocast`, with a weight of its dtype, x and bias
        are cast to that, as by torch.nn.functional.linear.
    weight
        Shape `(n, k)` in BSR format: a `BsrWeight` (prepared once, the fastest to call with), a
        `scipy.sparse.bsr_array`, a torch tensor of layout `torch.sparse_bsr`, or `(data, indices, indptr)` with data
        `(nnzb, block_rows, block_cols)`, indices `(nnzb,)` in [0, k / block_cols) and indptr `(n / block_rows + 1,)`.
        Weight blocks may be rectangular; block rows may be empty; columns need not be sorted, and duplicate blocks are
        added. Same dtype and device as `x`.
    bias
        `(n,)` of x's dtype, on its device.
    activation
        `"relu"`, `"gelu"` (by the error function, as torch's default) or `"silu"`, applied in float32.
    out
        `(m, n)` (or `(..., n)`) array of the weight's dtype to write into, contiguous, on the same device and of the
        same kind as x; it must not overlap with an input.
    validate
        Also check indices and indptr on a GPU, which costs a synchronisation; on the host they are always checked, for
        a `BsrWeight` when it is made. Invalid indices that are not checked cause reads out of bounds.
    dense
        Whether to multiply with a dense copy of the weight, by PyTorch's product (NumPy's for arrays of other libraries
        on the host). None: where that is likely to be faster, for torch tensors on a GPU and a `BsrWeight` that is
        `constant`. Such a weight makes the copy at its first use and keeps it, `n * k` elements; for others it is made
        in every call.
    precision
        None: products of float32 are exact but for the rounding of sums. `"tf32"`: tensor cores may ignore the lowest
        13 bits of x and the weight, where a kernel does, as those for many rows on Hopper; an element then differs by
        up to 2^-9 of the sum of the absolute values of its products. It says nothing about 16-bit inputs, a dense copy
        or the gradient of stored blocks.

    Returns
    -------
    y
        `(m, n)` (or `(..., n)`) of the weight's dtype.

    Raises
    ------
    TypeError
        If `x`, `weight` or `bias` has another type.
    ValueError
        For a 0-d x, another dtype, shapes that do not fit, a malformed structure (naming the first invalid entry),
        arrays on different devices, an unknown activation or precision, or an `out` that does not fit.
    RuntimeError
        If `out`, the data of a `BsrWeight`, or a sparse tensor requires a gradient.

    Notes
    -----
    The result is differentiable in tensors that require a gradient. The gradient of x is the product of the output's
    gradient with the transposed weight, by the same kernels; a `BsrWeight` keeps its transposed structure from the
    first such call on. Where products of warpgroups are the fastest, they read the blocks as they are; other kernels
    take a transposed copy. The gradient of stored blocks, given as `(data, indices, indptr)`, is a sampled dense-dense
    product, by PyTorch's batched product of gathered rows, or, where that is faster on a GPU, the stored blocks of its
    dense product; that of the bias is a sum. An activation costs a second product in the backward pass.

    A product with the dense copy is faster for many rows of x and many stored blocks: by the record of the problem, or
    without one by the share of stored blocks, as `explain` says. It multiplies zeros too: a NaN or an infinity in x
    makes all of its row NaN. Its sums are rounded to the dtype before an activation. Where PyTorch records a gradient
    or a graph, only `dense=True` takes it.

    When not to use it: if the weight may not be `constant`, with fewer than about half of the blocks zero, a dense
    product is as fast.

    Source: Gu 2020, "Optimizing Block-Sparse Matrix Multiplications on CUDA with TVM", section 3.
    """
    dense = None if dense is None else bool(dense)
    if not isinstance(weight, BsrWeight):
        parts = weight if isinstance(weight, (tuple, list)) else (weight,)
        if custom.transformed(x, bias, *parts, differentiable=True):
            return _operator(x, weight, bias, activation, out, validate, dense, precision)
        known = arrays.facts("x", x)
        check_floats("x", known)
        weight = BsrWeight(weight, columns=known.shape[-1], validate=validate, balance=False)
    elif validate:
        weight.validate()
    torch = sys.modules.get("torch")
    launchers = weight.launchers.of(dispatcher.launchers)
    what = asked(activation, dense, precision)
    found = repeat.again_by_rows(launchers, what, (x, *weight.arguments, bias), out)
    if found is not None:
        return found

    if custom.transformed(x, bias, weight.data, differentiable=True):
        return _operator(x, weight, bias, activation, out, validate, dense, precision)
    known = arrays.facts("x", x)
    check_floats("x", known)
    refuse_gradient("x", x, TORCH_ALONE)
    n, weight_k = weight.shape
    k = known.shape[-1]
    if k != weight_k:
        raise ValueError(f"x: expected {weight_k} columns, as the weight has, got shape {known.shape}")
    check_precision(precision)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "dense": dense, "precision": precision}
    casts = _casts(x, bias, known, weight, torch)
    if known.dtype != weight.dtype and not casts:
        raise ValueError(
            f"x: expected dtype {weight.dtype}, as the weight has, got {known.dtype}; convert x, or once the weight:"
            f" BsrWeight(...).to(dtype={known.dtype!r})"
        )
    if (known.device, known.index) != (weight.device, weight.device_index):
        raise ValueError(
            f"x: expected an array on {weight.device}:{weight.device_index}, as the weight is,"
            f" got {known.device}:{known.index}"
        )
    if casts:
        bias = bias.to(weight.data.dtype) if arrays.is_torch(bias) else bias
        x = x.to(weight.data.dtype)
        options["bias"] = bias
        return bsr_matmul(x, weight, out=out, **options)
    if len(known.shape) != 2:

        def call(rows: Any, given: Any) -> list[Any]:
            into = given and given[0]
            return [bsr_matmul(rows, weight, out=into, **options)]

        [y] = by_rows(call, x, known, out, (("out", (n,), known.dtype),))
        return out if out is not None else y
    m = known.shape[0]
    if activation is not None and activation not in ACTIVATIONS[1:]:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS[1:])} or None, got {activation!r}")
    extras = [] if bias is None else [SIGNATURES["bsr_matmul"].beside("bias", bias, known, "x is", n=n)]
    [y] = outputs_for(out, (("out", (m, n), known.dtype),), x, known)
    read = (weight.data, weight.indices, weight.indptr, weight.order)
    SIGNATURES["bsr_matmul"].refuse_overlap(out, x=x, weight=read, bias=bias)
    if arrays.is_fake(x):
        return y

    def some(given: list[Any], into: list[Any]) -> Any:
        return bsr_matmul(given[0], weight, out=into[0], **options)

    if m > (most := most_rows(k, n)):
        by_parts(some, m, most, (x,), (y,))
        return out if out is not None else arrays.returned(y, x)
    if m and n:
        if weight.nnzb == 0 or k == 0:
            if bias is None:
                fill(y, 0)
            else:
                _fill_rows(y, bias, activation or "")
        else:
            problem = weight.problem(m, int(bias is not None), activation or "", precision or "")
            [row] = [arrays.ready(name, array, theirs) for name, theirs, array in extras] or [None]
            ready, where = arrays.ready("x", x, known), machine_of("x", known)
            if dense is None:
                dense = weight.constant and arrays.is_torch(x) and way(problem, where) == DENSE
            arguments = (ready, *weight.arguments, row)
            if dense:
                told = {"activation": activation, "biased": row is not None, "finish": _finish(row, activation or "")}
                run_dense(weight, launchers, what, arguments, y, **told)
            elif m > (most := at_once(problem, where)):
                options["dense"] = False
                by_parts(some, m, most, (x,), (y,))
            else:
                launch(dispatcher, problem, where, what, arguments, (y,), single=True, kept=launchers)
    return out if out is not None else arrays.returned(y, x)


def at_once(problem: BsrMatmul, machine: Machine) -> int:
    """How many rows of x are multiplied by one launch."""
    most = rows_in_cache(problem, machine)
    in_parts = most < problem.m and dispatcher.kernel(problem, machine).explanation.candidate.startswith(WARPS_TEMPLATE)
    return most if in_parts else problem.m


def asked(activation: str | None, dense: bool | None, precision: str | None = None) -> Any:
    """What launchers of a weight are kept by, beside the arrays of a call."""
    return activation if dense is None and precision is None else (activation, dense, precision)


def check_precision(precision: Any) -> None:
    """Raise `ValueError` unless this is a precision of float32."""
    if precision is not None and precision not in PRECISIONS[1:]:
        raise ValueError(f"precision: expected {PRECISIONS[1]!r} or None, got {precision!r}")


def turned_product(x: Any, data: Any, indices: Any, indptr: Any, order: Any, structure: int, places: Any) -> Any:
    """x @ weight.T for a weight whose blocks are stored transposed: block b is the transposed `data[places[b]]`.

    Parameters
    ----------
    x
        `(m, k)`, m at least 1.
    data
        `(nnzb, block_cols, block_rows)` of x's dtype, at least one.
    indices, indptr, order, structure
        As in `BsrWeight.assembled`.
    places
        `(nnzb,)`, int32.

    Returns
    -------
    y
        `(m, n)`.
    """
    known, theirs = arrays.facts("x", x), arrays.facts("data", data)
    columns, long, pattern, constant, _ = Prepared.unpacked(structure)
    nnzb, cols, rows = theirs.shape
    block_rows = arrays.facts("indptr", indptr).shape[0] - 1
    sparsity = min(max(1 - nnzb / (block_rows * (columns // cols)), 0.0), 1.0)
    m, n = known.shape[0], block_rows * rows
    problem = BsrMatmul(m, columns, n, f"{rows}x{cols}", sparsity, pattern, known.dtype, turned=1)
    if order is None:
        order = unread_array((block_rows, 3), indptr, known)
    y = arrays.empty((m, n), known.dtype, x, known)
    ready = arrays.ready("x", x, known), arrays.ready("data", data, theirs)
    arguments = (*ready, indices, indptr, order, long, int(constant), places)
    launch(dispatcher, problem, machine_of("x", known), turned_choice(structure), arguments, (y,), single=True)
    return y


def turned_choice(structure: int) -> tuple[Any, ...]:
    """What decides on a kernel of `turned_product` beside its arguments: the key under which launchers are kept."""
    return "bsr_matmul of transposed blocks", structure


def way(problem: BsrMatmul, machine: Machine) -> str:
    """As `runtime.dense.way`."""
    return dense_ways.way(problem, machine, likely_way)


def told_way(problem: BsrMatmul, machine: Machine) -> str:
    """As `runtime.dense.told_way`."""
    return dense_ways.told_way(problem, machine, likely_way)


def _operator(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str | None,
    out: Any,
    validate: bool,
    dense: bool | None,
    precision: str | None,
) -> Any:
    options = {"activation": activation, "out": out, "validate": validate, "dense": dense, "precision": precision}
    return custom.module_of("bsr_matmul").bsr_matmul(x, weight, bias=bias, **options)


def _casts(x: Any, bias: Any, known: arrays.Facts, weight: BsrWeight, torch: Any) -> bool:
    """Whether torch.autocast casts x or bias to the weight's dtype."""
    if not (arrays.is_torch(x) and arrays.is_torch(weight.data) and torch.is_autocast_enabled(known.device)):
        return False
    dtype = weight.data.dtype
    others = x.dtype is not dtype or (arrays.is_torch(bias) and bias.dtype is not dtype)
    return others and torch.get_autocast_dtype(known.device) is dtype


def _finish(bias: Any, activation: str) -> Any:
    """Bias and activation of a product of arrays on the host."""

    def finish(found: Any) -> Any:
        return activated(found if bias is None else found + arrays.as_numpy(bias).astype(found.dtype), activation)

    return finish


def _fill_rows(y: Any, bias: Any, activation: str) -> None:
    """The result for a weight without stored blocks: the bias after its activation."""
    if arrays.is_torch(y):
        functions = sys.modules["torch"].nn.functional
        row = bias.detach().float()
        y.detach().copy_((getattr(functions, activation)(row) if activation else row).expand(y.shape))
    elif arrays.facts("bias", bias).device == "cpu":
        import numpy as np

        row = bias if arrays.is_numpy(bias) else np.from_dlpack(bias)
        y[...] = activated(row.astype(np.float64), activation)
    else:
        raise TypeError(f"bias: {type(bias).__name__} arrays on a GPU need a weight that has a block")
