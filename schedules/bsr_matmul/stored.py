"""How blocks are stored. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.template import NotApplicable
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul


def refuse_turned(problem: BsrMatmul) -> None:
    """Raise `NotApplicable` where blocks are stored transposed, for templates that do not read those."""
    if problem.turned:
        raise NotApplicable("blocks are stored transposed")
