"""The arguments of a kernel as buffers of TVMScript, by the names under which the operator declares them.

    @T.prim_func
    def main(chosen: T.handle, candidates: T.handle, counts: T.handle):
        lists = T.int32()
        io = T.meta_var(matched(problem, (chosen, candidates, counts), {"lists": lists}))
        ... io.chosen[0, 0] ...

This module loads the compiler: it is imported when a function is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .problem import Problem, numpy_dtype


def matched(
    problem: Problem, parameters: Sequence[tirx.Var], symbols: Mapping[str, tirx.Var], packed: bool = False
) -> SimpleNamespace:
    """The parameters of the function that is being built, in calling order: buffers of the declared shapes and dtypes.

    Parameters
    ----------
    problem
        The problem that the function is for. Arguments that it does not have must not be touched: the finished
        function is to be trimmed of them (`Problem.trimmed`).
    parameters
        One for each of the operator's inputs and outputs, including those that the problem does not have.
    symbols
        The extents that are known only at run time, all of one integer type; they are attributes of the result too. An
        extent of absent arguments alone must not be used.
    packed
        Whether arrays are aligned to their elements only. Otherwise TVM's alignment is assumed.
    """
    found: dict[str, Any] = dict(symbols)
    kind = next(iter(symbols.values())).ty.dtype
    for name, symbol in symbols.items():
        IRBuilder.name(name, symbol)

    def extent(name: str | int) -> Any:
        return symbols[str(name)] if name in symbols else tirx.const(problem.extent(name), kind)

    for argument, parameter in zip((*problem.inputs, *problem.outputs), parameters, strict=True):
        if not argument.shape or not problem.has(argument):
            found[argument.name] = parameter
            continue
        dtype = problem.axes.get(argument.dtype, argument.dtype)
        buffer = T.match_buffer(
            parameter,
            tuple(map(extent, argument.shape)),
            dtype,
            align=numpy_dtype(dtype).itemsize if packed else -1,
        )
        IRBuilder.name(argument.name, buffer)
        found[argument.name] = buffer
    return SimpleNamespace(**found)


def beside(io: SimpleNamespace, more: Mapping[str, Any]) -> SimpleNamespace:
    """`io` with further attributes, which replace those of the same name. Buffers among them, such as workspaces, get
    the attribute's name in emitted code.
    """
    for name, value in more.items():
        if isinstance(value, tirx.Buffer):
            IRBuilder.name(name, value)
    return SimpleNamespace(**{**vars(io), **more})
