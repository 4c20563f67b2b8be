"""The dense weight of a block-sparse layer, for code that reads `layer.weight`; it is made only for computations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_TENSOR: Any = torch.Tensor
_GRADIENT = _TENSOR.requires_grad.__get__
# Attributes of a tensor that do not need the dense matrix.
_FACTS: frozenset[Any] = frozenset(
    [getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")]
    + [getattr(_TENSOR, name).__get__ for name in ("is_meta", "is_quantized", "is_nested", "is_leaf", "itemsize")]
    + [_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.nelement, _TENSOR.element_size, _TENSOR.stride]
    + [_TENSOR.is_floating_point, _TENSOR.is_complex, _TENSOR.is_contiguous, _TENSOR.get_device]
)


class DenseWeight(torch.Tensor):
    """A tensor with a shape, dtype and device, which makes a layer's dense matrix only when it is used in a
    computation.

    So reading the dtype of a layer's weight costs nothing, while every computation with it makes the dense matrix of
    `out_features * in_features` numbers; gradients flow to the blocks. It is read-only. PyTorch's fused implementation
    of `torch.nn.TransformerEncoderLayer`, which multiplies with dense weights, is not used with such a tensor.
    """

    _layer: Any

    @staticmethod
    def __new__(cls, layer: Any) -> DenseWeight:
        shape = layer.out_features, layer.in_features
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.data.dtype, device=layer.data.device)
        made._layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        target: Any = args[0] if args else None
        if func == _GRADIENT:
            return target._layer.data.requires_grad
        if isinstance(target, cls) and (
            name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        ):
            raise TypeError(
                "weight: the dense weight of a BsrLinear is read only; change its blocks (`layer.data`), or make a"
                " torch.nn.Linear of the layer by `to_dense()`"
            )
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            return func(*tree_map(_dense, args), **tree_map(_dense, kwargs or {}))


def _dense(given: Any) -> Any:
    return given._layer.dense() if isinstance(given, DenseWeight) else given
