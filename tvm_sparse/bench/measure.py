"""The child that runs candidates: `python -m tvm_sparse.bench.measure`, started by `processes.Worker`.

A library is timed once it has been right (`verification`), and looked at again afterwards with the very arguments that
it was timed with. A process in which a call failed is renewed, so a spoilt GPU context costs one candidate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.registry import add_plugins, parse
from ..runtime.loading import load_function, prepare
from ..workers.absent import without
from ..workers.processes import serve
from .buffers import Fatal, device_of, empty
from .timing import time_kernel
from .verification import POISONS, Arguments, call, cases, check_again, verify, workspaces_on

# What is done with a library, in this order. VERIFY: the small cases. CHECK: the whole batch, with the very arguments
# that it is timed with. TIME: that, which CHECK has to come before.
VERIFY, CHECK, TIME = STEPS = ("verify", "check", "time")


def handle(message: dict[str, Any]) -> dict[str, Any]:
    """Measure one library: the `steps` that the message names, or all. It is timed `undisturbed` or not
    (`time_kernel`).

    A message without a library makes the problem's references and loads the runtime, but leaves the device alone. One
    without a problem tries the device, and has the driver set up what it sets up once. Neither is to a candidate's
    charge.
    """
    add_plugins(message.get("plugins", ()))
    kind = message["kind"]
    if "problem" not in message:
        prepare(kind)
        empty(kind, (1,), "uint8").numpy()
        if kind == "cuda":
            time_kernel(kind, lambda: None, ())  # streams, graphs
        return {}
    problem = parse(message["problem"])
    small, whole = cases(problem, message["seed"])
    if "library" not in message:
        prepare(kind)
        device_of(kind)
        return {}
    function, workspaces = load(message["library"], kind), message["workspaces"]
    steps = message.get("steps", STEPS)
    if VERIFY in steps:
        verify(function, kind, small, workspaces)
    if CHECK not in steps:
        return {"seconds": []}

    arguments = Arguments(kind, [whole], workspaces_on(kind, workspaces, problem), offset=False)
    given = arguments.load(whole, POISONS[0])
    seconds: list[float] = []
    with whole.named():
        call(function, given)
        first = arguments.outputs()
        whole.check(first)
        arguments.poison(POISONS[1])
        call(function, given)
        check_again(whole, first, arguments.outputs())
        if TIME in steps:
            arguments.poison(POISONS[0])
            try:
                seconds = time_kernel(kind, function, given, undisturbed=message.get("undisturbed", False))
            except Exception as error:
                raise Fatal(str(error)) from error
            check_again(whole, first, arguments.outputs())  # what the last of the timed calls has written
            arguments.poison(POISONS[1])
            call(function, given)
            check_again(whole, first, arguments.outputs())
        arguments.check_inputs()
    return {"seconds": seconds}


def load(library: str, kind: str) -> Any:
    return load_function(Path(library), kind, None)


if __name__ == "__main__":
    # Kernels are measured without PyTorch, which tvm_ffi imports where it is installed: most of this process's start.
    # Problems from outside may still import it.
    with without("torch"):
        import tvm_ffi  # noqa: F401

    serve(handle, watched=lambda message: "library" in message)
