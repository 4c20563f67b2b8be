"""The functions of kernels and definitions, whose signatures derive from `Problem.inputs` and `Problem.outputs`.

A body is a `T.inline` of one argument, an object whose attributes are the arguments by the names under which the
operator declares them:

    @T.inline
    def body(io):
        ... io.chosen[0, 0] ...

    main = function(problem, body)

This module loads the compiler: it is imported when a function is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import from_source
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .problem import Argument, Problem, numpy_dtype
from .template import Workspace

Body = Callable[[Any], None]


def function(
    problem: Problem,
    body: Body,
    workspaces: Sequence[Workspace] = (),
    *,
    blocks: bool = False,
    packed: bool = False,
    index: str = "int32",
    names: Mapping[str, str] | None = None,
    unread: Collection[str] = (),
) -> tirx.PrimFunc:
    """The function `main` of a problem's kernels, with `body` as its body.

    Its parameters are the problem's inputs, outputs and workspaces in calling order. The object that `body` is called
    with has as attributes

    - the arguments, by name: buffers of the declared shapes and dtypes, and scalars; None for those that the operator
      has and this problem does not;
    - the extents that are known only at run time, by name: those of `Problem.run_time_extents` that occur in a shape;
    - `lists`, `beam`, the rows of a list, and `rows` of all lists, where the operator has lists; an operator without
      them has one list, of all rows of its batch;
    - the workspaces, by name, whose shapes may say "rows", too;
    - `problem`.

    Parameters
    ----------
    blocks
        `body` consists of SBlocks (`T.sblock`), for schedule primitives or a CPU, and no two arguments overlap. Without
        it `body` is a kernel with explicit threads.
    packed
        Arrays are aligned to their elements and no more, as those of other libraries are; else to TVM's 64 bytes.
    index
        Integer type of the extents, and so of index arithmetic.
    names
        What buffers are called in emitted code, where it is not the argument's name. The code generator sorts a
        kernel's parameters by these names: other names are other machine code.
    unread
        Arguments that get no buffer, because no code reads them.

    Raises
    ------
    ValueError
        A workspace has the name of another attribute.
    """
    given = (*problem.kernel_inputs, *problem.kernel_outputs)
    kinds = {a.name: "handle" if a.shape else problem.dtype_of(a) for a in given}
    own = {f"own_{workspace.name}": workspace for workspace in workspaces}
    kinds |= dict.fromkeys(own, "handle")

    def io(*parameters: tirx.Var) -> SimpleNamespace:
        by_name = dict(zip(kinds, parameters, strict=True))
        found = _arguments(problem, by_name, packed=packed, index=index, names=names or {}, unread=unread)
        held = {w.name: _workspace(problem, w, by_name[name], found, packed, index) for name, w in own.items()}
        if clashing := held.keys() & vars(found).keys():
            raise ValueError(f"workspaces have names that are taken: {', '.join(sorted(clashing))}")
        for name, buffer in held.items():
            IRBuilder.name((names or {}).get(name, name), buffer)
        return SimpleNamespace(**vars(found), **held)

    signature = ", ".join(f"{name}: T.{kind}" for name, kind in kinds.items())
    text = f"""
@T.prim_func{"(s_tir=True)" if blocks else ""}
def main({signature}):
    {'T.func_attr({"tirx.noalias": True})' if blocks else "pass"}
    body_(io_({", ".join(kinds)}))
"""
    return from_source(text, {"T": T, "body_": body, "io_": io}).with_attr("global_symbol", "main")


def _arguments(
    problem: Problem,
    parameters: Mapping[str, tirx.Var],
    *,
    packed: bool,
    index: str,
    names: Mapping[str, str],
    unread: Collection[str],
) -> SimpleNamespace:
    """The arguments among the parameters of the function that is being built, as `function` says."""
    arguments = (*problem.inputs, *problem.outputs)
    read = [a for a in arguments if a.name in parameters and a.shape and a.name not in unread]
    shown = {str(extent).removesuffix(" + 1") for argument in read for extent in argument.shape}
    symbols = {name: getattr(T, index)() for name in problem.run_time_extents if name in shown}
    for name, symbol in symbols.items():
        IRBuilder.name(name, symbol)

    def extent(name: str | int) -> Any:
        base, _, factor = str(name).removesuffix(" + 1").partition(" * ")
        if base in symbols:
            found = symbols[base] * tirx.const(problem.extent(factor), index) if factor else symbols[base]
            return found + tirx.const(1, index) if str(name).endswith(" + 1") else found
        return tirx.const(problem.extent(name), index)

    def buffer(argument: Argument) -> tirx.Buffer:
        dtype = problem.dtype_of(argument)
        made = T.match_buffer(
            parameters[argument.name],
            tuple(map(extent, argument.shape)),
            dtype,
            align=numpy_dtype(dtype).itemsize if packed else -1,
        )
        IRBuilder.name(names.get(argument.name, argument.name), made)
        return made

    buffers = {argument.name: buffer(argument) for argument in read}
    others = {a.name: None if a.shape else parameters.get(a.name) for a in arguments}
    rows = symbols.get(problem.batch_axis)
    lists: dict[str, Any] = {"lists": 1, "beam": rows, "rows": rows}
    if "lists" in symbols and "beam" in problem.axes:
        beam = symbols.get("beam", problem.axes["beam"])
        lists = {"beam": beam, "rows": symbols["lists"] * beam}
    return SimpleNamespace(problem=problem, **{**lists, **symbols, **others, **buffers})


def _workspace(
    problem: Problem, workspace: Workspace, parameter: tirx.Var, io: SimpleNamespace, packed: bool, index: str
) -> tirx.Buffer:
    def extent(name: str | int) -> Any:
        known = vars(io).get(name) if name in (*problem.run_time_extents, "rows") else None
        return tirx.const(problem.extent(name), index) if known is None else known

    align = numpy_dtype(workspace.dtype).itemsize if packed else -1
    return T.match_buffer(parameter, tuple(map(extent, workspace.shape)), workspace.dtype, align=align)


def beside(io: SimpleNamespace, more: Mapping[str, Any]) -> SimpleNamespace:
    """`io` with further attributes, which replace those of the same name. Buffers among them, such as workspaces, get
    the attribute's name in emitted code.
    """
    for name, value in more.items():
        if isinstance(value, tirx.Buffer):
            IRBuilder.name(name, value)
    return SimpleNamespace(**{**vars(io), **more})
