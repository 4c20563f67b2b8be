"""The public functions: they check what kernels cannot, find the kernel, and launch it.

Arrays are PyTorch tensors on CPU or CUDA, NumPy arrays, or any arrays that speak DLPack; results are of the same kind.
Calls are zero-copy, run on PyTorch's current stream, can be captured in a CUDA graph once a first call of the same
shape has loaded the kernel, and allocate nothing but the outputs (or nothing at all, with `out`).
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

from . import machine
from .layers import BsrWeight, CsrRows
from .machine import Machine
from .operators import LogSumExp, Softmax, SoftmaxTopk, make, parse
from .operators.bsr_matmul import ACTIVATIONS, activated
from .operators.nhot_lookup import typical
from .operators.problem import FLOATS, Problem
from .operators.softmax import ALGORITHMS
from .runtime import arrays
from .runtime.arrays import Facts
from .runtime.dispatch import Explanation, dispatcher

# Factors that float32 holds as normal numbers.
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38
_MISALIGNED = arrays.CUDA_ALIGNMENT - 1  # bits of an address that vector loads need to be 0


def softmax_topk(
    logits: Any,
    k: int,
    *,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    ids: Any = None,
    out: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """The k most probable entries of softmax((logits + bias) / temperature, -1), in one pass over the logits.

    values[b, i] = exp((y[b, z_i] - m_b) / temperature) / sum_j exp((y[b, j] - m_b) / temperature),

    with y = logits + bias, m_b = max_j y[b, j], and z_i the index of the i-th largest entry of row b of y.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`; float32, float16 or bfloat16, accumulated in float32. `vocab` below 2^31. Arrays that
        are not contiguous, or not aligned to 16 bytes on a GPU, are copied first. On a GPU finite entries must stay
        below 2e38 times the temperature in size.
    k
        1 <= k <= vocab.
    log
        Log-probabilities in the place of probabilities.
    temperature
        Above 0 and finite; below 1 sharpens the distribution.
    bias
        `(vocab,)` float32, added to every row in float32; -inf masks a column. On the device of `logits`.
    ids
        `(batch, n)` int64 columns whose probabilities are wanted too, wherever they rank: the logprobs of sampled or
        given tokens, from the same pass. On the device of `logits`.
    out
        `(values, indices)`, or `(values, indices, given)` with `ids`, to write into: contiguous, of the shapes and
        dtypes below, on the device of `logits`.

    Returns
    -------
    values
        `(batch, k)` float32, descending.
    indices
        `(batch, k)` int64 columns. Equal entries come in the order of their indices, so that the result is
        deterministic. NaN counts as the largest, as in torch.topk; a row with NaN or +inf, or with nothing above -inf,
        has NaN for all its values, as torch.softmax has.
    given
        With `ids` only: `(batch, n)` float32, the probabilities (with `log` their logarithms) of these columns; NaN for
        a column outside [0, vocab).

    Raises
    ------
    TypeError
        If an argument is no array, lies on another kind of device, or `k` or `temperature` is no number.
    ValueError
        For another rank, shape, dtype or device, k or temperature out of range, vocab of 2^31 or more, or an `out` that
        does not fit.
    RuntimeError
        If `logits` or `bias` requires a gradient: there is no backward pass. Call it under `torch.no_grad()`.

    When not to use it: where the whole distribution is needed afterwards.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 4.
    """
    scale = 1.0 if temperature == 1.0 else _inverse(temperature)
    plain = bias is None and ids is None
    torch = sys.modules.get("torch")
    if torch is not None and type(logits) is torch.Tensor and type(k) is int:
        # The common case, in as few steps as it takes: what was checked for this key holds again, but layout, alignment
        # and gradients, which are properties of the tensor.
        key = (logits.shape, logits.dtype, logits.device, k)
        found = dispatcher.launchers.get(key if plain else (*key, *_layouts((bias, ids), torch)))
        if found is not None and _plain(logits):
            function, *likes = found
            if out is None:
                out = tuple([torch.empty_like(like) for like in likes])
            elif (
                type(out) is not tuple
                or len(out) != len(likes)
                or not all([_fits(given, like, torch) for given, like in zip(out, likes, strict=True)])
            ):
                found = None
            if found is not None:
                if plain:
                    function(logits, scale, 1 if log else 0, *out)
                else:
                    function(logits, scale, 1 if log else 0, *[a for a in (bias, ids) if a is not None], *out)
                return out

    known = _logits(logits)
    try:
        if isinstance(k, bool):
            raise TypeError
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"k: expected an integer, got {type(k).__name__}") from None
    batch, vocab = known.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k: expected 1 <= k <= vocab ({vocab}), got {k}")
    extras = []
    if bias is not None:
        extras.append(_beside("bias", bias, (vocab,), "float32", known))
    if ids is not None:
        extras.append(_beside("ids", ids, (batch, None), "int64", known))
    n = extras[-1][1].shape[1] if ids is not None else 0
    wanted = [("values", (batch, k), "float32"), ("indices", (batch, k), "int64")]
    if ids is not None:
        wanted.append(("given", (batch, n), "float32"))
    outputs = _outputs(out, tuple(wanted), logits, known)
    if batch:
        problem = SoftmaxTopk(batch, vocab, k, known.dtype, int(bias is not None), n)
        prepared = arrays.ready("logits", logits, known)
        launchers = dispatcher.launchers
        function = dispatcher.kernel(problem, _machine("logits", known)).function
        passed = outputs if n or ids is None else outputs[:2]  # no kernel takes an empty array
        function(
            arrays.argument(prepared),
            scale,
            int(log),
            *(arrays.argument(arrays.ready(name, array, theirs)) for name, theirs, array in extras if theirs.shape[-1]),
            *map(arrays.argument, passed),
        )
        if type(logits) is getattr(torch, "Tensor", None) and len(passed) == len(outputs):
            key = (logits.shape, logits.dtype, logits.device, k)
            layouts = () if plain else _layouts((bias, ids), torch)
            if None not in layouts:
                launchers[*key, *layouts] = (function, *map(arrays.prototype, outputs))
    return out if out is not None else tuple(arrays.returned(array, logits) for array in outputs)


def softmax(logits: Any, *, algorithm: str = "online", out: Any = None) -> Any:
    """softmax(logits, -1), each logit read from memory once where a row fits into a GPU's registers.

    probabilities[b, i] = exp(logits[b, i] - m_b) / sum_j exp(logits[b, j] - m_b),  m_b = max_j logits[b, j].

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`; float32, float16 or bfloat16, accumulated in float32. `vocab` below 2^31. Arrays that
        are not contiguous, or not aligned to 16 bytes on a GPU, are copied first.
    algorithm
        `"online"` (Algorithm 3 of the paper), `"safe"` (2) or `"naive"` (1). The others are there to be compared with:
        they pass over a row more often, and the naive one leaves m_b out, so that logits above 88 make infinities and
        NaN, and rows wholly below -87 make NaN.
    out
        Array to write into: contiguous, of the shape, dtype and device of `logits`. It may not overlap with it.

    Returns
    -------
    probabilities
        `(batch, vocab)` of the dtype of `logits`. Those below 1.2e-38 may be 0. A row with NaN or +inf, or with nothing
        above -inf, is NaN, as of torch.softmax. (By the naive algorithm +inf is NaN, and the rest of its row 0.)

    Raises
    ------
    TypeError
        If `logits` is no array or lies on another kind of device.
    ValueError
        For another rank or dtype, vocab of 2^31 or more, an unknown algorithm, or an `out` that does not fit.
    RuntimeError
        If `logits` requires a gradient: there is no backward pass. Call it under `torch.no_grad()`.

    When not to use it: where the k largest entries are all that is needed; `softmax_topk` writes nothing else.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithms 1 to 3.
    """
    return _softmax(logits, algorithm, 0, out)


def log_softmax(logits: Any, out: Any = None) -> Any:
    """log(softmax(logits, -1)), as exact for small probabilities as for large ones.

    logprobs[b, i] = logits[b, i] - m_b - log(sum_j exp(logits[b, j] - m_b)),  m_b = max_j logits[b, j].

    Arguments, result and errors are those of `softmax`, whose library it runs.
    """
    return _softmax(logits, "online", 1, out)


def _softmax(logits: Any, algorithm: str, log: int, out: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and type(logits) is torch.Tensor and type(algorithm) is str:
        # As in softmax_topk, where a number stands for the algorithm, and in logsumexp, where None does.
        found = dispatcher.launchers.get((logits.shape, logits.dtype, logits.device, algorithm))
        if found is not None and _plain(logits):
            function, like = found
            if out is None or _fits(out, like, torch):
                result = torch.empty_like(like) if out is None else out
                function(logits, log, result)
                return result

    known = _logits(logits)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    [result] = _outputs(out, (("out", known.shape, known.dtype),), logits, known)
    batch, vocab = known.shape
    if batch and vocab:
        prepared = arrays.ready("logits", logits, known)
        launchers = dispatcher.launchers
        problem = Softmax(batch, vocab, algorithm, known.dtype)
        function = dispatcher.kernel(problem, _machine("logits", known)).function
        function(arrays.argument(prepared), log, arrays.argument(result))
        if type(logits) is getattr(torch, "Tensor", None):
            launchers[logits.shape, logits.dtype, logits.device, algorithm] = (function, arrays.prototype(result))
    return out if out is not None else arrays.returned(result, logits)


def logsumexp(logits: Any, out: Any = None) -> Any:
    """log(sum_j exp(logits[:, j])), the normaliser of softmax, in one read of the logits.

    values[b] = m_b + log(sum_j exp(logits[b, j] - m_b)),  m_b = max_j logits[b, j].

    Parameters
    ----------
    logits
        As for `softmax`.
    out
        `(batch,)` float32 array to write into: contiguous, on the device of `logits`.

    Returns
    -------
    values
        `(batch,)` float32, whatever the dtype of `logits`: rounded to half precision (where torch.logsumexp rounds it)
        it would be of no use as what log-probabilities are the difference to. A row of nothing but -inf, or of nothing,
        has -inf, one with +inf has +inf, and one with NaN has NaN, as of torch.logsumexp.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3, lines 1 to 6.
    """
    torch = sys.modules.get("torch")
    if torch is not None and type(logits) is torch.Tensor:
        found = dispatcher.launchers.get((logits.shape, logits.dtype, logits.device, None))
        if found is not None and _plain(logits):
            function, like = found
            if out is None or _fits(out, like, torch):
                result = torch.empty_like(like) if out is None else out
                function(logits, result)
                return result

    known = _logits(logits)
    batch, vocab = known.shape
    [result] = _outputs(out, (("out", (batch,), "float32"),), logits, known)
    if batch and not vocab:
        _fill(result, -math.inf)
    elif batch:
        prepared = arrays.ready("logits", logits, known)
        launchers = dispatcher.launchers
        function = dispatcher.kernel(LogSumExp(batch, vocab, known.dtype), _machine("logits", known)).function
        function(arrays.argument(prepared), arrays.argument(result))
        if type(logits) is getattr(torch, "Tensor", None):
            launchers[logits.shape, logits.dtype, logits.device, None] = (function, arrays.prototype(result))
    return out if out is not None else arrays.returned(result, logits)


def bsr_matmul(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    validate: bool = False,
) -> Any:
    """activation(x @ weight.T + bias) with a block-sparse weight.

    y[i, j] = activation(bias[j] + sum_k x[i, k] * weight[j, k]),  of which only the stored blocks of the weight are
    read.

    Parameters
    ----------
    x
        Shape `(m, k)`; float32, float16 or bfloat16, accumulated in float32. Copied first if it is not contiguous.
    weight
        Shape `(n, k)` in BSR format: a `BsrWeight` (prepared once, the fastest to call with), a
        `scipy.sparse.bsr_array`, a torch tensor of layout `torch.sparse_bsr`, or `(data, indices, indptr)` with data
        `(nnzb, block_rows, block_cols)`, indices `(nnzb,)` in [0, k / block_cols) and indptr `(n / block_rows + 1,)`.
        Blocks may be rectangular; block rows may be empty; columns of a row need not be sorted, and blocks that stand
        twice are added. Same dtype and device as `x`.
    bias
        `(n,)` of x's dtype, on its device.
    activation
        `"relu"`, `"gelu"` (by the error function, as torch's default) or `"silu"`, applied in float32.
    out
        `(m, n)` array of x's dtype to write into, contiguous and on the same device.
    validate
        Also check indices and indptr that lie on a GPU, which costs a synchronisation; those on the host are always
        checked, of a `BsrWeight` when it is made. Unchecked bad indices read out of bounds.

    Returns
    -------
    y
        `(m, n)` of x's dtype.

    Raises
    ------
    TypeError
        If `x`, `weight` or `bias` is none of these.
    ValueError
        For another rank or dtype, shapes that do not fit, a malformed structure (naming the first bad entry), arrays on
        different devices, matrices of 2^31 elements or more, an unknown activation, or an `out` that does not fit.
    RuntimeError
        If `x`, the weight or the bias requires a gradient.

    When not to use it: with less than about half of the blocks zero a dense product is as fast.

    Source: Gu 2020, "Optimizing Block-Sparse Matrix Multiplications on CUDA with TVM", section 3.
    """
    if not isinstance(weight, BsrWeight):
        known = arrays.facts("x", x)
        _check_floats("x", known, rank=2)
        weight = BsrWeight(weight, columns=known.shape[1], validate=validate, balance=False)
    elif validate:
        weight.validate()
    torch = sys.modules.get("torch")
    plain = bias is None and activation is None
    if torch is not None and type(x) is torch.Tensor:
        key = (x.shape, x.dtype, x.device)
        found = weight.kernels.get(key if plain else (*key, activation, *_layouts((bias,), torch)))
        # Other launchers: other kernels have been loaded since.
        if found is not None and found[2] is dispatcher.launchers and _plain(x):
            function, like, _ = found
            if out is None or _fits(out, like, torch):
                y = torch.empty_like(like) if out is None else out
                if bias is None:
                    function(x, *weight.arguments, y)
                else:
                    function(x, *weight.arguments, bias, y)
                return y

    known = arrays.facts("x", x)
    _check_floats("x", known, rank=2)
    _refuse_gradient("x", x)
    m, k = known.shape
    n, weight_k = weight.shape
    if k != weight_k:
        raise ValueError(f"x: expected {weight_k} columns, as the weight has, got shape {known.shape}")
    if known.dtype != weight.dtype:
        raise ValueError(f"x: expected dtype {weight.dtype}, as the weight has, got {known.dtype}")
    if (known.device, known.index) != (weight.device, weight.device_index):
        raise ValueError(
            f"x: expected an array on {weight.device}:{weight.device_index}, as the weight is,"
            f" got {known.device}:{known.index}"
        )
    if max(m * k, m * n) >= 2**31:
        raise ValueError(
            f"x: expected x and the product to have fewer than 2^31 elements, got ({m}, {k}) and ({m}, {n})"
        )
    if activation is not None and activation not in ACTIVATIONS[1:]:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS[1:])} or None, got {activation!r}")
    extras = [] if bias is None else [_beside("bias", bias, (n,), known.dtype, known, "x is")]
    [y] = _outputs(out, (("out", (m, n), known.dtype),), x, known)
    if m and n:
        if weight.nnzb == 0 or k == 0:
            if bias is None:
                _fill(y, 0)
            else:
                _fill_rows(y, bias, activation or "")
        else:
            prepared = arrays.ready("x", x, known)
            launchers = dispatcher.launchers
            problem = weight.problem(m, int(bias is not None), activation or "")
            function = dispatcher.kernel(problem, _machine("x", known)).function
            beside = (arrays.argument(arrays.ready(name, array, theirs)) for name, theirs, array in extras)
            function(arrays.argument(prepared), *weight.arguments, *beside, arrays.argument(y))
            if type(x) is getattr(torch, "Tensor", None) and arrays.is_torch(weight.data):
                key = (x.shape, x.dtype, x.device)
                layouts = () if plain else (activation, *_layouts((bias,), torch))
                if None not in layouts[1:]:
                    weight.kernels[*key, *layouts] = (function, arrays.prototype(y), launchers)
    return out if out is not None else arrays.returned(y, x)


def nhot_lookup(csr: Any, table: Any, *, out: Any = None, validate: bool = False) -> Any:
    """csr @ table: sums of the rows of a table that sparse rows look up.

    out[r, j] = sum_e values[e] * table[indices[e], j],  e = indptr[r] ... indptr[r + 1] - 1.

    Parameters
    ----------
    csr
        Shape `(rows, vocab)`, a few nonzeros a row: a `CsrRows` (prepared once, the fastest to call with), a
        `scipy.sparse.csr_array`, a torch tensor of layout `torch.sparse_csr`, or `(indptr, indices, values)` with
        indptr `(rows + 1,)`, indices `(nnz,)` in [0, vocab), both int32 or both int64, and values `(nnz,)` of the
        table's dtype, or None if all are 1. Rows may be empty; columns need not be sorted, and those that stand twice
        are added. On the device of `table`.
    table
        Shape `(vocab, width)`; float32, float16 or bfloat16, accumulated in float32. Copied first if it is not
        contiguous, or not aligned to 16 bytes on a GPU.
    out
        `(rows, width)` array of the table's dtype to write into, contiguous and on the same device.
    validate
        Also check indptr and indices that lie on a GPU, which costs a synchronisation; those on the host are always
        checked, of a `CsrRows` when it is made. Unchecked bad indices read out of bounds.

    Returns
    -------
    out
        `(rows, width)` of the table's dtype; zeros for an empty row. Sums are made in a fixed order: results are
        deterministic.

    Raises
    ------
    TypeError
        If `csr` or `table` is none of these.
    ValueError
        For another rank or dtype, shapes that do not fit, a malformed structure (naming the first bad entry), arrays on
        different devices, or an `out` that does not fit.
    RuntimeError
        If the table or the values require a gradient.

    When not to use it: with more than a few percent of the columns nonzero a dense product is as fast.

    Source: Argueta & Chiang 2019, "Accelerating Sparse Matrix Operations in Neural Networks on Graphics Processing
    Units", section 4.1.
    """
    torch = sys.modules.get("torch")
    if validate and isinstance(csr, CsrRows):
        csr.validate()
    elif torch is not None and type(table) is torch.Tensor and not validate:
        found = _repeated_lookup(csr, table, torch)
        if found is not None and _plain(table):
            function, like, arguments = found
            if out is None:
                result = torch.empty_like(like)
                function(*arguments, table, result)
                return result
            if _fits(out, like, torch):
                function(*arguments, table, out)
                return out

    known = arrays.facts("table", table)
    _check_floats("table", known, rank=2)
    _refuse_gradient("table", table)
    vocab, width = known.shape
    given = csr
    if not isinstance(csr, CsrRows):
        csr = CsrRows(csr, columns=vocab, validate=validate)
    rows, columns = csr.shape
    if columns != vocab:
        raise ValueError(f"csr: expected {vocab} columns, as the table has rows, got shape ({rows}, {columns})")
    if csr.dtype is not None and csr.dtype != known.dtype:
        raise ValueError(f"values: expected dtype {known.dtype}, as the table has, got {csr.dtype}")
    if (csr.device, csr.device_index) != (known.device, known.index):
        raise ValueError(
            f"csr: expected arrays on {known.device}:{known.index}, as the table is,"
            f" got {csr.device}:{csr.device_index}"
        )
    if max(rows, vocab, width) >= 2**31 or rows * width >= 2**34:
        raise ValueError(
            f"csr: expected extents below 2^31 and a product of fewer than 2^34 elements, got rows={rows},"
            f" vocab={vocab}, width={width}"
        )
    [result] = _outputs(out, (("out", (rows, width), known.dtype),), table, known)
    if rows and width:
        if csr.nnz == 0:
            _fill(result, 0)
        else:
            prepared = arrays.ready("table", table, known)
            launchers = dispatcher.launchers
            function = dispatcher.kernel(csr.problem(width, known.dtype), _machine("table", known)).function
            function(*csr.arguments, arrays.argument(prepared), arrays.argument(result))
            if type(table) is getattr(torch, "Tensor", None) and arrays.is_torch(csr.indptr):
                like = arrays.prototype(result)
                if given is csr:
                    csr.kernels[table.shape, table.dtype, table.device] = (function, like, launchers)
                elif known.device == "cuda" and (parts := _csr_tensors(given, table, torch)) is not None:
                    launchers[_lookup_key(parts, table)] = (function, like)
    return out if out is not None else arrays.returned(result, table)


def explain(problem: str | Problem, *, target: str = "auto", **axes: Any) -> Explanation:
    """Which kernel a call runs, and why: exact record, batch bucket, nearby record or fallback.

    Parameters
    ----------
    problem
        A problem, its key (`"softmax_topk/batch=10,vocab=25000,k=5,dtype=float32"`), or an operator's name with the
        axes as keywords: `explain("softmax_topk", batch=10, vocab=25000, k=5)`.
    target
        As for the command line: `auto` (the GPU if there is one), `cpu`, `cuda`, or an architecture.

    Raises
    ------
    ProblemError
        For an unknown operator or axis, with the nearest valid names.
    UnknownArch
        For an unknown target.
    """
    if isinstance(problem, str):
        problem = parse(problem) if "/" in problem else make(problem, axes)
    elif not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a Problem, its key or an operator's name, got {type(problem).__name__}")
    return dispatcher.explain(problem, machine.resolve(target))


def _machine(name: str, known: Facts) -> Machine:
    if known.device == "cpu":
        return machine.cpu()
    found = machine.gpu()
    if found is None:
        raise ValueError(f"{name}: lies on a GPU, but the driver reports none")
    return found


def _check_floats(name: str, known: Facts, rank: int) -> None:
    if len(known.shape) != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got shape {known.shape}")
    if known.dtype not in FLOATS:
        raise ValueError(f"{name}: expected dtype {', '.join(FLOATS)}, got {known.dtype}")


def _logits(logits: Any) -> Facts:
    """Facts of the argument `logits`, checked."""
    known = arrays.facts("logits", logits)
    _check_floats("logits", known, rank=2)
    _refuse_gradient("logits", logits)
    if known.shape[1] >= 2**31:
        raise ValueError(f"logits: expected a vocab below 2^31, got {known.shape[1]}")
    return known


def _inverse(temperature: Any) -> float:
    """The factor that a temperature stands for."""
    try:
        inverse = 1.0 / float(temperature)
    except (TypeError, ValueError):
        raise TypeError(f"temperature: expected a number, got {type(temperature).__name__}") from None
    except ZeroDivisionError:
        inverse = math.inf
    if not _SMALLEST < inverse < _LARGEST:
        raise ValueError(f"temperature: expected a finite number above 0, got {temperature!r}")
    return inverse


def _beside(
    name: str, array: Any, shape: tuple[int | None, ...], dtype: str, first: Facts, where: str = "the logits are"
) -> tuple[str, Facts, Any]:
    """An array that comes with the first argument, checked; None in `shape` is any extent."""
    known = arrays.facts(name, array)
    _refuse_gradient(name, array)
    same = len(known.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(known.shape, shape, strict=True)
    )
    if not same or known.dtype != dtype:
        text = ", ".join("n" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"{name}: expected shape ({text}{',' * (len(shape) == 1)}) and dtype {dtype}, got {known.shape} and"
            f" {known.dtype}"
        )
    if (known.device, known.index) != (first.device, first.index):
        raise ValueError(
            f"{name}: expected an array on {first.device}:{first.index}, as {where}, got {known.device}:{known.index}"
        )
    return name, known, array


def _layouts(given: tuple[Any, ...], torch: Any) -> tuple[Any, ...]:
    """What a launcher depends on of arrays beside the first; None for one that has to be looked at every time."""
    return tuple(
        [
            False if a is None else (a.shape, a.dtype, a.device) if type(a) is torch.Tensor and _plain(a) else None
            for a in given
        ]
    )


def _refuse_gradient(name: str, array: Any) -> None:
    if arrays.is_torch(array) and array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise RuntimeError(f"{name}: requires a gradient, and there is no backward pass; call it under torch.no_grad()")


def _plain(tensor: Any) -> bool:
    """Whether a kernel takes a torch tensor as it is."""
    try:
        return tensor.is_contiguous() and not tensor.data_ptr() & _MISALIGNED and not tensor.requires_grad
    except RuntimeError:  # sparse layouts know neither contiguity nor an address
        return False


def _repeated_lookup(csr: Any, table: Any, torch: Any) -> tuple[Any, Any, tuple[Any, ...]] | None:
    """Of a look-up like one before: the kernel, a prototype of its output, and the arguments in front of the table."""
    if type(csr) is CsrRows:
        found = csr.kernels.get((table.shape, table.dtype, table.device))
        # Other launchers: other kernels have been loaded since.
        return (*found[:2], csr.arguments) if found is not None and found[2] is dispatcher.launchers else None
    # Structures on the host are checked at every call.
    parts = _csr_tensors(csr, table, torch) if table.is_cuda else None
    if parts is None:
        return None
    found = dispatcher.launchers.get(_lookup_key(parts, table))
    return (*found, parts) if found is not None and all(map(_plain, parts)) else None


def _csr_tensors(csr: Any, table: Any, torch: Any) -> tuple[Any, ...] | None:
    """indptr, indices and, if there are, values, if all are tensors on the table's device that fit each other."""
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
    return parts if rows > 0 and entries[0] and parts[-1].shape == entries else None


def _lookup_key(parts: tuple[Any, ...], table: Any) -> tuple[Any, ...]:
    """What the choice of a kernel for a look-up depends on."""
    indptr, indices, *values = parts
    nonzeros = typical(indices.shape[0], indptr.shape[0] - 1)
    dtypes = indptr.dtype, indices.dtype, values[0].dtype if values else None
    return (indptr.shape, nonzeros, dtypes, table.shape, table.dtype, table.device)


def _fits(tensor: Any, like: Any, torch: Any) -> bool:
    """Whether a kernel can write into a torch tensor in the place of `like`."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is like.dtype
        and tensor.shape == like.shape
        and tensor.device == like.device
        and _plain(tensor)
    )


def _outputs(out: Any, wanted: tuple[tuple[str, tuple[int, ...], str], ...], like: Any, known: Facts) -> list[Any]:
    """The arrays to write into: new ones, or those of `out`, checked."""
    if out is None:
        return [arrays.empty(shape, dtype, like, known) for _, shape, dtype in wanted]
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(wanted):
        raise ValueError(
            f"out: expected {len(wanted)} arrays ({', '.join(name for name, _, _ in wanted)}), got {len(given)}"
        )
    for array, (name, shape, dtype) in zip(given, wanted, strict=True):
        name = "out" if name == "out" else f"out ({name})"
        theirs = arrays.facts(name, array)
        _refuse_gradient(name, array)
        if theirs.shape != shape or theirs.dtype != dtype:
            raise ValueError(f"{name}: expected shape {shape} and dtype {dtype}, got {theirs.shape} and {theirs.dtype}")
        if (theirs.device, theirs.index) != (known.device, known.index):
            raise ValueError(
                f"{name}: expected an array on {known.device}:{known.index}, got {theirs.device}:{theirs.index}"
            )
        if not theirs.contiguous or not theirs.aligned:
            raise ValueError(f"{name}: expected a contiguous, writeable and aligned array")
    return given


def _fill(array: Any, value: float) -> None:
    if arrays.is_torch(array):
        array.detach().fill_(value)
    else:
        array[...] = value


def _fill_rows(y: Any, bias: Any, activation: str) -> None:
    """What a product of nothing leaves: the bias after its activation."""
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
