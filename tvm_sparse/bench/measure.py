"""The child that runs candidates: `python -m tvm_sparse.bench.measure`, started by `processes.Worker`.

A library is timed once it has been right on cases that are drawn for it (`draws`), and looked at again afterwards with
the very arguments that it was timed with. Candidates of a problem are timed with the same arrays, one after the other:
where arrays lie may make a kernel slower, so that candidates with arrays of their own would be compared by their luck.
A process in which a call failed is renewed, so a spoilt GPU context costs one candidate.
"""

from __future__ import annotations

import functools
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.problem import Problem
from ..core.registry import add_plugins, parse
from ..runtime.loading import load_function, prepare
from ..workers.absent import without
from ..workers.serving import serve
from .buffers import Fatal, Guarded, device_of
from .draws import Pool
from .producer import Producer
from .timing import time_kernel
from .verification import POISONS, Arguments, Case, call, check_again, make_case, verify, workspaces_on

# What is done with a library, in this order. VERIFY: the cases of a candidate. PROVE: those of the winner of a final,
# ten times as many. CHECK: the whole batch, with the very arguments that it is timed with. TIME: that. RECHECK: these
# arguments, and what the timed calls have made of them. A step may come in a message of its own: only TIME needs the
# device for itself.
VERIFY, PROVE, CHECK, TIME, RECHECK = EVERYTHING = ("verify", "prove", "check", "time", "recheck")
WITHOUT_VERIFY = (CHECK, TIME, RECHECK)
STEPS = (VERIFY, *WITHOUT_VERIFY)
# Bytes of the whole batch's arrays that are kept for the next candidate, beside those that it is verified with.
MOST_KEPT = 1 << 30


@dataclass(frozen=True)
class Checked:
    """A library that was right, and what it is timed with."""

    library: str
    kind: str
    function: Any
    whole: Case
    arguments: Arguments
    given: list[Any]
    first: list[Any]  # its outputs

    def time(self, *, undisturbed: bool = False, fresh: bool = False) -> list[float]:
        """Seconds a call, by rounds; `fresh`: behind a kernel that has just written the inputs of the batch."""
        self.arguments.poison(POISONS[0])
        try:
            producer = self._producer().launch if fresh else None
            return time_kernel(self.kind, self.function, self.given, undisturbed=undisturbed, producer=producer)
        except Exception as error:
            raise Fatal(str(error)) from error

    def _producer(self) -> Producer:
        """That of the inputs, which is the same for all candidates that are timed with these arguments."""
        if self.arguments not in _producers:
            problem, slots = self.whole.problem, self.whole.slots
            inputs = zip(problem.kernel_inputs, slots, self.given, strict=False)
            arrays = [(array, slot.content) for spec, slot, array in inputs if slot.layout and problem.batched(spec)]
            _producers[self.arguments] = Producer(arrays)
        return _producers[self.arguments]

    def recheck(self) -> None:
        """Raise unless the last of the timed calls was right, and another one is, and the inputs are as they were."""
        with self.whole.named():
            check_again(self.whole, self.first, self.arguments.outputs())
            self.arguments.poison(POISONS[1])
            call(self.function, self.given)
            check_again(self.whole, self.first, self.arguments.outputs())
            self.arguments.check_inputs()


_checked: Checked | None = None  # from one message to the next
_kept: Checked | None = None  # from one candidate to the next, for its arguments: the inputs are as they were
# As long as their arguments: each has copies of the inputs.
_producers: weakref.WeakKeyDictionary[Arguments, Producer] = weakref.WeakKeyDictionary()


def arguments_of(kind: str, whole: Case, workspaces: Any) -> Arguments:
    """Those of the candidate before, if they were found to be as they should, else new ones."""
    global _kept
    kept, _kept = _kept, None
    if kept is None or kept.kind != kind or kept.whole is not whole:
        return Arguments(kind, [whole], workspaces, offset=False)
    kept.arguments.take(workspaces)
    return kept.arguments


def check(library: str, kind: str, function: Any, whole: Case, workspaces: Any) -> Checked:
    """Call a library twice with the whole batch; raise if it is wrong."""
    arguments = arguments_of(kind, whole, workspaces)
    given = arguments.load(whole, POISONS[0])
    with whole.named():
        call(function, given)
        first = arguments.outputs()
        whole.check(first)
        arguments.poison(POISONS[1])
        call(function, given)
        check_again(whole, first, arguments.outputs())
    return Checked(library, kind, function, whole, arguments, given, first)


@functools.lru_cache(maxsize=1)
def prepared(problem: Problem, seed: int, kind: str) -> tuple[Pool, Case]:
    """What cases are drawn of, and the whole batch as it is timed; kept for the candidates of one problem."""
    return Pool(problem, seed, kind), make_case(problem, seed)


def handle(message: dict[str, Any]) -> dict[str, Any]:
    """Measure one library: the `steps` that the message names, or all. It is timed `undisturbed` or not
    (`time_kernel`), and on a GPU with `fresh` inputs or not (`Checked.time`).

    `draw` seeds the cases that are drawn for this library; without it they are others every time. A failure names the
    draw of its case, which `draws.again` makes anew.

    A message without a library makes the problem's references and loads the runtime, but leaves the device alone. One
    without a problem tries the device, and has the driver set up what it sets up once. Neither is to a candidate's
    charge.
    """
    global _checked, _kept
    add_plugins(message.get("plugins", ()))
    kind = message["kind"]
    if "problem" not in message:
        prepare(kind)
        room = Guarded(kind, 1, 0)
        room.place((1,), "uint8")
        room.write(0)
        room.read()
        if kind == "cuda":
            time_kernel(kind, lambda: None, ())  # streams, graphs
        return {}
    checked, _checked = _checked, None
    problem = parse(message["problem"])
    pool, whole = prepared(problem, message["seed"], kind)
    if "library" not in message:
        prepare(kind)
        device_of(kind)
        return {}
    library, steps = message["library"], message.get("steps", EVERYTHING)
    if {VERIFY, PROVE, CHECK} & set(steps):
        checked, function, workspaces = None, load(library, kind), message["workspaces"]
        draw = message.get("draw")
        draw = int.from_bytes(os.urandom(6), "little") if draw is None else draw
        if VERIFY in steps:
            verify(function, kind, pool.draw(draw), workspaces)
        if PROVE in steps:
            for cases in pool.proof(draw):
                verify(function, kind, cases, workspaces)
        if CHECK in steps:
            checked = check(library, kind, function, whole, workspaces_on(kind, workspaces, problem))
    if TIME not in steps and RECHECK not in steps:
        _checked = checked
        return {"seconds": []}
    if checked is None or checked.library != library:
        raise RuntimeError(f"{library} was not checked in this process")
    how = {name: bool(message.get(name)) for name in ("undisturbed", "fresh")}
    seconds = checked.time(**how) if TIME in steps else []
    if RECHECK in steps:
        checked.recheck()
        if checked.arguments.nbytes <= MOST_KEPT:
            _kept = checked
    else:
        _checked = checked
    return {"seconds": seconds}


def load(library: str, kind: str) -> Any:
    return load_function(Path(library), kind, None)


if __name__ == "__main__":
    # Kernels are measured without PyTorch, which tvm_ffi imports where it is installed: most of this process's start.
    # Problems from outside may still import it.
    with without("torch"):
        import tvm_ffi  # noqa: F401

    serve(handle, watched=lambda message: "library" in message)
