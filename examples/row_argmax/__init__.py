"""The largest element of each row, with the row's logsumexp, by the engine for rows: an operator of another package.

`tvm-sparse --plugin examples/row_argmax` has it in every command, `tvm_sparse.core.registry.add_plugin` in Python.
"""

from tvm_sparse.core.registry import Operator

OPERATOR = Operator(
    "row_argmax_logsumexp",
    home="row_argmax",
    schedules="row_argmax.schedules",
    public=("row_argmax_logsumexp",),
)
