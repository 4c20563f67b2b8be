"""Custom operators of PyTorch: how a public function stands in a graph, and how it gets a gradient.

An operator's `torch_op` module, which is imported with PyTorch only, gives each of its functions a custom operator by
`define`, and a form of the public function that torch.compile can follow. Plain tensors of eager calls never come
here: a public function asks `transformed` where its short way has failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..core import registry
from . import arrays, dispatch, repeat
from .calls import no_gradient

NAMESPACE = "tvm_sparse"
_libraries: list[Any] = []  # an operator is there as long as the library object that defined it


def transformed(*given: Any, differentiable: bool = False) -> bool:
    """Whether a call with these arrays, of which some may be None, has to go through its custom operator.

    Never if one is not PyTorch's. It has to where PyTorch wants to see it: while torch.jit.trace records, tensors
    without data (of fake mode, torch.export, torch.func), a mode that watches calls, and, of a function that is
    `differentiable`, a tensor that requires a gradient.

    Raises
    ------
    RuntimeError
        Within derivatives of torch.func, which do not know the backward passes of custom operators.
    """
    tensors = [array for array in given if array is not None]
    torch = sys.modules.get("torch")
    if torch is None or arrays.here.below or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    if (  # the usual case in fewer questions, as a call that draws without a seed asks each time
        not differentiable
        and not torch._C._len_torch_dispatch_stack()
        and not arrays.traced()
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(tensor) is torch.Tensor for tensor in tensors)
    ):
        return False
    if any(map(torch._C._functorch.is_gradtrackingtensor, tensors)):
        raise RuntimeError(
            "torch.func.grad, vjp, jvp and what is made of them do not go through custom operators of PyTorch; use"
            " torch.autograd.grad"
        )
    if differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return arrays.traced() or torch._C._len_torch_dispatch_stack() > 0 or any(map(arrays.stands_for_data, tensors))


def module_of(name: str) -> ModuleType:
    """The `torch_op` module of the operator `name`."""
    return registry.operators()[name].torch_op


def define(
    schema: str,
    call: Callable[..., Any],
    batched: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., Any] | None = None,
    launched: Callable[..., tuple[Any, tuple[Any, ...]]] | None = None,
) -> Any:
    """Define a custom operator, and return its only overload.

    Parameters
    ----------
    schema
        Of `torch.library`: `name(arguments) -> results`. What a call leaves out or gives as the schema has it comes to
        the functions here as any other argument.
    call
        Computes it. Of fake tensors, too: it then checks them and makes the outputs, and launches nothing.
    batched
        Rule of vmap: `(info, in_dims, *arguments) -> (results, out_dims)`.
    backward, setup
        As of `torch.library.register_autograd`.
    launched
        What ran in a call of plain tensors, so that calls like it need no Python of the operator: `(launchers,
        *arguments) -> (launcher, before)`, as `repeat.remember_operator` takes them; the launcher is None if there is
        none.
        `launchers` are those of the dispatcher before the call.
    """
    import torch

    name = schema.partition("(")[0]
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    qualified = f"{NAMESPACE}::{name}"
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    defaults = [argument.default_value for argument in overload._schema.arguments]
    # What follows the first arguments. PyTorch drops those at the end that are their defaults.
    rest = [tuple(defaults[given:]) for given in range(len(defaults) + 1)]

    def computed(args: tuple[Any, ...]) -> Any:
        launchers, whole = dispatch.dispatcher.launchers, (*args, *rest[len(args)])
        results = call(*whole)
        if launched is not None and repeat.key_of(None, args) is not None:
            launcher, before = launched(launchers, *whole)
            if launcher is not None:
                repeat.remember_operator(launchers, qualified, args, launcher, before)
        return results

    set_tracing: Callable[[Any], None] = vars(torch._C)["_set_tracing_state"]

    def run(*args: Any) -> Any:
        found = repeat.recalled(dispatch.dispatcher.launchers, qualified, args)
        if found is not None:
            return found
        before, arrays.here.below = arrays.here.below, True
        graph = torch._C._get_tracing_state()
        if graph is not None:  # the operator is what a trace shows, and not what happens in it
            set_tracing(None)
        try:
            return computed(args)
        finally:
            arrays.here.below = before
            if graph is not None:
                set_tracing(graph)

    def mapped(info: Any, in_dims: Any, *args: Any) -> Any:
        return batched(info, (*in_dims, *[None] * len(rest[len(args)])), *args, *rest[len(args)])

    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(qualified, run, lib=library)
    torch.library.register_vmap(qualified, mapped, lib=library)
    # What torch.library.register_autograd registers.
    differentiated = torch._library.autograd.make_autograd_impl(overload, torch._library.autograd.Info(backward, setup))

    def front(keyset: Any, *args: Any) -> Any:
        """Plain tensors need nothing of what lies between here and `run`, which takes three times as long as a call."""
        found = repeat.recalled(dispatch.dispatcher.launchers, qualified, args)
        if found is not None:
            return found
        return differentiated(keyset, *args) if repeat.key_of(None, args) is None else computed(args)

    library.impl(name, front, "Autograd", with_keyset=True)
    return overload


def number(value: Any) -> tuple[Any, Any]:
    """A float argument as operators take it: (the number, None), or (1.0, a tensor of no dimension that holds it).

    The latter for such a tensor, and for a number that a graph of torch.compile knows only when it runs: as a float of
    the operator's schema it would be fixed, and each value would take a graph of its own.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return 1.0, value
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if not has_static_value(value):
            return 1.0, torch.ones((), dtype=torch.float64) * value
    return value, None


def value_of(given: Any, tensor: Any) -> Any:
    """The float that an operator was given by `number`; of a fake tensor, whose value nobody knows, the other one."""
    return given if tensor is None or arrays.is_fake(tensor) else tensor.item()


def without_backward(name: str, instead: str = "") -> Callable[..., Any]:
    """The backward pass of a custom operator that has none: an error that says what to use `instead`."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(no_gradient(name, instead))

    return backward


def in_front(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with the dimension of vmap in front; broadcast along it if it has none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def unbatched(name: str, dims: Any, names: tuple[str, ...]) -> None:
    """Raise for arguments that vmap may not map over.

    Raises
    ------
    ValueError
        Naming the first of them that it maps over.
    """
    for argument, dim in zip(names, dims, strict=True):
        if dim is not None and dim != []:
            raise ValueError(f"{argument}: vmap over this argument of {name} is not offered; call it in a loop")


def written(results: Any, out: Any) -> Any:
    """What a call with `out` returns in a graph: its results, copied there.

    Raises
    ------
    ValueError
        If `out` does not fit.
    RuntimeError
        If a gradient is wanted, which cannot go through `out`.
    """
    if out is None:
        return results
    several = isinstance(results, (tuple, list))
    given, wanted = (out, results) if several else ((out,), (results,))
    if len(given) != len(wanted):
        raise ValueError(f"out: expected {len(wanted)} arrays, got {len(given)}")
    for have, want in zip(given, wanted):  # noqa: B905 (torch.compile)
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ValueError(
                f"out: expected shape {tuple(want.shape)} and dtype {want.dtype}, got {tuple(have.shape)} and"
                f" {have.dtype}"
            )
        if want.requires_grad or have.requires_grad:
            raise RuntimeError("out: a gradient is wanted, and none goes through `out`; call it without")
        have.copy_(want)
    return out
