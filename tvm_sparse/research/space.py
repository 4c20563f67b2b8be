"""Properties of a schedule space: its templates, sizes and restrictions, the share that compiles, and code of its
points.

Any architecture can be examined on any machine, since nothing is run.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import scratch, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.template import NotApplicable, Table, Template
from ..records.queries import without_numbers
from ..workers import building
from ..workers.processes import Pool, Reply

# Most combinations of a table that are enumerated, which takes minutes; and the number drawn from a larger one.
MOST_COMBINATIONS, DRAWN = 1_000_000_000, 100_000

EMITTED = {"cuda": ("tir", "cuda", "ptx", "sass"), "llvm": ("tir", "llvm", "asm")}
"""What `emitted` can show, by kind of machine."""


@dataclass(frozen=True)
class Part:
    """One template's part of a problem's space.

    Attributes
    ----------
    template
        The template.
    reason
        Why it does not apply; empty where it does.
    table
        Its decisions, each with its values.
    points
        The allowed points; for a table with more than `MOST_COMBINATIONS` combinations, those among the drawn ones.
    refused
        Number of points of the table, or of those drawn from it, by the first restriction that refuses them. A
        restriction is identified by its sentence, with `#` for numbers.
    drawn
        Number of combinations drawn at random, the same ones each time; 0 if all were enumerated.
    """

    template: Template
    reason: str
    table: Table
    points: tuple[Candidate, ...]
    refused: Mapping[str, int]
    drawn: int = 0

    @property
    def share(self) -> tuple[float, float]:
        """The share of the table's combinations that are points: exact, or as a 95 % confidence interval if it was
        sampled.
        """
        if self.drawn:
            return wilson(len(self.points), self.drawn)
        exact = len(self.points) / self.product if self.product else 0.0
        return exact, exact

    @property
    def product(self) -> int:
        """Number of points that the table would have without restrictions."""
        return spaces.combinations(self.table) if self.table else 0


def parts(problem: Problem, machine: Machine, names: Collection[str] = ()) -> list[Part]:
    """The part of every template of the problem's operator for this kind of machine, or of those named.

    Raises
    ------
    ProblemError
        For a name that is not such a template's.
    """
    found = []
    for template in spaces.named(names, problem.operator, machine):
        try:
            table = template.space(problem, machine)
        except NotApplicable as error:
            found.append(Part(template, str(error), {}, (), {}))
            continue
        points, refused = [], Counter[str]()
        number = DRAWN if spaces.combinations(table) > MOST_COMBINATIONS else 0
        for values in _draws(table, number, problem.key) if number else itertools.product(*table.values()):
            decisions = dict(zip(table, values, strict=True))
            reason = template.allowed(problem, machine, decisions)
            if reason is None:
                points.append(template.candidate(decisions))
            else:
                refused[without_numbers(reason)] += 1
        found.append(Part(template, "", table, tuple(points), dict(refused.most_common()), number))
    return found


def _draws(table: Table, number: int, seed: str) -> Iterator[tuple[int, ...]]:
    generator = random.Random(seed)
    return (tuple(generator.choice(values) for values in table.values()) for _ in range(number))


def sampled(points: Sequence[Candidate], count: int, seed: int = 0) -> list[Candidate]:
    """`count` points, the same ones for the same seed; all if there are no more."""
    return random.Random(seed).sample(points, min(count, len(points)))


@dataclass(frozen=True)
class Compiled:
    """Outcomes of compiling a sample of points.

    Attributes
    ----------
    tried
        Number of points tried.
    of
        Number of points of the space.
    fits
        Number that compiled, within the architecture's limits and without spilling registers.
    failures
        Number that did not, by reason (numbers as `#`).
    """

    tried: int
    of: int
    fits: int
    failures: Mapping[str, int]

    @property
    def interval(self) -> tuple[float, float]:
        """The share of the space that fits, as a 95 % confidence interval, or exactly if all points were tried."""
        return (self.fits / self.of, self.fits / self.of) if self.tried == self.of else wilson(self.fits, self.tried)


def wilson(count: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (1927, "Probable inference, the law of succession, and statistical
    inference"), which is valid for few draws, and for shares near 0 and 1.
    """
    if not of:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, extra = count / of, z * z / of
    middle = (share + extra / 2) / (1 + extra)
    width = z / (1 + extra) * math.sqrt(share * (1 - share) / of + extra / (4 * of))
    return max(0.0, middle - width), min(1.0, middle + width)


def compiled(
    problem: Problem, machine: Machine, points: Sequence[Candidate], builders: int, *, of: int | None = None
) -> Compiled:
    """Compile points, `builders` at a time, each in a child process; they are a sample of a space of `of` points, or
    all.
    """
    failures = Counter[str]()
    with scratch.folder() as folder, Pool(builders, building.BUILD_WORKER, name="build") as pool:
        requests = [
            building.request(problem, point, machine, folder / f"{number}.so") for number, point in enumerate(points)
        ]
        for reply in pool.map(requests, timeout=building.BUILD_TIMEOUT):
            if reason := _failure(reply):
                failures[without_numbers(reason)] += 1
    tried, fits = len(points), len(points) - failures.total()
    return Compiled(tried, len(points) if of is None else of, fits, dict(failures.most_common()))


def _failure(reply: Reply) -> str:
    if not reply.ok:
        return f"{reply.kind}: {reply.message.splitlines()[0]}" if reply.message else reply.kind
    spills = (reply.value["resources"] or {}).get("spill_instructions", 0)
    return "spills registers" if spills else ""


def check_form(form: str, machine: Machine) -> None:
    """Raise `ProblemError` for a form of code that this kind of machine does not have."""
    if form not in EMITTED[machine.kind]:
        raise ProblemError(f"emit: got {form!r}; on {machine.arch} expected one of {', '.join(EMITTED[machine.kind])}")


def emitted(problem: Problem, candidate: Candidate, machine: Machine, form: str) -> str:
    """The code of a point.

    Parameters
    ----------
    form
        `tir`; for a GPU `cuda` (the code generator's output), `ptx` or `sass` (machine code, by NVIDIA's `nvdisasm`);
        for a CPU `llvm` or `asm`.

    Raises
    ------
    ProblemError
        For a form that this kind of machine does not have, or a candidate that is not a point.
    ToolchainError
        For `sass` without `nvdisasm`.
    """
    check_form(form, machine)
    if reason := spaces.refusal(candidate, problem, machine):
        raise ProblemError(f"{candidate} is no point for {problem} on {machine.arch}: {reason}")
    if form in ("ptx", "sass"):
        return _assembled(problem, candidate, machine, form)
    program = spaces.find(candidate.template, problem.operator).build(problem, candidate.values)
    if form == "tir":
        return program.module.script()
    from ..artifacts.compile import target_of

    target = target_of(machine)
    if form == "cuda":
        from ..emulation import cuda_source

        return cuda_source(program.module, target, pipeline=program.pipeline)
    import tvm

    with target:
        built = tvm.compile(program.module, target=target, tir_pipeline=program.pipeline or "default")
    return built.mod.inspect_source("ll" if form == "llvm" else "s")


def _assembled(problem: Problem, candidate: Candidate, machine: Machine, form: str) -> str:
    """PTX, or disassembled machine code, of every kernel of a point."""
    from ..artifacts import cuda
    from ..artifacts.compile import compile_candidate

    if form == "ptx" and not machine.arch.startswith("compute_"):
        machine = replace(machine, arch=f"compute_{machine.capability}")
    with scratch.folder() as folder:
        library = folder / "kernel.so"
        compile_candidate(problem, candidate, machine, library)
        if form == "sass":
            return "\n".join(map(cuda.disassembled, cuda.cubins(library)))
        return "\n".join(cuda.ptx_texts(library))


@dataclass(frozen=True)
class Difference:
    """A line of a comparison: the name of a decision or property, and its value on either side."""

    what: str
    one: Any
    other: Any


def differences(one: Part, other: Part) -> Iterator[Difference]:
    """Differences between two templates, or one template for two problems: sizes, and values of decisions."""
    yield Difference("template", one.template.name, other.template.name)
    yield Difference("points without restrictions", one.product, other.product)
    yield Difference("points", len(one.points), len(other.points))
    for name in dict.fromkeys([*one.table, *other.table]):
        if one.table.get(name) != other.table.get(name):
            yield Difference(name, one.table.get(name), other.table.get(name))
    for reason in dict.fromkeys([*one.refused, *other.refused]):
        if one.refused.get(reason) != other.refused.get(reason):
            yield Difference(f"refused: {reason}", one.refused.get(reason, 0), other.refused.get(reason, 0))
    if one.reason != other.reason:
        yield Difference("does not apply", one.reason, other.reason)


def point_differences(one: Candidate, other: Candidate) -> Iterator[Difference]:
    """Differences between two points: template and decisions."""
    if (one.template, one.version) != (other.template, other.version):
        yield Difference("template", f"{one.template}@{one.version}", f"{other.template}@{other.version}")
    mine, theirs = one.values, other.values
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            yield Difference(name, mine.get(name), theirs.get(name))
