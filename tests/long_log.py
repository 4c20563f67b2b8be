"""Writes a log of many trials, and times what reads it:  python tests/long_log.py FOLDER [TRIALS]"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tvm_sparse.core.candidate import Candidate
from tvm_sparse.records import Best, Log, Session, Trial
from tvm_sparse.records.codec import encode
from tvm_sparse.records.queries import best_records

ARCH, OPERATOR = "sm_90a", "softmax"
EACH = 500  # trials of a problem, and of a session


def key(number: int) -> str:
    return f"softmax/batch={number + 1},vocab=1000,algorithm=online,dtype=float32"


def write(root: Path, trials: int) -> None:
    """A log of so many trials, `EACH` a problem, each problem with a session and a ranking."""
    log = Log(root, ARCH, OPERATOR)
    log.trials_path.parent.mkdir(parents=True)
    with log.trials_path.open("wb") as lines, log.best_path.open("wb") as rankings:
        for number in range(trials // EACH):
            session = f"s{number}"
            lines.write(encode(Session(session, "2026-01-02T03:04:05Z", {"name": "a machine"}, {}, "a timer", {})))
            for order in range(EACH):
                decisions = (("threads", 64), ("cluster", 1), ("rows", 1), ("vectors", order))
                point = Candidate("softmax_streamed", 1, decisions)
                times, taken = (1e-6,) * 10, {"registers": 40, "shared_bytes": 1024}
                lines.write(encode(Trial(key(number), ARCH, point, "ok", "", times, 0.5, session, order, taken)))
            rankings.write(encode(Best(key(number), ARCH, point, 1e-6, point, 2e-6, 5, session, EACH)))


def main(root: Path, trials: int = 450_000) -> None:
    write(root, trials)
    log = Log(root, ARCH, OPERATOR)
    for name, read in (
        ("rankings", lambda: best_records([root], ARCH, (OPERATOR,))),
        ("one problem", lambda: log.of_problem(key(0))),
        ("everything", log.read),
    ):
        began = time.perf_counter()
        read()
        print(f"{name}: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
