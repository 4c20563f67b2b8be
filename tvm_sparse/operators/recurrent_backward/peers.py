"""The call with a problem's inputs. No other library offers this gradient by itself: `scripts/rnn_training.py` times
both passes beside cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_sparse.bench.contenders import Call, Peer
from tvm_sparse.core.problem import Problem

from .call import TransposedWeight, problem_of, recurrent_backward
from .problem import RecurrentBackward

PEERS: tuple[Peer, ...] = ()


def ours(problem: RecurrentBackward, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    units, row_start, entries = (convert(array) for array in inputs[:3])
    longest = int(np.diff(inputs[1]).max(initial=0)) * problem.parts
    sizes = problem.hidden, problem.gates, problem.dtype, len(inputs[2])
    weight = TransposedWeight(*sizes, units, row_start, entries, longest)
    names = (argument.name for argument in problem.kernel_inputs[3:])
    given = {name: convert(array) for name, array in zip(names, inputs[3:], strict=True)}
    arguments = [given.pop(name, None) for name in ("kept", "before", "c0", "d_output", "d_h_n", "d_c_n")]
    asked = problem_of(weight, problem.steps, problem.batch, problem.cell, problem.ragged, problem.resets)
    return lambda: recurrent_backward(weight, *arguments, **given, cell=problem.cell), asked
