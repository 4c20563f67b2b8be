"""What templates ask of a problem, whether it is softmax's or logsumexp's. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, ceildiv
from tvm_sparse.operators.logsumexp.problem import LogSumExp
from tvm_sparse.operators.softmax.problem import Softmax

from ..rows.cut import STAGED_VECTORS, Extents, Keep, vector_width

RowProblem = Softmax | LogSumExp


def algorithm(problem: RowProblem) -> str:
    """The algorithm of Milakov & Gimelshein by which the normaliser is found; for logsumexp it is always the online
    one.
    """
    return problem.algorithm if isinstance(problem, Softmax) else "online"


def out_dtype(problem: RowProblem) -> str:
    """The dtype of what is written."""
    return problem.dtype_of(problem.outputs[0])


def extents(problem: RowProblem, decisions: Decisions, keep: Keep) -> Extents:
    """How a point of the vector templates cuts the problem's rows, and what it keeps of them."""
    cluster, threads = decisions["cluster"], decisions["threads"]
    part = ceildiv(problem.vocab // vector_width(problem.dtype), cluster)
    vectors = {"registers": max(ceildiv(part, threads), 1), "shared": STAGED_VECTORS}.get(keep)
    return Extents(
        writes=isinstance(problem, Softmax),
        algorithm=algorithm(problem),
        dtype=problem.dtype,
        out_dtype=out_dtype(problem),
        vocab=problem.vocab,
        keep=keep,
        cluster=cluster,
        threads=threads,
        rows=decisions.get("rows", 1),
        vectors=vectors or decisions["vectors"],
    )
