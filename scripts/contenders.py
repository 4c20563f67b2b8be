"""Code shared by the scripts that repeat the papers' softmax measurements: our templates as contenders, and the run of
a shape.

A template enters the comparison of `tvm_sparse.bench` as a peer does: its library is built beforehand, all libraries
side by side, and its result is checked before it is timed. The contender "tvm_sparse" is the public function, which
runs the tuned kernel. Failures become notes.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from reproduction import has_plot, timing_rows, write_csv

from tvm_sparse.artifacts import manifest
from tvm_sparse.bench.compare import NAME, Comparison, compare
from tvm_sparse.bench.contenders import Call, Peer
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.runtime import arrays, loading
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.workers import building
from tvm_sparse.workers.building import library_name
from tvm_sparse.workers.processes import Pool, Reply

BUILD_TIMEOUT = 120.0


@dataclass(frozen=True)
class Named:
    """A template at its default point, except for `decisions`; `axes` replace those of the problem."""

    label: str
    template: str
    decisions: Mapping[str, int] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)

    def job(self, problem: Problem, where: Machine) -> tuple[Problem, Candidate]:
        """The job of building it. Raises `NotApplicable`."""
        problem = dataclasses.replace(problem, **self.axes)
        template = spaces.find(self.template)
        decisions = {**template.default(problem, where), **self.decisions}
        if reason := template.point(problem, where, decisions):
            raise NotApplicable(reason)
        return problem, template.candidate(decisions)


Job = tuple[Problem, Candidate]
# A shape, and the contenders besides the public function.
Shape = tuple[Problem, Sequence[Named], Sequence[Peer]]


class Libraries:
    """Compiled candidates of this run, in a folder of its own."""

    def __init__(self, folder: Path, where: Machine) -> None:
        self._folder, self._where = folder, where
        self._built: dict[Job, Reply] = {}

    def build(self, shapes: Sequence[Shape]) -> None:
        """Build the libraries for these shapes, including those of the public functions."""
        named, public = [], {}
        for problem, contenders, _ in shapes:
            found = dispatcher.explain(problem, self._where)
            if found.library is None:
                public[_chosen(problem, found.record, found.candidate)] = found
            for one in contenders:
                try:
                    named.append(one.job(problem, self._where))
                except NotApplicable:
                    continue  # reported when its turn comes
        jobs = list(dict.fromkeys([*public, *named]))
        requests = [
            building.request(p, c, self._where, self._folder / library_name(p, c, self._where.arch), symbol="")
            for p, c in jobs
        ]
        builders = max(1, min(machine.cpu().cores, 16, len(jobs)))
        with Pool(builders, [sys.executable, "-m", "tvm_sparse.workers.building"], name="build") as pool:
            self._built = dict(zip(jobs, pool.map(requests, timeout=BUILD_TIMEOUT), strict=True))
        # A folder like an exported one: public functions look there before they compile.
        entries = [
            building.described(*job, self._where, found.how, self._built[job].value, found.figures)
            for job, found in public.items()
            if self._built[job].ok
        ]
        if entries:
            manifest.write(self._folder, entries)
            dispatcher.add(self._folder)

    def peer(self, one: Named, operator: str) -> Peer:
        """The named template as a contender of `compare`."""

        def prepare(problem: Problem, inputs: Sequence[Any], device: str) -> Call:
            problem, candidate = one.job(problem, self._where)
            reply = self._built[problem, candidate]
            if not reply.ok:
                raise RuntimeError(f"build: {reply.message}")
            path, symbol = Path(reply.value["path"]), reply.value["symbol"]
            function = loading.load_function(path, self._where.kind, None, symbol)
            function = loading.with_workspaces(function, reply.value["workspaces"], problem, self._where.kind)
            return call_of(function, problem, inputs, device)

        return Peer(one.label, "tvm", ("cpu", "cuda"), prepare)


def _chosen(problem: Problem, record: str | None, candidate: str) -> Job:
    """The job for what the dispatcher would compile: a record's decisions are valid at the record's own batch."""
    recorded = parse(record) if record else problem
    same = recorded.with_batch(problem.batch_extent) == problem
    return (recorded if same else problem), Candidate.parse(candidate)


def call_of(function: Any, problem: Problem, inputs: Sequence[Any], device: str) -> Call:
    """A call of a kernel on given inputs.

    On a GPU it allocates its outputs, as the public function does, which costs nothing in a graph. On the CPU it reuses
    its outputs, since the pages of new arrays would cost more than a softmax of long rows.
    """
    specs = problem.output_layouts()
    if device == "cuda":
        import torch

        given = [torch.from_numpy(a).to(device) if hasattr(a, "dtype") else a for a in inputs]

        def call() -> Any:
            outputs = tuple(torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in specs)
            function(*given, *outputs)
            return outputs

        return call
    import numpy as np

    kept = tuple(np.empty(shape, numpy_dtype(dtype)) for shape, dtype in specs)
    arguments = [arrays.argument(a) if hasattr(a, "dtype") else a for a in (*inputs, *kept)]

    def call_in_place() -> Any:
        function(*arguments)
        return kept

    return call_in_place


@contextmanager
def built(shapes: Sequence[Shape], where: Machine) -> Iterator[Libraries]:
    """The libraries that these shapes need."""
    with tempfile.TemporaryDirectory(prefix="tvm_sparse-") as folder:
        libraries = Libraries(Path(folder), where)
        libraries.build(shapes)
        yield libraries


def compared(shape: Shape, libraries: Libraries, where: Machine, seed: int) -> Comparison | None:
    """The shape's comparison, or None with a message if our own public function fails."""
    problem, contenders, others = shape
    typer.echo(f"measuring {problem}", err=True)
    if any("compile" in peer.name for peer in others):
        import torch

        torch._dynamo.reset()  # it gives up after a few shapes of the same function
    ours = [libraries.peer(one, problem.operator) for one in contenders]
    try:
        return compare(problem, where, seed=seed, peers=[*ours, *others], host=False)
    except (Mismatch, RuntimeError, MemoryError) as error:
        typer.echo(f"{problem} is left out: {NAME} itself: {str(error)[:300]}", err=True)
        return None


def torch_compiled(problem: Problem, inputs: Sequence[Any], device: str) -> Call:
    """softmax and topk in one compiled function, in which topk stays the library's own."""
    import torch

    x = torch.from_numpy(inputs[0]).to(device)
    k = problem.axes["k"]
    compiled = torch.compile(
        lambda logits: torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k),
        fullgraph=True,
        dynamic=False,
    )
    compiled(x)
    return lambda: compiled(x)


TORCH_COMPILED = Peer("torch.compile softmax, topk", "triton", ("cuda",), torch_compiled)


def others(operator: str, *, compiled: bool) -> tuple[Peer, ...]:
    """The other libraries' ways; compiled ones, which take seconds for each shape, only on request."""
    known = registry.find(operator).peers.PEERS
    if operator == "softmax_topk":
        known = (*known, TORCH_COMPILED)
    return tuple(peer for peer in known if compiled or "compile" not in peer.name)


COLUMNS = ("figure", "problem", "implementation", "microseconds", "peer_over_ours", "compulsory_GB_per_s", "timed",
           "correct", "kernel", "note")  # fmt: skip


def medians(results: Mapping[int, Comparison], axis: str) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """From a table's results by the axis' value: microseconds by contender and value, and for each contender the reason
    for missing ones.
    """
    series: dict[str, dict[int, float]] = {}
    notes: dict[str, str] = {}
    for value, result in results.items():
        for timing in result.timings:
            if timing.median:
                series.setdefault(timing.name, {})[value] = timing.median * 1e6
            elif timing.note:
                notes[timing.name] = f"{axis} = {value}: {timing.note}"
    return series, notes


def print_origins(results: Mapping[int, Comparison], notes: Mapping[str, str], axis: str) -> None:
    """Print the origin of our kernel at each value, and the notes of contenders without a time."""
    for value, result in results.items():
        typer.echo(f"{NAME} at {axis} = {value}: {result.kernel} ({result.how})")
    for name, note in notes.items():
        typer.echo(f"{name}, {note}")


def measured(
    shapes: Mapping[int, Shape],
    figure: str,
    libraries: Libraries,
    where: Machine,
    seed: int,
    path: Path,
    facts: Mapping[str, str],
    lines: list[list[Any]],
) -> dict[int, Comparison]:
    """The results of a table's shapes, by their value; `lines` is extended, and written to the CSV, after each."""
    results = {}
    for value, shape in shapes.items():
        result = compared(shape, libraries, where, seed)
        if result is not None:
            results[value] = result
            lines += timing_rows(COLUMNS, result, figure=figure)
            # Results so far are kept if a later shape fails.
            write_csv(path.with_suffix(".csv"), facts, COLUMNS, lines)
    return results


def say_written(path: Path, lines: Sequence[Any]) -> None:
    """Print the path of the CSV, if there is one, and what plots need."""
    if lines:
        typer.echo(f"\nwritten: {path.with_suffix('.csv')}")
    if not has_plot():
        typer.echo('no plots, matplotlib is absent: pip install "tvm_sparse[plot]"')
