"""What a tensor operator is, declared once: everything else in the package derives from a `Problem`.

A problem is one operator at one shape, dtype and structure. Its subclasses are frozen dataclasses whose fields are the
axes; the text key (`softmax_topk/batch=10,vocab=25000,k=5,dtype=float32`) is built from them and read back by
`tvm_sparse.core.registry.parse`. No thread, thread block or memory scope appears in an operator: templates map it to a
machine (`schedules/`).

A problem also declares the inputs with which its kernels are tuned and checked. A `structure` says how the data are
distributed; `settings` are what else a caller chooses, such as `log`. `tuned` and the first of the settings are what is
tuned and timed. A candidate's time counts only if it was right on cases drawn at random (`bench.draws`): structures
from `verified`, settings from `draw_settings`, magnitudes and shifts of the inputs named in `scaled` and `shifted`,
data from `redrawn`, and other batches that its library serves.

A kernel of a problem is one host function `main(inputs..., outputs..., workspaces...)`. It may launch several device
kernels (candidate generation, product, merge) and may be cooperative (a recurrent layer): neither shows in its
interface, because buffers that its kernels share are workspaces, which the template declares and the runtime owns
(`core.template.Program`).
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .rounding import overflow

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import numpy as np
    from tvm import tirx

FLOATS = ("float32", "float16", "bfloat16")

# A structure of this name and the path of a file is that of the sparse matrix in the file.
FROM_FILE = "file:"

# What a caller chooses beside shape and data, by name: `{"scale": 1.0, "log": 0}`.
Settings = Mapping[str, float]

# For axes that most problems leave at their default: `field(default=0, metadata=OPTIONAL)` keeps them out of the key.
OPTIONAL = {"optional": True}

# Rows of the batch whose decisions serve all batches if results must not depend on the batch: products that read a
# weight once for 64 rows are bound by memory; more rows take several passes.
ROWS = 64


@functools.cache
def fields(cls: type[Problem]) -> tuple[dataclasses.Field, ...]:
    """The axes of an operator's problems, as declared. Kept, because look-up asks often."""
    return dataclasses.fields(cls)


class ProblemError(ValueError):
    """An axis, dtype or key that is not valid for any problem of the operator."""


class Mismatch(AssertionError):
    """A kernel's outputs differ from the reference; the message says where and by how much."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel, in calling order.

    `shape` names axes, as "rows + 1" or "rows * tables" too, or gives extents; an empty shape is a scalar. `dtype` may
    name an axis, as "dtype" does. `when` names an axis: where that is 0 or empty, kernels do not have this argument.
    Other names are resolved by the operator's `Problem.extent`.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str
    doc: str
    when: str = ""


@dataclass(frozen=True)
class Cost:
    """The least work that any kernel must do: the numerator of every printed rate."""

    bytes: int  # compulsory: each input read once, each output written once
    operations: int  # floating-point operations, an exponential counted as one


@dataclass(frozen=True)
class Problem(ABC):
    """One operator at one static shape, dtype and structure."""

    operator: ClassVar[str]
    batch_axis: ClassVar[str]  # the axis for which one library serves every extent
    # Whether rows along that axis depend on earlier ones, as steps of a recurrence do, or outputs are sums over them.
    # Such rows are not sampled.
    sequential: ClassVar[bool] = False
    # Axes that describe how the data are distributed: decisions are tuned for them, but programs read the data at run
    # time.
    data_axes: ClassVar[tuple[str, ...]] = ()
    # Axes beside `batch_axis` that count rows, too, which are computed independently: hypotheses that share a list of
    # candidates, or sequences of a recurrent layer.
    row_axes: ClassVar[tuple[str, ...]] = ()
    # Axes that models of the operator's times may have been trained without: such models know only the defaults.
    added_axes: ClassVar[tuple[str, ...]] = ()
    # Data axes that summarise the batch's rows, each with the value that stands for every batch (`of_any_batch`).
    typical_rows: ClassVar[Mapping[str, Any]] = {}
    alike: ClassVar[tuple[str, ...]] = ()  # axes on which the best decisions hardly depend, see `distance`
    # Extents of arguments that follow from the data alone, such as `nnz`.
    counted: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[Argument, ...]]  # of every problem of the operator; `kernel_inputs` are those of one problem
    outputs: ClassVar[tuple[Argument, ...]]
    # Number of outputs, from the first on, that peers return; None: all.
    peer_outputs: ClassVar[int | None] = None
    structures: ClassVar[tuple[str, ...]]  # names of the distributions of data that `generate` can make
    has_files: ClassVar[bool] = False  # whether a structure may also be that of a matrix in a file (`axes_of_file`)
    tuned: ClassVar[str]  # the structure that is tuned and timed
    verified: ClassVar[tuple[str, ...]]  # the structures on which a kernel has to be right before it is timed
    settings: ClassVar[tuple[Settings, ...]] = ({},)  # choices of callers; the first is tuned and timed
    example: ClassVar[Mapping[str, Any]]  # a small shape, for the quickstart and the listing
    source: ClassVar[str]  # paper and algorithm
    # Arguments of calls that may be given instead of axes, each with the values it may take: see `of_call`.
    call_words: ClassVar[Mapping[str, str]] = {}
    most_drawn_bytes: ClassVar[int] = 1 << 28  # limit for the arrays of a problem drawn at random

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        """Axes of a problem drawn at random as users may have it (`core.distribution`); they need not be valid.

        Raises
        ------
        ProblemError
            If the operator declares no distribution.
        """
        raise ProblemError(f"{cls.operator}: declares no distribution of its problems (Problem.drawn_axes)")

    @property
    def axes(self) -> dict[str, Any]:
        return dict(self._axes)

    # Kept, as the arguments of its kernels: look-up and checks ask a problem often.
    @functools.cached_property
    def _axes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(type(self))}

    def settle(self, **axes: Any) -> None:
        """Give axes their one form, at the end of `__post_init__`: a problem changes nowhere else."""
        for name, value in axes.items():
            object.__setattr__(self, name, value)
        self.__dict__.pop("_axes", None)

    @property
    def added(self) -> dict[str, Any]:
        """Those of the `added_axes` that have another value than the default."""
        default = {field.name: field.default for field in fields(type(self))}
        return {name: value for name in self.added_axes if (value := getattr(self, name)) != default[name]}

    @property
    def key(self) -> str:
        """The axes as text; axes whose field has `metadata=OPTIONAL` appear only where they differ from the default."""
        shown = (
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(type(self))
            if not (field.metadata.get("optional") and getattr(self, field.name) == field.default)
        )
        return f"{self.operator}/" + ",".join(shown)

    @property
    def typed(self) -> str:
        """Operator and axes as typed after `tvm-sparse tune`, without axes that have their default value."""
        default = {field.name: field.default for field in fields(type(self))}
        shown = (f"{name}={value}" for name, value in self.axes.items() if default[name] != value)
        return " ".join((self.operator, *shown))

    @functools.cached_property
    def kernel_inputs(self) -> tuple[Argument, ...]:
        """The inputs that kernels of this problem take, in calling order."""
        return tuple(filter(self.has, self.inputs))

    @functools.cached_property
    def kernel_outputs(self) -> tuple[Argument, ...]:
        """The outputs that kernels of this problem write, in calling order."""
        return tuple(filter(self.has, self.outputs))

    @property
    def run_time_extents(self) -> tuple[str, ...]:
        """Names of the extents that programs take when they run: one library serves every value of them."""
        return (self.batch_axis, *self.data_axes, *self.counted)

    def dtype_of(self, argument: Argument) -> str:
        """The dtype of an argument of this very problem."""
        return self._axes.get(argument.dtype, argument.dtype)

    def __str__(self) -> str:
        return self.key

    @property
    def scaled(self) -> tuple[str, ...]:
        """Names of floating inputs that may have any magnitude: the check multiplies each by a random number."""
        return ()

    @property
    def shifted(self) -> tuple[str, ...]:
        """Names of floating inputs that may be shifted: the check adds a random number to each."""
        return ()

    @property
    def batch_extent(self) -> int:
        found: int = getattr(self, self.batch_axis)
        return found

    def sample(self, inputs: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """The inputs from which the problem `with_batch(len(rows))` computes the given rows of the outputs."""
        pairs = zip(self.kernel_inputs, inputs, strict=True)
        return [array[rows] if self.batched(spec) else array for spec, array in pairs]

    @property
    def counts_rows(self) -> bool:
        """Whether the number of a row in the batch decides on its outputs: they are then others where rows move."""
        return False

    def batched(self, argument: Argument) -> bool:
        """Whether an argument holds data of the batch's rows, as logits do and a weight does not.

        The first axis tells. An operator whose rows are stored differently, as in CSR, overrides this.
        """
        return argument.shape[:1] == (self.batch_axis,)

    def with_batch(self, extent: int) -> Problem:
        return dataclasses.replace(self, **{self.batch_axis: extent})

    def of_any_batch(self) -> Problem:
        """The problem of the same rows in a batch of a fixed size: `ROWS`, or 1 if its arrays would be too large.

        It is the same for all batches, for which `configure(batch_invariant=True)` takes its decisions.
        """
        axes = {**self.typical_rows, **dict.fromkeys(self.row_axes, 1)}
        try:
            return dataclasses.replace(self, **axes, **{self.batch_axis: ROWS})
        except ProblemError:
            return dataclasses.replace(self, **axes, **{self.batch_axis: 1})

    @classmethod
    def of_call(cls, words: Mapping[str, Any]) -> dict[str, Any]:
        """The axes of a problem described by axes and by arguments of a call (`call_words`), as typed.

        Raises
        ------
        ProblemError
            For an argument that no call takes, and for an axis that is given twice, once through arguments.
        """
        return dict(words)

    def as_called(self) -> Problem:
        """The problem under which calls with such data are looked up and tuned: axes may be rounded to steps."""
        return self

    def as_shipped(self) -> tuple[Problem, ...]:
        """The problems for which a library is exported where this one has a record: they run the same decisions, but
        calls differ in what their programs are given.
        """
        return (self,)

    def as_tuned(self) -> Problem:
        """The problem under which records are kept: all problems that differ only in axes on which no decision depends
        share it.

        Their programs differ, so each needs a library of its own.
        """
        return self

    def smaller(self, extent: int) -> Problem:
        """A problem with batch `extent` that the same program computes and that is cheap to check.

        Data that programs read at run time (`data_axes`) may be reduced as well.
        """
        return self.with_batch(extent)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """This problem with other data: axes that programs read at run time (`data_axes`) are drawn again."""
        return self

    def draw_settings(self, rng: np.random.Generator) -> dict[str, float]:
        """Settings of a call, drawn at random: each independently from the declared ones. An operator whose settings
        are numbers in a range, such as a temperature, overrides this.
        """
        names = self.settings[0]
        return {name: self.settings[rng.integers(len(self.settings))][name] for name in names}

    def altered(self, inputs: list[Any], rng: np.random.Generator) -> list[Any]:
        """The inputs of `generate`, with values drawn that neither structure nor settings determine, such as uniform
        numbers at the ends of their range.
        """
        return inputs

    def distance(self, other: Problem) -> float | None:
        """Distance in octaves to another problem whose decisions may suit this one; None if they cannot.

        It is the sum of the axes' absolute log2 ratios; dtypes and other names must be equal. Axes of `alike` count as
        equal.
        """
        import math

        if type(other) is not type(self):
            return None
        total = 0.0
        for name, value in self.axes.items():
            theirs = other.axes[name]
            if name in self.alike:
                continue
            if isinstance(value, str):
                if value != theirs:
                    return None
            else:
                total += abs(math.log2((value + 1e-3) / (theirs + 1e-3)))
        return total

    @abstractmethod
    def definition(self) -> tirx.PrimFunc:
        """The operator in TE or TVMScript, unscheduled: it runs on `llvm` as it is and is right for every input."""

    @abstractmethod
    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Valid inputs in calling order, as NumPy arrays and Python scalars (bfloat16 through ml_dtypes).

        The default structure is `tuned`; missing settings are taken from the first of `settings`. The data depend on
        seed and structure alone.
        """

    @classmethod
    def axes_of_file(cls, path: Path, given: Mapping[str, str]) -> dict[str, Any]:
        """The axes that the sparse matrix in a file decides, beside those given.

        Operators with a sparse matrix whose structure a file may hold override this; their `generate` then takes
        `FROM_FILE` and a path as a structure.

        Raises
        ------
        ProblemError
            If no file can hold the operator's structure, or this one does not.
        """
        raise ProblemError(f"structure: no file can hold that of {cls.operator}")

    def chosen(self, structure: str | None, settings: Settings | None) -> tuple[str, dict[str, float]]:
        """The structure and settings for `generate`: those given, completed by those that are tuned.

        Raises
        ------
        ProblemError
            For a structure or a setting that the operator does not have.
        """
        structure = self.tuned if structure is None else structure
        of_file = self.has_files and structure.startswith(FROM_FILE)
        if structure not in self.structures and not of_file:
            raise ProblemError(f"structure: got {structure!r}; expected one of {', '.join(self.structures)}")
        known = dict(self.settings[0])
        for name in settings or ():
            if name not in known:
                raise ProblemError(f"settings: got {name!r}; {self.operator} has {', '.join(known) or 'none'}")
        return structure, {**known, **(settings or {})}

    @abstractmethod
    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """The outputs, computed in float64 by the plainest NumPy or SciPy."""

    @abstractmethod
    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The allowed deviation of each output element from the reference; None for outputs that must be equal."""

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

        An operator with other admissible differences overrides this: indices of words whose scores differ by less than
        their rounding may be swapped.
        """
        compare(self.kernel_outputs, expected, tolerance, outputs)

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        """For an operator whose second output holds indices: the scores that rank them, and the error these
        may have.
        """
        import numpy as np

        return np.take_along_axis(np.asarray(inputs[0]).astype(np.float64), indices, axis=1), 0.0

    def admits(self, inputs: Sequence[Any], outputs: Sequence[np.ndarray]) -> bool | None:
        """For an operator that draws at random: whether another library's outputs are possible draws.

        None for all other operators, whose outputs have to match the reference.
        """
        return None

    @abstractmethod
    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        """Compulsory bytes and operations. With `inputs`, parts that depend on the data are exact."""

    def trimmed(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Remove from `function`, written for every argument of the operator, those that this problem does not have."""
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
        """The value of an extent in an argument's shape, or of the axis that its `when` names.

        A name is that of an axis. An operator whose arguments have other extents, such as the 32-bit words of a bitmap,
        overrides this.
        """
        return self._axes[name] if isinstance(name, str) else name

    def has(self, argument: Argument) -> bool:
        """Whether kernels of this problem have an argument."""
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
        # A few rows at a time, so that the intermediate arrays stay in the cache.
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


# Element by element.
_AT_ONCE = 1 << 18


def _agree(found: np.ndarray, wanted: np.ndarray, bound: np.ndarray | None) -> np.ndarray:
    import numpy as np

    if bound is None:
        return found == wanted
    largest = overflow(found.dtype)
    found = found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Where infinity is expected the tolerance is infinite too and would accept anything.
        close = np.isfinite(wanted) & (np.abs(found - wanted) <= bound)
        if close.all():
            return close
        close |= (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        # A number beyond the range of the output's dtype may have become infinite.
        beyond = np.isinf(found) & np.isfinite(wanted) & (np.abs(wanted) + bound >= largest)
        return close | (beyond & ((found > 0) == (wanted > 0)))


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a dtype's name, bfloat16 and float8_e4m3fn included."""
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


# Widths to which a number of words is rounded up, so that a new number seldom needs another kernel.
WIDTHS = (8, 32, 64, 128, 256, 512, 1024)


def width(count: int, most: int | None = None) -> int:
    """A number of words rounded up to one of `WIDTHS`, at most `most`; 0 and numbers above all widths are unchanged."""
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
