"""One interface for NumPy and PyTorch, for what layers do with arrays beside calling operators.

`library(name, array)` returns the interface of the array's library. Results are new arrays of that library, on the
array's device, and no function waits for a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..core.given import described
from ..runtime import arrays


class Library(Protocol):
    """The interface of both libraries. `like` is an array on the wanted device."""

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any: ...
    def arange(self, count: int, dtype: str, like: Any) -> Any: ...
    def copy(self, array: Any) -> Any: ...
    def take(self, array: Any, index: Any) -> Any: ...
    def take_along(self, array: Any, index: Any) -> Any: ...
    def descending(self, array: Any) -> Any: ...
    def kth_largest(self, array: Any, k: int) -> Any: ...
    def logsumexp(self, array: Any) -> Any: ...
    def where(self, condition: Any, array: Any, other: Any) -> Any: ...
    def isnan(self, array: Any) -> Any: ...
    def above_zero(self, array: Any) -> Any: ...
    def cast(self, array: Any, dtype: str) -> Any: ...
    def concatenate(self, parts: list[Any], axis: int) -> Any: ...
    def from_host(self, array: np.ndarray, like: Any) -> Any: ...


class _NumPy:
    def __reduce__(self) -> str:
        return "NUMPY"  # copies are on the host too

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        return np.full(shape, value, dtype)

    def arange(self, count: int, dtype: str, like: Any) -> Any:
        return np.arange(count, dtype=dtype)

    def copy(self, array: Any) -> Any:
        return array.copy()

    def take(self, array: Any, index: Any) -> Any:
        return array[index]

    def take_along(self, array: Any, index: Any) -> Any:
        return np.take_along_axis(array, index, 1)

    def descending(self, array: Any) -> Any:
        return np.argsort(-array, axis=1, kind="stable")

    def kth_largest(self, array: Any, k: int) -> Any:
        place = array.shape[1] - k
        return np.partition(array, place, axis=1)[:, place].copy()

    def logsumexp(self, array: Any) -> Any:
        most = array.max(1, keepdims=True)
        most = np.where(np.isinf(most), 0, most)
        with np.errstate(divide="ignore"):  # a row without a finite entry gives -inf
            return np.log(np.exp(array - most).sum(1)) + most[:, 0]

    def where(self, condition: Any, array: Any, other: Any) -> Any:
        return np.where(condition, array, other)

    def isnan(self, array: Any) -> Any:
        return np.isnan(array)

    def above_zero(self, array: Any) -> Any:
        return np.maximum(array, 0)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype)

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return np.concatenate(parts, axis)

    def from_host(self, array: np.ndarray, like: Any) -> Any:
        return array


class _Torch:
    def __reduce__(self) -> str:
        return "TORCH"

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        torch = _torch()
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=like.device)

    def arange(self, count: int, dtype: str, like: Any) -> Any:
        torch = _torch()
        return torch.arange(count, dtype=getattr(torch, dtype), device=like.device)

    def copy(self, array: Any) -> Any:
        return array.clone()

    def take(self, array: Any, index: Any) -> Any:
        return array.index_select(0, index)

    def take_along(self, array: Any, index: Any) -> Any:
        return array.gather(1, index)

    def descending(self, array: Any) -> Any:
        return _torch().sort(array, dim=1, descending=True, stable=True).indices

    def kth_largest(self, array: Any, k: int) -> Any:
        if array.device.type == "cpu":  # five times as fast as torch's there
            return _torch().from_numpy(NUMPY.kth_largest(array.numpy(), k))
        return array.kthvalue(array.shape[1] - k + 1, dim=1).values

    def logsumexp(self, array: Any) -> Any:
        return array.logsumexp(1)

    def where(self, condition: Any, array: Any, other: Any) -> Any:
        return _torch().where(condition, array, other)

    def isnan(self, array: Any) -> Any:
        return array.isnan()

    def above_zero(self, array: Any) -> Any:
        return array.clamp(min=0)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(getattr(_torch(), dtype))

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return _torch().cat(parts, axis)

    def from_host(self, array: np.ndarray, like: Any) -> Any:
        return tensor(array, like.device)


NUMPY, TORCH = _NumPy(), _Torch()


def kept(store: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """`store[key]`, made by `make()` where it is absent.

    While torch.compile traces the caller, the result is not stored: what is made then belongs to a graph, which may
    write something else to its memory.
    """
    if key in store:
        return store[key]
    made, torch = make(), sys.modules.get("torch")
    if torch is None or not torch.compiler.is_compiling():
        store[key] = made
    return made


def library(name: str, array: Any) -> Library:
    """The library of the argument `name`.

    Raises
    ------
    TypeError
        If it is neither NumPy's nor PyTorch's.
    """
    if arrays.is_torch(array):
        return TORCH
    if arrays.is_numpy(array):
        return NUMPY
    raise TypeError(f"{name}: expected a torch tensor or a NumPy array, got {described(array)}")


def to_host(array: Any) -> np.ndarray:
    """The array as a NumPy array, bfloat16 by ml_dtypes; without a copy if it is on the host."""
    if not arrays.is_torch(array):
        return array
    torch = _torch()
    array = array.detach().cpu()
    if array.dtype is torch.bfloat16:
        return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array.numpy()


def tensor(array: np.ndarray, device: Any) -> Any:
    """The NumPy array as a torch tensor on a device."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _torch() -> Any:
    return sys.modules["torch"]
