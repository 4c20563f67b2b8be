"""Custom operators of PyTorch, by which public functions become part of graphs and get gradients.

An operator's `torch_op` module, which is imported only with PyTorch, defines a custom operator for each of its
functions (`define`), and a version of the public function that torch.compile can trace. Eager calls with plain tensors
never come here: a public function calls `transformed` only if no launcher fits the call.
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
_libraries: list[Any] = []  # an operator exists as long as the library object that defined it


def transformed(*given: Any, differentiable: bool = False) -> bool:
    """Whether a call with these arrays (or None) has to go through its custom operator.

    It is false if one is not PyTorch's. It is true where PyTorch has to see the call: while torch.jit.trace records,
    for tensors without data (of fake mode, torch.export, torch.func), within a dispatch mode, and for a tensor that
    requires a gradient, if the function is `differentiable`.

    Raises
    ------
    RuntimeError
        Within derivatives of torch.func, which do not support the backward passes of custom operators.
    """
    torch = sys.modules.get("torch")
    if torch is None or arrays.here.below:
        return False
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
    if not watched and not differentiable and torch._C._functorch.peek_interpreter_stack() is None:
        for array in given:  # a loop, as every call that draws without a seed comes here
            if array is not None and type(array) is not torch.Tensor:
                break
        else:
            return False
    tensors = [array for array in given if array is not None]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    if any(map(torch._C._functorch.is_gradtrackingtensor, tensors)):
        raise RuntimeError(
            "torch.func.grad, vjp, jvp and what is made of them do not go through custom operators of PyTorch; use"
            " torch.autograd.grad"
        )
    if differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return watched or any(map(arrays.stands_for_data, tensors))


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
        A schema of `torch.library`: `name(arguments) -> results`. The functions below get all arguments, including
        those that have their default.
    call
        Computes the results. For fake tensors it checks them and makes the outputs, and launches nothing.
    batched
        Rule for vmap: `(info, in_dims, *arguments) -> (results, out_dims)`.
    backward, setup
        As in `torch.library.register_autograd`.
    launched
        Finds the launcher of a call with plain tensors, so that later calls like it skip the operator's Python code:
        `(launchers, *arguments) -> (launcher, before)`, as for `repeat.remember_operator`; the launcher is None if
        there is none. `launchers` is the dispatcher's dict before the call.
    """
    import torch

    name = schema.partition("(")[0]
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    qualified = f"{NAMESPACE}::{name}"
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    defaults = [argument.default_value for argument in overload._schema.arguments]
    # Defaults of the arguments after the first ones. PyTorch drops trailing arguments that have their default.
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
        graph = torch._C._get_tracing_state()
        if graph is None:
            args = tuple(map(plain, args))
        found = repeat.recalled(dispatch.dispatcher.launchers, qualified, args)
        if found is not None:
            return found
        before, arrays.here.below = arrays.here.below, True
        if graph is not None:  # a trace shows the operator, not its inner calls
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

    def beneath(keyset: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Differentiated(torch.autograd.Function):
        """What torch.library.register_autograd would register, but for the defaults of the schema's arguments, which
        that makes anew in every call, in a third of its time.
        """

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *args, keyset = given
            results = repeat.recalled(dispatch.dispatcher.launchers, qualified, tuple(map(plain, args)))
            if results is None:
                results = beneath(keyset, tuple(args))
            if setup is not None:
                setup(ctx, (*args, *rest[len(args)]), results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            found = backward(ctx, *grads)
            return (*found, None) if isinstance(found, tuple) else (found, None)

    Differentiated.__name__ = f"GradientOf_{name}"

    def front(keyset: Any, *args: Any) -> Any:
        """Call the operator, with its gradient where one is required. Plain tensors skip PyTorch's layers, which take
        three times as long as a call.
        """
        eager = args
        if torch._C._any_requires_grad(*args):
            if torch.is_grad_enabled():
                return Differentiated.apply(*args, keyset)
            if torch._C._get_tracing_state() is None:
                eager = tuple(map(plain, args))
        found = repeat.recalled(dispatch.dispatcher.launchers, qualified, eager)
        if found is not None:
            return found
        return beneath(keyset, args) if repeat.key_of(None, eager) is None else computed(eager)

    library.impl(name, front, "Autograd", with_keyset=True)
    return overload


def plain(one: Any) -> Any:
    """A parameter, or a tensor that requires a gradient, as a tensor of the same memory: where nothing records a
    gradient, calls of a training step are then repeated like others.
    """
    torch = sys.modules["torch"]
    kind = type(one)
    return one.detach() if kind is torch.nn.Parameter or (kind is torch.Tensor and one.requires_grad) else one


def call(operator: Any, *args: Any) -> Any:
    """Call a custom operator. An eager call of plain tensors like one before skips PyTorch's dispatcher, which takes
    longer than the call.
    """
    torch = sys.modules["torch"]
    if not torch.compiler.is_compiling():
        known = args if torch.is_grad_enabled() else tuple(map(plain, args))
        found = repeat.recalled(dispatch.dispatcher.launchers, operator._name.partition(".")[0], known)
        if found is not None:
            return found
    return operator(*args)


def unseen(*tensors: Any) -> bool:
    """Whether nothing of PyTorch but its recording of gradients may see a computation with these tensors (or None)."""
    torch = sys.modules["torch"]
    kinds = torch.Tensor, torch.nn.Parameter
    return (
        all([one is None or type(one) in kinds for one in tensors])
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def number(value: Any) -> tuple[Any, Any]:
    """A float argument in the form of the operators' schemas: (the number, None), or (1.0, a 0-d tensor with its
    value).

    The second form is for 0-d tensors and symbolic floats of torch.compile: passed as a float, the number would be a
    constant of the graph, and each value would need another graph. A tensor with a number of each row has it, too.
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
    """What `number` encoded: a float, or the tensor with one of each row. Where that is a fake tensor of no dimension,
    which has no value, it is the number beside it.
    """
    if tensor is not None and tensor.dim():
        return tensor
    return given if tensor is None or arrays.is_fake(tensor) else tensor.item()


def of_rows_in_front(tensor: Any, dim: int | None, leading: Any) -> Any:
    """A number that may differ from row to row, as `number` encodes it, under vmap over rows with the dimensions
    `leading`, of which vmap's is the first.
    """
    if tensor is None or (dim is None and not tensor.dim()):
        return tensor
    found = in_front(tensor, dim, leading[0])
    return found.view(*found.shape, *[1] * (len(leading) - found.dim())).expand(leading)


def without_backward(name: str, instead: str = "") -> Callable[..., Any]:
    """The backward pass of a custom operator without one: it raises an error that names the function to use
    `instead`.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(no_gradient(name, instead))

    return backward


def in_front(tensor: Any, dim: int | None, size: int) -> Any:
    """The tensor with vmap's dimension moved to the front, or broadcast along it if it has none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def unbatched(name: str, dims: Any, names: tuple[str, ...]) -> None:
    """Check that vmap does not map over these arguments.

    Raises
    ------
    ValueError
        Naming the first argument that it maps over.
    """
    for argument, dim in zip(names, dims, strict=True):
        if dim is not None and dim != []:
            raise ValueError(f"{argument}: vmap over this argument of {name} is not offered; call it in a loop")


def written(results: Any, out: Any) -> Any:
    """Copy results into `out` and return it, for a call in a graph.

    Raises
    ------
    ValueError
        If `out` does not fit.
    RuntimeError
        If a gradient is required, which cannot flow through `out`.
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
