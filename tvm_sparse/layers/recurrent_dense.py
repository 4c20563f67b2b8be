"""The dense way of a recurrent stack: PyTorch's own layer with a dense copy of the weights, where it is faster.

On a GPU PyTorch runs cuDNN's layers. Their time hardly grows with the batch, since tensor cores multiply 16 sequences
or more at once; that of a sparse layer grows in proportion to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.machine import Machine
from ..core.problem import numpy_dtype
from ..operators.recurrent_backward.autograd import pattern_of
from ..operators.sparse_recurrent.problem import GATES
from ..runtime import dispatch
from ..runtime.dense import DENSE, KERNEL, Likely
from .libraries import tensor
from .recurrent import BATCH
from .recurrent_projected import ProjectedLSTM, stays_on_chip

OPERATORS: dict[str, Any] = {
    "tanh": torch._VF.rnn_tanh,  # type: ignore[attr-defined]
    "relu": torch._VF.rnn_relu,  # type: ignore[attr-defined]
    "lstm": torch._VF.lstm,  # type: ignore[attr-defined]
    "gru": torch._VF.gru,  # type: ignore[attr-defined]
}
# Sequences that cuDNN's persistent kernels take at once: 17 of an LSTM take nearly twice as long as 16.
AT_ONCE = 16
# Kinds of cuDNN's kernels: one a step, or a persistent one, of up to AT_ONCE sequences or of more.
STEPS, FEW, MANY = "kernels of a step", f"a persistent kernel of up to {AT_ONCE} sequences", "a persistent kernel"
# The least batch from which the dense way is faster, in 16 bits on Hopper: by cell and kind of cuDNN's kernels, by
# units, at each of DENSITIES. Logarithms are interpolated in between. scripts/rnn_grid.py prints the table that its
# measurements make. A number above AT_ONCE for FEW is extrapolated, and serves to interpolate.
DENSITIES = (0.02, 0.1, 0.3, 1.0)
NEVER = 512
LEAST_BATCH: dict[tuple[str, str], dict[int, tuple[int, int, int, int]]] = {
    ("rnn", MANY): {
        256: (17, 17, 17, 17),
        512: (49, 49, 49, 49),
        1024: (49, 49, 49, 49),
    },
    ("rnn", FEW): {
        256: (NEVER, NEVER, 18, 18),
        512: (NEVER, NEVER, NEVER, NEVER),
        1024: (NEVER, NEVER, NEVER, NEVER),
    },
    ("rnn", STEPS): {
        256: (49, 49, 49, 49),
        512: (49, 49, 65, 49),
        1024: (65, 65, 65, 65),
        1280: (65, 65, 65, 65),
        2048: (49, 49, 49, 49),
        4096: (33, 17, 7, 17),
    },
    ("lstm", MANY): {
        256: (65, 65, 65, 65),
        512: (17, 17, 17, 17),
        1024: (17, 17, 17, 17),
    },
    ("lstm", FEW): {
        256: (NEVER, 47, 4, 4),
        512: (48, 7, 5, 5),
        1024: (11, 9, 10, 10),
    },
    ("lstm", STEPS): {
        256: (81, 81, 81, 81),
        512: (65, 65, 65, 65),
        1024: (49, 49, 49, 49),
        1280: (33, 17, 11, 33),
        2048: (49, 17, 8, 17),
        4096: (65, 17, 4, 4),
    },
    ("gru", STEPS): {
        256: (65, 65, 65, 65),
        512: (65, 65, 65, 65),
        1024: (49, 49, 49, 49),
        1280: (33, 17, 13, 33),
        2048: (33, 17, 14, 15),
        4096: (65, 17, 4, 4),
    },
}


@dataclass(frozen=True)
class DenseCall:
    """What the choice of a way depends on."""

    cell: str
    hidden: int
    inputs: int
    batch: int
    density: float
    dtype: str
    ragged: bool = False
    resets: bool = False
    proj: int = 0  # elements of a projected state; 0: states are not projected


def family(cell: str) -> str:
    """The name of a cell in `LEAST_BATCH`."""
    return cell if cell in ("lstm", "gru") else "rnn"


def persistent(call: DenseCall) -> bool:
    """Whether PyTorch chooses cuDNN's persistent kernels on Hopper: the conditions of its
    `aten/src/ATen/native/cudnn/RNN.cpp`.
    """
    return (
        call.cell != "gru"
        and call.dtype == "float16"
        and call.hidden <= 1024
        and call.hidden % 128 == call.inputs % 128 == call.batch % 8 == 0
        and call.batch <= 128
        and (call.cell == "lstm" or call.batch < 96 or call.hidden < 896)
    )


def kernels_of(call: DenseCall) -> str:
    """The kind of cuDNN's kernels for a call."""
    return STEPS if not persistent(call) else FEW if call.batch <= AT_ONCE else MANY


def least_batch(cell: str, kind: str, hidden: int, density: float) -> int | None:
    """The batch from which the dense way is likely to be faster by kernels of a kind: `NEVER` for none, None where
    nothing is known.
    """
    known = LEAST_BATCH.get((family(cell), kind), {})
    if not known or not min(known) <= hidden <= max(known) or density < DENSITIES[0] / 2:
        return None
    of_units = {units: _between(density, dict(zip(DENSITIES, found, strict=True))) for units, found in known.items()}
    found = round(_between(hidden, of_units))
    # In the sparse way 33 sequences take as long as 48: three launches.
    return found if found <= BATCH or found >= NEVER else (found - 1) // BATCH * BATCH + 1


def _between(x: float, known: Mapping[Any, float]) -> float:
    """The value at x of a function with these values, in logarithms linear between them and constant beyond."""
    below = max((one for one in known if one <= x), default=min(known))
    above = min((one for one in known if one >= x), default=max(known))
    if below == above:
        return known[below]
    share = math.log(x / below) / math.log(above / below)
    return known[below] ** (1 - share) * known[above] ** share


def inexpressible(call: DenseCall) -> str | None:
    """Why PyTorch's layer cannot compute a call; None if it can."""
    if call.cell not in OPERATORS:
        return f"PyTorch has no layer of {call.cell}"
    if call.resets:
        return "PyTorch's layers have no resets"
    if call.ragged:
        return "PyTorch's layers take lengths only as a PackedSequence, from the host"
    return None


def likely_way(call: DenseCall, machine: Machine) -> Likely:
    """The way likely to be faster, forward and backward."""
    why = inexpressible(call)
    if why is not None:
        return Likely(KERNEL, why)
    if dispatch.dispatcher.batch_invariant:
        return Likely(KERNEL, dispatch.UNCHANGING)
    if call.proj:
        few, many = 5 * call.proj * call.hidden, 4 * call.hidden**2
        if machine.kind == "cuda" and stays_on_chip(call.hidden, call.dtype):
            return Likely(KERNEL, f"the folded weight of {many:,} values stays on the chip")
        return Likely(DENSE, f"the folded weight has {many:,} values, those of PyTorch's layer {few:,}")
    if machine.kind != "cuda" or not machine.has_warpgroups or numpy_dtype(call.dtype).itemsize != 2:
        return Likely(KERNEL, f"nothing is known of a faster dense layer in {call.dtype} on {machine.arch}")
    kind = kernels_of(call)
    least = least_batch(call.cell, kind, call.hidden, call.density)
    layer = f"cuDNN has {kind} for {call.hidden:,} units with {call.density:.3g} of the weights stored"
    if least is None:
        return Likely(KERNEL, f"{layer}, and no batch is known from which it is faster")
    if least >= NEVER or kind == FEW and least > AT_ONCE:
        return Likely(KERNEL, f"{layer}, and is likely faster at no batch")
    way = DENSE if call.batch >= least else KERNEL
    return Likely(way, f"{layer}, and is likely faster from batch {least} on")


def projected_weights(
    layer: ProjectedLSTM, values: Any, projection: Any, weight_ih: torch.Tensor, bias: Any
) -> list[torch.Tensor]:
    """As `flat_weights`, for a layer with projected states; each weight is a tensor of its own."""
    weight = layer.dense_weight(values, weight_ih.device)
    if projection is None:
        projection = tensor(layer.projection, weight_ih.device)
    biases = [] if bias is None else [bias, torch.zeros_like(bias)]
    return [weight_ih, weight.contiguous(), *biases, projection]


def flat_weights(weights: Any, values: Any, weight_ih: torch.Tensor, bias: Any, hidden_bias: Any) -> list[torch.Tensor]:
    """A layer's weights as PyTorch's operators take them, in one buffer in the order in which cuDNN reads it.

    `values` `(nonzeros,)` stand in the place of those of `weights`. Gradients flow to all tensors that are given.
    """
    pattern = pattern_of(weights, weight_ih.device)
    rows, hidden = pattern.gates * pattern.hidden, pattern.hidden
    values = pattern.own if values is None else values
    dense = values.new_zeros(rows * hidden).index_copy(0, pattern.places, values)
    zeros = weight_ih.new_zeros(rows)
    inside = zeros if hidden_bias is None else torch.cat([zeros[hidden:], hidden_bias])
    # cuDNN's buffer has room for biases also where a layer has none.
    parts = [weight_ih.reshape(-1), dense, zeros if bias is None else bias, inside]
    found = torch.cat(parts).split([len(part) for part in parts])
    biases = found[2:] if bias is not None or hidden_bias is not None else ()
    return [found[0].view(rows, -1), found[1].view(rows, hidden), *biases]


def run_dense(
    cell: str, x: torch.Tensor, states: tuple[Any, ...], weights: list[torch.Tensor], gradient: bool
) -> tuple[Any, ...]:
    """A layer's results for inputs `(steps, batch, input)`; `states` `(batch, hidden)` each, None: zeros.

    `gradient`: whether a backward pass follows, for which cuDNN keeps more.
    """
    # Elements of h and of c, which differ where h is projected.
    widths = weights[1].shape[1], len(weights[1]) // GATES[cell]
    given = [
        x.new_zeros((x.shape[1], width)) if state is None else state
        for state, width in zip(states, widths, strict=False)
    ]
    held = [state[None].contiguous() for state in given]
    biased = len(weights) > 3  # a projection of states makes 3 without biases, and 5 with them
    with torch.autocast(x.device.type, enabled=False):
        found = OPERATORS[cell](x, held if cell == "lstm" else held[0], weights, biased, 1, 0.0, gradient, False, False)
    return found[0], *(state[0] for state in found[1:])
