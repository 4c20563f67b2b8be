"""End times of a kernel's phases, for short calls whose time neither memory nor arithmetic explains.

    python scripts/timeline.py "softmax_topk/batch=10,vocab=128256,k=20,dtype=bfloat16" --behind 4096
    python scripts/timeline.py "head_topk/batch=12,vocab=25000,hidden=1000,k=12,dtype=float16" --cold

After each phase the first thread of each thread block stores the GPU's clock (`%globaltimer`). A phase that is executed
several times keeps its last end; a phase within another one ends before it. Calls follow each other in a CUDA graph;
with `--behind` each follows a product with that many columns, as after the last layer of a model, and with `--cold` a
kernel that reads twice the L2 cache's size. Times are those of the first, the median and the last thread block to reach
the end, each the median over the replays, counted from the moment at which the first thread block of the call's first
kernel has waited for its producer kernel. The table also has the time of a call with and without the stamps, minus that
of the kernel of `--cold`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import typer
from floors import build
from heads import Call, Report, behind, cache_reader, draw, time_cold
from reproduction import provenance

import tvm_sparse
from tvm_sparse.bench.contenders import torch_tensor
from tvm_sparse.bench.timing import ROUNDS, time_cuda
from tvm_sparse.cli.common import Fixed, Target, console, errors, fixed_values, machine_here, table
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.runtime.loading import with_workspaces

GATE, HELD, LAYER, STEP = (
    f"tvm_sparse.schedules.{part}"
    for part in (
        "softmax_topk.threshold_gate", "softmax_topk.held_rows", "output_layer", "lsh_topk.fused_step",
    )
)  # fmt: skip
GATES = {
    f"{GATE}.stream": ("offer_sample", "take_threshold", "mark_survivors", "push_survivors"),
    f"{GATE}.cluster": ("push_part", "unite_parts"),
    f"{GATE}.kernel": (
        "locate_row", "await_producer", "begin_pass", "stream_row", "add_up", "search_marked", "gather_survivors",
        "share_parts", "settle", "rank_survivors",
    ),
}  # fmt: skip
PRODUCTS = (
    "prefetch_tiles", "take_tiles", "load_states", "bring_states", "multiply_step", "finish_tile", "join_tiles",
)  # fmt: skip
RINGS = ("init_ring", "await_stage")
BEST = {
    f"{LAYER}.best.kernel": ("clear", "begin_search", "begin_near", "collect_near", "write_absent"),
    f"{LAYER}.best.sums": ("load_pairs", "join_lanes", "join_pairs"),
    f"{LAYER}.best.search": ("collect", "find_tops", "bound_tiles", "collect_bits", "rank", "rank_few"),
}
# The factories of each template's phases, by the module that assembles them.
PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "cluster_gate": GATES,
    "threshold_gate": GATES,
    "held_rows": {
        f"{HELD}.kernel": (
            "locate_row", "prepare_block", "load_row", "stage_row", "take_row", "take_steps", "take_held", "find_tops",
            "find_keys", "share_parts", "count_parts", "unite_parts", "finish_row", "finish_agreed",
        ),
        f"{HELD}.paced": ("offer_top",),
        f"{HELD}.held": ("offer_top", "weigh_warp"),
        f"{HELD}.find": ("find_bound", "put_single", "put_reached", "list_steps", "put_listed"),
        f"{HELD}.cluster": ("send_keys", "sum_of_warp"),
        f"{HELD}.rank": ("gather_parts", "rank_at_once", "add_up"),
    },
    "head_registers": {f"{LAYER}.registers.kernel": PRODUCTS, **BEST},
    "head_warp_rings": {f"{LAYER}.warp_rings.kernel": (*PRODUCTS, *RINGS, "begin_asking"), **BEST},
    "head_rings": {
        f"{LAYER}.rings.dealt": (
            "init_ring", "prefetch_tiles", "take_tiles", "load_states", "bring_states", "await_stage",
            "multiply_step", "write_parts", "finish_scores", "join_tiles",
        ),
        f"{LAYER}.rings.taken": (
            "init_ring", "prefetch_tiles", "take_tiles", "ask_states", "load_states", "end_states", "find_tile",
            "multiply_step", "write_parts", "hold_scores", "weigh_scores", "join_tiles",
        ),
        **BEST,
    },
    "head_warpgroups": {
        f"{LAYER}.warpgroups.kernel": (),
        f"{LAYER}.warpgroups.product": ("begin", "fill_ring", "finish_tile", "consume", "tell_sums", "join_warps"),
        **BEST,
    },
    "fused_step": {
        f"{STEP}.look_up": (
            "begin", "stage_row", "load_first_columns", "find_places", "find_pieces", "lengthen", "count_pieces",
            "tell", "receive", "vote", "list_reached",
        ),
        f"{STEP}.product": ("ask_first", "multiply_tile"),
        f"{STEP}.kernel": ("stage_states", "keep_states", "find_share", "multiply_all"),
        f"{STEP}.merge": (
            "load_heads", "find_blocks", "join_sums", "ask_keys", "take_asked", "take_keys", "rank", "finish_list",
            "clear",
        ),
    },
}  # fmt: skip
# The instruction after which a kernel may use its producer's results.
WAITS = {"wait_then_start_consumer", "wait_for_producer"}
ENDS = ("first_ns", "median_ns", "last_ns")  # of a phase, by thread blocks
COLUMNS = ("problem", "behind", "cold", "kernel", "phase", *ENDS, "plain_microseconds", "stamped_microseconds")
REPLAYS, CALLS = 40, 20
MOST_STAMPS, MOST_BLOCKS = 64, 4096


class Stamps:
    """Indices of the stamps by name, and the address of their buffer."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.written = torch.zeros((MOST_STAMPS, MOST_BLOCKS), dtype=torch.int64, device="cuda")

    def put(self, name: str) -> None:
        """Emit a stamp, in a kernel that is being written."""
        from tvm.script import tirx as T

        if name not in self.names:
            self.names.append(name)
        T.evaluate(T.cuda.func_call("stamp", self.names.index(name), source_code=self.source, return_type="void"))

    @property
    def source(self) -> str:
        # The address is a constant of the program, which runs in this process alone.
        return f"""
__device__ __forceinline__ void stamp(int number) {{
  unsigned int block = blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0 && block < {MOST_BLOCKS}) {{
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time) :: "memory");
    ((volatile unsigned long long*){self.written.data_ptr()}ULL)[number * {MOST_BLOCKS} + block] = time;
  }}
}}
"""

    def phase(self, name: str, phase: Callable[..., Any]) -> Callable[..., None]:
        """A phase with a stamp at its end."""

        def stamped(*arguments: Any) -> None:
            phase(*arguments)
            self.put(name)

        return stamped

    def factory(self, name: str, factory: Callable[..., Any]) -> Callable[..., Any]:
        """A factory of phases with stamps."""
        return lambda *sizes, **options: self.phase(name, factory(*sizes, **options))


class Line(NamedTuple):
    """Times at which thread blocks reach a stamp, in nanoseconds from the first one's first wait."""

    name: str
    first: float
    median: float
    last: float


def stamped_module(problem: Problem, candidate: Candidate, stamps: Stamps) -> Any:
    """The candidate's module with stamps after its phases."""
    # All are loaded before the first is changed, since they import phases of each other.
    modules = [(importlib.import_module(place), names) for place, names in PHASES[candidate.template].items()]
    with contextlib.ExitStack() as stack:
        for module, names in modules:
            label = module.__name__.rpartition(".")[2]
            stamped = {name: stamps.factory(f"{label}: {name}", getattr(module, name)) for name in names}
            stamped |= {
                name: stamps.phase(f"{label}: wait", getattr(module, name)) for name in WAITS & vars(module).keys()
            }
            for name, with_stamp in stamped.items():
                stack.enter_context(mock.patch.object(module, name, with_stamp))
        return spaces.find(candidate.template, problem.operator).build(problem, candidate.values).module


def tensors_of(problem: Problem) -> list[Any]:
    """Inputs and outputs of a call on the GPU."""
    given = (*problem.generate(0), *problem.empty_outputs())
    return [torch_tensor(one, "cuda") if isinstance(one, np.ndarray) else one for one in given]


def lines_of(stamps: Stamps, call: Callable[[], Any]) -> list[Line]:
    """The stamps of the last of several calls in a graph, over many replays, in their order."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    found: list[list[np.ndarray]] = []  # for each replay and stamp, by thread blocks
    for _ in range(REPLAYS):
        stamps.written.zero_()
        graph.replay()
        torch.cuda.synchronize()
        written = stamps.written[: len(stamps.names)].cpu().numpy()
        waits = [row[row > 0] for row, name in zip(written, stamps.names, strict=True) if name.endswith(": wait")]
        begin = min(row.min() for row in waits if len(row))
        found.append([row[row > 0] - begin for row in written])
    lines = []
    for name, rows in zip(stamps.names, zip(*found, strict=True), strict=True):
        if all(map(len, rows)):
            of_replays = [[reduce(row) for row in rows] for reduce in (np.min, np.median, np.max)]
            lines.append(Line(name, *(float(np.median(times)) for times in of_replays)))
    return sorted(lines, key=lambda line: line.last)


def measure(
    problem: Problem,
    where: Machine,
    columns: int,
    cold: bool,
    other: str | None,
    fix: Sequence[str] | None,
    report: Report,
) -> None:
    """Stamp one problem's kernel, and show the end times of its phases."""
    candidate = Candidate.parse(tvm_sparse.explain(problem).candidate)
    if other is not None:
        template = spaces.find(other, problem.operator)
        candidate = template.candidate(template.default(problem, where))
    if candidate.template not in PHASES:
        raise typer.BadParameter(f"expected a problem that one of {', '.join(PHASES)} has, got {candidate}")
    template = spaces.find(candidate.template, problem.operator)
    fixed = fixed_values(fix, candidate.values)
    candidate = template.candidate(candidate.values | {name: values[0] for name, values in fixed.items()})
    program, stamps = template.build(problem, candidate.values), Stamps()
    modules = {"plain": program.module, "stamped": stamped_module(problem, candidate, stamps)}
    own, given = [dataclasses.asdict(workspace) for workspace in program.workspaces], tensors_of(problem)
    with tempfile.TemporaryDirectory() as folder:
        functions = {name: build(module, where, Path(folder) / f"{name}.so") for name, module in modules.items()}
        if columns:
            rows, words = given[0].shape
            embedding, states = draw(words, columns, rows, problem.axes["dtype"], "cuda")
            logits = given[0] = torch.empty_like(given[0])

            def product() -> None:
                torch.mm(states, embedding.T, out=logits)

            product()
        calls: dict[str, Call] = {
            name: functools.partial(with_workspaces(function, own, problem, "cuda"), *given)
            for name, function in functions.items()
        }
        if columns:
            calls = {name: behind(product, call) for name, call in calls.items()} | {"product": product}
        first = len(problem.kernel_inputs)
        outputs = given[first : first + len(problem.kernel_outputs)]
        calls["plain"]()
        wanted = [array.clone() for array in outputs]
        calls["stamped"]()
        if not all(map(torch.equal, outputs, wanted)):
            raise AssertionError("the stamps change the result")
        timed = (time_cold if cold else time_cuda)(calls, ROUNDS["cuda"])
        times = {name: statistics.median(seconds) * 1e6 for name, (_, seconds) in timed.items()}
        lines = lines_of(stamps, behind(cache_reader(), calls["stamped"]) if cold else calls["stamped"])
    printed = table("phase", *ENDS, right=ENDS)
    for line in lines:
        ends = [f"{time:.0f}" for time in (line.first, line.median, line.last)]
        printed.add_row(line.name, *ends)
        report.add(
            problem=problem.key, behind=columns, cold=int(cold), kernel=str(candidate), phase=line.name,
            **dict(zip(ENDS, ends, strict=True)),
            plain_microseconds=f"{times['plain']:.3f}", stamped_microseconds=f"{times['stamped']:.3f}",
        )  # fmt: skip
    said = ", ".join(f"{name} {value:.2f} us" for name, value in times.items())
    typer.echo(f"\n{problem.key}\n{candidate}\n{said}")
    console().print(printed)


def main(
    problem: Annotated[list[str], typer.Argument(help="Keys of problems.")],
    target: Target = "auto",
    columns: Annotated[int, typer.Option("--behind", min=0, help="Columns of a product in front; 0: none.")] = 0,
    cold: Annotated[bool, typer.Option("--cold", help="Another kernel uses the L2 cache between calls.")] = False,
    template: Annotated[str | None, typer.Option(help="A template, at its default, in the place of what runs.")] = None,
    fix: Fixed = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
) -> None:
    """Show when the phases of kernels end."""
    with errors():
        where = machine_here(target, "measuring")
        if not where.has_clusters:
            raise typer.BadParameter("expected a GPU whose launches overlap (compute capability 9.0)")
        report = Report(csv_path, provenance(where, cold=cold), COLUMNS)
        for key in problem:
            measure(parse(key), where, columns, cold, template, fix, report)
        report.close()


if __name__ == "__main__":
    typer.run(main)
