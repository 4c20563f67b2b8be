"""Time samplers without a top-k by batch and by filter, point by point, on logits that are normal numbers.

    python scripts/probes/sampling.py --out sampling.csv --batches 1,64,256,512 --vocab 128256 --dtypes float32,bfloat16

Points of `sample_slices` are drawn from what `--fix` leaves of its space, or given by `--point`, and compiled once a
dtype, on all cores: a kernel serves every batch and filter. Beside them stand the defaults of `sample_gate` and
`sample_cluster`, which keep the 128 best words of a row and search it. Each point is checked on every structure of a
smaller problem, and on the first rows of what it is timed on. A wrong point is a line with a reason.
Times are of a kernel alone, in a CUDA graph, inputs hot; `read_us` is what reading the logits once takes at the
memory's speed.
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import explore
import numpy as np
import typer

from tvm_sparse.bench.buffers import Fatal
from tvm_sparse.bench.timing import time_kernel
from tvm_sparse.bench.verification import Arguments, Case, call, make_case, verify, workspaces_on
from tvm_sparse.cli.common import Fixed, fixed_values, machine_here
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, numpy_dtype
from tvm_sparse.formats.bitmap import pack_bits
from tvm_sparse.operators.softmax_sample.problem import UNSAID, SoftmaxSample
from tvm_sparse.runtime import loading

# temperature, top_k, top_p, min_p
FILTERS = {"temperature": (1.0, 0, 1.0, 0.0), "min_p": (1.0, 0, 1.0, 0.05), "top_p": (1.0, 0, 0.9, 0.0)}
CHECKED = 16  # rows
COLUMNS = ("dtype", "rows", "deviation", "filter", "us", "read_us", "template", "decisions", "registers", "local_bytes",
           "note")  # fmt: skip


def wanted_points(
    problem: SoftmaxSample, machine: Machine, fix: list[str], given: list[str], count: int, seed: int
) -> list[Candidate]:
    """The points that are given; if none are, the defaults for one row and for many, and some other points."""
    template = spaces.find("sample_slices")
    table = template.space(problem, machine)
    if given:
        points = (fixed_values(one.split(","), table) for one in given)
        return [template.candidate({name: value for name, (value,) in one.items()}) for one in points]
    defaults = {template.candidate(template.default(problem.with_batch(rows), machine)) for rows in (1, 64, 512)}
    space = spaces.narrowed(table, fixed_values(fix, table))
    others = [one for one in spaces.points(problem, machine, {template.name: space}) if one not in defaults]
    return [*defaults, *random.Random(seed).sample(others, min(count, len(others)))]


def cases_of(problem: SoftmaxSample, logits: np.ndarray, arrays: list[np.ndarray]) -> dict[str, Case]:
    """The checked rows of each filter, with their reference; `arrays` follow the filters."""
    few, found = problem.with_batch(CHECKED), {}
    for name, filters in FILTERS.items():
        inputs = [logits[:CHECKED], *filters, *(array[:CHECKED] for array in arrays)]
        expected = few.reference(inputs)
        found[name] = Case(few, name, inputs, expected, few.tolerance(inputs, expected), None)
    return found


def main(
    out: Annotated[Path, typer.Option(help="The CSV to write.")],
    batches: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,64,256,512",
    vocab: Annotated[int, typer.Option(min=2)] = 128256,
    dtypes: Annotated[str, typer.Option()] = "float32,bfloat16",
    deviations: Annotated[str, typer.Option(help="Of the logits; with 4 rows are peaked.")] = "1",
    allowed: Annotated[bool, typer.Option(help="With bitmaps that allow nine tenths of the columns.")] = False,
    points: Annotated[int, typer.Option(min=0, help="Beside the defaults.")] = 60,
    point: Annotated[list[str] | None, typer.Option(help="One to time, and no others, as threads=512,...")] = None,
    gates: Annotated[bool, typer.Option(help="Whether the templates that keep 128 words stand beside.")] = True,
    seconds: Annotated[float, typer.Option(help="When to stop timing further points.")] = 210,
    seed: Annotated[int, typer.Option(help="Of the draw and the data.")] = 0,
    fix: Fixed = None,
) -> None:
    """Compile, check and time points, and write a CSV."""
    started, machine = time.monotonic(), machine_here("auto", "exploring")
    numbers, spread = list(map(int, batches.split(","))), list(map(float, deviations.split(",")))
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal((max(*numbers, CHECKED), vocab), dtype=np.float32)
    uniforms = rng.random(len(flat), dtype=np.float32)
    bitmaps = [pack_bits(rng.random(flat.shape) < 0.9)] if allowed else []
    loading.prepare(machine.kind)
    with out.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)

        def write(
            dtype: str,
            rows: int,
            deviation: float,
            name: str,
            us: str,
            candidate: Candidate,
            reply: Any,
            note: str = "",
        ) -> None:
            size = rows * vocab * numpy_dtype(dtype).itemsize
            read = f"{size / machine.bandwidth * 1e6:.2f}" if machine.bandwidth else ""
            resources = reply["resources"] or {}
            decisions = " ".join(f"{key}={value}" for key, value in candidate.decisions)
            told = (resources.get("registers", ""), resources.get("local_bytes", ""))
            writer.writerow((dtype, rows, deviation, name, us, read, candidate.template, decisions, *told, note))
            file.flush()

        for number, dtype in enumerate(dtypes.split(",")):
            until = started + seconds * (number + 1) / len(dtypes.split(","))
            slices = SoftmaxSample(max(numbers), vocab, 1, dtype, whole=1, allowed=int(allowed))
            best = SoftmaxSample(max(numbers), vocab, UNSAID, dtype, whole=1, allowed=int(allowed))
            kinds = [(slices, wanted_points(slices, machine, fix or [], point or [], points, seed))]
            others = [spaces.find(name) for name in ("sample_gate", "sample_cluster") if gates]
            kinds.append((best, [one.candidate(one.default(best.with_batch(64), machine)) for one in others]))
            for problem, candidates in kinds:
                if not candidates:
                    continue
                own = Path(folder) / f"{dtype}-{problem.k}"
                own.mkdir()
                built = list(explore.compiled(problem, machine, candidates, own))
                small = [
                    make_case(problem.smaller(explore.FEW_ROWS), seed + n, structure, problem.settings[n % 3])
                    for n, structure in enumerate(problem.structures)
                ]
                good = []
                for candidate, reply in built:
                    function = loading.load_function(Path(reply["path"]), machine.kind, None)
                    try:
                        verify(function, machine.kind, small, reply["workspaces"])
                        good.append((candidate, reply, function))
                    except (Mismatch, Fatal) as error:
                        write(dtype, 0, 0, "", "", candidate, reply, f"wrong: {error}"[:300])
                for deviation, rows in itertools.product(spread, numbers):
                    logits = (flat * np.float32(deviation)).astype(numpy_dtype(dtype))
                    if rows == numbers[0]:
                        checked = cases_of(problem, logits, [*bitmaps, uniforms])
                    those = problem.with_batch(rows)
                    beside = [array[:rows] for array in (*bitmaps, uniforms)]
                    inputs = [logits[:rows], *FILTERS["temperature"], *beside]
                    case = Case(those, "timed", inputs, those.empty_outputs(), [None] * 4, None)
                    arguments = Arguments(machine.kind, [case], workspaces_on(machine.kind, [], those), offset=False)
                    for candidate, reply, function in good:
                        arguments.take(workspaces_on(machine.kind, reply["workspaces"], those))
                        for name in FILTERS:
                            if time.monotonic() > until:
                                write(dtype, rows, deviation, name, "", candidate, reply, "no time")
                                continue
                            given = arguments.load(case, explore.POISON)
                            given[1:5] = FILTERS[name]
                            call(function, given)
                            few = min(rows, CHECKED)
                            try:
                                inputs = [
                                    one[:few] if isinstance(one, np.ndarray) else one for one in checked[name].inputs
                                ]
                                expected = [one[:few] for one in checked[name].expected]
                                found = [one[:few] for one in arguments.outputs()]
                                problem.with_batch(few).check(inputs, expected, found)
                            except Mismatch as error:
                                write(dtype, rows, deviation, name, "", candidate, reply, f"wrong: {error}"[:300])
                                continue
                            us = statistics.median(time_kernel(machine.kind, function, given)) * 1e6
                            write(dtype, rows, deviation, name, f"{us:.2f}", candidate, reply)
    print(f"{time.monotonic() - started:.0f} s, {out}")


if __name__ == "__main__":
    typer.run(main)
