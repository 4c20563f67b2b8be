"""Winner-take-all hashing on a GPU, a thread a code, which reads the row where it is: the plainest way.

It asks nothing of the shape, and is what runs without tuning where `staged_hash` does not fit.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template, powers
from tvm_sparse.operators.wta_hash.problem import WtaHash

THREADS = powers(32, 512)


def build(problem: WtaHash, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.definition()}))
    codes = schedule.get_sblock("codes")
    block, thread = schedule.split(schedule.fuse(*schedule.get_loops(codes)), [None, decisions["threads"]])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    return Program(schedule.mod)


hash_elements = Template(
    name="hash_elements",
    version=1,
    operator="wta_hash",
    kind="cuda",
    summary="a thread a code, rows read where they are",
    space=lambda problem, machine: {"threads": THREADS},
    default=lambda problem, machine: {"threads": 128},
    program=build,
)
