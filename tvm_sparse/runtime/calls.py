"""Code that the public calls share: checks that kernels cannot make, and the making or checking of outputs.

Arrays are PyTorch tensors on CPU or CUDA, NumPy arrays, or any arrays with DLPack; results are of the same kind. Calls
are zero-copy, run on PyTorch's current stream, can be captured in a CUDA graph once a first call of the same shape has
loaded the kernel, and allocate nothing but the outputs (or nothing at all, with `out`), unless a kernel with larger
extents serves a problem that was neither tuned nor warmed up: it writes to arrays of its own, which are copied.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import machine
from ..core.given import integer
from ..core.machine import Machine
from ..core.problem import FLOATS, Problem, numpy_dtype
from . import arrays, repeat
from .arrays import Facts
from .dispatch import Dispatcher

if TYPE_CHECKING:
    import numpy as np

# Bounds of factors that float32 holds as normal numbers.
_SMALLEST, _LARGEST = 1.2e-38, 3.4e38


def machine_of(name: str, known: Facts) -> Machine:
    if known.device == "cpu":
        return machine.cpu()
    found = machine.gpu()
    if found is None:
        refused = next(filter(None, map(machine.below_floor, machine.gpus())), None)
        raise ValueError(f"{name}: lies on a GPU, but {refused or 'the driver reports none'}")
    return found


def check_floats(name: str, known: Facts, rank: int | None = None) -> None:
    """Check dtype and number of dimensions; without a rank there must be at least one dimension."""
    if rank is None and not known.shape:
        raise ValueError(f"{name}: expected at least 1 dimension, got shape ()")
    if rank is not None and len(known.shape) != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got shape {known.shape}")
    if known.dtype not in FLOATS:
        raise ValueError(f"{name}: expected dtype {', '.join(FLOATS)}, got {known.dtype}")


def float_dtype(given: Any) -> np.dtype:
    """The NumPy dtype of an argument `dtype`: a dtype of floating numbers that kernels have, or its name.

    Raises
    ------
    ValueError
        For another one.
    """
    name = arrays.dtype_name(given)
    if name not in FLOATS:
        raise ValueError(f"dtype: expected {', '.join(FLOATS)}, got {given!r}")
    return numpy_dtype(name)


def logits_facts(logits: Any, instead: str = "") -> Facts:
    """Facts of the argument `logits`, checked; `instead` names a function with a gradient, for the message."""
    known = arrays.facts("logits", logits)
    check_floats("logits", known)
    refuse_gradient("logits", logits, instead)
    if not arrays.is_fake(logits) and known.shape[-1] >= 2**31:  # for a fake one it would be a condition of the graph
        raise ValueError(f"logits: expected a vocab below 2^31, got {known.shape[-1]}")
    return known


def by_rows(
    call: Callable[[Any, list[Any] | None], Sequence[Any]],
    array: Any,
    known: Facts,
    out: Any,
    wanted: tuple[tuple[str, tuple[int, ...], str], ...],
) -> list[Any]:
    """Apply a call on rows `(batch, width)` to an array `(..., width)` with any number of dimensions.

    Parameters
    ----------
    call
        (rows, arrays to write into or None) -> the outputs.
    out, wanted
        As in `outputs_for`, with the shapes of single rows.
    """
    leading = known.shape[:-1]
    batch = math.prod(leading)
    rows = arrays.reshaped(array, (batch, known.shape[-1]))
    if out is None:
        results = call(rows, None)
        return [
            arrays.reshaped(result, (*leading, *shape)) for result, (_, shape, _) in zip(results, wanted, strict=True)
        ]
    full = tuple((name, (*leading, *shape), dtype) for name, shape, dtype in wanted)
    given = outputs_for(out, full, array, known)
    call(rows, [arrays.reshaped(one, (batch, *shape)) for one, (_, shape, _) in zip(given, wanted, strict=True)])
    return given


# Kernels count in 32 bits: arrays with this many elements or more are processed in parts, some rows at a time.
LIMIT = 2**31
# Parts of `out` begin at a multiple of this many rows, so that their addresses are aligned for vector loads.
_ROWS_ALIGNED = 16


def most_rows(*widths: int) -> int:
    """How many rows of these widths a kernel can process at once."""
    most = max(1, (LIMIT - 1) // max(1, *widths))
    return most // _ROWS_ALIGNED * _ROWS_ALIGNED or most


def by_parts(
    call: Callable[[list[Any], list[Any]], Any], rows: int, most: int, given: Sequence[Any], outputs: Sequence[Any]
) -> None:
    """Compute outputs by several calls, each for at most `most` rows.

    Parameters
    ----------
    call
        (part of `given`, part of `outputs`): computes these rows.
    given, outputs
        Arrays whose first axis is the rows; None among `given` stays None.
    """
    for first in range(0, rows, most):
        part = slice(first, first + most)
        into = [one[part] for one in outputs]
        facts = [arrays.facts("out", one) for one in into]
        aligned = all(known.aligned for known in facts)
        written = into if aligned else [arrays.empty(f.shape, f.dtype, o, f) for o, f in zip(into, facts, strict=True)]
        call([None if one is None else one[part] for one in given], written)
        if not aligned:
            for one, other in zip(into, written, strict=True):
                one[...] = other


def launch(
    dispatcher: Dispatcher,
    problem: Problem,
    machine: Machine,
    what: Any,
    arguments: tuple[Any, ...],
    outputs: Sequence[Any],
    *,
    single: bool = False,
    kept: Any = True,
    free: int = 0,
    around: Callable[[Any], Any] | None = None,
    wider: Problem | None = None,
) -> None:
    """Call the kernel of a problem, and store a launcher with which `repeat.again` repeats the call for arguments of
    the same kinds.

    Parameters
    ----------
    what, single, free
        As in `repeat.remember`.
    arguments, outputs
        The kernel's arguments, prepared by `arrays.ready`; None for an absent argument.
    kept
        The dict in which the launcher is stored: True for the dispatcher's, None to store none.
    around
        Wraps the kernel into a function of these arguments and outputs, where its own differ.
    wider
        The problem with extents rounded up by `width`, whose kernel may run instead (`Dispatcher.serving`), for torch
        tensors and NumPy arrays.
    """
    launchers = dispatcher.launchers if kept is True else kept  # before the look-up, which may replace the dispatcher's
    torch_alone = arrays.is_torch(outputs[0])
    served = problem
    if wider is not None and (torch_alone or arrays.is_numpy(outputs[0])):
        served = dispatcher.serving(problem, wider, machine)
    function = dispatcher.kernel(served, machine).function
    function = function if around is None else around(function)
    if served != problem:
        function = _narrowed(function, problem, served, arguments, len(outputs), torch_alone)
        if not torch_alone:
            function(*[one for one in arguments if one is not None], *outputs)
            return
    run(launchers, what, function, arguments, outputs, single, free)


def _narrowed(
    function: Any, problem: Problem, served: Problem, arguments: tuple[Any, ...], outputs: int, torch_alone: bool
) -> Any:
    """A function of the arrays of `problem` that calls the kernel of a wider problem, which differs in last extents.

    Inputs are padded with -1; outputs are written to temporary arrays, whose first columns are copied.
    """
    given = [spec for spec, one in zip(problem.inputs, arguments, strict=True) if one is not None]
    all_there = outputs == len(problem.kernel_outputs)
    written = [spec for spec in problem.kernel_outputs if all_there or spec.name != "normaliser"]

    def extent(spec: Any) -> int | None:
        """The last extent in the wider problem, if it differs."""
        last = spec.shape[-1] if spec.shape else 0
        wide = served.extent(last)
        return wide if wide != problem.extent(last) else None

    grown = [extent(spec) for spec in (*given, *written)]

    def call(*arrays_given: Any) -> None:
        passed, copies = [], []
        for place, (array, wide) in enumerate(zip(arrays_given, grown, strict=True)):
            if wide is None:
                passed.append(array)
                continue
            shape = (*array.shape[:-1], wide)
            made = array.new_empty(shape) if torch_alone else sys.modules["numpy"].empty(shape, array.dtype)
            if place < len(given):
                made[..., array.shape[-1] :] = -1
                made[..., : array.shape[-1]] = array
            else:
                copies.append((array, made))
            passed.append(made)
        if torch_alone:
            function(*passed)
        else:
            function(*[one if isinstance(one, int | float) else arrays.argument(one) for one in passed])
        for array, made in copies:
            array[...] = made[..., : array.shape[-1]]

    return call


def run(
    launchers: dict[Any, Any] | None,
    what: Any,
    function: Any,
    arguments: tuple[Any, ...],
    outputs: Sequence[Any],
    single: bool = False,
    free: int = 0,
) -> None:
    """As `launch`, for a function that has been found; `launchers` is the dict from before it was looked up."""
    given = [one if one is None or isinstance(one, int | float) else arrays.argument(one) for one in arguments]
    function(*[one for one in given if one is not None], *map(arrays.argument, outputs))
    if launchers is not None and all(
        arrays.is_torch(one) or one is None or isinstance(one, int | float) for one in (*arguments, *outputs)
    ):
        repeat.remember(launchers, what, arguments, function, tuple(outputs), single, free)


def with_scratch(function: Any, unshown: Any, after: int) -> Any:
    """Wrap a kernel with an output that the caller does not want: it is written to an array made for each call.

    `unshown`: an array of the output's shape and dtype. `after`: the number of outputs after it.
    """
    like = arrays.prototype(unshown) if arrays.is_torch(unshown) else None

    def call(*arguments: Any) -> None:
        made = arrays.argument(unshown) if like is None else sys.modules["torch"].empty_like(like)
        place = len(arguments) - after
        function(*arguments[:place], made, *arguments[place:])

    return call


def whole_number(name: str, value: Any) -> int:
    """Check an integer argument; a symbolic integer of a graph is returned unchanged."""
    return value if arrays.is_symbol(value) else integer(name, value)


def count(name: str, value: Any) -> int:
    """Check an integer argument: at least 1 and below 2^31."""
    if type(value) is int and 1 <= value < 2**31:
        return value
    try:
        found = whole_number(name, value)
    except TypeError:
        found = 0
    if not 1 <= found < 2**31:
        raise ValueError(f"{name}: expected an integer of at least 1 and below 2^31, got {value!r}")
    return found


def is_of_rows(value: Any) -> bool:
    """Whether a number that may differ from row to row is an array, with one for each row."""
    return type(value) not in (float, int) and bool(getattr(value, "shape", ()))


def tensors_among(*numbers: Any) -> list[Any]:
    """The numbers that a custom operator of PyTorch has to see: arrays with one for each row, and tensors whose value
    must not be read.
    """
    return [one for one in numbers if is_of_rows(one) or arrays.unread(one)]


def scales_of(temperature: Any) -> tuple[Any, Any]:
    """What kernels take for a temperature, one of which is None: the factor on logits, its inverse, checked; and the
    array of a temperature of each row.
    """
    return (None, temperature) if is_of_rows(temperature) else (inverse_temperature(temperature), None)


def inverse_temperature(temperature: Any) -> Any:
    """The factor on logits for a temperature: its inverse, checked; a tensor whose value must not be read
    (`arrays.unread`) is returned as it is.
    """
    if type(temperature) is float and temperature == 1.0:
        return 1.0
    if arrays.unread(temperature):
        return temperature
    try:
        if isinstance(temperature, str | bytes | bool):  # float() would accept these
            raise TypeError
        inverse = 1.0 / float(temperature)
    except (TypeError, ValueError, RuntimeError):
        what = f"{type(temperature).__name__}"
        if getattr(temperature, "shape", ()):
            what += f" of shape {tuple(temperature.shape)}"
        raise TypeError(f"temperature: expected one number, for all rows, got {what}") from None
    except ZeroDivisionError:
        inverse = math.inf
    if not _SMALLEST < inverse < _LARGEST:
        raise ValueError(
            f"temperature: expected a finite number above 0, from {1 / _LARGEST:.2g} to {1 / _SMALLEST:.2g}, whose"
            f" inverse float32 holds, got {temperature!r}"
        )
    return inverse


def check_device(name: str, known: Facts, first: Facts, where: str) -> None:
    """Raise ValueError unless an array is on the same device as the first one; `where` begins the message,
    as "x is".
    """
    if (known.device, known.index) != (first.device, first.index):
        raise ValueError(
            f"{name}: expected an array on {first.device}:{first.index}, as {where}, got {known.device}:{known.index}"
        )


def facts_beside(
    name: str,
    array: Any,
    shape: tuple[int | None, ...],
    dtype: str | tuple[str, ...],
    first: Facts,
    where: str = "the logits are",
) -> tuple[str, Facts, Any]:
    """Check an array that accompanies the first argument. None in `shape` allows any extent; `dtype` is one name or
    several.
    """
    known = arrays.facts(name, array)
    dtypes = (dtype,) if isinstance(dtype, str) else dtype
    refuse_gradient(name, array)
    same = len(known.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(known.shape, shape, strict=True)
    )
    if not same or known.dtype not in dtypes:
        text = ", ".join("n" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"{name}: expected shape ({text}{',' * (len(shape) == 1)}) and dtype {' or '.join(dtypes)}, got"
            f" {known.shape} and"
            f" {known.dtype}"
        )
    check_device(name, known, first, where)
    return name, known, array


# Dtypes accepted for index arrays.
INDEX = ("int32", "int64")


def index_beside(
    name: str, array: Any, shapes: tuple[tuple[int | str, ...], ...], first: Facts, where: str = "the logits are"
) -> tuple[str, Facts, Any]:
    """Check an array of indices that accompanies the first argument: int32 or int64, with one of `shapes`.

    An extent given as text is free, and named so in messages. `index_as` converts to the dtype of a kernel.
    """
    known = arrays.facts(name, array)

    def fits(shape: tuple[int | str, ...]) -> bool:
        return len(shape) == len(known.shape) and all(
            isinstance(want, str) or have == want for have, want in zip(known.shape, shape, strict=True)
        )

    if known.dtype not in INDEX or not any(map(fits, shapes)):
        texts = [f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})" for shape in shapes]
        raise ValueError(
            f"{name}: expected shape {' or '.join(texts)} and dtype {' or '.join(INDEX)}, got {known.shape} and"
            f" {known.dtype}"
        )
    check_device(name, known, first, where)
    return name, known, array


def index_as(name: str, array: Any, known: Facts, dtype: str) -> Any:
    """Indices, int32 or int64, converted to `dtype`, contiguous and aligned.

    A conversion copies, on a GPU by an elementwise kernel on the current stream. From int64 to int32 it takes two
    kernels: numbers outside the range of int32 are clamped, so that none turns into a valid index.

    Raises
    ------
    ValueError
        For an array on a GPU that needs a copy, and whose library is neither PyTorch nor CuPy.
    """
    if known.device == "cpu" and not (arrays.is_torch(array) or arrays.is_numpy(array)):
        array = arrays.as_numpy(array)  # which has the operations below, and shares the memory
        known = arrays.facts(name, array)
    if known.dtype == dtype:
        return arrays.ready(name, array, known)
    narrow = dtype == "int32"
    least, most = -(2**31), 2**31 - 1
    if arrays.is_torch(array):
        torch = sys.modules["torch"]
        array = array.detach().clamp(least, most) if narrow else array.detach()
        return array.to(getattr(torch, dtype), memory_format=torch.contiguous_format)
    if known.device != "cpu" and not arrays.is_cupy(array):
        raise ValueError(
            f"{name}: expected {dtype} of a {type(array).__name__} on a GPU, got {known.dtype}; convert it first"
        )
    return (array.clip(least, most) if narrow else array).astype(dtype, order="C")


def passed(beside: tuple[str, Facts, Any], shape: tuple[int, ...] | None = None) -> Any:
    """The object passed to the kernel for an array checked by `facts_beside`, reshaped if `shape` is given."""
    name, known, array = beside
    ready = arrays.ready(name, array, known)
    return arrays.argument(ready if shape is None or shape == known.shape else arrays.reshaped(ready, shape))


# Functions with a backward pass, each by its custom operator.
TORCH_ALONE = "there is one where all arrays are torch tensors; call it under torch.no_grad()"


def no_gradient(name: str, instead: str = "") -> str:
    """The message for an argument that requires a gradient, of a function without one."""
    return f"{name}: requires a gradient, and there is no backward pass; " + (
        instead or "call it under torch.no_grad()"
    )


def refuse_gradient(name: str, array: Any, instead: str = "") -> None:
    """Raise for a torch tensor that requires a gradient or has a tangent; `instead` names a function with a
    gradient.
    """
    if not arrays.is_torch(array):
        return
    if array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise RuntimeError(no_gradient(name, instead))
    if _forward_mode() and sys.modules["torch"].autograd.forward_ad.unpack_dual(array).tangent is not None:
        raise RuntimeError(
            f"{name}: has a tangent, and there is no forward-mode derivative; pass"
            " torch.autograd.forward_ad.unpack_dual(...).primal"
        )


def _forward_mode() -> bool:
    """Whether this is within `torch.autograd.forward_ad.dual_level`, since only there tensors have tangents."""
    return sys.modules["torch.autograd.forward_ad"]._current_level >= 0


def without_gradient(array: Any) -> Any:
    """A parameter of PyTorch as a plain tensor if gradients are off; anything else unchanged."""
    torch = sys.modules.get("torch")
    if torch is not None and type(array) is torch.nn.Parameter and not torch.is_grad_enabled():
        return array.detach()
    return array


def outputs_for(out: Any, wanted: tuple[tuple[str, tuple[int, ...], str], ...], like: Any, known: Facts) -> list[Any]:
    """The arrays to write into: new ones, or those of `out` after a check."""
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
        refuse_gradient(name, array)
        if arrays.is_jax(array):
            raise TypeError(f"{name}: arrays of JAX are immutable; call it without")
        if arrays.is_torch(array) != arrays.is_torch(like):
            wanted_kind = "a torch tensor" if arrays.is_torch(like) else "an array that is no torch tensor"
            raise ValueError(f"{name}: expected {wanted_kind}, as the input is, got {type(array).__name__}")
        if theirs.shape != shape or theirs.dtype != dtype:
            raise ValueError(f"{name}: expected shape {shape} and dtype {dtype}, got {theirs.shape} and {theirs.dtype}")
        if (theirs.device, theirs.index) != (known.device, known.index):
            raise ValueError(
                f"{name}: expected an array on {known.device}:{known.index}, got {theirs.device}:{theirs.index}"
            )
        if not theirs.contiguous or not theirs.aligned:
            raise ValueError(f"{name}: expected a contiguous, writeable and aligned array")
    return given


def fill(array: Any, value: float) -> None:
    if arrays.is_torch(array):
        array.detach().fill_(value)
    else:
        array[...] = value
