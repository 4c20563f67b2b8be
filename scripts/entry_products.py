"""Time both ways of `csr_linear`, its kernel and the product with a dense copy of the weight, and tell what the way
that calls take without a record costs.

    python scripts/entry_products.py --csv scripts/results/entry-products-h200.csv --seconds 90

Kernels are the template's defaults, all compiled before the first is timed. Each way is compared with the product in
float64 before it is timed. Times are of a call in a CUDA graph, inputs hot, both ways in turn.

regret       time of the way that calls of a constant weight take over that of the faster way

At the end stands the constant of `operators/csr_linear/dense.py` that these times make.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from reproduction import provenance, write_csv

import tvm_sparse
from tvm_sparse.bench.ways import time_ways
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.machine import Machine
from tvm_sparse.operators.csr_linear.dense import LAUNCH, likely_way, time_of_entries
from tvm_sparse.operators.csr_linear.problem import CsrLinear
from tvm_sparse.runtime.dense import DENSE, KERNEL, dense_time, operations

# In this order, as time may end.
ROWS = (32, 16, 8, 64, 1, 4)
# k and n, and sparsities of each.
WEIGHTS = {(4096, 4096): (0.8, 0.9, 0.95, 0.98), (4096, 11008): (0.8, 0.95), (1024, 4096): (0.9,)}
COLUMNS = ("m", "k", "n", "sparsity", "dtype", KERNEL, DENSE, "likely_kernel", "likely_dense", "way", "regret")


def line_of(problem: CsrLinear, times: Mapping[str, float], where: Machine) -> dict[str, Any]:
    """The microseconds of both ways, what is expected of them, and what the choice costs."""
    found = {way: seconds * 1e6 for way, seconds in times.items()}
    way = likely_way(problem, where).way
    return {
        **{name: getattr(problem, name) for name in ("m", "k", "n", "sparsity", "dtype")},
        **{name: round(us, 2) for name, us in found.items()},
        "likely_kernel": round(time_of_entries(problem), 1),
        "likely_dense": round(dense_time(problem), 1),
        "way": way,
        "regret": round(found[way] / min(found.values()), 3),
    }


def constants(lines: Sequence[tuple[CsrLinear, float]]) -> str:
    """The rate of operations that the kernel's times make, of problems that neither memory nor the launch bounds."""
    rates = [operations(problem) / (us - LAUNCH) for problem, us in lines if problem.m >= 8 and us > 2 * LAUNCH]
    return f"RATE = {statistics.median(rates):.2g} of {len(rates)} problems" if rates else "no time tells a rate"


def main(
    csv_path: Annotated[Path, typer.Option("--csv", help="File to write.")],
    target: Target = "auto",
    dtype: Annotated[str, typer.Option()] = "float16",
    shape: Annotated[list[str] | None, typer.Option(help="m,k,n,sparsity instead of the grid.")] = None,
    seconds: Annotated[float, typer.Option(help="No problem is begun after this time.")] = 120.0,
) -> None:
    """Time both ways of `csr_linear` over a grid of shapes."""
    ends, lines, times = time.monotonic() + seconds, [], []
    with errors():
        where = machine_here(target, "comparing")
        chosen = [tuple(map(float, one.split(","))) for one in shape or ()] or [
            (m, *weight, sparsity) for m in ROWS for weight, sparsities in WEIGHTS.items() for sparsity in sparsities
        ]
        problems = [CsrLinear(int(m), int(k), int(n), sparsity, dtype) for m, k, n, sparsity in chosen]
        tvm_sparse.warmup(problems, target=where.device)
        for problem in problems:
            if time.monotonic() > ends:
                typer.echo(f"no time for {problem.key}", err=True)
                continue
            found = time_ways(problem, where)
            lines.append(line_of(problem, found, where))
            times.append((problem, found[KERNEL] * 1e6))
            typer.echo(" ".join(f"{name}={value}" for name, value in lines[-1].items()))
            write_csv(csv_path, provenance(where), COLUMNS, [[line[name] for name in COLUMNS] for line in lines])
    regrets = [line["regret"] for line in lines]
    typer.echo(f"regret {statistics.geometric_mean(regrets):.3f}, worst {max(regrets):.3f}; {constants(times)}")


if __name__ == "__main__":
    typer.run(main)
