"""The short way of a repeated call: what was checked for calls like it holds again.

A launcher is kept under what the kernel was given: the layouts (shape, dtype, device) of its tensors, and of its
numbers whether they are integers or floats, whatever their values. So it is found for arguments of the same kinds
alone, and a call that made one of its arguments (uniform numbers of a seed) leaves nothing that could be mistaken for a
call that passes it. What may differ between tensors of one layout is looked at every time: that a kernel takes them as
they are (`is_plain`), and that `out` fits. Whatever is not so makes the call go the long way, which says what is wrong.

The extension `native` does the same in C, in a third of the time, where it was built and PyTorch has DLPack's table of
functions (2.10 and later); `TVM_SPARSE_NATIVE=0` leaves it alone.
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
except ImportError:  # no compiler where the package was installed
    native = None  # type: ignore[assignment]

logger = logging.getLogger("tvm_sparse")
NATIVE = "TVM_SPARSE_NATIVE"
REVISION = 4  # of the extension that goes with this file: an editable install keeps one that was built before

_MISALIGNED = arrays.CUDA_ALIGNMENT - 1  # bits of an address that vector loads need to be 0


class Launcher(NamedTuple):
    """What `again` needs."""

    function: Any
    likes: tuple[Any, ...]  # prototypes of the outputs
    single: bool  # one output, which is no tuple


class Recipe(NamedTuple):
    """What `recalled` needs."""

    function: Any
    likes: tuple[Any, ...]
    single: bool  # these three as of the launcher
    before: tuple[Any, ...]  # the kernel's arguments in front of the outputs, None for those that a call gives
    places: tuple[int, ...]  # of these among the arguments of the call


class Own:
    """The launchers of one weight or structure, whose arguments no call has to give again."""

    def __init__(self) -> None:
        self._launchers: dict[Any, Any] = {}
        self._beside: Any = None

    def of(self, launchers: dict[Any, Any]) -> dict[Any, Any]:
        """Those that were kept while `launchers` were in use: with others, other kernels have been loaded."""
        if self._beside is not launchers:
            self._beside, self._launchers = launchers, {}
        return self._launchers


def _is_plain(tensor: Any) -> bool:
    """Whether a kernel takes a torch tensor as it is."""
    try:
        address = tensor.data_ptr()  # 0: of nothing, or of a tensor that stands for another
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
    except RuntimeError:  # sparse layouts know neither contiguity nor an address
        return False


def _find_modes() -> int:
    """How many modes of PyTorch watch calls; from now on by PyTorch's own function, in a third of the time."""
    global _modes, _tracing, _forward_ad
    import torch
    import torch.autograd.forward_ad

    _forward_ad = torch.autograd.forward_ad  # first: another thread may be here
    _tracing = torch._C._get_tracing_state
    _modes = torch._C._len_torch_dispatch_stack
    return _modes()


# What `is_plain` asks at every call. Only within a level of forward mode do tensors have tangents.
_modes: Callable[[], int] = _find_modes
_tracing: Callable[[], Any] = _find_modes  # the graph that torch.jit.trace records, or None; `_modes` comes first
_forward_ad: Any = None


def _kind(one: Any) -> Any:
    """What kind of argument of a kernel this is, which is no tensor; `_NO_KIND` if of none."""
    if one is None:
        return None
    if type(one) is int and -(2**63) <= one < 2**63:
        return int
    return float if type(one) is float else _NO_KIND


def _value(one: Any) -> Any:
    """What tells one setting of an operator from another, also 1, 1.0 and True."""
    if one is None:
        return None
    return repr(one) if type(one) in (bool, int, float, str) else _NO_KIND


_NO_KIND = object()


def _layouts(given: tuple[Any, ...], of_others: Callable[[Any], Any], free: int = 0) -> tuple[Any, ...] | None:
    """The layouts of the tensors among these arguments, and what `of_others` says of the rest.

    Extents of a tensor whose bit of `free` is set are left out. None if a kernel does not take all tensors as they are,
    or for an argument of no known kind.
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
    """The key of a custom operator's call with these arguments, whose values count; None if one is neither plain nor a
    value. Values are None, truth values, numbers and texts."""
    like = _layouts(given, _value)
    return None if like is None else (what, like)


def _kinds_of(what: Any, arguments: tuple[Any, ...], free: int = 0) -> Any:
    """The key of a kernel's launcher for these arguments, of whose numbers only the kinds count; None as `key_of`.

    Bit i of `free` says that the kernel takes any extents of the i-th argument, as those of the entries of sparse rows.
    """
    like = _layouts(arguments, _kind, free)
    return None if like is None else (what, like)


def _repeated(launchers: dict[Any, Any], what: Any, arguments: tuple[Any, ...], free: int = 0) -> Any:
    """The launcher that `remember` kept for arguments like these, or None."""
    key = _kinds_of(what, arguments, free)
    return None if key is None else launchers.get(key)


def _made(likes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([sys.modules["torch"].empty_like(like) for like in likes])


def _fits(outputs: tuple[Any, ...], likes: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    """Whether each output is like its prototype, and shares no memory with an argument or another output."""
    if len(outputs) != len(likes) or _layouts(outputs, _value) != tuple([(o.shape, o.dtype, o.device) for o in likes]):
        return False
    read = [one for one in arguments if arrays.is_torch(one)]
    return not any(arrays.overlap(one, other) for i, one in enumerate(outputs) for other in (*outputs[:i], *read))


def _again(launchers: dict[Any, Any], what: Any, arguments: tuple[Any, ...], out: Any, free: int = 0) -> Any:
    """Call the kernel of a launcher with these arguments, None for one that is absent; its outputs, or None.

    None if there is no launcher, if a tensor is not plain, or if `out` does not fit or overlaps with an argument.
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


def _recalled(launchers: dict[Any, Any], name: str, args: tuple[Any, ...]) -> Any:
    """The outputs of a call of the operator `name` that is like one to `remember_operator`, or None.

    One look at the arguments serves the checks, the search and the call.
    """
    known = launchers.get(name, {})
    key = _key_of(None, args) if known else None
    found = None if key is None else known.get(key)
    if found is None:
        return None
    places, outputs = iter(found.places), _made(found.likes)
    found.function(*[args[next(places)] if one is None else one for one in found.before], *outputs)
    return outputs[0] if found.single else outputs


# As `use_native` says.
is_plain: Callable[..., bool] = _is_plain
key_of: Callable[..., Any] = _key_of
kinds_of: Callable[..., Any] = _kinds_of
repeated: Callable[..., Any] = _repeated
again: Callable[..., Any] = _again
recalled: Callable[..., Any] = _recalled
_asked = False  # whether `native` was tried


def use_native(wanted: bool) -> None:
    """Take the functions of `native`, which has been prepared, or those here; keys of the one are none of the other."""
    global is_plain, key_of, kinds_of, repeated, again, recalled
    if wanted:
        is_plain, key_of, kinds_of = native.is_plain, native.key_of, native.kinds_of
        repeated, again, recalled = native.repeated, native.again, native.recalled
    else:
        is_plain, key_of, kinds_of = _is_plain, _key_of, _kinds_of
        repeated, again, recalled = _repeated, _again, _recalled


MOST = 1024  # calls that are remembered, of all functions and of each operator: some come in shapes without end


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
    """Let `again` call a kernel for arguments of these kinds.

    Parameters
    ----------
    what
        What the choice of the kernel and the shapes of its outputs depend on beside the arguments.
    arguments
        What the kernel was given in front of the outputs, None for what is absent. Nothing is remembered if one of them
        is no plain tensor, integer or float.
    function, outputs
        The kernel, and what it wrote: torch tensors.
    single
        The call returns one array, which is no tuple.
    free
        Which of the arguments may have other extents, as `kinds_of` takes it.
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
    """Let `recalled` find this call of the operator `name`, whose kernel took the arguments `before` the outputs.

    Every tensor of `before` is one of `args`, and what else there is follows from the layouts and values of `args`;
    None stands for what is absent. Nothing is remembered where a tensor stands twice among `args`, which leaves open
    where others stand.
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
    """Use `native` from now on, if it can be had; PyTorch has been imported."""
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
