"""The cost of the worst inputs: sorted rows, constant rows, Zipf-like rows and ties; sparse weights with skewed rows.

    python scripts/structures.py                     # on a GPU with 16 cores, about two minutes
    python scripts/structures.py --operator bsr_matmul
    python scripts/structures.py --operator softmax_topk --shape 4000x25000   # not a default: inputs take long to make

Each line is a shape of `softmax_topk` or `bsr_matmul`, with the public function's time for inputs in random order
(blocks spread evenly), and the ratio to it for other inputs. Everything is checked against the reference before it is
timed. Writes one CSV for each operator, with GPU, versions and date, into scripts/results/.
"""

from __future__ import annotations

from typing import Annotated

import typer
from bench_peers import SOFTMAX, TOP
from contenders import built
from reproduction import provenance, result_path, write_csv

from tvm_sparse.bench.compare import compare
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import make

LARGE = (4000, 25000)
ORDERS = ("random", "ascending", "constant", "zipf", "ties")
PRODUCTS = (
    {"m": 8, "k": 1024, "n": 1024, "block": 16, "sparsity": 0.85},
    {"m": 8, "k": 4096, "n": 4096, "block": 16, "sparsity": 0.85, "dtype": "float16"},
    {"m": 512, "k": 4096, "n": 4096, "block": 32, "sparsity": 0.85, "dtype": "float16"},
    {"m": 8, "k": 8192, "n": 28672, "block": 16, "sparsity": 0.85, "dtype": "float16"},
)
PATTERNS = ("uniform", "skewed")


def cases(operator: str, only: list[str]) -> list[list[tuple[str, Problem, str | None]]]:
    """By shape: the name of each kind of input, the problem, and the structure to generate."""
    if operator == "softmax_topk":
        named = {"{}x{}".format(*shape): shape for shape in SOFTMAX}
        if unknown := set(only) - set(named):
            expected = f"expected some of {', '.join(named)}, got {', '.join(sorted(unknown))}"
            raise typer.BadParameter(expected, param_hint="--shape")
        shapes = [named[name] for name in only] or [shape for shape in SOFTMAX if shape != LARGE]
        problems = [make(operator, {"batch": b, "vocab": v, "k": k}) for b, v in shapes for k in TOP]
        return [[(order, problem, order) for order in ORDERS] for problem in problems]
    return [[(name, make(operator, {**axes, "pattern": name}), None) for name in PATTERNS] for axes in PRODUCTS]


def main(
    target: Target = "auto",
    operator: Annotated[list[str] | None, typer.Option(help="Only softmax_topk, or only bsr_matmul.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Of softmax_topk only these, like 4000x25000.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Compare kinds of input of one shape."""
    with errors():
        where = machine_here(target, "comparing")
        facts = provenance(where)
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        for kind in operator or ("softmax_topk", "bsr_matmul"):
            lines: list[list[object]] = []
            path = result_path("-".join(["structures", kind, *(shape or ())]), where).with_suffix(".csv")
            shapes = cases(kind, shape or [])
            names = [name for name, _, _ in shapes[0]]
            printed = table("problem", f"{names[0]} us", *names[1:], right=(f"{names[0]} us", *names[1:]))
            with built([(problem, (), ()) for kinds in shapes for _, problem, _ in kinds], where):
                for kinds in shapes:
                    seconds = []
                    for name, problem, structure in kinds:
                        result = compare(problem, where, seed=seed, structure=structure, peers=(), host=False)
                        assert result.ours.median is not None
                        seconds.append(result.ours.median)
                        ratio = seconds[-1] / seconds[0]
                        lines.append([problem.key, name, f"{seconds[-1] * 1e6:.3f}", f"{ratio:.3f}", result.kernel])
                    ratios = [f"{s / seconds[0]:.2f}" for s in seconds[1:]]
                    printed.add_row(kinds[0][1].key, us(seconds[0]), *ratios)
                    # Results so far are kept if a later shape fails.
                    write_csv(path, facts, ("problem", "inputs", "microseconds", "over_first", "kernel"), lines)
            console().print(printed)
            typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
