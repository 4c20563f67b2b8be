"""The dense way of a recurrent stack: PyTorch's own layer with a dense copy of the weights, where it is faster.

On a GPU PyTorch runs cuDNN's layers. Their time hardly grows with the batch, since tensor cores multiply 16 sequences
or more at once; that of a sparse layer grows in proportion to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.machine import Machine
from ..operators.bsr_matmul.dense import DENSE, KERNEL, Likely
from ..operators.recurrent_backward.autograd import pattern_of

OPERATORS: dict[str, Any] = {
    "tanh": torch._VF.rnn_tanh,  # type: ignore[attr-defined]
    "relu": torch._VF.rnn_relu,  # type: ignore[attr-defined]
    "lstm": torch._VF.lstm,  # type: ignore[attr-defined]
    "gru": torch._VF.gru,  # type: ignore[attr-defined]
}
# Where the dense way is faster, by measurements on an H200 (scripts/rnn_training.py, zhu_pool_figures.py): the least
# units of a layer, and for these the least batch, with cuDNN's persistent kernels and with others. Launches of 16
# sequences take equal times: two of 1,792 units nearly as long as cuDNN's kernels for 32, so that a third one decides.
MOST_UNITS = 2048
PERSISTENT, OTHERS = ((1024, 8), (512, 32)), ((1024, 33),)
LEAST_DENSITY = 0.1  # of the layers measured


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


def persistent(call: DenseCall) -> bool:
    """Whether PyTorch chooses cuDNN's persistent kernels: the conditions of its `aten/src/ATen/native/cudnn/RNN.cpp`
    for an LSTM in float16 on Hopper.
    """
    return (
        call.cell == "lstm"
        and call.hidden <= 1024
        and call.hidden % 128 == call.inputs % 128 == call.batch % 8 == 0
        and call.batch <= 128
    )


def inexpressible(call: DenseCall) -> str | None:
    """Why PyTorch's layer cannot compute a call; None if it can."""
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
    if machine.kind != "cuda" or not machine.has_warpgroups or call.dtype != "float16":
        return Likely(KERNEL, f"nothing is known of a faster dense layer in {call.dtype} on {machine.arch}")
    if call.density < LEAST_DENSITY:
        return Likely(KERNEL, f"nothing is known of a faster dense layer at densities below {LEAST_DENSITY:.0%}")
    kind, known = ("a persistent kernel", PERSISTENT) if persistent(call) else ("kernels of a step", OTHERS)
    found = [batch for units, batch in known if units <= call.hidden <= MOST_UNITS]
    if not found:
        units = f"{known[-1][0]:,} to {MOST_UNITS:,} units"
        return Likely(KERNEL, f"cuDNN has {kind} for it, known to be faster only at {units}")
    way = DENSE if call.batch >= found[0] else KERNEL
    return Likely(way, f"cuDNN has {kind} for it, and is faster from batch {found[0]} on")


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
    zeros = None
    if any(state is None for state in states):
        zeros = x.new_zeros((x.shape[1], weights[1].shape[1]))
    held = [(zeros if state is None else state)[None].contiguous() for state in states]  # type: ignore[index]
    with torch.autocast(x.device.type, enabled=False):
        found = OPERATORS[cell](
            x, held if cell == "lstm" else held[0], weights, len(weights) == 4, 1, 0.0, gradient, False, False
        )
    return found[0], *(state[0] for state in found[1:])
