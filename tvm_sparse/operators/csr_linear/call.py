"""The public call of sparse linear layers."""

from __future__ import annotations

import sys
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.operators.nhot_lookup.rows import CsrRows
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
from tvm_sparse.runtime.signature import ROWS, Absent, Array, Number, Output, Signature, Structure

from .dense import likely_way
from .problem import CsrLinear

SIGNATURES = {
    "csr_linear": Signature(
        ("x", Array((ROWS, "k"), FLOATS, gradient=True)),
        ("weight", Structure(("CsrRows", "scipy.sparse.csr_array", "torch.sparse_csr", "(indptr, indices, values)"))),
        ("validate", Number("bool")),
        ("dense", Absent(), Number("bool")),
        outputs=(Output("y"),),
    )
}

__all__ = ["csr_linear"]


def csr_linear(x: Any, weight: Any, *, out: Any = None, validate: bool = False, dense: bool | None = None) -> Any:
    """x @ weight.T with an unstructured sparse weight.

    y[i, j] = sum_e x[i, indices[e]] * values[e],  e = indptr[j] ... indptr[j + 1] - 1.

    Parameters
    ----------
    x
        Shape `(m, k)`, or `(..., k)` with any number of dimensions before; float32, float16 or bfloat16, accumulated in
        float32. Copied first if it is not contiguous.
    weight
        Shape `(n, k)` in CSR format: a `CsrRows` (prepared once, the fastest to call with), a `scipy.sparse.csr_array`,
        a torch tensor of layout `torch.sparse_csr`, or `(indptr, indices, values)` with indptr `(n + 1,)`, indices
        `(nnz,)` in [0, k), each int32 or int64, and values `(nnz,)` of x's dtype. Rows may be empty; columns need not
        be sorted, and duplicates are added. On the device of `x`.
    out
        `(m, n)` (or `(..., n)`) array of x's dtype to write into, contiguous, on the same device and of the same kind
        as x; it must not overlap with an input.
    validate
        Also check indptr and indices on a GPU, which costs a synchronisation; on the host they are always checked, for
        a `CsrRows` when it is made. Invalid indices that are not checked cause reads out of bounds.
    dense
        Whether to multiply with a dense copy of the weight, by PyTorch's product (NumPy's for arrays of other libraries
        on the host). None: where that is likely to be faster, for torch tensors on a GPU and a `CsrRows` that is
        `constant`. Such a weight makes the copy at its first use and keeps it, `n * k` elements; for others it is made
        in every call.

    Returns
    -------
    y
        `(m, n)` (or `(..., n)`) of x's dtype. Sums have a fixed order, so results are deterministic.

    Raises
    ------
    TypeError
        If `x` or `weight` has another type.
    ValueError
        For a 0-d x, another dtype, a weight without values, shapes that do not fit, a malformed structure (naming the
        first invalid entry), arrays on different devices, or an `out` that does not fit.
    RuntimeError
        If `out`, or the values of a `CsrRows` or of a sparse tensor, require a gradient.

    Notes
    -----
    The result is differentiable in x, by this same function with the transposed weight, and in values given as
    `(indptr, indices, values)`, by a sampled dense-dense product.

    A product with the dense copy is faster for many rows of x and many entries: by the record of the problem, or
    without one by the share of nonzeros, as `explain` says. It multiplies zeros too: a NaN or an infinity in x makes
    all of its row NaN. Where PyTorch records a gradient or a graph, only `dense=True` takes it.

    When not to use it: if the weight may not be `constant`, for more than some 16 rows of x, or with fewer than about
    70 % of the weight zero, a dense product is as fast. If nonzeros come in blocks, `bsr_matmul` is faster.

    Source: Gale et al. 2020, "Sparse GPU Kernels for Deep Learning", section 5.
    """
    dense = None if dense is None else bool(dense)
    what = WHAT if dense is None else (WHAT, dense)
    if isinstance(weight, CsrRows):
        if validate:
            weight.validate()
        launchers = weight.launchers.of(dispatcher.launchers)
        found = repeat.again_by_rows(launchers, what, (x, *weight.arguments), out)
        if found is not None:
            return found
    if custom.transformed(x, *_arrays_of(weight), differentiable=True):
        return custom.module_of("csr_linear").csr_linear(x, weight, out=out, validate=validate, dense=dense)
    known = arrays.facts("x", x)
    check_floats("x", known)
    refuse_gradient("x", x, TORCH_ALONE)
    k = known.shape[-1]
    rows = weight if isinstance(weight, CsrRows) else CsrRows(_named(weight), columns=k, validate=validate)
    n, columns = rows.shape
    if columns != k:
        raise ValueError(f"x: expected {columns} columns, as the weight has, got shape {known.shape}")
    if rows.dtype != known.dtype:
        raise ValueError(f"weight: expected values of {known.dtype}, as x is, got {rows.dtype or 'none'}")
    if (rows.device, rows.device_index) != (known.device, known.index):
        raise ValueError(
            f"weight: expected arrays on {known.device}:{known.index}, as x is, got {rows.device}:{rows.device_index}"
        )
    if len(known.shape) != 2:

        def call(some: Any, given: Any) -> list[Any]:
            return [csr_linear(some, rows, out=given and given[0], dense=dense)]

        [y] = by_rows(call, x, known, out, (("out", (n,), known.dtype),))
        return out if out is not None else y
    m = known.shape[0]
    [y] = outputs_for(out, (("out", (m, n), known.dtype),), x, known)
    SIGNATURES["csr_linear"].refuse_overlap(out, x=x, weight=_arrays_of(rows))
    if arrays.is_fake(x):
        return y
    most = most_rows(k, n)
    if m > most:

        def part(given: list[Any], into: list[Any]) -> Any:
            return csr_linear(given[0], rows, out=into[0], dense=dense)

        by_parts(part, m, most, (x,), (y,))
    elif m and n:
        if rows.nnz == 0 or k == 0:
            fill(y, 0)
        else:
            kept = rows.launchers.of(dispatcher.launchers) if rows is weight else None
            arguments = (arrays.ready("x", x, known), *rows.arguments)
            problem, where = problem_of(rows, m), machine_of("x", known)
            if dense is None:
                dense = rows.constant and arrays.is_torch(x) and way(problem, where) == DENSE
            if dense:
                run_dense(rows, kept, what, arguments, y)
            else:
                launch(dispatcher, problem, where, what, arguments, (y,), single=True, kept=kept)
    return out if out is not None else arrays.returned(y, x)


# What launchers of sparse rows are kept by, beside those of look-ups.
WHAT = "csr_linear"


def way(problem: CsrLinear, machine: Machine) -> str:
    """As `runtime.dense.way`."""
    return dense_ways.way(problem, machine, likely_way)


def told_way(problem: CsrLinear, machine: Machine) -> str:
    """As `runtime.dense.told_way`."""
    return dense_ways.told_way(problem, machine, likely_way)


def problem_of(rows: CsrRows, m: int) -> CsrLinear:
    """The problem of a product with `m` rows of x."""
    n, k = rows.shape
    sparsity = min(max(1 - rows.nnz / max(n * k, 1), 0.0), 1.0)
    return CsrLinear(m, k, n, sparsity, rows.dtype or "", rows.index)


def _arrays_of(weight: Any) -> tuple[Any, ...]:
    """The arrays of a weight in any of its forms."""
    if isinstance(weight, CsrRows):
        return weight.indptr, weight.indices, weight.values
    return tuple(weight) if isinstance(weight, (tuple, list)) else (weight,)


def _named(weight: Any) -> Any:
    """A weight that is no `CsrRows`, refused under this argument's name where it is none of its forms."""
    torch = sys.modules.get("torch")
    forms = isinstance(weight, (tuple, list)) or (torch is not None and isinstance(weight, torch.Tensor))
    if not forms and not isinstance(getattr(weight, "format", None), str):
        raise TypeError(
            "weight: expected a CsrRows, a scipy.sparse.csr_array, a torch.sparse_csr tensor or (indptr, indices,"
            f" values), got {type(weight).__name__}"
        )
    return weight
