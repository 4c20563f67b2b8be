"""Replacements of the slow parts of TVMScript's parser.

A large kernel calls some seventy inlines and evaluates some three thousand expressions, most of them a name. The parser
of apache-tvm 0.27 reads source files to find itself, parses an inline's text anew at every call, and sends every
expression through Python's compiler. With the replacements the TIR is the same (docs/script-parser.md).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import linecache
import re
import sys
from types import FrameType
from typing import Any

_CALL = compile("__tvm_callee__(*__tvm_arguments__, **__tvm_keywords__)", "<call>", "eval")


class _Place:
    """The fields of an `inspect.FrameInfo` that the parser uses; source text is read on access."""

    positions = None

    def __init__(self, frame: FrameType) -> None:
        self.frame, self.filename, self.lineno = frame, frame.f_code.co_filename, frame.f_lineno

    @property
    def code_context(self) -> list[str] | None:
        line = linecache.getline(self.filename, self.lineno)
        return [line] if line else None


class _Inspect:
    """The module `inspect`, but with a `stack` that does not read the source files of all callers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def stack(context: int = 1) -> list[_Place]:
        places = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            places.append(_Place(frame))
            frame = frame.f_back
        return places


@functools.cache
def quicken_parser() -> None:
    """Replace the slow parts of the parser, once a process.

    Raises
    ------
    AttributeError
        If the installed TVM lacks a function that is to be replaced.
    """
    from tvm.script.parser.core import doc, evaluator
    from tvm.script.parser.core.diagnostics import Source
    from tvm.script.parser.core.error import ParserError
    from tvm.script.parser.core.evaluator import ExprEvaluator
    from tvm.script.parser.core.parser import Parser, ScriptMacro
    from tvm.tirx.script.builder import ir
    from tvm.tirx.script.parser import entry

    def find_parser(self: Any) -> Any:
        """Find the parser that calls an inline through frames alone; `inspect.getouterframes` would read
        source files.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            parser = frame.f_globals.get(ScriptMacro.parser_object_name)
            if parser is not None:
                return parser
            frame = frame.f_back
        raise RuntimeError(f"{ScriptMacro.parser_object_name}: no parser calls this inline")

    read, sources = Source.__init__, dict[tuple[str, Any], dict[str, Any]]()

    def read_once(self: Any, program: Any) -> None:
        """Read and tokenise the source text of a function once, however often its factory runs."""
        code = getattr(program, "__code__", None)
        if code is None:
            return read(self, program)
        key = (code.co_filename, code)
        if key not in sources:
            read(self, program)
            sources[key] = dict(vars(self))
        vars(self).update(sources[key])

    parsed = functools.lru_cache(maxsize=1024)(doc.parse)

    def as_ast(self: Any) -> Any:
        """The syntax tree of a source text, cached; a function inside another is parsed when it is visited."""
        nested = len(re.findall(r"^\s*(?:def|class) ", self.source, re.MULTILINE)) != 1
        return doc.parse(self.source) if nested else parsed(self.source)

    class Values(ExprEvaluator):
        """Evaluates an expression to its value; TVM's own turns each part into a name of a table, which it copies for
        every expression. A part has the source span of its statement; errors record their own.
        """

        def __init__(self, parser: Any, extra: dict[str, Any] | None) -> None:
            self.parser, self.extra, self.names = parser, extra or {}, parser.var_table.name2value

        def value(self, node: Any) -> Any:
            kind = type(node)
            if kind is doc.Name:
                return self.named(node)
            if kind is doc.Constant:
                return node.value
            how = ways.get(kind)
            if how is None or is_left(node):
                return ExprEvaluator.eval(self.parser, self.table(), node)
            try:
                return how(self, node)
            except ParserError:  # which knows its own node
                raise
            except Exception as error:
                self.parser.report_error(node, error)

        def table(self) -> dict[str, Any]:
            """All names, for what Python compiles."""
            known = {name: values[-1] for name, values in self.names.items() if values}
            return {**known, **self.extra, ScriptMacro.parser_object_name: self.parser}

        # The base class calls these two for the operands of its operators.
        def _visit(self, node: Any) -> Any:
            return self.value(node)

        def _eval_expr(self, v: Any) -> Any:
            return v

        def named(self, node: Any) -> Any:
            if node.id in self.extra:
                return self.extra[node.id]
            if values := self.names.get(node.id):
                return values[-1]
            if hasattr(builtins, node.id):
                return getattr(builtins, node.id)
            raise ParserError(node, f"Undefined variable: {node.id}")

        def parts(self, nodes: Any) -> list[Any]:
            """The values of arguments or elements, `*several` unpacked."""
            found: list[Any] = []
            for node in nodes:
                if type(node) is doc.Starred:
                    found.extend(self.value(node.value))
                else:
                    found.append(self.value(node))
            return found

        def call(self, node: Any) -> Any:
            # For a frame whose globals are `names`: an inline finds its parser there.
            names = {ScriptMacro.parser_object_name: self.parser, "__tvm_callee__": self.value(node.func)}
            names["__tvm_arguments__"] = self.parts(node.args)
            names["__tvm_keywords__"] = {one.arg: self.value(one.value) for one in node.keywords}
            return eval(_CALL, names)

        def operator(self, node: Any, *operands: Any) -> Any:
            return evaluator._eval_op(node.op, [self.value(one) for one in operands])

        def compare(self, node: Any) -> Any:
            left, *right = [self.value(one) for one in (node.left, *node.comparators)]
            return self._eval_compare({"left": left, "comparators": right, "ops": node.ops})

        def slice(self, node: Any) -> Any:
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if one is None else self.value(one) for one in ends))

    ways: dict[Any, Any] = {
        doc.Attribute: lambda self, node: getattr(self.value(node.value), node.attr),
        doc.Subscript: lambda self, node: self.value(node.value)[self.value(node.slice)],
        doc.Slice: Values.slice,
        doc.Tuple: lambda self, node: tuple(self.parts(node.elts)),
        doc.List: lambda self, node: self.parts(node.elts),
        doc.Call: Values.call,
        doc.BinOp: lambda self, node: self.operator(node, node.left, node.right),
        doc.UnaryOp: lambda self, node: self.operator(node, node.operand),
        doc.Compare: Values.compare,
        doc.BoolOp: Values._eval_bool_op,
        doc.IfExp: Values._eval_if_exp,
    }

    def is_left(node: Any) -> bool:
        """Whether a node is left to TVM's evaluator, which gives slices of buffers that are operands a step, and to
        Python, which unpacks `**keywords`.
        """
        kind = type(node)
        if kind is doc.Call:
            return any(one.arg is None for one in node.keywords) or any(map(is_part, node.args))
        if kind is doc.BinOp:
            return is_part(node.left) or is_part(node.right)
        return kind is doc.Compare and (is_part(node.left) or any(map(is_part, node.comparators)))

    def is_part(node: Any) -> bool:
        if type(node) is not doc.Subscript:
            return False
        at = node.slice
        return type(at) is doc.Slice or (type(at) is doc.Tuple and any(type(one) is doc.Slice for one in at.elts))

    def eval_expr(self: Any, node: Any, extra_vars: dict[str, Any] | None = None) -> Any:
        """The value of an expression, in most cases without Python's compiler."""
        return self.annotate_current_source_span(Values(self, extra_vars).value(node))

    assigned = evaluator._eval_assign

    def assign(target: Any, source: Any) -> dict[str, Any]:
        return {target.id: source} if type(target) is doc.Name else assigned(target, source)

    inspecting = _Inspect()
    for owner, name, quick in (
        (ir, "inspect", inspecting),
        (entry, "inspect", inspecting),
        (ScriptMacro, "_find_parser_def", find_parser),
        (Source, "__init__", read_once),
        (Source, "as_ast", as_ast),
        (Parser, "eval_expr", eval_expr),
        (evaluator, "_eval_assign", assign),
    ):
        getattr(owner, name)  # raises if this version of TVM renamed it, since the replacement would have no effect
        setattr(owner, name, quick)
