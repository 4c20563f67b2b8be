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
    from tvm.script.parser.core.evaluator import ExprEvaluator
    from tvm.script.parser.core.parser import ScriptMacro
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

    def visit(self: Any, node: Any) -> Any:
        """Visit an expression without recording its source span: that of its statement stays, and errors record their
        own.
        """
        if isinstance(node, list):
            return [visit(self, one) for one in node]
        if isinstance(node, tuple):
            return tuple(visit(self, one) for one in node)
        return self._visit_node(node)

    compiled = evaluator._eval_expr

    def evaluate(node: Any, names: dict[str, Any]) -> Any:
        """The value of an expression whose parts have been evaluated, in most cases without Python's compiler."""
        kind = type(node)
        if kind is doc.Constant:
            return node.value
        if kind is doc.Name:
            if node.id in names:
                return names[node.id]
            if hasattr(builtins, node.id):
                return getattr(builtins, node.id)
        elif kind is doc.Attribute:
            return getattr(evaluate(node.value, names), node.attr)
        elif kind is doc.Subscript and type(node.slice) in (doc.Name, doc.Constant):
            return evaluate(node.value, names)[evaluate(node.slice, names)]
        elif kind is doc.Call and all(type(one) in (doc.Name, doc.Constant) for one in node.args):
            if all(one.arg is not None for one in node.keywords):
                # For a frame whose globals are `names`: an inline finds its parser there.
                names["__tvm_callee__"] = evaluate(node.func, names)
                names["__tvm_arguments__"] = [evaluate(one, names) for one in node.args]
                names["__tvm_keywords__"] = {one.arg: evaluate(one.value, names) for one in node.keywords}
                return eval(_CALL, names)
        return compiled(node, names)

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
        (ExprEvaluator, "_visit", visit),
        (evaluator, "_eval_expr", evaluate),
        (evaluator, "_eval_assign", assign),
    ):
        getattr(owner, name)  # raises if this version of TVM renamed it, since the replacement would have no effect
        setattr(owner, name, quick)
