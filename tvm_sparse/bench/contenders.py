"""What a comparison takes part with: another library's way to compute an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
BOTH, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)


@dataclass(frozen=True)
class Peer:
    """Another library's way to compute an operator.

    `prepare(problem, inputs, device)` does what is done once (copies, conversions to its sparse format) and returns
    the call to be timed. It may raise: the message becomes the peer's line. `formed(problem, outputs)` makes NumPy
    arrays of its result the operator's outputs, where it has another form; that is not timed.
    """

    name: str
    needs: str  # the module that has to be importable
    devices: tuple[str, ...]
    prepare: Callable[[Any, Sequence[Any], str], Call]
    formed: Callable[[Any, list[Any]], list[Any]] = lambda problem, outputs: outputs


def torch_tensor(array: Any, device: str) -> Any:
    import numpy as np
    import torch

    if array.dtype.name == "bfloat16":  # NumPy's is unknown to torch: the same bits by way of integers
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)
