"""The kernel of `persistent_back`, a list of phases.

before the last step

    take_units      which units are whose                                  (`persistent_rows.weights`)
    cells_of        the cell states of an LSTM                             (`cells`)
    mark            the exchange made ready                                (`recurrent.exchange`)
    load_weights    the transposed weight, to registers                    (`persistent_rows.weights`)
    a barrier of the grid
    begin           the last step, which needs no sums                     (`step`)

in each step back from there, for each pack

    load_inputs     what the next one needs                                (`step`)
    load_ahead      weights that are not on chip                           (`persistent_rows.weights`)
    stage           the gradients of the step after, from all thread blocks (`recurrent.exchange`)
    gather          products of weights and gradients                      (`persistent_rows.step`)
    reduce_lanes    their sums
    finish          the gradients of the gates, to all thread blocks       (`step`)
    write_exchanged the gradients of the step after, to the caller

With the reset before the product a step has a second half: `finish` sends the gradients of the candidate alone, whose
products `finish_gates` makes those of the other gates of.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, Resident, Workspace
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward

from ...interface import gpu_program
from ...recurrent.exchange import mark
from ...recurrent.sizes import WIDEST
from ...sparse_recurrent.persistent_rows.kernel import persistent, sum_products
from ...sparse_recurrent.persistent_rows.step import load_length
from ..cells import cells_of
from .space import BackExtents
from .state import BackState
from .step import begin, finish, finish_gates, load_inputs, take_inputs, write_exchanged


# fmt: off
@phase
def second_half(e, /, s, io, step, slot, pack):
    """From the gradients of a step's candidates to those of its other gates."""
    sum_products(e, 2, 3, e.regions[1])(s, io, slot, pack)
    finish_gates(e)(s, step, pack, slot)
    write_exchanged(e, 2)(s, io, step, pack)


@phase
def take_pack(e, /, s, io, back, pack):
    """A pack's way through one step back, `back` counting the steps from the last but one.
    """
    load, gates = T.meta_var(load_inputs(e)), T.meta_var(second_half(e) if e.twice else None)
    sums = T.meta_var(sum_products(e, 0, 2, e.regions[0]) if e.twice else sum_products(e))
    step = T.meta_var(io.steps - 2 - back)
    take_inputs(e)(s)
    if pack + 1 < e.packs:
        load(s, io, step, pack + 1)
    elif step >= 0:
        load(s, io, step - 1, 0)
    sums(s, io, back, pack)
    finish(e)(s, io, step, pack, back + 1)
    write_exchanged(e, 0, 2 if e.twice else None)(s, io, step + 1, pack)
    if e.twice:
        if step >= 0:
            gates(s, io, step, back + 1, pack)
        elif e.packs > 1:  # the next copy goes to the same place
            T.cuda.cta_sync()
    elif e.stages == 2:
        s.front[0] = s.copies[0] - s.front[0]


@phase
def last_step(e, /, s, io):
    """The last step of all packs.

    After: the inputs of the step before it are being loaded. Barriers: none, but all lanes of a warp take part.
    """
    load, gates = T.meta_var(load_inputs(e)), T.meta_var(second_half(e) if e.twice else None)
    for pack in T.serial(e.packs):
        load(s, io, io.steps - 1, pack)
        take_inputs(e)(s)
        load_length(e)(s, io, pack)
        begin(e)(s, io, pack)
        if e.twice:
            gates(s, io, io.steps - 1, 0, pack)
            if e.packs > 1:  # the next copy goes to the same place
                T.cuda.cta_sync()
    load(s, io, io.steps - 2, 0)


def kernel_body(problem: RecurrentBackward, e: BackExtents) -> Phase:
    """The kernel, as the body of the function; called with its arguments."""
    scan = cells_of(problem)

    @T.inline
    def cells(s, io, block):
        if e.cell == "lstm":
            scan(io, block * e.threads + s.t, e.blocks * e.threads)

    return persistent(e, BackState, mark(e, begun=False, gap=e.gap), cells, last_step(e), take_pack(e))
# fmt: on


def program(problem: RecurrentBackward, decisions: Decisions) -> Program:
    """The program of a point."""
    e = BackExtents.of(problem, decisions)
    own = [Workspace("exchange", ("steps", e.packs * e.pitch * WIDEST // 4), "uint32", fill=None)]
    if e.cell == "lstm":
        own.append(Workspace("cells", ("steps", e.batch, e.hidden), "float32", fill=None))
    return gpu_program(problem, kernel_body(problem, e), own, resident=Resident(e.blocks, e.threads, e.shared_bytes))
