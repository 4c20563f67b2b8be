"""The smoke tests of `tvm-sparse doctor`, each in a separate process: `python -m tvm_sparse.cli.smoke NAME`.

An incompatible version of tvm-ffi ends the process by a segmentation fault, so no test may run in the caller's process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ..workers.absent import without


def serialise() -> dict[str, Any]:
    """Serialise IR, in which incompatible versions of tvm-ffi segfault."""
    import tvm

    text = tvm.ir.save_json(tvm.ir.Range(0, 3))
    return {"bytes": len(text)}


def cpu() -> dict[str, Any]:
    """Compile, link, load and call a CPU kernel, and compare its result."""
    from ..core import machine

    return _kernel(machine.cpu(), run=True)


def cuda() -> dict[str, Any]:
    """Compile a cubin by NVRTC; with a GPU, also run the kernel and compare its result."""
    from ..artifacts import cuda
    from ..core import machine

    toolchain = cuda.activate()
    here = machine.gpu()
    result = _kernel(here or machine.resolve("sm_90a"), run=here is not None)
    return {
        **result,
        "nvrtc": ".".join(map(str, toolchain.nvrtc_version)),
        "driver_is_stub": toolchain.runtime.driver_is_stub,
    }


def _kernel(where: Any, run: bool) -> dict[str, Any]:
    from ..artifacts.compile import compile_candidate
    from ..bench import measure
    from ..core import scratch, spaces
    from ..core.registry import parse

    problem = parse("softmax_topk/batch=2,vocab=64,k=3")
    with scratch.folder() as folder:
        library = folder / "smoke.so"
        built = compile_candidate(problem, spaces.fallback(problem, where), where, library)
        if run:
            measure.handle(
                {
                    "problem": problem.key,
                    "kind": where.kind,
                    "library": str(library),
                    "workspaces": built.workspaces,
                    "seed": 0,
                    "steps": (measure.VERIFY, measure.CHECK, measure.RECHECK),
                }
            )
    return {"arch": where.arch, "seconds": round(built.seconds, 2), "run": run}


if __name__ == "__main__":
    tests = {"serialise": serialise, "cpu": cpu, "cuda": cuda}
    try:
        with without("torch"):  # imported by tvm_ffi if installed: more than half of a test
            print(json.dumps(tests[sys.argv[1]]()))
    except Exception as error:  # the message is the result, whatever failed
        sys.exit(f"{type(error).__name__}: {error}")
