"""What a schedule template is: a named space of decisions, and the program that each point of it stands for.

A template declares, for a problem on a machine, a table of decisions (or the reason why it does not apply) and
builds the program of one point. It is a function of its arguments alone: a candidate is stored as (template,
version, decisions) and replayed by calling `build` again, which survives a compiler upgrade and carries no code.
Where TVM's schedule primitives reach, `build` applies them to a definition without threads; where they do not
(selection by threshold, an exchange between blocks), it generates TIR with explicit threads. Search, records and
command line see no difference.

Raise `version` whenever the same decisions would give another program.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .candidate import Candidate
from .machine import Machine
from .problem import Problem
from .script import quicken_parser

if TYPE_CHECKING:
    from tvm import IRModule

Decisions = Mapping[str, int]
Table = Mapping[str, tuple[int, ...]]
Features = Mapping[str, float]
P = TypeVar("P", bound=Problem)  # the problem class of a template's operator


class NotApplicable(Exception):
    """The template does not fit the problem or the machine; the message is the reason, shown in reports on
    the space.
    """


@dataclass(frozen=True)
class Workspace:
    """A buffer that a program's kernels share, owned by the runtime and passed after the outputs.

    `shape` gives extents, or by name the problem's batch axis, its data axes, and what `Problem.extent` makes of these.
    It is filled with the byte `fill` once, when it is allocated; a kernel that relies on this content must restore it.
    With None it is scratch, whose content at the start of a call is undefined. On a GPU consecutive kernels share
    scratch, so a kernel must not touch it before the previous one has ended.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    fill: int | None = 0


@dataclass(frozen=True)
class Resident:
    """The thread blocks of a cooperative kernel, all of which must run at the same time.

    They wait for each other, so some of them alone would wait for ever. A cooperative launch fails instead.
    """

    blocks: int
    threads: int  # per thread block
    shared_bytes: int  # dynamic shared memory


@dataclass(frozen=True)
class Launch:
    """The resources of a thread block of a CUDA kernel, apart from registers and static shared memory."""

    threads: int
    dynamic_shared_bytes: int = 0


@dataclass(frozen=True)
class Program:
    """One point of a template, ready to compile: the function `main` and the workspaces that it takes."""

    module: IRModule
    workspaces: tuple[Workspace, ...] = ()
    pipeline: str | None = None  # "tirx" for kernels with explicit threads, else TVM's default
    resident: Resident | None = None  # for a cooperative template
    instructions: tuple[str, ...] = ()  # used beyond those of a CPU's level, as named in `Machine`


@dataclass(frozen=True)
class Template(Generic[P]):
    """A named strategy for one operator on one kind of machine.

    Attributes
    ----------
    space
        (problem, machine) -> the decisions by name, each with the values it may take. Raises `NotApplicable`.
    default
        (problem, machine) -> the decisions taken without tuning. They must be a point of the space.
    program
        (problem, decisions) -> the program of that point. Callers use `build`.
    allowed
        (problem, machine, decisions) -> None, or why this point of the table is left out.
    features
        (problem, machine, decisions) -> numbers by name from which, with axes and decisions, the time of a point may be
        learned: thread blocks per multiprocessor, steps per thread, share of idle lanes. Templates of one operator give
        the same name to the same thing (`records.predictor`). Called for any decisions of the table, including those
        that are not allowed.
    launch
        (problem, decisions) -> the launch of a CUDA program's kernel; of the slowest one if it has several. Tables of
        trials take threads and occupancy from it (`records.database`); without it the decision `threads` is used, and
        dynamic shared memory is not counted.
    explicit_threads
        Whether the program uses barriers, shuffles or atomics by hand. Such a program cannot be checked by turning its
        thread bindings into loops; its CUDA source is run thread by thread instead.
    cooperative
        Whether the program's kernel is launched cooperatively (`Resident`). A GPU may be too small for its library,
        which the runtime finds out before it launches, or too busy: then a fallback runs that is not cooperative.
    declines
        (problem, machine) -> whether another fallback is the better guess without tuning, though this template fits.
    comparison
        Built for study, as a paper's own kernel is: left out of tuning unless it is named.
    """

    name: str
    version: int
    operator: str
    kind: str  # of machine: "llvm" or "cuda"
    summary: str
    space: Callable[[P, Machine], Table]
    default: Callable[[P, Machine], Decisions]
    program: Callable[[P, Decisions], Program]
    allowed: Callable[[P, Machine, Decisions], str | None] = lambda problem, machine, decisions: None
    features: Callable[[P, Machine, Decisions], Features] = lambda problem, machine, decisions: {}
    launch: Callable[[P, Decisions], Launch] | None = None
    explicit_threads: bool = False
    cooperative: bool = False
    comparison: bool = False
    declines: Callable[[P, Machine], bool] = lambda problem, machine: False

    def build(self, problem: P, decisions: Decisions) -> Program:
        """The program of a point, ready to compile. Loads the compiler."""
        quicken_parser()
        return self.program(problem, decisions)

    def candidate(self, decisions: Decisions) -> Candidate:
        return Candidate(self.name, self.version, tuple((name, int(value)) for name, value in decisions.items()))

    def needs(self, problem: P, decisions: Decisions) -> dict[str, int]:
        """Resources of a GPU that a point needs beyond those recorded in its machine code, as far as they are declared.

        Keys: `dynamic_shared_bytes` of a thread block (`Launch`), and `cluster`, thread blocks in a cluster, if there
        are several.
        """
        if self.kind != "cuda":
            return {}
        launch = self.launch(problem, decisions) if self.launch else None
        found = {"dynamic_shared_bytes": launch.dynamic_shared_bytes if launch else 0}
        found["cluster"] = decisions["cluster"] if decisions.get("cluster", 1) > 1 else 0
        return {name: int(value) for name, value in found.items() if value}

    def point(self, problem: P, machine: Machine, decisions: Decisions) -> str | None:
        """None if `decisions` is a point of this template's space for the problem, else why it is not."""
        try:
            table = self.space(problem, machine)
        except NotApplicable as error:
            return str(error)
        if list(decisions) != list(table):
            names = f"decisions are {', '.join(decisions)}; the space has {', '.join(table)}"
            return f"{names} (tvm-sparse db migrate completes records of an earlier version)"
        for name, value in decisions.items():
            if value not in table[name]:
                return f"{name}={value} is not among {', '.join(map(str, table[name]))}"
        return self.allowed(problem, machine, decisions)


# Functions of a template that a package's `space.py` may define.
OF_SPACE = ("space", "default", "allowed", "features", "launch", "declines")


def in_phases(space: ModuleType, /, **declared: Any) -> Template[Any]:
    """The template of a package with a generated kernel: its functions are those of `space.py`, and its program is
    `program(problem, decisions)` of `kernel.py`, which is imported when a point is built.

    Parameters
    ----------
    space
        The package's module of that name.
    declared
        `name`, `version`, `operator`, `summary`, and what else of `Template` is neither its default nor that of a
        generated kernel: "cuda" and explicit threads.
    """

    def program(problem: Any, decisions: Decisions) -> Program:
        kernel = importlib.import_module(".kernel", space.__package__)
        made: Program = kernel.program(problem, decisions)
        return made

    found = {name: getattr(space, name) for name in OF_SPACE if hasattr(space, name)}
    return Template(**{"kind": "cuda", "explicit_threads": True, "program": program, **found, **declared})


def powers(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from `low` to `high`, both powers of two themselves and included."""
    return tuple(1 << i for i in range(low.bit_length() - 1, high.bit_length()))


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)
