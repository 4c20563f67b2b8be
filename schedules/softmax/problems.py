"""What templates ask of a problem, whether it is softmax's or logsumexp's. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.operators.logsumexp.problem import LogSumExp
from tvm_sparse.operators.softmax.problem import Softmax

RowProblem = Softmax | LogSumExp


def algorithm(problem: RowProblem) -> str:
    """The algorithm of Milakov & Gimelshein by which the normaliser is found; logsumexp has but the online one."""
    return problem.algorithm if isinstance(problem, Softmax) else "online"
