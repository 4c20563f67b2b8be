"""TVMScript's parser, without what makes it slow."""

from __future__ import annotations

import functools
import sys
from typing import Any


@functools.cache
def quicken_parser() -> None:
    """Let inlines find the parser that calls them by frames alone. Once a process; the TIR is the same.

    The parser's own way asks `inspect.getouterframes`, which reads source files for every frame at every call of an
    inline: a second of the 1.7 that a large kernel takes (apache-tvm 0.27).
    """
    from tvm.script.parser.core.parser import ScriptMacro

    def find(self: Any) -> Any:
        frame = sys._getframe(1)
        while frame is not None:
            parser = frame.f_globals.get(ScriptMacro.parser_object_name)
            if parser is not None:
                return parser
            frame = frame.f_back
        raise RuntimeError(f"{ScriptMacro.parser_object_name}: no parser calls this inline")

    ScriptMacro._find_parser_def = find
