"""The child that compiles candidates: `python -m tvm_sparse.tuning.build_worker`, started by `processes.Worker`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..machine import Machine
from ..operators import parse
from .processes import serve
from .records import Candidate


def request(problem: Any, candidate: Candidate, machine: Machine, path: Path) -> dict[str, Any]:
    """The message that asks for one library."""
    return {"problem": problem.key, "candidate": str(candidate), "machine": asdict(machine), "path": str(path)}


def handle(message: dict[str, Any]) -> dict[str, Any]:
    from ..artifacts.compile import compile_candidate

    compiled = compile_candidate(
        parse(message["problem"]),
        Candidate.parse(message["candidate"]),
        Machine(**message["machine"]),
        Path(message["path"]),
    )
    return asdict(compiled)


if __name__ == "__main__":
    serve(handle)
