"""The state that the phases of a kernel share: buffers and registers, as attributes of one object.

TVMScript passes such an object to an inline as one argument (`s = T.meta_var(State.alloc(...))`). A buffer is indexed
through its attribute, `s.sums[0]`, and a register is assigned by it, `s.count = s.count + 1`.

A small state allocates its buffers itself, and `named` names them. A large one is a subclass of `Buffers`, a dataclass
that declares a buffer a line, by `local`, `scalar`, `shared` and `pooled`:

    @dataclass
    class State(Buffers):
        t: Any  # the thread, given to `alloc`
        largest: Any = local("float32")
        maxima: Any = shared("float32", lambda layout: layout.warps)

    s = T.meta_var(State.alloc(layout, t=t))  # in the kernel; phases then say s.largest[0]

Buffers are allocated in the order of the fields, under the fields' names. The assembler lays shared memory out in that
order and assigns registers by it: another order is other machine code, if mostly as good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeVar

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


def in_vectors(buffer: tirx.Buffer, width: int) -> tirx.Buffer:
    """`buffer`, if it begins with a whole vector of `width` of its elements in its pool of shared memory.

    Raises
    ------
    ValueError
        If accesses of such vectors would be misaligned.
    """
    if int(buffer.elem_offset) % width:
        raise ValueError(f"{buffer.name} begins at element {buffer.elem_offset}: no whole vectors of {width}")
    return buffer


# A number, or a function that computes it from the static extents of a kernel; and the same for a dtype.
Extent = int | Callable[[Any], int]
Dtype = str | Callable[[Any], str]


def _field(**how: Any) -> Any:
    return dataclasses.field(default=None, metadata=how)


def local(dtype: Dtype, extent: Extent = 1, when: Callable[[Any], bool] | None = None) -> Any:
    """A buffer of each thread: registers, as long as it is indexed by constants. `when`: whether it exists; otherwise
    the attribute is None.
    """
    return _field(scope="local", dtype=dtype, extent=extent, when=when)


def scalar(dtype: Dtype = "int32", when: Callable[[Any], bool] | None = None) -> Any:
    """A `register`, assigned by its name. `when`: as for `local`."""
    return _field(scope="scalar", dtype=dtype, extent=1, when=when)


def shared(dtype: Dtype, extent: Extent = 1, when: Callable[[Any], bool] | None = None) -> Any:
    """A buffer of a block, in static shared memory. `when`: as for `local`."""
    return _field(scope="shared", dtype=dtype, extent=extent, when=when)


def pooled(dtype: str, extent: Extent, at: Extent, when: Callable[[Any], bool] | None = None) -> Any:
    """A buffer of a block, in dynamic shared memory from element `at` on. `when`: as for `local`."""
    return _field(scope="pool", dtype=dtype, extent=extent, at=at, when=when)


def _of(layout: Any, value: Any) -> Any:
    return value(layout) if callable(value) else value


@dataclasses.dataclass
class Buffers:
    """The base of a kernel's state."""

    @classmethod
    def alloc(cls, layout: Any = None, pool_bytes: int = 0, **given: Any) -> Self:
        """Within a kernel: allocate every declared buffer. `given`: the fields that are no buffers."""
        if pool_bytes:
            pool = T.alloc_buffer([pool_bytes // 8], "uint64", scope="shared.dyn")
            IRBuilder.name("pool", pool)
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            how = field.metadata
            if not how or (how.get("when") and not how["when"](layout)):
                continue
            shape, dtype = [_of(layout, how["extent"])], _of(layout, how["dtype"])
            if how["scope"] == "scalar":
                buffer = register(dtype)
            elif how["scope"] == "local":
                buffer = T.alloc_local(shape, dtype)
            elif how["scope"] == "shared":
                buffer = T.alloc_shared(shape, dtype)
            else:
                buffer = T.decl_buffer(
                    shape, dtype, data=pool.data, elem_offset=_of(layout, how["at"]), scope="shared.dyn"
                )
            IRBuilder.name(field.name, getattr(buffer, "source", buffer))
            found[field.name] = buffer
        return cls(**found, **given)
