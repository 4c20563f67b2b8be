"""The build worker, but for machine code of CPUs that is not optimised: `cases.calls_run` uses it."""

from __future__ import annotations

from typing import Any

from tvm_sparse.artifacts import compile
from tvm_sparse.workers import building
from tvm_sparse.workers.absent import without
from tvm_sparse.workers.serving import serve

optimised = compile.target_of


def target_of(machine: Any, **how: Any) -> Any:
    target = optimised(machine, **how)
    return type(target)({**target.export(), "opt-level": 0}) if machine.kind == "llvm" else target


if __name__ == "__main__":
    compile.target_of = target_of
    with without("torch", "tvm.runtime.disco"):
        serve(building.handle)
