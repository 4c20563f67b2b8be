"""Helpers for PyTorch modules: their effective tensors, whether a layer of this package may replace them, and
all-or-nothing conversion of this package's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..core.problem import FLOATS

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in FLOATS}
DEVICES = ("cpu", "cuda", "meta")


def effective(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The effective tensor of this name with which a module computes, without a gradient; None if it has none.

    This is the parameter, or the tensor that its next call would compute from parameters: masked
    (`torch.nn.utils.prune`), parametrized (`torch.nn.utils.parametrize`), or normalised (`weight_norm`,
    `spectral_norm`, of either kind). The power iteration of a spectral norm is not performed: buffers do not change.
    """
    with torch.no_grad():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
                return hook.apply_mask(module).detach()
            if isinstance(hook, WeightNorm) and hook.name == name:
                return hook.compute_weight(module).detach()
            if isinstance(hook, SpectralNorm) and hook.name == name:
                return hook.compute_weight(module, do_power_iteration=False).detach()
        if parametrize.is_parametrized(module, name):
            parts: Any = module.parametrizations[name]  # type: ignore[index, union-attr]
            training = [part for part in parts.modules() if part.training]
            try:
                for part in training:
                    part.training = False
                found = parts()
            finally:
                for part in training:
                    part.training = True
            return found.detach()
    found = getattr(module, name, None)
    return None if found is None else found.detach()


def parameters_of(module: torch.nn.Module, name: str) -> Iterator[torch.nn.Parameter]:
    """The parameters from which a module computes the tensor of this name."""
    if parametrize.is_parametrized(module, name):
        yield from module.parametrizations[name].parameters()  # type: ignore[index, union-attr]
    for suffix in ("", "_orig", "_g", "_v"):
        found = module._parameters.get(name + suffix)
        if found is not None:
            yield found


def parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """The parameter of this name; if a module computes the tensor from others, a new parameter with
    its present value.
    """
    found = module._parameters.get(name)
    made = effective(module, name)
    if found is not None or made is None:
        return found
    return torch.nn.Parameter(made.clone(), trained(module, name))


def trained(module: torch.nn.Module, name: str) -> bool:
    """Whether gradients flow to the tensor of this name."""
    return any(parameter.requires_grad for parameter in parameters_of(module, name))


def plain_class(module: torch.nn.Module) -> type:
    """The class of a module; for a parametrized one its original class."""
    kind = type(module)
    # PyTorch makes a separate subclass for every parametrized module.
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def own_forward(module: torch.nn.Module, *kinds: type) -> str | None:
    """Why this module cannot be replaced by a layer of this package: its `forward` is not that of one of these classes.

    None if it is.
    """
    forward = getattr(type(module), "forward", None)
    if "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own, set on the module"
    if not any(forward is kind.forward for kind in kinds):  # type: ignore[attr-defined]
        return f"{type(module).__name__} has a forward of its own"
    return None


def refuse_own_forward(name: str, module: torch.nn.Module, *kinds: type, instead: str) -> None:
    """Raise TypeError for a module that computes something else than its base class."""
    why = own_forward(module, *kinds)
    if why is not None:
        raise TypeError(f"{name}: {why}, which no layer here computes; {instead}")


def check_conversion(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise before `Module._apply` changes anything, if `fn` makes a dtype or device without a kernel.

    Raises
    ------
    TypeError
        Naming the dtype or the device, and the supported ones.
    """
    kinds = {(tensor.dtype, tensor.device) for tensor in [*module.parameters(False), *module.buffers(False)]}
    for dtype, device in kinds:
        if not (dtype.is_floating_point or dtype.is_complex):
            continue
        found = fn(torch.empty(0, dtype=dtype, device=device))
        what = type(module).__name__
        if found.dtype not in DTYPES:
            raise TypeError(
                f"dtype: {what} computes in {', '.join(FLOATS)}, got {found.dtype}; the module stays as it was. Convert"
                " it to one of these, or the rest of the model alone"
            )
        if found.device.type not in DEVICES:
            raise TypeError(
                f"device: {what} computes on {' and '.join(DEVICES[:2])}, got {found.device}; the module stays as it"
                " was"
            )
