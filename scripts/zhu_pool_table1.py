"""Table 1 of Zhu, Pool et al. 2018 on this machine: the gain of each of its optimisations, and bank conflicts.

    python scripts/zhu_pool_table1.py                          # under a minute on a GPU
    python scripts/zhu_pool_table1.py --case 2304,4,256,0.3

One kernel, at the default point of `persistent_rows` except for each line's changes: samples side by side in a gather
(wide loads), the order of a row's entries (Algorithm 1 of appendix A, and a better one), and how thread blocks exchange
hidden states (a grid barrier, which is `barrier_rows`, or data that is polled). Speed-ups are over the dense step loop
in float32, cuBLAS in a CUDA graph. The bank conflict penalty is the number of cycles of a gather beyond the first:
expected values are computed on the host from the layout, measured ones come from hardware counters of Nsight Compute
(`ncu`), if it is installed. Without a GPU only the expected penalties are printed.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from contenders import Libraries, Named, built
from heads import Call, Report, Timed, over, show, timed
from recurrent import DENSE, OURS, ROUNDS, Case, Drawn, check, dense_loop, draw, inputs_of, ours, reference
from reproduction import provenance, result_path

from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.formats.recurrent import RecurrentWeights, recurrent_weights
from tvm_sparse.layers.recurrent_weights import launch_problem

BARRIER, POLLED = "barrier_rows", "persistent_rows"
CASE = "1152,4,256,0.1"
# The machine whose points are used without a GPU.
ELSEWHERE = "sm_90a"
CONFLICTS, WAVEFRONTS = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
)  # fmt: skip
COLUMNS = ("configuration", "cell", "hidden", "batch", "steps", "density", "nonzeros", "dtype", "microseconds",
           "microseconds_a_step", "speed_up", "paper_speed_up", "expected_penalty", "measured_penalty", "paper_penalty",
           "candidate", "timed", "note")  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A configuration: decisions that differ from the default point, the order of entries, and the paper's figures."""

    name: str
    order: str
    wide: bool  # whether to use the default's number of samples per gather, or the smallest one of the space
    template: str
    paper: tuple[float, float] | None = None  # speed-up over dense GEMM, and penalty, on a V100


LINES = (
    Line("naive", "columns", False, BARRIER, (2.53, 1.3)),
    Line("wide loads", "columns", True, BARRIER, (4.28, 1.0)),
    Line("bank-aware layout, Algorithm 1", "greedy", True, BARRIER, (4.56, 0.3)),
    Line("bank-aware layout, by residues", "banks", True, BARRIER),
    Line("Lamport exchange", "banks", True, POLLED, (5.44, 0.3)),
)


def decisions_of(line: Line, problem: Problem, where: Machine) -> Mapping[str, int]:
    """The line's point in the template's space."""
    template = spaces.find(line.template)
    default = template.default(problem, where)
    point = dict(default)
    if line.wide:
        return point
    narrower = ({**point, "pack": pack} for pack in sorted(template.space(problem, where)["pack"]))
    return next((one for one in narrower if template.point(problem, where, one) is None), point)


def banks_of(pack: int, dtype: str) -> int:
    """Number of gathers, with `pack` samples each, that shared memory serves at once: 32 of 4
    bytes, 16 of 8, 8 of 16.
    """
    return 32 // max(1, pack * numpy_dtype(dtype).itemsize // 4)


def layouts(drawn: Drawn, problem: Problem, where: Machine, dtype: str) -> dict[Line, tuple[Named, RecurrentWeights]]:
    """For each line its kernel, and weights in its order."""
    found, kept = {}, drawn.layers[dtype].weights.dense()
    for line in LINES:
        point = decisions_of(line, problem, where)
        banks = banks_of(point["pack"], dtype)
        weights = recurrent_weights(kept, drawn.layers[dtype].weights.gates, order=line.order, banks=banks)
        found[line] = Named(line.name, line.template, point), weights
    return found


def calls_of(
    drawn: Drawn, kernels: Mapping[Line, tuple[Named, RecurrentWeights]], problem: Problem, libraries: Libraries,
    dtype: str, device: str,
) -> dict[str, Call]:  # fmt: skip
    """Each line's kernel on its weights."""
    calls = {}
    for line, (named, weights) in kernels.items():
        run = libraries.peer(named, problem.operator).prepare(problem, inputs_of(drawn, dtype, weights), device)
        calls[line.name] = lambda run=run: run()[0]
    return calls


def counted(names: list[str], arguments: list[str]) -> tuple[dict[str, float], str]:
    """Measured penalties by configuration, from a run of this script under Nsight Compute; or the reason why there are
    none.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        return {}, "ncu (Nsight Compute) is not installed"
    command = [ncu, "--metrics", f"{CONFLICTS},{WAVEFRONTS}", "--csv", "--page", "raw", "--print-units", "base",
               "--profile-from-start", "off", sys.executable, __file__, *arguments, "--profiled"]  # fmt: skip
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return {}, f"ncu failed: {said[-1] if said else done.returncode}"
    return penalties(done.stdout, names)


def penalties(text: str, names: list[str]) -> tuple[dict[str, float], str]:
    """Parse ncu's output for one launch per configuration, in their order."""
    # Lines before the table are the program's own output, and messages of ncu.
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID", "").isdecimal()]
    if len(rows) != len(names):
        said = next((line for line in text.splitlines() if line.startswith("==ERROR==")), "")
        return {}, f"ncu counted {len(rows)} launches in the place of {len(names)}. {said}".strip()
    found = {}
    for name, row in zip(names, rows, strict=True):
        conflicts, wavefronts = (float(row[metric].replace(",", "")) for metric in (CONFLICTS, WAVEFRONTS))
        found[name] = conflicts / max(1.0, wavefronts - conflicts)
    return found, ""


def run_profiled(calls: Mapping[str, Call]) -> None:
    """Run each call once, for the counters."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


@torch.no_grad()
def main(
    target: Target = "auto",
    case: Annotated[str, typer.Option(help="hidden,batch,steps,density[,cell].")] = CASE,
    dtype: Annotated[str, typer.Option(help="Of weights and states.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="Of timing.")] = ROUNDS,
    counters: Annotated[bool, typer.Option(help="Count bank conflicts with ncu.")] = True,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
    profiled: Annotated[bool, typer.Option("--profiled", hidden=True)] = False,
) -> None:
    """Measure the gain of each optimisation."""
    with errors():
        where, what = machine_here(target, "comparing"), Case.parsed(case)
        on_gpu = where.kind == "cuda"
        drawn = draw(what, where.device, (dtype,), seed)
        problem = launch_problem(drawn.layers[dtype].weights, what.steps, what.batch, what.cell)
        kernels = layouts(drawn, problem, where if on_gpu else machine.resolve(ELSEWHERE), dtype)
        results: dict[str, Timed] = {}
        measured: dict[str, float] = {}
        reason = "no GPU here: kernels are not run, and penalties are those expected of the layouts"
        if on_gpu:
            with built([(problem, [named for named, _ in kernels.values()], ())], where) as libraries:
                calls = calls_of(drawn, kernels, problem, libraries, dtype, where.device)
                if profiled:
                    run_profiled(calls)
                    return
                calls |= {OURS: ours(drawn, dtype), DENSE: dense_loop(drawn, "float32")}
                wanted = reference(drawn)
                kinds = {name: "float32" if name == DENSE else dtype for name in calls}
                checks = {
                    name: lambda found, kind=kind: check(wanted, kind, str(what), found) for name, kind in kinds.items()
                }
                results = timed(calls, checks, where.device, rounds)
            reason = "counters were not asked for"
            if counters:
                options = ["--target", "cuda", "--case", case, "--dtype", dtype, "--seed", str(seed)]
                measured, reason = counted([line.name for line in LINES], options)
        path = csv_path or result_path("zhu-pool-table1", where).with_suffix(".csv")
        report = Report(path, provenance(where), COLUMNS)
        dense, rows = results.get(DENSE), []
        for line, (named, weights) in kernels.items():
            result = results.get(line.name, Timed(None, note="" if on_gpu else "no GPU"))
            pack = named.decisions["pack"]
            expected = weights.conflicts(named.decisions["reduce_threads"], banks_of(pack, dtype)).penalty
            paper = line.paper or ("", "")
            seconds = result.seconds
            count = f"{measured[line.name]:.2f}" if line.name in measured else ""
            report.add(
                **dataclasses.asdict(what), configuration=line.name, nonzeros=weights.nonzeros, dtype=dtype,
                microseconds=f"{seconds * 1e6:.3f}" if seconds else "",
                microseconds_a_step=f"{seconds * 1e6 / what.steps:.3f}" if seconds else "",
                speed_up=over(dense, result), paper_speed_up=paper[0], expected_penalty=f"{expected:.3f}",
                measured_penalty=count, paper_penalty=paper[1],
                candidate=str(spaces.find(line.template).candidate(named.decisions)), timed=result.how,
                note=result.note,
            )  # fmt: skip
            rows.append([line.name, result, over(dense, result), paper[0], f"{expected:.2f}", count or "-", paper[1]])
        for name in (OURS, DENSE):
            if name in results:
                result = results[name]
                seconds = result.seconds
                report.add(
                    **dataclasses.asdict(what), configuration=name, nonzeros=drawn.nonzeros, dtype=dtype,
                    microseconds=f"{seconds * 1e6:.3f}" if seconds else "",
                    microseconds_a_step=f"{seconds * 1e6 / what.steps:.3f}" if seconds else "",
                    speed_up=over(dense, result), timed=result.how, note=result.note,
                )  # fmt: skip
                rows.append([name, result, over(dense, result), "", "", "-", ""])
        heads = ("configuration", "microseconds", "over dense loop", "paper's", "expected penalty", "measured",
                 "paper's")  # fmt: skip
        show(f"Table 1: {what}, {dtype}", heads, rows)
        if reason:
            typer.echo(reason)
        report.close()


if __name__ == "__main__":
    typer.run(main)
