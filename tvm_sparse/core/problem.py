"""What a tensor operator is, declared once: everything else in the package derives from a `Problem`.

A problem is one operator at one shape, dtype and structure. Its subclasses are frozen dataclasses whose
fields are the axes; the text key (`softmax_topk/batch=10,vocab=25000,k=5,dtype=float32`) is built from
them and read back by `tvm_sparse.core.registry.parse`. No thread, block or memory scope appears in an operator:
how it is mapped to a machine is a template's affair (`schedules/`).

A kernel of a problem is one host function `main(inputs..., outputs..., workspaces...)`. It may launch
several device kernels (candidate generation, product, merge) and may be cooperative (a recurrent layer):
neither shows in its interface, because buffers between its kernels are workspaces that the template declares
and the runtime owns (`core.template.Program`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from tvm import tirx

FLOATS = ("float32", "float16", "bfloat16")

# For fields of extras that most problems do without: `field(default=0, metadata=OPTIONAL)` keeps them out of the key.
OPTIONAL = {"optional": True}


class ProblemError(ValueError):
    """An axis, dtype or key that no problem of the operator can have."""


class Mismatch(AssertionError):
    """A kernel's outputs are not what the reference says; the message tells where and by how much."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in calling order.

    `shape` names axes or gives extents; an empty shape is a scalar. `dtype` may name an axis, as "dtype" does.
    `when` names an axis: kernels of problems where it is 0 or empty do not have this argument.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    doc: str
    when: str = ""


@dataclass(frozen=True)
class Cost:
    """What must be done whatever the kernel: the numerator of every figure that is printed."""

    bytes: int  # compulsory: each input read once, each output written once
    operations: int  # floating-point operations, an exponential counted as one


@dataclass(frozen=True)
class Problem(ABC):
    """One operator at one static shape, dtype and structure."""

    operator: ClassVar[str]
    batch_axis: ClassVar[str]  # the axis that one library serves at every extent
    # Axes that tell how the data lie: decisions are tuned for them, but programs read them when they run.
    data_axes: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[Argument, ...]]  # of any problem; `kernel_inputs` are those of one
    outputs: ClassVar[tuple[Argument, ...]]
    structures: ClassVar[tuple[str, ...]]  # what `generate` can make; the first is what is tuned and timed
    example: ClassVar[Mapping[str, Any]]  # a small shape, for the quickstart and the listing
    source: ClassVar[str]  # paper and algorithm

    @property
    def axes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def key(self) -> str:
        """The axes as text; those whose field says `metadata=OPTIONAL` only where they differ from the default."""
        shown = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not (field.metadata.get("optional") and getattr(self, field.name) == field.default)
        )
        return f"{self.operator}/" + ",".join(shown)

    @property
    def kernel_inputs(self) -> tuple[Argument, ...]:
        """The inputs that kernels of this very problem take, in calling order."""
        return tuple(a for a in self.inputs if not a.when or self.axes[a.when])

    @property
    def kernel_outputs(self) -> tuple[Argument, ...]:
        """The outputs that kernels of this very problem write, in calling order."""
        return tuple(a for a in self.outputs if not a.when or self.axes[a.when])

    def __str__(self) -> str:
        return self.key

    @property
    def batch_extent(self) -> int:
        return self.axes[self.batch_axis]

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """The inputs that give some rows of the outputs, for the problem `with_batch(len(rows))`."""
        batched = [spec.shape[:1] == (self.batch_axis,) for spec in self.kernel_inputs]
        return [array[rows] if along else array for array, along in zip(inputs, batched, strict=True)]

    def with_batch(self, extent: int) -> Problem:
        return dataclasses.replace(self, **{self.batch_axis: extent})

    def distance(self, other: Problem) -> float | None:
        """How far another problem's decisions are from suiting this one, in octaves; None if they cannot.

        Sums the axes' log2 ratios; dtypes and other names must be equal.
        """
        import math

        if type(other) is not type(self):
            return None
        total = 0.0
        for name, value in self.axes.items():
            theirs = other.axes[name]
            if isinstance(value, str):
                if value != theirs:
                    return None
            else:
                total += abs(math.log2((value + 1e-3) / (theirs + 1e-3)))
        return total

    @abstractmethod
    def definition(self) -> tirx.PrimFunc:
        """The operator in TE or TVMScript, unscheduled: runs on `llvm` as it is, and is right for every input."""

    @abstractmethod
    def generate(self, seed: int, structure: str | None = None) -> list[Any]:
        """Valid inputs in calling order, as NumPy arrays and Python scalars (bfloat16 through ml_dtypes)."""

    @abstractmethod
    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The outputs by the plainest NumPy or SciPy, in float64."""

    @abstractmethod
    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Compare a kernel's outputs with the reference's.

        Raises
        ------
        Mismatch
            Naming the first output and position that is wrong.
        """

    @abstractmethod
    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Compulsory bytes and operations; `inputs` refines what depends on the data."""

    def trimmed(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """`function`, written for every argument of the operator, without those that this problem does not have."""
        from tvm import tirx

        arguments = (*self.inputs, *self.outputs)
        absent = [bool(a.when) and not self.axes[a.when] for a in arguments]
        absent += [False] * (len(function.params) - len(arguments))  # workspaces
        params = [p for p, missing in zip(function.params, absent, strict=True) if not missing]
        return tirx.PrimFunc(params, function.body, function.ret_type, function.attrs)

    def empty_outputs(self) -> list[np.ndarray]:
        """Output arrays filled with a poison (NaN, or the most negative integer) that no kernel writes."""
        import numpy as np

        arrays = []
        for argument in self.kernel_outputs:
            shape = tuple(self.axes[axis] if isinstance(axis, str) else axis for axis in argument.shape)
            dtype = numpy_dtype(self.axes["dtype"] if argument.dtype == "dtype" else argument.dtype)
            poison = np.iinfo(dtype).min if dtype.kind == "i" else np.nan
            arrays.append(np.full(shape, poison, dtype))
        return arrays


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a dtype's name, bfloat16 included."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def require_positive(problem: Problem, *names: str) -> None:
    """Raise `ProblemError` for the first of the named axes that is not an integer of at least 1."""
    for name in names:
        value = problem.axes[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ProblemError(f"{problem.operator}: {name} must be an integer of at least 1, got {value!r}")


def require_dtype(problem: Problem) -> None:
    dtype = problem.axes["dtype"]
    if dtype not in FLOATS:
        raise ProblemError(f"{problem.operator}: dtype must be one of {', '.join(FLOATS)}, got {dtype!r}")
