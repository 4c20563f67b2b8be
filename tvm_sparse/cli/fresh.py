"""The fresh process of the quickstart: `python -m tvm_sparse.cli.fresh REQUEST`.

The request is JSON: the exported `folder`, the `kind` of machine, the `problems` by key, the parent's `plugins`, and
the number of `rounds` for timing (null: the usual number).

It loads an exported folder, calls the public functions on inputs that tuning never saw, compares the results with the
float64 reference, and times them together with the fastest peer. It prints one JSON line for each problem.
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import tvm_sparse
from tvm_sparse.bench.verification import make_case, verify
from tvm_sparse.core import machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import add_plugins, parse

from ..bench.compare import compare, has_torch


def result_of(problem: Problem, where: machine.Machine, folder: str, rounds: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "problem": problem.key,
        "correct": None,
        "error": "",
        "seconds": None,
        "rounds": [],  # the same for each round
        "host_seconds": None,  # the part of it that Python costs
        "peer": None,
        "compiler": False,
    }
    found = tvm_sparse.explain(problem, target=where.arch)
    if found.how != "exact" or not (found.library or "").startswith(folder):
        result["error"] = f"the exported kernel is not used: {found.how}: {found.why}"
        return result
    seed = secrets.randbelow(1 << 20)
    try:
        if where.device == "cuda" and not has_torch("cuda"):
            _check_without_torch(problem, where, seed)
            result["correct"] = True
        else:
            compared = compare(problem, where, seed=seed, host=where.device == "cpu", rounds=rounds)
            best = compared.best_peer
            ours = compared.ours
            result.update(correct=True, seconds=ours.median, rounds=ours.seconds, host_seconds=compared.host_seconds)
            if compared.how != "exact":
                result["error"] = f"the call ran another kernel ({compared.how}): {compared.kernel}"
            if best is not None:
                result["peer"] = {"name": best.name, "seconds": best.median, "rounds": best.seconds}
    except AssertionError as error:
        result.update(correct=False, error=f"wrong with seed {seed}: {error}")
    result["compiler"] = "tvm" in sys.modules
    return result


def _check_without_torch(problem: Problem, where: machine.Machine, seed: int) -> None:
    """Check on a GPU without PyTorch, where nothing else can hold arrays: the kernel is called as the tuner does."""
    from tvm_sparse.runtime.dispatch import dispatcher

    kernel = dispatcher.kernel(problem, where)
    verify(kernel.function, where.kind, [make_case(problem, seed)], workspaces=())


def main(request: dict[str, Any]) -> None:
    add_plugins(request["plugins"])
    where = machine.gpu() if request["kind"] == "cuda" else machine.cpu()
    assert where is not None
    tvm_sparse.load(request["folder"])
    for key in request["problems"]:
        print(json.dumps(result_of(parse(key), where, request["folder"], request["rounds"])), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
