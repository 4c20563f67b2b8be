"""Checking a kernel on cases: inputs of a problem with their expected outputs.

`verify` calls a kernel with several cases, one after the other without waiting in between, and then a second time:

- Arrays may have the least alignment that public calls guarantee, and are surrounded by guard bytes (`buffers`). These
  and the inputs must not change.
- Outputs are filled with different poisons in the two rounds, and the results must be equal: elements that were not
  written are detected even where NaN is right.
- In the second round a case's arrays are where another case's were in the first, so that a kernel cannot rely on state
  kept for an address. Workspaces are shared by all calls of one shape, as in public calls.

`draws` chooses the cases of a candidate. Every row is compared with the operator's own reference in float64. A problem
is *large* if it has large arrays that do not depend on the batch, such as the embedding and the tables of an LSH head:
from the second round on its cases keep their memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.problem import Argument, Mismatch, Problem, Settings, numpy_dtype
from ..runtime import loading
from ..runtime.arrays import CUDA_ALIGNMENT
from .buffers import Fatal, Guarded, bytes_of, empty

if TYPE_CHECKING:
    import numpy as np

# Most elements of inputs and outputs that the reference processes at a time: its intermediate arrays are in float64.
REFERENCE_ELEMENTS = 1 << 22
# Bytes with which outputs are filled before a call: NaN, then a number.
POISONS = (0xFF, 0x5A)
# Least number of calls of a kernel: it may be wrong occasionally, or from some call on.
CALLS = 20
# Bytes of arrays independent of the batch from which a problem counts as large.
LARGE = 1 << 25
# Bytes that are compared at a time.
COMPARED = 1 << 20
# Offsets of arrays from an allocator's position are below this number of bytes.
OFFSETS = 128


@dataclass(frozen=True, eq=False)
class Slot:
    """One argument of a kernel."""

    name: str
    layout: tuple[tuple[int, ...], str] | None  # shape and dtype; None for a scalar
    content: Any  # None for an output


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of a problem, with their expected outputs."""

    problem: Problem
    name: str
    inputs: list[Any]
    expected: list[np.ndarray]
    tolerance: list[np.ndarray | None]
    # Seeds of the arrays' offsets: of those independent of the batch, and of the others. None: the least alignment that
    # calls allow.
    place: tuple[int, int] | None = None

    def check(self, outputs: Sequence[np.ndarray]) -> None:
        """Raise `Mismatch` unless these outputs are right."""
        self.problem.agree(self.inputs, self.expected, self.tolerance, outputs)

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The arguments of a kernel, in calling order and without workspaces."""
        outputs = zip(self.problem.kernel_outputs, self.problem.output_layouts(), strict=True)
        return (
            *(
                Slot(spec.name, (given.shape, given.dtype.name) if hasattr(given, "dtype") else None, given)
                for spec, given in zip(self.problem.kernel_inputs, self.inputs, strict=True)
            ),
            *(Slot(spec.name, layout, None) for spec, layout in outputs),
        )

    @functools.cached_property
    def large(self) -> bool:
        """Whether arrays that are independent of the batch are large."""
        arrays = zip(self.problem.kernel_inputs, self.inputs, strict=True)
        whole = [given for spec, given in arrays if spec.shape and not self.problem.batched(spec)]
        return sum(given.nbytes for given in whole) > LARGE

    def offsets(self, kind: str) -> list[int]:
        """Offset of each argument in bytes from an allocator's position; 0 for a scalar.

        Drawn at random: all aligned as by an allocator, all with the least alignment that calls allow, or each
        independently.
        """
        import numpy as np

        whole, own = (np.random.default_rng([seed, 7]) for seed in self.place or (0, 0))
        how = own.integers(4) if self.place else 1
        batched = [*map(self.problem.batched, self.problem.kernel_inputs), *(True for _ in self.problem.kernel_outputs)]
        found = []
        for slot, grows in zip(self.slots, batched, strict=True):
            least = CUDA_ALIGNMENT if kind == "cuda" else numpy_dtype(slot.layout[1]).itemsize if slot.layout else 1
            rng, steps = own if grows else whole, (OFFSETS // least).bit_length()
            # Alignments to each power of two are equally likely.
            alone = (int(rng.integers(OFFSETS)) * 2 + 1) * (least << int(rng.integers(steps))) % OFFSETS
            found.append((0, least)[how] if grows and how < 2 else alone if self.place else least)
        return found

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Add the case's name to a `Mismatch` raised within the block."""
        try:
            yield
        except Mismatch as error:
            raise Mismatch(f"{self.name}: {error}") from None


def make_case(problem: Problem, seed: int, structure: str | None = None, settings: Settings | None = None) -> Case:
    structure, chosen = problem.chosen(structure, settings)
    return case_of(problem, problem.generate(seed, structure, chosen), structure, chosen)


def case_of(
    problem: Problem,
    inputs: list[Any],
    structure: str,
    settings: Settings,
    said: Sequence[str] = (),
    place: tuple[int, int] | None = None,
) -> Case:
    """A case of these inputs, named after their origin."""
    words = (structure, *(f"{name} {value:g}" for name, value in settings.items()), *said[:-1])
    name = ", ".join((*words, f"{problem.batch_axis} {problem.batch_extent}", *said[-1:]))
    return Case(problem, name, inputs, *reference(problem, inputs), place)


def row_elements(problem: Problem) -> int:
    """Elements of one row of the batch, over all arguments."""

    def of_a_row(argument: Argument) -> int:
        return math.prod(map(problem.extent, argument.shape[1:])) if problem.batched(argument) else 0

    return max(1, sum(map(of_a_row, problem.kernel_inputs)) + sum(map(of_a_row, problem.kernel_outputs)))


def reference(
    problem: Problem, inputs: Sequence[Any], elements: int = REFERENCE_ELEMENTS
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """The problem's reference and tolerance, computed for as many rows at a time as have about `elements` elements.

    Rows that depend on each other (`Problem.sequential`) are computed together.
    """
    import numpy as np

    expected: list[np.ndarray]
    tolerance: list[np.ndarray | None]

    def with_all_rows(part: np.ndarray) -> np.ndarray:
        return np.empty((problem.batch_extent, *part.shape[1:]), part.dtype)

    step = max(1, elements // row_elements(problem))
    if problem.sequential or step >= problem.batch_extent:
        expected = problem.reference(inputs)
        return expected, problem.tolerance(inputs, expected)
    expected, tolerance = [], []
    for start in range(0, problem.batch_extent, step):
        rows = np.arange(start, min(start + step, problem.batch_extent))
        part, some = problem.with_batch(len(rows)), problem.sample(inputs, rows)
        outputs = part.reference(some)
        bounds = part.tolerance(some, outputs)
        if not expected:
            expected = [with_all_rows(array) for array in outputs]
            tolerance = [None if bound is None else with_all_rows(bound) for bound in bounds]
        for whole, array in zip((*expected, *tolerance), (*outputs, *bounds), strict=True):
            if whole is not None:
                whole[rows] = array
    return expected, tolerance


class Arguments:
    """A kernel's arguments on the device, for one case or for several one after the other.

    With `offset` arrays begin at the case's offsets (`Case.offsets`), else at an allocator's. Inputs that are the same
    objects in each case share memory among all arguments with the same `rooms`.
    """

    def __init__(
        self,
        kind: str,
        cases: Sequence[Case],
        workspaces: Sequence[Any],
        *,
        offset: bool,
        rooms: dict[tuple[int, ...], Guarded] | None = None,
    ) -> None:
        self._workspaces = workspaces
        self._case: Case | None = None  # the case whose inputs are loaded
        self._kind, self._offset = kind, offset
        rooms = {} if rooms is None else rooms
        self._rooms: list[Guarded | None] = []  # None for a scalar
        for slots in zip(*(case.slots for case in cases), strict=True):
            layouts = [slot.layout for slot in slots if slot.layout]
            if not layouts:
                self._rooms.append(None)
                continue
            size = max(math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype in layouts)
            objects = tuple(id(slot.content) for slot in slots)
            room = rooms.get(objects) or Guarded(kind, size, OFFSETS if offset else 0)
            self._rooms.append(room)
            if slots[0].content is not None:
                rooms[objects] = room

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on the device, without workspaces; as many are used on the host."""
        return sum(room.nbytes for room in self._rooms if room)

    def take(self, workspaces: Sequence[Any]) -> None:
        """Use these workspaces in further calls."""
        self._workspaces = workspaces

    def load(self, case: Case, poison: int) -> list[Any]:
        """Load a case's inputs, if they are not loaded, and fill its outputs with poison; returns the arguments for a
        kernel.
        """
        self._case = case
        offsets = case.offsets(self._kind) if self._offset else [0] * len(case.slots)
        arguments = [
            room.place(*slot.layout, offset) if room and slot.layout else slot.content
            for slot, room, offset in zip(case.slots, self._rooms, offsets, strict=True)
        ]
        for slot, room in self._arrays(outputs=False):
            if room.held is not slot.content:
                room.write(slot.content)
        self.poison(poison)
        return [*arguments, *self._workspaces]

    def poison(self, byte: int) -> None:
        """Fill the outputs with poison."""
        for _, room in self._arrays(outputs=True):
            room.write(byte)

    def outputs(self) -> list[np.ndarray]:
        """The outputs' present contents. Raises `Mismatch` if a guard byte beside one of them was overwritten."""
        return [_read(slot, room) for slot, room in self._arrays(outputs=True)]

    def check_inputs(self, checked: set[Guarded] | None = None) -> None:
        """Raise `Mismatch` if an input, or a guard byte beside one, was overwritten. Those in `checked` are skipped,
        the others are added to it.
        """
        checked = set() if checked is None else checked
        for slot, room in self._arrays(outputs=False):
            if room not in checked and not _same_bits(_read(slot, room), slot.content):
                raise Mismatch(f"the input {slot.name} was changed")
            checked.add(room)

    def _arrays(self, *, outputs: bool) -> list[tuple[Slot, Guarded]]:
        assert self._case is not None, "nothing is loaded"
        pairs = zip(self._case.slots, self._rooms, strict=True)
        return [(slot, room) for slot, room in pairs if room and outputs == (slot.content is None)]


def _read(slot: Slot, room: Guarded) -> np.ndarray:
    try:
        return room.read()
    except Mismatch as error:
        raise Mismatch(f"{slot.name}: {error}") from None


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    import numpy as np

    a, b = bytes_of(one), bytes_of(other)
    # Some at a time, so that compared data stay in the cache.
    return len(a) == len(b) and all(
        np.array_equal(a[start : start + COMPARED], b[start : start + COMPARED]) for start in range(0, len(a), COMPARED)
    )


def workspaces_on(kind: str, declared: Sequence[Mapping[str, Any]], problem: Problem) -> list[Any]:
    """A library's workspaces on the device, for calls of one problem."""

    def allocate(shape: tuple[int, ...], dtype: str, fill: int) -> Any:
        room = empty(kind, shape, dtype)  # first: if the device has no room, the host's memory must not be filled
        return room.copyfrom(loading.on_host(shape, dtype, fill))

    return loading.allocated(declared, problem, allocate)


def call(function: Any, arguments: Sequence[Any]) -> None:
    """Call a kernel. Raises `Fatal` for any error of its own."""
    try:
        function(*arguments)
    except Exception as error:
        raise Fatal(str(error)) from error


def check_again(case: Case, first: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Raise `Mismatch` unless outputs equal those of an earlier run to the last bit."""
    if not all(map(_same_bits, first, outputs)):
        case.check(outputs)
        raise Mismatch("two runs on the same inputs differ")


def verify(function: Any, kind: str, cases: Sequence[Case], workspaces: Sequence[Mapping[str, Any]]) -> None:
    """Raise `Mismatch` unless a kernel is right on all of these cases, checked as the module's docstring says."""
    alike: dict[Problem, list[Case]] = {}
    for case in cases:
        alike.setdefault(case.problem, []).append(case)
    rooms: list[dict[tuple[int, ...], Guarded]] = [{} for _ in cases]
    places = []
    for problem, group in alike.items():
        shared = workspaces_on(kind, workspaces, problem)
        held = [Arguments(kind, group, shared, offset=True, rooms=some) for _, some in zip(group, rooms, strict=False)]
        places.append((group, held))
    first: dict[Case, list[np.ndarray]] = {}
    rounds = max(2, -(-CALLS // len(cases)))
    for number in range(rounds):
        calls = []
        for group, held in places:
            for at, arguments in enumerate(held):
                shift = min(number, 1) if group[at].large else number
                case = group[(at + shift) % len(group)]
                calls.append((case, arguments, arguments.load(case, POISONS[number % 2])))
        for _, _, given in calls:
            call(function, given)
        checked: set[Guarded] = set()
        for case, arguments, _ in calls:
            with case.named():
                outputs = arguments.outputs()
                if case in first:
                    check_again(case, first[case], outputs)
                else:
                    case.check(outputs)
                    first[case] = outputs
                if not case.large or number in (0, rounds - 1):
                    arguments.check_inputs(checked)
