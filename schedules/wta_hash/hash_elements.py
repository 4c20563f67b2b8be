"""Winner-take-all hashing on a GPU, one thread per code, which reads the row from global memory: the plainest way.

The template fits any shape, and runs without tuning where `staged_hash` does not fit.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.wta_hash.problem import WtaHash

from ..lsh.plain import plain


def build(problem: WtaHash, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..interface import gpu_program
    from ..lsh import naive

    step = naive.hash_elements(
        problem.k, problem.units, decisions["threads"], lambda io, row, column: io.hidden[row, column]
    )

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        step(io)
    # fmt: on
    return gpu_program(problem, body)


hash_elements = plain(
    name="hash_elements",
    version=1,
    operator="wta_hash",
    summary="a thread a code, rows read where they are",
    program=build,
)
