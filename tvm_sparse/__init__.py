"""Compiled, tuned kernels for the sparse and large-vocabulary ends of neural networks, on Apache TVM.

>>> values, indices = tvm_sparse.softmax_topk(logits, k=5)
>>> y = tvm_sparse.bsr_matmul(x, weight)
>>> rows = tvm_sparse.nhot_lookup(csr, table)
>>> values, indices, info = tvm_sparse.LshHead(embedding).topk(hidden, 12)
>>> output, h_n, c_n = tvm_sparse.SparseLSTM(weight_hh, density=0.1)(x_projected)
>>> tvm_sparse.nn.sparsify(model, block=16, sparsity=0.9)  # modules of PyTorch: tvm_sparse.nn
>>> print(tvm_sparse.explain("softmax_topk", batch=10, vocab=25000, k=5))

Names are resolved when they are first used: importing the package loads neither the compiler nor PyTorch.
`core.registry` lists the public names of each operator.
"""

from __future__ import annotations

import types
from typing import Any

# Public names that belong to no operator, and the modules that define them.
_GENERAL = {
    "configure": "runtime.dispatch",
    "explain": "runtime.dispatch",
    "load": "runtime.dispatch",
    "warmup": "runtime.dispatch",
    "Explanation": "runtime.dispatch",
    "Miss": "runtime.loading",
    "quantize_embedding": "formats.quantized",
    "QuantizedEmbedding": "formats.quantized",
    "LshHead": "layers.lsh_head",
    "beam_search": "layers.beam",
    "ScreenedHead": "layers.screened_head",
    "LmHead": "layers.lm_head",
    "merge_topk": "layers.shards",
    "head_sample": "layers.head_sample",
    "sample_details": "layers.sampling",
    "SampleDetails": "layers.sampling",
    "merge_sample": "layers.sampling",
    "SparseRNN": "layers.recurrent",
    "SparseLSTM": "layers.recurrent",
    "SparseGRU": "layers.recurrent",
    "project_inputs": "layers.recurrent",
    "from_torch": "layers.recurrent_stack",
    "RecurrentStack": "layers.recurrent_stack",
    "prune": "layers.pruning",
    "pruning_mask": "layers.pruning",
    "cubic_schedule": "layers.pruning",
    "constant_schedule": "layers.pruning",
    "GradualPruning": "layers.pruning",
}
# Modules that import PyTorch.
_WITH_TORCH = ("nn", "distributed")


def _homes() -> dict[str, str]:
    """The public names, each with the module that defines it."""
    from .core import registry

    homes = {name: f"{__name__}.{home}" for name, home in _GENERAL.items()}
    for operator in registry.operators().values():
        homes |= {name: f"{operator.home}.call" for name in operator.public}
    return homes


def _show_to_compilers(name: str, function: types.FunctionType) -> None:
    """Set the attributes at which torch.compile looks before it traces a function.

    They are those that torch.compiler.disable and torch.compile set. Those functions themselves would need PyTorch, and
    the first adds a microsecond to each call.
    """
    from . import traced
    from .runtime.arrays import UNTRACED

    found: Any = getattr(traced, name, None)
    if found is None:
        function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=UNTRACED)
    else:
        # The first attribute counts where another traced function calls this one, the others for
        # torch.compile(function).
        function.__dict__.update(
            _torchdynamo_inline=found, _torchdynamo_orig_callable=found, _torchdynamo_wrapper_id=id(function)
        )


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__all__":
        return sorted(_homes())
    if name in _WITH_TORCH:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version(__name__)
    if name.startswith("__") or name not in (homes := _homes()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(homes[name]), name)
    if isinstance(value, types.FunctionType):
        _show_to_compilers(name, value)
    globals()[name] = value  # so that the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes(), "__all__", "__version__", *_WITH_TORCH})
