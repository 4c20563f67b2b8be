"""The short way of a repeated call: what was checked for calls like it holds again.

A launcher is put down under what was asked for and the layouts (shape, dtype, device) of the tensors that the choice of
a kernel depends on. What may differ between tensors of one layout is looked at every time: that a kernel takes them as
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
REVISION = 2  # of the extension that goes with this file: an editable install keeps one that was built before

_MISALIGNED = arrays.CUDA_ALIGNMENT - 1  # bits of an address that vector loads need to be 0


class Launcher(NamedTuple):
    """What `again` needs."""

    function: Any
    likes: tuple[Any, ...]  # prototypes of the outputs
    facts: Any  # of the outputs
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
        """Those that were put down while `launchers` were in use: with others, other kernels have been loaded."""
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
            and _forward_ad._current_level < 0
        )
    except RuntimeError:  # sparse layouts know neither contiguity nor an address
        return False


def _find_modes() -> int:
    """How many modes of PyTorch watch calls; from now on by PyTorch's own function, in a third of the time."""
    global _modes, _forward_ad
    import torch
    import torch.autograd.forward_ad

    _forward_ad = torch.autograd.forward_ad  # first: another thread may be here
    _modes = torch._C._len_torch_dispatch_stack
    return _modes()


# What `is_plain` asks at every call. Only within a level of forward mode do tensors have tangents.
_modes: Callable[[], int] = _find_modes
_forward_ad: Any = None


def _layouts(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a launcher depends on of these arguments; None if a kernel does not take all tensors as they are.

    The layouts of tensors, None, and of truth values, numbers and texts what tells 1, 1.0 and True apart.
    """
    torch = sys.modules.get("torch")
    found: list[Any] = []
    for one in given:
        if one is None:
            found.append(None)
        elif torch is not None and type(one) is torch.Tensor and _is_plain(one):
            found.append((one.shape, one.dtype, one.device))
        elif type(one) in (bool, int, float, str):
            found.append(repr(one))
        else:
            return None
    return tuple(found)


def _key_of(what: Any, given: tuple[Any, ...]) -> Any:
    """Under what a launcher for a call like this one is put down; None if one of `given` is neither plain nor a value.

    Values are None, truth values, numbers and texts.
    """
    like = _layouts(given)
    return None if like is None else (what, like)


def _repeated(launchers: dict[Any, Any], what: Any, given: tuple[Any, ...]) -> Any:
    """What was put down for a call like this one, or None: `what` was asked for, of these tensors and values."""
    key = _key_of(what, given)
    return None if key is None else launchers.get(key)


def _made(likes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([sys.modules["torch"].empty_like(like) for like in likes])


def _again(launchers: dict[Any, Any], what: Any, given: tuple[Any, ...], before: tuple[Any, ...], out: Any) -> Any:
    """Call the kernel of a `Launcher` with the arguments `before` the outputs; its outputs, or None if there is none.

    Also None if a tensor of `given` is not plain, or if `out` does not fit or overlaps with an argument.
    """
    found = _repeated(launchers, what, given)
    if found is None:
        return None
    if out is None:
        outputs = _made(found.likes)
    else:
        outputs = (out,) if found.single else out
        if type(outputs) is not tuple or _layouts(outputs) != found.facts:
            return None
        if any(arrays.overlap(one, other) for one in outputs for other in before if arrays.is_torch(other)):
            return None
    found.function(*before, *outputs)
    return out if out is not None else outputs[0] if found.single else outputs


def _recalled(launchers: dict[Any, Any], name: str, args: tuple[Any, ...]) -> Any:
    """The outputs of a call of the operator `name` that is like one to `remember`, or None.

    One look at the arguments serves the checks, the search and the call.
    """
    known = launchers.get(name)
    found = None if known is None else _repeated(known, None, args)
    if found is None:
        return None
    places, outputs = iter(found.places), _made(found.likes)
    found.function(*[args[next(places)] if one is None else one for one in found.before], *outputs)
    return outputs[0] if found.single else outputs


# As `use_native` says.
is_plain: Callable[..., bool] = _is_plain
key_of: Callable[..., Any] = _key_of
repeated: Callable[..., Any] = _repeated
again: Callable[..., Any] = _again
recalled: Callable[..., Any] = _recalled
_asked = False  # whether `native` was tried


def use_native(wanted: bool) -> None:
    """Take the functions of `native`, which has been prepared, or those here; keys of the one are none of the other."""
    global is_plain, key_of, repeated, again, recalled
    if wanted:
        is_plain, key_of = native.is_plain, native.key_of
        repeated, again, recalled = native.repeated, native.again, native.recalled
    else:
        is_plain, key_of, repeated, again, recalled = _is_plain, _key_of, _repeated, _again, _recalled


def put_down(launchers: dict[Any, Any], what: Any, given: tuple[Any, ...], found: Any) -> None:
    """Put down what `repeated` is to find the next time, unless a tensor of `given` is not plain."""
    if "torch" not in sys.modules:
        return
    _prepare()
    key = key_of(what, given)
    if key is not None:
        launchers[key] = found


def launcher(function: Any, outputs: tuple[Any, ...], single: bool = False) -> Launcher:
    """For calls like the one that has made these outputs, which are plain tensors."""
    _prepare()
    key = key_of(None, outputs)
    return Launcher(loading.settled(function), tuple(map(arrays.prototype, outputs)), key and key[1], single)


MOST = 1024  # calls of an operator that are remembered: some come in shapes without end


def remember(
    launchers: dict[Any, Any], name: str, args: tuple[Any, ...], launcher: Launcher, before: tuple[Any, ...]
) -> None:
    """Let `recalled` find this call of the operator `name`, whose kernel took the arguments `before` the outputs.

    Every tensor of `before` is one of `args`, and what else there is follows from the layouts and values of `args`.
    Nothing is remembered where a tensor stands twice among `args`, which leaves open where others stand.
    """
    places: list[int] = []
    for tensor in filter(arrays.is_torch, before):
        at = [place for place, one in enumerate(args) if one is tensor]
        if len(at) != 1:
            return
        places += at
    recipe = tuple([None if arrays.is_torch(one) else one for one in before])
    known = launchers.setdefault(name, {})
    if len(known) >= MOST:
        known.clear()
    put_down(known, None, args, Recipe(launcher.function, launcher.likes, launcher.single, recipe, tuple(places)))


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
    modes, tangents = torch._C._len_torch_dispatch_stack, vars(torch.autograd.forward_ad)
    if native.prepare(torch.Tensor, torch.Tensor.is_neg, torch.empty_like, modes, tangents, table):
        use_native(True)
