"""Arguments of kernels on a device, each array surrounded by guard bytes that must not change.

On every kind of machine an array is part of a larger buffer, which is written and read as a whole. So writes outside of
outputs are detected, and arrays can have the least alignment that public calls allow, not just an allocator's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.problem import Mismatch, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

# Bytes before and after every array: wide enough for any store beyond its end, and the largest alignment of allocators.
GUARD_BYTES = 256
# The guard byte: floats made of it are NaN, so that results show reads beyond the end of an input.
GUARD = 0xFF


class Fatal(RuntimeError):
    """The device may be in a bad state: the parent must not use this process again."""

    fatal = True


def device_of(kind: str) -> Any:
    import tvm

    return tvm.cuda(0) if kind == "cuda" else tvm.cpu(0)


def empty(kind: str, shape: Sequence[int], dtype: str) -> Any:
    """A tensor on the device. Raises `Fatal` if the device has no memory left, or fails."""
    import tvm

    try:
        return tvm.runtime.empty(tuple(shape), dtype, device_of(kind))
    except Exception as error:
        raise Fatal(f"{type(error).__name__}: {error}") from error


class Guarded:
    """A buffer for one array at a time, of at most `size` bytes, up to `most` bytes after an allocator's position."""

    def __init__(self, kind: str, size: int, most: int) -> None:
        import numpy as np

        self._begin = GUARD_BYTES
        self._buffer = empty(kind, (GUARD_BYTES + most + size + GUARD_BYTES,), "uint8")
        self._image = np.empty(self._buffer.shape, np.uint8)  # on the host, kept: allocating costs more than a copy
        self.held: np.ndarray | int | None = None  # content written last

    @property
    def nbytes(self) -> int:
        return int(self._image.nbytes)

    def place(self, shape: Sequence[int], dtype: str, offset: int = 0) -> Any:
        """The tensor of this shape and dtype in this buffer, as kernels take it: `offset` bytes after the position
        where an allocator would put it.
        """
        if self._begin != GUARD_BYTES + offset:
            self._begin, self.held = GUARD_BYTES + offset, None
        self._shape, self._dtype = tuple(shape), numpy_dtype(dtype)
        self._end = self._begin + math.prod(shape) * self._dtype.itemsize
        return _addressed(self._buffer._create_view(self._shape, dtype, self._begin))

    def write(self, content: np.ndarray | int) -> None:
        """Fill the tensor with these contents, or with one byte, and renew the guard bytes around it."""
        self._image[: self._begin] = self._image[self._end :] = GUARD
        self._image[self._begin : self._end] = content if isinstance(content, int) else bytes_of(content)
        self._buffer.copyfrom(self._image)
        self.held = content

    def read(self) -> np.ndarray:
        """The tensor's present contents.

        Raises
        ------
        Mismatch
            If a guard byte was overwritten.
        Fatal
            If copying from the device fails.
        """
        try:
            image = self._buffer.numpy()
        except Exception as error:
            raise Fatal(str(error)) from error
        for beside, where in ((image[: self._begin][::-1], "before"), (image[self._end :], "behind")):
            changed = (beside != GUARD).nonzero()[0]
            if len(changed):
                raise Mismatch(f"up to {changed[-1] + 1} bytes {where} it were written")
        return image[self._begin : self._end].view(self._dtype).reshape(self._shape)


def bytes_of(array: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _DLTensor(ctypes.Structure):
    """The first fields of the struct to which a DLPack capsule points."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Export:
    """DLPack export of a part of a tensor, with its offset added to its address."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._view._to_dlpack()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
        tensor.data, tensor.byte_offset = tensor.data + tensor.byte_offset, 0
        return capsule


def _addressed(view: Any) -> Any:
    """A part of a tensor with its own address, as in public calls: kernels refuse tensors with a byte offset."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_Export(view))
