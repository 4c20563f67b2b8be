"""The child that times a few candidates of a problem: `python -m tvm_sparse.tuning.measured`, started by
`runtime.measuring`.

It is a tuning run with given candidates: they are built in parallel, checked and timed, and the best few are timed
again in turn with the fallback. Trials and winner are recorded in the log. Its own children are kept for the next
problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import add_plugins, parse
from ..records import MEASURED, Best, Log
from ..workers.serving import serve
from . import fleet
from .fleet import Fleet
from .plans import Progress, uncounted
from .session import tune
from .workbench import MEASURE_TIMEOUT, NoValidRecord

# Rounds of the final: few, since a user waits.
ROUNDS = 3
# Candidates that are checked at the same time, after which the time limit is checked.
TOGETHER = 3
# Share of the time limit after which no more candidates are begun, and the final starts.
SEARCH_SHARE = 0.7

_fleets: dict[tuple[Any, ...], Fleet] = {}  # kept between requests


def measured(
    problem: Problem,
    machine: Machine,
    candidates: Sequence[Candidate],
    log: Log,
    using: Fleet,
    *,
    stop: Callable[[], bool] = lambda: False,
    show: Callable[[Progress], None] = lambda progress: None,
    builders: int = 1,
    limit: float | None = None,
    strategy: str = MEASURED,
    rounds: int = ROUNDS,
) -> Best:
    """Time these candidates and the fallback, and append the winner to the log.

    Parameters
    ----------
    stop
        Called between batches of candidates; if it returns true, the final begins.
    limit
        Time limit in seconds for checking and timing one candidate.

    Raises
    ------
    NoValidRecord
        If no candidate was right.
    """
    proposed = tuple(candidates)
    how = {"strategy": strategy, "limit": limit, "proposed": proposed, "rounds": rounds, "given": TOGETHER}
    plan = uncounted(problem, machine, len(candidates), builders, **how)
    return tune(plan, log, using=using, show=show, stop=stop)


def handle(message: dict[str, Any]) -> dict[str, Any]:
    """Time the candidates of a request (`runtime.measuring.measure`); returns the winner, and all times."""
    began = time.monotonic()
    add_plugins(message["plugins"])
    machine, seconds = Machine(**message["machine"]), message["seconds"]
    problem = parse(message["problem"])
    candidates = [Candidate.parse(text) for text in message["candidates"]]
    log = Log(Path(message["logs"]), machine.arch, problem.operator)
    wanted = (machine, message["number"], message["builders"])
    if wanted not in _fleets:
        gpus = [message["number"]] if machine.kind == "cuda" else [0]
        _fleets[wanted] = fleet.local(machine, message["builders"], gpus=gpus)
    last: list[Progress] = []

    def over() -> bool:
        return time.monotonic() - began > SEARCH_SHARE * seconds

    try:
        best = measured(
            problem,
            machine,
            candidates,
            log,
            _fleets[wanted],
            stop=over,
            show=last.append,
            builders=message["builders"],
            limit=min(MEASURE_TIMEOUT, seconds),
        )
    except NoValidRecord as error:
        return {"reason": str(error)}
    medians = last[-1].medians if last else {}
    return {
        "candidate": str(best.candidate),
        "seconds": best.seconds,
        "fallback_seconds": best.fallback_seconds,
        "times": {str(candidate): taken for candidate, taken in medians.items()},
    }


if __name__ == "__main__":
    serve(handle)
