"""Programs of softmax_topk, whose buffers have short names in emitted code. Loads the compiler."""

from __future__ import annotations

from functools import partial

from .. import interface

# The code generator puts a kernel's parameters in the order of these names: other names are other machine code.
EMITTED = {
    "logits": "X",
    "bias": "B",
    "ids": "ids",
    "values": "V",
    "indices": "Z",
    "given": "G",
    "probabilities": "P",
}

gpu_program = partial(interface.gpu_program, names=EMITTED)
cpu_program = partial(interface.cpu_program, names=EMITTED)
