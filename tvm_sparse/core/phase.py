"""Phases, of which a generated kernel consists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# What a phase is in a kernel, and what a factory of one returns: an inline.
Phase = Callable[..., Any]


def phase(body: Callable[..., Any]) -> Callable[..., Phase]:
    """Make a phase of a function whose body is TVMScript.

    Parameters before the slash are known before the kernel is generated, as its extents are; those after it are state,
    buffers and indices of the kernel. `def store(e, /, io, s, row)` becomes a function of `e`, which returns an inline
    of `io`, `s` and `row`: a kernel calls it as `store(e)(io, s, row)`.

    Parameters have no annotations: with one, mypy would check the body, which is no Python.
    Conditions that are known are Python's bools there: `e.stages > 0`, not `e.stages`.
    """
    # TVM asks for it at every call, and Python would make it anew.
    vars(body)["__signature__"] = inspect.signature(body)

    @functools.wraps(body)
    def made(*known: Any) -> Phase:
        from tvm.script import tirx as T

        return functools.partial(T.inline(body), *known)

    return made
