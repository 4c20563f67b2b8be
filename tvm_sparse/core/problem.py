"""What a tensor operator is, declared once: everything else in the package derives from a `Problem`.

A problem is one operator at one shape, dtype and structure. Its subclasses are frozen dataclasses whose
fields are the axes; the text key (`softmax_topk/batch=10,vocab=25000,k=5,dtype=float32`) is built from
them and read back by `tvm_sparse.core.registry.parse`. No thread, block or memory scope appears in an operator:
how it is mapped to a machine is a template's affair (`schedules/`).

A problem also says with which inputs its kernels are tuned and checked. How the data lie is a `structure`; what else a
caller chooses, such as `log`, is one of its `settings`. `tuned` and the first of the settings are what is tuned and
timed. A candidate's time counts once it has been right on cases that are drawn at random (`bench.draws`): structures
of `verified`, settings of `draw_settings`, magnitudes and shifts of the inputs named in `scaled` and `shifted`, data as
`redrawn` has them, and batches that its library serves.

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

from .rounding import overflow

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

FLOATS = ("float32", "float16", "bfloat16")

# What a caller chooses beside shape and data, by name: `{"scale": 1.0, "log": 0}`.
Settings = Mapping[str, float]

# For fields of extras that most problems do without: `field(default=0, metadata=OPTIONAL)` keeps them out of the key.
OPTIONAL = {"optional": True}


class ProblemError(ValueError):
    """An axis, dtype or key that no problem of the operator can have."""


class Mismatch(AssertionError):
    """A kernel's outputs are not what the reference says; the message tells where and by how much."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in calling order.

    `shape` names axes or gives extents; an empty shape is a scalar. `dtype` may name an axis, as "dtype" does. `when`
    names an axis: kernels of problems where it is 0 or empty do not have this argument. Names other than axes are those
    that the operator's `Problem.extent` knows.
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
    # Whether rows along that axis depend on those before, as steps of a recurrence do: then they are not sampled.
    sequential: ClassVar[bool] = False
    # Axes that tell how the data lie: decisions are tuned for them, but programs read them when they run.
    data_axes: ClassVar[tuple[str, ...]] = ()
    # Extents of arguments that follow from the data alone, such as `nnz`.
    counted: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[Argument, ...]]  # of any problem; `kernel_inputs` are those of one
    outputs: ClassVar[tuple[Argument, ...]]
    # How many of the outputs, from the first on, other libraries' ways return; None: all.
    peer_outputs: ClassVar[int | None] = None
    structures: ClassVar[tuple[str, ...]]  # how the data may lie: what `generate` can make
    tuned: ClassVar[str]  # the structure that is tuned and timed
    verified: ClassVar[tuple[str, ...]]  # the structures on which a kernel has to be right before it is timed
    settings: ClassVar[tuple[Settings, ...]] = ({},)  # what calls choose; the first is tuned and timed
    example: ClassVar[Mapping[str, Any]]  # a small shape, for the quickstart and the listing
    source: ClassVar[str]  # paper and algorithm
    # Arguments of calls by which a problem may be told in the place of axes, and what each may be: see `of_call`.
    call_words: ClassVar[Mapping[str, str]] = {}
    most_drawn_bytes: ClassVar[int] = 1 << 28  # of a problem's arrays where it is drawn at random

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        """Axes of a problem drawn at random as users may have it (`core.distribution`); they need not be valid.

        Raises
        ------
        ProblemError
            Of an operator that declares no distribution.
        """
        raise ProblemError(f"{cls.operator}: declares no distribution of its problems (Problem.drawn_axes)")

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
    def typed(self) -> str:
        """Operator and axes as they are typed after `tvm-sparse tune`, without axes that have their default."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        shown = (f"{name}={value}" for name, value in self.axes.items() if fields[name] != value)
        return " ".join((self.operator, *shown))

    @property
    def kernel_inputs(self) -> tuple[Argument, ...]:
        """The inputs that kernels of this very problem take, in calling order."""
        return tuple(filter(self.has, self.inputs))

    @property
    def kernel_outputs(self) -> tuple[Argument, ...]:
        """The outputs that kernels of this very problem write, in calling order."""
        return tuple(filter(self.has, self.outputs))

    @property
    def run_time_extents(self) -> tuple[str, ...]:
        """Names of the extents that programs take when they run: one library serves every value of them."""
        return (self.batch_axis, *self.data_axes, *self.counted)

    def dtype_of(self, argument: Argument) -> str:
        """The dtype of an argument of this very problem."""
        return self.axes.get(argument.dtype, argument.dtype)

    def __str__(self) -> str:
        return self.key

    @property
    def scaled(self) -> tuple[str, ...]:
        """Floating inputs that may be of any magnitude: the check multiplies each by a number."""
        return ()

    @property
    def shifted(self) -> tuple[str, ...]:
        """Floating inputs that may lie around any number, which the check adds."""
        return ()

    @property
    def batch_extent(self) -> int:
        return self.axes[self.batch_axis]

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """The inputs that give some rows of the outputs, for the problem `with_batch(len(rows))`."""
        pairs = zip(self.kernel_inputs, inputs, strict=True)
        return [array[rows] if self.batched(spec) else array for spec, array in pairs]

    def batched(self, argument: Argument) -> bool:
        """Whether an argument holds data of the batch's rows, as logits do and a weight does not.

        By its first axis; an operator whose rows lie otherwise, as in CSR, says so by overriding this.
        """
        return argument.shape[:1] == (self.batch_axis,)

    def with_batch(self, extent: int) -> Problem:
        return dataclasses.replace(self, **{self.batch_axis: extent})

    @classmethod
    def of_call(cls, words: Mapping[str, Any]) -> dict[str, Any]:
        """The axes of a problem that is told by axes and by arguments of a call (`call_words`), as they are typed.

        Raises
        ------
        ProblemError
            For an argument that no call takes, and for an axis that also follows from arguments.
        """
        return dict(words)

    def as_called(self) -> Problem:
        """The problem that calls with such data ask for, and that is tuned for them: an axis may be known in steps."""
        return self

    def as_shipped(self) -> tuple[Problem, ...]:
        """The problems that a library is exported for where this one has a record: those whose calls differ in what the
        program is given, and run the same decisions."""
        return (self,)

    def as_tuned(self) -> Problem:
        """The problem that stands for all whose records are each other's own: no decision depends on where they differ.

        Their programs differ, so that a library of one is none of another.
        """
        return self

    def smaller(self, extent: int) -> Problem:
        """A problem with this batch that the same program computes, and that is cheap to check.

        What programs read when they run (`data_axes`) may be cut down too.
        """
        return self.with_batch(extent)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """This problem with data that lie otherwise: what its programs read when they run (`data_axes`) is drawn."""
        return self

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        """Settings of a call, drawn at random: here each by itself of the declared ones. An operator whose settings are
        numbers in a range, as a temperature is, overrides this."""
        names = self.settings[0]
        return {name: self.settings[rng.integers(len(self.settings))][name] for name in names}

    def altered(self, inputs: list[Any], rng: np.random.Generator) -> list[Any]:
        """Inputs of `generate` in which the check draws what neither structure nor settings tell, such as uniform
        numbers at the ends of their range."""
        return inputs

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
    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Valid inputs in calling order, as NumPy arrays and Python scalars (bfloat16 through ml_dtypes).

        Without a structure or settings, or where these lack a name: as `tuned` and the first of `settings` are. The
        data depend on seed and structure alone.
        """

    def chosen(self, structure: str | None, settings: Settings | None) -> tuple[str, dict[str, float]]:
        """For `generate`: what it was asked for, completed by what is tuned.

        Raises
        ------
        ProblemError
            For a structure or a setting that the operator does not have.
        """
        structure = self.tuned if structure is None else structure
        if structure not in self.structures:
            raise ProblemError(f"structure: got {structure!r}; expected one of {', '.join(self.structures)}")
        known = dict(self.settings[0])
        for name in settings or ():
            if name not in known:
                raise ProblemError(f"settings: got {name!r}; {self.operator} has {', '.join(known) or 'none'}")
        return structure, {**known, **(settings or {})}

    @abstractmethod
    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The outputs by the plainest NumPy or SciPy, in float64."""

    @abstractmethod
    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """How far each output may be from the reference's, element by element; None where they must be equal."""

    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Compare a kernel's outputs with the reference's, see `agree`."""
        self.agree(inputs, expected, self.tolerance(inputs, expected), outputs)

    def agree(
        self,
        inputs: Sequence[Any],
        expected: Sequence[np.ndarray],
        tolerance: Sequence[np.ndarray | None],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """Raise `Mismatch` unless outputs are those expected, see `compare`.

        An operator whose outputs may differ otherwise says how: indices of words whose scores differ by less than
        their rounding may change places.
        """
        compare(self.kernel_outputs, expected, tolerance, outputs)

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        """For an operator whose second output are indices: what these were ranked by, and how far it may be off."""
        import numpy as np

        return np.take_along_axis(np.asarray(inputs[0]).astype(np.float64), indices, axis=1), 0.0

    def admits(self, inputs: Sequence[Any], outputs: Sequence[np.ndarray]) -> bool | None:
        """Of an operator that draws at random: whether another library's outputs may have been drawn.

        None for all others, whose outputs have to be those of the reference.
        """
        return None

    @abstractmethod
    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Compulsory bytes and operations; `inputs` refines what depends on the data."""

    def trimmed(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """`function`, written for every argument of the operator, without those that this problem does not have."""
        from tvm import tirx

        arguments = (*self.inputs, *self.outputs)
        absent = [not self.has(a) for a in arguments]
        absent += [False] * (len(function.params) - len(arguments))  # workspaces
        params = [p for p, missing in zip(function.params, absent, strict=True) if not missing]
        return tirx.PrimFunc(params, function.body, function.ret_type, function.attrs)

    def empty_outputs(self) -> list[np.ndarray]:
        """Output arrays filled with a poison (NaN, or the most negative integer) that no kernel writes."""
        import numpy as np

        arrays = []
        for shape, dtype in self.output_layouts():
            kind = numpy_dtype(dtype)
            arrays.append(np.full(shape, np.iinfo(kind).min if kind.kind == "i" else np.nan, kind))
        return arrays

    def output_layouts(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of each output."""
        return [(tuple(map(self.extent, argument.shape)), self.dtype_of(argument)) for argument in self.kernel_outputs]

    def extent(self, name: str | int) -> int:
        """An extent of an argument's shape, or what its `when` names: a number, or what the name stands for.

        Names are those of axes. An operator whose arguments have other extents, such as the words of a bitmap, says
        what they are by overriding this.
        """
        return self.axes[name] if isinstance(name, str) else name

    def has(self, argument: Argument) -> bool:
        """Whether kernels of this very problem have an argument."""
        return not argument.when or bool(self.extent(argument.when))


def compare(
    arguments: Sequence[Argument],
    expected: Sequence[np.ndarray],
    tolerance: Sequence[np.ndarray | None],
    outputs: Sequence[np.ndarray],
) -> None:
    """Compare outputs with those expected: within the tolerance, NaN and infinities at the same places.

    Raises
    ------
    Mismatch
        Naming the first output and position that is wrong.
    """
    import numpy as np

    for argument, wanted, bound, output in zip(arguments, expected, tolerance, outputs, strict=True):
        found = np.asarray(output)
        count, first = 0, None
        # Some rows at a time: the intermediate arrays stay in the cache.
        step = max(1, _AT_ONCE * len(wanted) // max(1, wanted.size))
        for start in range(0, len(wanted), step):
            rows = slice(start, start + step)
            wrong = ~_agree(found[rows], wanted[rows], None if bound is None else bound[rows])
            if wrong.any():
                count += int(np.count_nonzero(wrong))
                if first is None:
                    row, *rest = (int(i) for i in np.argwhere(wrong)[0])
                    first = (start + row, *rest)
        if first is not None:
            form = ".9g" if bound is not None else "d"
            have, want = (format(a[first].item(), form) for a in (found, wanted))
            raise Mismatch(
                f"{argument.name}[{', '.join(map(str, first))}] is {have}, expected {want}"
                f" ({count} of {found.size} differ)"
            )


# Elements.
_AT_ONCE = 1 << 18


def _agree(found: np.ndarray, wanted: np.ndarray, bound: np.ndarray | None) -> np.ndarray:
    import numpy as np

    if bound is None:
        return found == wanted
    largest = overflow(found.dtype)
    found = found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Where an infinity is wanted the bound is infinite too, and says nothing.
        close = np.isfinite(wanted) & (np.abs(found - wanted) <= bound)
        if close.all():
            return close
        close |= (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        # A number that the output's dtype does not reach may have become an infinity.
        beyond = np.isinf(found) & np.isfinite(wanted) & (np.abs(wanted) + bound >= largest)
        return close | (beyond & ((found > 0) == (wanted > 0)))


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a dtype's name, bfloat16 included."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# What numbers of words are rounded up to, so that a new one seldom takes another kernel.
WIDTHS = (8, 32, 64, 128, 256, 512, 1024)


def width(count: int, most: int | None = None) -> int:
    """A number of words rounded up to one of `WIDTHS`, at most `most`; 0 and what exceeds all of them stay."""
    found = next((one for one in WIDTHS if one >= count), count) if count else 0
    return found if most is None else min(found, most)


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
