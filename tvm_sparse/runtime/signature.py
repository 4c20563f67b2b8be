"""Signatures of public functions as data: each argument with the forms that it accepts.

An operator's `call` module declares one `Signature` for each of its public functions, in `SIGNATURES`. It provides the
checks of arrays beside the first (`Signature.beside`), the rule which inputs outputs may share memory with
(`Signature.refuse_overlap`), and the test that calls every form of every argument (`tests/test_forms.py`), which also
fails for undeclared parameters. Recognising a repeated call needs no declaration: `repeat` examines the kernel's
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.problem import FLOATS
from . import arrays
from .arrays import Facts
from .calls import facts_beside, index_as

# As the first extent of a shape: any number of dimensions.
ROWS = ...


@dataclass(frozen=True)
class Number:
    """A number of Python or NumPy, or a 0-d array or tensor.

    `least` and `most` bound what is valid, as numbers or names of extents; a test draws between them.
    """

    kind: str  # "int", "float" or "bool"
    least: Any = 0
    most: Any = 1


@dataclass(frozen=True)
class Text:
    """One of several words."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Array:
    """A torch tensor on CPU or CUDA, a NumPy array, or another DLPack array.

    `shape` names extents. `ROWS` at its begin stands for the leading dimensions of the first argument, of any number,
    and None for an independent extent. `dtypes` are those accepted; the first is the kernel's, and integers of another
    are copied. Without any, the first argument's dtype is required. `below`: integers in [0, below), a number or the
    name of an extent; `negative`: also -1. `gradient`: the result is differentiable in it.
    """

    shape: tuple[Any, ...]
    dtypes: tuple[str, ...] = ()
    below: Any = None
    negative: bool = False
    gradient: bool = False


@dataclass(frozen=True)
class Structure:
    """A sparse structure, in one of several forms, named after Python types or after the content of a tuple."""

    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Stored:
    """An embedding in eight bits, `formats.quantized.QuantizedEmbedding`, of one of these dtypes."""

    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Shard:
    """A pair of integers: the first word of a shard of a vocabulary, and the number of words of the whole one."""


@dataclass(frozen=True)
class Absent:
    """The argument may be None."""


Form = Number | Text | Array | Structure | Stored | Shard | Absent


@dataclass(frozen=True)
class Argument:
    """One argument of a public function, with its forms; the most usual one comes first."""

    name: str
    forms: tuple[Form, ...]

    @property
    def array(self) -> Array | None:
        return next((form for form in self.forms if isinstance(form, Array)), None)

    @property
    def read(self) -> bool:
        """Whether a kernel reads memory of it."""
        return any(isinstance(form, Array | Structure) for form in self.forms)


@dataclass(frozen=True)
class Output:
    """One returned array. `asked`: the argument that requests it, if any. `given`: it may be passed in `out`."""

    name: str
    asked: str = ""
    given: bool = True


class Signature:
    """The arguments of a public function, in the order of its parameters, without `out`, and its outputs.

    Parameters
    ----------
    arguments
        Name and forms: `("bias", Array(("vocab",), ("float32",)), Absent())`.
    outputs
        The outputs; an `Output` instead of a tuple if the call returns a single array.
    operator
        Whether the function is a custom operator of PyTorch, which traces and graphs contain.
    """

    def __init__(self, *arguments: tuple[Any, ...], outputs: tuple[Output, ...], operator: bool = True) -> None:
        self.arguments = tuple(Argument(name, forms) for name, *rest in arguments for forms in [tuple(rest)])
        self.outputs = outputs
        self.operator = operator
        self._named = {argument.name: argument for argument in self.arguments}
        self._read = frozenset(argument.name for argument in self.arguments if argument.read)

    def __getitem__(self, name: str) -> Argument:
        return self._named[name]

    def beside(
        self, name: str, array: Any, first: Facts, where: str = "the logits are", **extents: int
    ) -> tuple[str, Facts, Any]:
        """Check an array that accompanies the first argument, and convert it to the kernel's dtype.

        `extents` are known extents by name; others may have any value. The dimensions `ROWS` are those of the first
        argument.
        """
        form = self._named[name].array
        assert form is not None, name
        shape: list[int | None] = []
        for extent in form.shape:
            if extent is ROWS:
                shape += first.shape[:-1]
            else:
                shape.append(extents.get(extent) if isinstance(extent, str) else extent)
        accepted = form.dtypes or (first.dtype,)
        found = facts_beside(name, array, tuple(shape), accepted, first, where)
        if found[1].dtype == accepted[0]:
            return found
        ready = index_as(name, array, found[1], accepted[0])
        return name, arrays.facts(name, ready), ready

    def refuse_overlap(self, out: Any, **read: Any) -> None:
        """Raise if an array of `out` shares memory with an input that the kernel reads, or with another one of `out`.

        `read` has every argument that may hold an array, by name: arrays, None, numbers, and structures as tuples of
        arrays.
        """
        assert read.keys() == self._read, f"expected {sorted(self._read)}, got {sorted(read)}"
        if out is None:
            return
        outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        returned = [one for one in self.outputs if read.get(one.asked, out) is not None]
        names = [f"out ({one.name})" for one in returned] if len(outputs) > 1 else ["out"]
        names += ["out"] * (len(outputs) - len(names))
        given = [
            (name, one)
            for name, value in read.items()
            for one in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(one, "shape") or hasattr(one, "__dlpack__")
        ]
        for i, (name, one) in enumerate(zip(names, outputs, strict=False)):
            if arrays.is_fake(one):
                return
            for other, array in (*given, *zip(names[:i], outputs, strict=False)):
                if arrays.overlap(one, array):
                    use = "which is read while out is written" if not other.startswith("out") else "another output"
                    raise ValueError(f"{name}: shares memory with {other}, {use}; pass another array")


FLOAT_ROWS = Array((ROWS, "vocab"), FLOATS)
OF_ROWS = Array((ROWS,), ("float32",))
