"""A small tuning run in a process of its own, to be interrupted: `python tuning_child.py LOGS TRIALS`.

Prints the phase and the number of trials measured after each, and `best` at the end.
"""

import sys
from pathlib import Path

from tvm_sparse.core.machine import cpu
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log
from tvm_sparse.tuning import plans, session

PROBLEM = parse("softmax_topk/batch=2,vocab=100,k=3")
# Large enough for kernels that start threads.
THREADED = parse("softmax_topk/batch=4,vocab=300,k=5")
BATCH = 2


def main(logs: str, trials: str) -> None:
    plans.BATCH, plans.FINAL_ROUNDS, plans.FINALISTS = BATCH, 1, 2
    log = Log(Path(logs), cpu().arch, PROBLEM.operator)
    plan = plans.make_plan(PROBLEM, cpu(), int(trials), log, builders=1)
    with session.stop_on_interrupt() as stop:
        best = session.tune(plan, log, show=lambda p: print(p.phase, p.measured, flush=True), stop=stop)
    print("best", best.candidate, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
