"""The child that runs candidates: `python -m tvm_sparse.bench.measure`, started by `processes.Worker`.

A library is timed only after it has been right on cases drawn for it (`draws`), and is checked again afterwards with
the arguments used for timing. All candidates of a problem are timed with the same arrays, since a kernel's time may
depend on their addresses. After a failed call the process is replaced, so a corrupted GPU context costs one candidate.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
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

# Steps for a library, in this order. VERIFY: check the cases of a candidate. PROVE: check those of the winner of a
# final, ten times as many. CHECK: check the whole batch with the arguments used for timing. TIME: time it. RECHECK:
# check these arguments and the outputs of the timed calls. Each step may be requested by a message of its own; only
# TIME needs exclusive use of the device.
VERIFY, PROVE, CHECK, TIME, RECHECK = EVERYTHING = ("verify", "prove", "check", "time", "recheck")
# A step before VERIFY, or before PROVE with `proof` in the message: draw the cases of the next step, without the
# device. It may be left out: VERIFY and PROVE then draw all their cases. A proof has several portions of cases, each
# drawn and proven by messages of their own; the reply's `left` says whether there was one to be drawn.
DRAW = "draw"
WITHOUT_VERIFY = (CHECK, TIME, RECHECK)
STEPS = (VERIFY, *WITHOUT_VERIFY)
# Most bytes of the whole batch's arrays that are kept for the next candidate, beside its verification's arrays.
MOST_KEPT = 1 << 30


@dataclass(frozen=True)
class Checked:
    """A library with a right result, and the arguments for timing it."""

    library: str
    kind: str
    function: Any
    whole: Case
    arguments: Arguments
    given: list[Any]
    first: list[Any]  # its outputs

    def time(self, *, undisturbed: bool = False, fresh: bool = False) -> list[float]:
        """Seconds per call for each round; with `fresh`, each call follows a kernel that has just written the batch's
        inputs.
        """
        self.arguments.poison(POISONS[0])
        try:
            producer = self._producer().launch if fresh else None
            return time_kernel(self.kind, self.function, self.given, undisturbed=undisturbed, producer=producer)
        except Exception as error:
            raise Fatal(str(error)) from error

    def _producer(self) -> Producer:
        """The producer of the inputs, the same for all candidates timed with these arguments."""
        if self.arguments not in _producers:
            problem, slots = self.whole.problem, self.whole.slots
            inputs = zip(problem.kernel_inputs, slots, self.given, strict=False)
            arrays = [(array, slot.content) for spec, slot, array in inputs if slot.layout and problem.batched(spec)]
            _producers[self.arguments] = Producer(arrays)
        return _producers[self.arguments]

    def recheck(self) -> None:
        """Raise unless the outputs of the last timed call and of another one are right, and the inputs are
        unchanged.
        """
        with self.whole.named():
            check_again(self.whole, self.first, self.arguments.outputs())
            self.arguments.poison(POISONS[1])
            call(self.function, self.given)
            check_again(self.whole, self.first, self.arguments.outputs())
            self.arguments.check_inputs()


@dataclass
class Drawn:
    """The cases that `DRAW` has drawn for a library and seed."""

    of: tuple[str, int, bool]  # the library, the seed, and whether it is a proof
    portions: Iterator[list[Case]]
    next: list[Case] | None = None  # the portion for the next step; None if there is none left


_drawn: Drawn | None = None
_checked: Checked | None = None  # kept between messages
_kept: Checked | None = None  # kept for the next candidate, for its arguments, whose inputs are unchanged
# Producers live as long as their arguments: each has copies of the inputs.
_producers: weakref.WeakKeyDictionary[Arguments, Producer] = weakref.WeakKeyDictionary()


def arguments_of(kind: str, whole: Case, workspaces: Any) -> Arguments:
    """The previous candidate's arguments, if they were found unchanged, else new ones."""
    global _kept
    kept, _kept = _kept, None
    if kept is None or kept.kind != kind or kept.whole is not whole:
        return Arguments(kind, [whole], workspaces, offset=False)
    kept.arguments.take(workspaces)
    return kept.arguments


def check(library: str, kind: str, function: Any, whole: Case, workspaces: Any) -> Checked:
    """Call a library twice with the whole batch; raises if a result is wrong."""
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


def portions(pool: Pool, of: tuple[str, int, bool]) -> Iterator[list[Case]]:
    """All cases, in portions: several of a proof, one of a verification."""
    _, seed, proof = of
    return iter(pool.proof(seed)) if proof else iter([pool.draw(seed)])


def draw(pool: Pool, of: tuple[str, int, bool]) -> bool:
    """Draw the next portion of cases; returns whether there was one left."""
    global _drawn
    if _drawn is None or _drawn.of != of:
        _drawn = Drawn(of, portions(pool, of))
    _drawn.next = next(_drawn.portions, None)
    return _drawn.next is not None


def cases_of(pool: Pool, of: tuple[str, int, bool]) -> Iterator[list[Case]]:
    """The portion of cases that was drawn, or all portions if none was."""
    if _drawn is not None and _drawn.of == of and _drawn.next is not None:
        cases, _drawn.next = _drawn.next, None
        return iter([cases])
    return portions(pool, of)


@functools.lru_cache(maxsize=1)
def prepared(problem: Problem, seed: int, kind: str, structure: str | None = None) -> tuple[Pool, Case]:
    """The pool of cases, and the whole batch for timing, which has this structure; cached for the candidates of one
    problem."""
    return Pool(problem, seed, kind), make_case(problem, seed, structure)


def handle(message: dict[str, Any]) -> dict[str, Any]:
    """Measure one library, by the `steps` in the message or by all. `undisturbed` and, on a GPU, `fresh` say how it is
    timed (`time_kernel`, `Checked.time`).

    `draw` seeds the cases for this library; without it they differ every time. A failure names the draw of its case,
    which `draws.again` reproduces.

    A message without a library prepares the problem's references and loads the runtime without using the device. A
    message without a problem tests the device and triggers the driver's one-time initialisation. Both keep this time
    out of candidates' time limits.
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
            time_kernel(kind, lambda: None, ())  # initialises streams and graphs
        return {}
    checked, _checked = _checked, None
    problem = parse(message["problem"])
    pool, whole = prepared(problem, message["seed"], kind, message.get("structure"))
    if "library" not in message:
        prepare(kind)
        device_of(kind)
        return {}
    library, steps = message["library"], message.get("steps", EVERYTHING)
    if DRAW in steps:
        return {"seconds": [], "left": draw(pool, (library, message["draw"], bool(message.get("proof"))))}
    if {VERIFY, PROVE, CHECK} & set(steps):
        checked, function, workspaces = None, load(library, kind), message["workspaces"]
        seed = message.get("draw")
        seed = int.from_bytes(os.urandom(6), "little") if seed is None else seed
        for step in (VERIFY, PROVE):
            if step in steps:
                for cases in cases_of(pool, (library, seed, step == PROVE)):
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
    # Kernels are measured without PyTorch, which tvm_ffi imports if it is installed, and which takes most of this
    # process's start. Problems of plugins may still import it.
    with without("torch"):
        import tvm_ffi  # noqa: F401

    serve(handle, watched=lambda message: "library" in message)
