"""Fast repetition of a call: checks that held for an earlier call with arguments of the same kinds are skipped.

A launcher is stored under the kinds of the kernel's arguments: the layouts (shape, dtype, device) of tensors, and for
numbers whether they are integers or floats, not their values. So it is found only for arguments of the same kinds, and
a call that made one of its arguments itself (uniform numbers from a seed) is not mistaken for one that passes it.
Properties that may differ between tensors of one layout are checked every time: that a kernel accepts them unchanged
(`is_plain`), and that `out` fits. If a check fails, the call takes the slow path, which reports errors.

The extension `native` does the same in C, in a third of the time, if it was built and PyTorch has DLPack's table of
functions (2.10 and later); `TVM_SPARSE_NATIVE=0` disables it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import arrays, loading

try:
    from . import native
except ImportError:  # the package was installed without a C compiler
    native = None  # type: ignore[assignment]

logger = logging.getLogger("tvm_sparse")
NATIVE = "TVM_SPARSE_NATIVE"
REVISION = 4  # of the extension that this file needs: an editable install may keep an older build

_MISALIGNED = arrays.CUDA_ALIGNMENT - 1  # address bits that must be 0 for vector loads


class Launcher(NamedTuple):
    """A kernel with the data that `again` needs to call it."""

    function: Any
    likes: tuple[Any, ...]  # prototypes of the outputs
    single: bool  # one output, returned without a tuple


class Recipe(NamedTuple):
    """A custom operator's call, with the data that `recalled` needs to repeat it."""

    function: Any
    likes: tuple[Any, ...]
    single: bool  # these three as in `Launcher`
    before: tuple[Any, ...]  # the kernel's arguments before the outputs; None where a call gives one
    places: tuple[int, ...]  # indices of these among the arguments of the call


class Own:
    """The launchers of one weight or structure, whose arrays calls do not pass again."""

    def __init__(self) -> None:
        self._launchers: dict[Any, Any] = {}
        self._beside: Any = None

    def of(self, launchers: dict[Any, Any]) -> dict[Any, Any]:
        """The launchers stored while `launchers` was in use; a new, empty dict if it was replaced, since kernels have
        changed.
        """
        if self._beside is not launchers:
            self._beside, self._launchers = launchers, {}
        return self._launchers


def _is_plain(tensor: Any) -> bool:
    """Whether a kernel accepts a torch tensor unchanged."""
    try:
        address = tensor.data_ptr()  # 0 for an empty tensor, or one without data
        return (
            address != 0
            and not address & _MISALIGNED
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and not tensor.is_neg()
            and not _modes()
            and _tracing() is None
            and _forward_ad._current_level < 0
        )
    except RuntimeError:  # sparse layouts have neither contiguity nor an address
        return False


def _find_modes() -> int:
    """Number of PyTorch's active dispatch modes; replaces itself by PyTorch's own function, which takes a third of the
    time.
    """
    global _modes, _tracing, _forward_ad
    import torch
    import torch.autograd.forward_ad

    _forward_ad = torch.autograd.forward_ad  # first: another thread may be in this function
    _tracing = torch._C._get_tracing_state
    _modes = torch._C._len_torch_dispatch_stack
    return _modes()


# State that `is_plain` checks at every call. Tensors have tangents only within a level of forward mode.
_modes: Callable[[], int] = _find_modes
_tracing: Callable[[], Any] = _find_modes  # the graph that torch.jit.trace records, or None; checked after `_modes`
_forward_ad: Any = None


def _kind(one: Any) -> Any:
    """The kind of a kernel's argument that is not a tensor; `_NO_KIND` if it has none."""
    if one is None:
        return None
    if type(one) is int and -(2**63) <= one < 2**63:
        return int
    return float if type(one) is float else _NO_KIND


def _value(one: Any) -> Any:
    """A key for a setting's value that also tells 1, 1.0 and True apart."""
    if one is None:
        return None
    return repr(one) if type(one) in (bool, int, float, str) else _NO_KIND


_NO_KIND = object()


def _layouts(given: tuple[Any, ...], of_others: Callable[[Any], Any], free: int = 0) -> tuple[Any, ...] | None:
    """The layouts of the tensors among these arguments, and the result of `of_others` for the rest.

    Extents of a tensor whose bit of `free` is set are left out. None if a kernel does not accept all tensors unchanged,
    or for an argument of unknown kind.
    """
    torch = sys.modules.get("torch")
    found: list[Any] = []
    for i, one in enumerate(given):
        if torch is not None and type(one) is torch.Tensor:
            if not _is_plain(one):
                return None
            found.append((one.dim() if free >> i & 1 else one.shape, one.dtype, one.device))
            continue
        kind = of_others(one)
        if kind is _NO_KIND:
            return None
        found.append(kind)
    return tuple(found)


def _key_of(what: Any, given: tuple[Any, ...]) -> Any:
    """The key of a custom operator's call, with the values of its non-tensor arguments; None if an argument is neither
    a plain tensor nor a value. Values are None, truth values, numbers and texts.
    """
    like = _layouts(given, _value)
    return None if like is None else (what, like)


def _kinds_of(what: Any, arguments: tuple[Any, ...], free: int = 0) -> Any:
    """The key of a kernel's launcher for these arguments, in which numbers count by their kinds only; None as in
    `key_of`.

    Bit i of `free` says that the kernel accepts any extents of the i-th argument, as for the entries of sparse rows.
    """
    like = _layouts(arguments, _kind, free)
    return None if like is None else (what, like)


def _repeated(launchers: dict[Any, Any], what: Any, arguments: tuple[Any, ...], free: int = 0) -> Any:
    """The launcher stored by `remember` for arguments of these kinds, or None."""
    key = _kinds_of(what, arguments, free)
    return None if key is None else launchers.get(key)


def _made(likes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([sys.modules["torch"].empty_like(like) for like in likes])


def _fits(outputs: tuple[Any, ...], likes: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    """Whether each output has the layout of its prototype, and shares no memory with an argument or another output."""
    if len(outputs) != len(likes) or _layouts(outputs, _value) != tuple([(o.shape, o.dtype, o.device) for o in likes]):
        return False
    read = [one for one in arguments if arrays.is_torch(one)]
    return not any(arrays.overlap(one, other) for i, one in enumerate(outputs) for other in (*outputs[:i], *read))


def _again(launchers: dict[Any, Any], what: Any, arguments: tuple[Any, ...], out: Any, free: int = 0) -> Any:
    """Call the kernel of the launcher for these arguments (None for absent ones), and return its outputs.

    Returns None, without a call, if there is no launcher, a tensor is not plain, or `out` does not fit or overlaps with
    an argument.
    """
    found = _repeated(launchers, what, arguments, free)
    if found is None:
        return None
    if out is None:
        outputs = _made(found.likes)
    else:
        outputs = (out,) if found.single else out
        if type(outputs) is not tuple or not _fits(outputs, found.likes, arguments):
            return None
    found.function(*[one for one in arguments if one is not None], *outputs)
    return out if out is not None else outputs[0] if found.single else outputs


def again_by_rows(launchers: dict[Any, Any], what: Any, arguments: tuple[Any, ...], out: Any) -> Any:
    """As `again`, for a function of one output whose first argument `(..., k)` may have any number of dimensions: with
    three and more its rows are those of a call with two.
    """
    found = again(launchers, what, arguments, out)
    x = arguments[0]
    if found is not None or out is not None or getattr(x, "ndim", 0) < 3 or not arrays.is_torch(x) or not is_plain(x):
        return found
    found = again(launchers, what, (x.flatten(0, -2), *arguments[1:]), None)
    return None if found is None else found.view(*x.shape[:-1], found.shape[-1])


def _recalled(launchers: dict[Any, Any], name: str, args: tuple[Any, ...]) -> Any:
    """Repeat a call of the operator `name` that `remember_operator` stored, and return its outputs; None if there is
    none.

    The arguments are examined once for the checks, the look-up and the call.
    """
    known = launchers.get(name, {})
    key = _key_of(None, args) if known else None
    found = None if key is None else known.get(key)
    if found is None:
        return None
    places, outputs = iter(found.places), _made(found.likes)
    found.function(*[args[next(places)] if one is None else one for one in found.before], *outputs)
    return outputs[0] if found.single else outputs


# Set by `use_native`.
is_plain: Callable[..., bool] = _is_plain
key_of: Callable[..., Any] = _key_of
kinds_of: Callable[..., Any] = _kinds_of
repeated: Callable[..., Any] = _repeated
again: Callable[..., Any] = _again
recalled: Callable[..., Any] = _recalled
_asked = False  # whether loading `native` was attempted


def use_native(wanted: bool) -> None:
    """Use the functions of `native`, which must be prepared, or those of this module; launchers of one are not found by
    the other.
    """
    global is_plain, key_of, kinds_of, repeated, again, recalled
    if wanted:
        is_plain, key_of, kinds_of = native.is_plain, native.key_of, native.kinds_of
        repeated, again, recalled = native.repeated, native.again, native.recalled
    else:
        is_plain, key_of, kinds_of = _is_plain, _key_of, _kinds_of
        repeated, again, recalled = _repeated, _again, _recalled


MOST = 1024  # launchers kept for all functions, and for each operator: some callers use ever new shapes


def _keep(launchers: dict[Any, Any], key: Any, found: Any) -> None:
    if len(launchers) >= MOST and key not in launchers:
        launchers.clear()
    launchers[key] = found


def remember(
    launchers: dict[Any, Any],
    what: Any,
    arguments: tuple[Any, ...],
    function: Any,
    outputs: tuple[Any, ...],
    single: bool = False,
    free: int = 0,
) -> None:
    """Store a launcher with which `again` calls a kernel for arguments of these kinds.

    Parameters
    ----------
    what
        Everything beside the arguments on which the choice of kernel and the shapes of its outputs depend.
    arguments
        The kernel's arguments before the outputs; None for absent ones. Nothing is stored unless all are plain tensors,
        integers or floats.
    function, outputs
        The kernel, and the torch tensors that it wrote.
    single
        Whether the call returns one array instead of a tuple.
    free
        Bits of the arguments that may have other extents, as in `kinds_of`.
    """
    if "torch" not in sys.modules:
        return
    _prepare()
    key = kinds_of(what, arguments, free)
    if key is not None:
        _keep(launchers, key, Launcher(loading.settled(function), tuple(map(arrays.prototype, outputs)), single))


def remember_operator(
    launchers: dict[Any, Any], name: str, args: tuple[Any, ...], launcher: Launcher, before: tuple[Any, ...]
) -> None:
    """Store this call of the operator `name` for `recalled`; `before` are its kernel's arguments before the outputs.

    Every tensor in `before` must be one of `args`, and everything else must follow from the layouts and values of
    `args`; None marks absent arguments. Nothing is stored if a tensor occurs twice among `args`, since its position in
    other calls would be ambiguous.
    """
    before = tuple([one for one in before if one is not None])
    places: list[int] = []
    for tensor in filter(arrays.is_torch, before):
        at = [place for place, one in enumerate(args) if one is tensor]
        if len(at) != 1:
            return
        places += at
    key = key_of(None, args)
    if key is not None:
        recipe = tuple([None if arrays.is_torch(one) else one for one in before])
        found = Recipe(launcher.function, launcher.likes, launcher.single, recipe, tuple(places))
        _keep(launchers.setdefault(name, {}), key, found)


def _prepare() -> None:
    """Use `native` from now on, if it is available; PyTorch must have been imported."""
    global _asked
    if _asked or native is None:
        return
    _asked = True
    import torch
    import torch.autograd.forward_ad

    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if os.environ.get(NATIVE) == "0" or table is None:
        return
    if getattr(native, "revision", None) != REVISION:
        logger.warning("%s was built from other sources, and is not used: install the package again", native.__name__)
        return
    modes, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
    tangents = vars(torch.autograd.forward_ad)
    if native.prepare(torch.Tensor, torch.Tensor.is_neg, torch.empty_like, modes, tracing, tangents, table):
        use_native(True)
