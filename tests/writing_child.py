"""A process that appends records to a log, one by one, and prints each: `python writing_child.py LOGS WRITER COUNT`.

Every record has a problem of its own, by writer and number: which is whose can be told from any part of it.
"""

import sys
from pathlib import Path

from tvm_sparse.core.candidate import Candidate
from tvm_sparse.records import Log, Trial

ARCH = "sm_90a"


def record(writer: int, order: int) -> Trial:
    problem = f"softmax_topk/batch={writer + 1},vocab={order + 1},k=1,dtype=float32"
    candidate = Candidate("row_scan", writer, (("order", order),))
    return Trial(problem, ARCH, candidate, "ok", "", (1e-6 * (order + 1),), None, f"s{writer}", order, {"by": writer})


def main(logs: str, writer: str, count: str) -> None:
    log = Log(Path(logs), ARCH, "softmax_topk")
    for order in range(int(count)):
        log.append(record(int(writer), order))
        print(order, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
