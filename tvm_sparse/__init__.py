"""Compiled, tuned kernels for the sparse and large-vocabulary ends of neural networks, on Apache TVM.

>>> values, indices = tvm_sparse.softmax_topk(logits, k=5)
>>> y = tvm_sparse.bsr_matmul(x, weight)
>>> rows = tvm_sparse.nhot_lookup(csr, table)
>>> print(tvm_sparse.explain("softmax_topk", batch=10, vocab=25000, k=5))

Names are resolved when they are first used: importing the package loads neither the compiler nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import bsr_matmul, explain, log_softmax, logsumexp, nhot_lookup, softmax, softmax_topk
    from .layers import BsrWeight, CsrRows
    from .runtime.dispatch import Explanation

_HOMES = {
    "softmax_topk": "functional",
    "bsr_matmul": "functional",
    "nhot_lookup": "functional",
    "softmax": "functional",
    "log_softmax": "functional",
    "logsumexp": "functional",
    "explain": "functional",
    "BsrWeight": "layers",
    "CsrRows": "layers",
    "Explanation": "runtime.dispatch",
}

__all__ = [
    "BsrWeight",
    "CsrRows",
    "Explanation",
    "bsr_matmul",
    "explain",
    "load",
    "log_softmax",
    "logsumexp",
    "nhot_lookup",
    "softmax",
    "softmax_topk",
]


def load(folder: str) -> int:
    """Use the kernels of a folder that `tvm-sparse export` wrote, before all others; returns how many fit this machine.

    Raises
    ------
    ManifestError
        If the folder's manifest is missing, malformed or of another version. Libraries are checked, by their hash,
        when they are first used.
    """
    from pathlib import Path

    from . import machine
    from .runtime.dispatch import dispatcher

    present = {found.arch for found in (machine.cpu(), machine.gpu()) if found is not None}
    return sum(entry.arch in present for entry in dispatcher.add(Path(folder)))


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # the next look-up finds it there, and does not come here
    return value
