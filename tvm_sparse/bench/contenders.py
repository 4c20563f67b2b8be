"""Contenders of a comparison: other libraries' ways to compute an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.arrays import on_device

Call = Callable[[], Any]
BOTH, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)


@dataclass(frozen=True)
class Peer:
    """Another library's way to compute an operator.

    `prepare(problem, inputs, device)` does the one-time work (copies, conversions to its sparse format) and returns the
    call to be timed. If it raises, the message becomes the peer's line. `formed(problem, outputs)` converts its result,
    as NumPy arrays, to the operator's outputs if it has another form; that is not timed.
    """

    name: str
    needs: str  # the module that must be importable
    devices: tuple[str, ...]
    prepare: Callable[[Any, Sequence[Any], str], Call]
    formed: Callable[[Any, list[Any]], list[Any]] = lambda problem, outputs: outputs


def torch_tensor(array: Any, device: str) -> Any:
    return on_device(array, device)
