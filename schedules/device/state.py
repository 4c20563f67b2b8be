"""The state that the phases of a kernel share: buffers and registers, as attributes of one object.

TVMScript passes such an object to an inline as one argument (`s = T.meta_var(State.alloc(...))`). A buffer is indexed
through its attribute, `s.sums[0]`, and a register is assigned by it, `s.count = s.count + 1`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

State = TypeVar("State")


def register(dtype: str = "int32") -> Any:
    """A variable of one thread, as `name: T.int32` declares it in a kernel; `named` gives it its name."""
    return T.local_scalar(dtype).scalar


def named(state: State) -> State:
    """`state`, its buffers and registers called in the generated code what its attributes are called."""
    for name, held in vars(state).items():
        buffer = getattr(held, "source", held)
        if isinstance(buffer, tirx.Buffer):
            IRBuilder.name(name, buffer)
    return state
