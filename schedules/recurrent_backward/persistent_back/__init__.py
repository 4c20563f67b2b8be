"""The gradient of a sparse recurrent layer on a GPU in one launch: the transposed weight stays on chip.

The kernel is that of `sparse_recurrent.persistent_rows`, whose phases it is made of: slots, lanes, registers, the copy
of what is exchanged, gathers and sums are the same, with the rows of the transposed weight `(hidden, gates * hidden)`,
one for each unit. Different are the ends of a step. Thread blocks exchange the gradients d of all gates, a group's
sums are the gradient dh of its unit's state after a step, and from it and what the step kept follow the gradients of
its gates (`recurrent_backward.definition.through_cell`). What passes a state by, and the gradient of an LSTM's cell
state, stay with the group.

With the reset before the product a step has two halves: the gradient of the candidate follows from dh, and that of the
reset gate from the product of the candidate's gradients with their rows. The gradients of a step lie in one slot of the
exchange, and in two regions of one copy: while one region is written, the other one is read.

Source: Zhu, Pool et al. 2018, "Sparse Persistent RNNs", for the forward pass.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

persistent_back = in_phases(
    space,
    name="persistent_back",
    version=1,
    operator="recurrent_backward",
    summary="all steps back in one launch; the transposed weight stays on chip, blocks exchange gradients",
    cooperative=True,
)
