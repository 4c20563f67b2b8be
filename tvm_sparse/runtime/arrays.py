"""Arrays of other libraries: their dtype, shape and device, and passing them to kernels without a copy.

PyTorch tensors and NumPy arrays are known by type, everything else by the DLPack protocol. No library is imported for
this: an array exists only if its library has been imported.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.given import described

if TYPE_CHECKING:
    import numpy as np

# DLPack's device types for which kernels exist (kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged).
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
# Vector loads of CUDA kernels need alignment to their own width, CPU kernels to an element's.
CUDA_ALIGNMENT = 16
# The message where PyTorch traces or transforms a function that is not a custom operator.
UNTRACED = (
    "this function of tvm_sparse is no custom operator of PyTorch: torch.compile calls it between two graphs, and it"
    " cannot be part of one (fullgraph=True), nor of torch.export, torch.func (vmap, jvp, grad) or fake mode"
)
# The message where torch.jit.trace records a call of such a function.
UNRECORDED = (
    "torch.jit.trace (and torch.onnx.export with dynamo=False) cannot record this function of tvm_sparse, which is no"
    " custom operator of PyTorch; call it outside of what is traced"
)
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Facts:
    """Properties of an array that public functions check."""

    shape: tuple[int, ...]
    dtype: str
    device: str  # "cpu" or "cuda"
    index: int  # number of the device
    contiguous: bool
    aligned: bool


class _Here(threading.local):
    """State of this thread: `below` is true within a custom operator of PyTorch, where tensors without data are
    allowed.
    """

    below = False


here = _Here()


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def traced() -> bool:
    """Whether torch.jit.trace records this thread's calls."""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._get_tracing_state() is not None


def is_numpy(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def is_jax(array: Any) -> bool:
    """Whether this is an array of JAX's, or a tracer. JAX's arrays are immutable."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def is_cupy(array: Any) -> bool:
    """Whether this is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


@functools.lru_cache(64)
def _name(dtype: Any) -> str:
    """The name of a NumPy dtype; cached, since NumPy computes it at every access, in microseconds."""
    return dtype.name


def dtype_name(given: Any) -> str:
    """The name of a dtype, given as one of torch or NumPy or as a name."""
    import numpy as np

    if not isinstance(given, str) and not str(given).startswith("torch."):
        try:
            return np.dtype(given).name
        except TypeError:
            pass
    return str(given).removeprefix("torch.")


def on_device(array: np.ndarray, device: Any) -> Any:
    """A NumPy array as a tensor on a device of PyTorch; the array itself for None."""
    if device is None:
        return array
    import numpy as np
    import torch

    if array.dtype.name == "bfloat16":  # unknown to torch: pass the same bits as integers
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def facts(name: str, array: Any) -> Facts:
    """The facts of an array given as the argument `name`.

    Raises
    ------
    TypeError
        If it is not an array, is a masked array, lies on a device without kernels, or has no data (as in a trace); if
        torch.jit.trace records the call of a function without a custom operator.
    """
    if is_torch(array):
        device = array.device.type
        if device not in ("cpu", "cuda"):
            raise TypeError(f"{name}: expected a tensor on cpu or cuda, got one on {device}")
        if array.layout is not sys.modules["torch"].strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {array.layout}")
        if traced():
            raise TypeError(f"{name}: {UNRECORDED}")
        dtype = str(array.dtype).removeprefix("torch.")
        alignment = CUDA_ALIGNMENT if device == "cuda" else ITEMSIZE.get(dtype, 1)
        address = _address(name, array)
        return Facts(
            tuple(array.shape),
            dtype,
            device,
            array.device.index or 0,
            # A tensor may store its values negated, as `torch.Tensor.imag` of a conjugate does.
            array.is_contiguous() and not array.is_neg(),
            address % alignment == 0,
        )
    if is_numpy(array):
        masked = sys.modules.get("numpy.ma")
        if masked is not None and isinstance(array, masked.MaskedArray):
            raise TypeError(f"{name}: got a masked array, whose mask a kernel does not see; use its filled(value)")
        dtype = _name(array.dtype) if array.dtype.isnative else f"{_name(array.dtype)} of the other byte order"
        return Facts(
            array.shape,
            dtype,
            "cpu",
            0,
            array.flags.c_contiguous and array.flags.writeable,
            array.flags.aligned,
        )
    if is_jax(array) and isinstance(array, sys.modules["jax"].core.Tracer):
        raise TypeError(
            f"{name}: got a tracer of JAX, which has no data. Within jax.jit call this function by jax.pure_callback;"
            " there is no derivative (jax.grad) and no rule of jax.vmap"
        )
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected a torch tensor, a NumPy array or another DLPack array, got {described(array)}"
        )
    import tvm_ffi

    kind, index = (int(part) for part in array.__dlpack_device__())
    if kind not in (CPU, CUDA, CUDA_HOST, CUDA_MANAGED):
        raise TypeError(f"{name}: expected an array on cpu or cuda, got DLPack device type {kind}")
    if kind != CPU and is_jax(array):
        raise TypeError(
            f"{name}: got a JAX array on a GPU, whose streams do not wait for the kernel's; pass"
            " torch.from_dlpack(array), and take results by jax.dlpack.from_dlpack"
        )
    try:
        tensor = tvm_ffi.from_dlpack(array)
    except BufferError as error:
        raise TypeError(f"{name}: its library does not hand it over by DLPack: {error}") from None
    device = "cuda" if kind in (CUDA, CUDA_MANAGED) else "cpu"
    dtype = str(tensor.dtype)
    alignment = CUDA_ALIGNMENT if device == "cuda" else ITEMSIZE.get(dtype, 1)
    aligned = tensor.data_ptr() % alignment == 0
    return Facts(tuple(tensor.shape), dtype, device, index, tensor.is_contiguous(), aligned)


def _address(name: str, tensor: Any) -> int:
    """The address of a torch tensor's data; of a fake tensor below a custom operator, its offset in its storage.

    Raises
    ------
    TypeError
        If it has no data, as while PyTorch traces or transforms a function.
    """
    if not stands_for_data(tensor):
        return tensor.data_ptr()
    if here.below:
        return 0
    raise TypeError(f"{name}: got a tensor without data. {UNTRACED}")


def overlap(one: Any, other: Any) -> bool:
    """Whether the address ranges of two arrays overlap, from the first to the last byte of each."""
    (start, end), (begin, stop) = _span(one), _span(other)
    return start < stop and begin < end


def _span(array: Any) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last."""
    if is_torch(array):
        start = array.data_ptr()
        if array.is_contiguous():
            return start, start + array.nbytes
        size, strides = array.element_size(), array.stride()
        last = sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
        return start, start + (last + 1) * size if array.numel() else start
    if is_numpy(array):
        from numpy.lib import array_utils

        return array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    tensor = argument(array)
    start = tensor.data_ptr()
    return start, start + ITEMSIZE.get(str(tensor.dtype), 8) * math.prod(tensor.shape)


def is_fake(array: Any) -> bool:
    """Whether this is a tensor of PyTorch's fake mode, which has a shape, a dtype and a device, but no data."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(array, fake.FakeTensor)


def is_symbol(value: Any) -> bool:
    """Whether this is a symbolic integer, whose value a graph of torch.compile knows only when it runs."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.SymInt)


def stands_for_data(tensor: Any) -> bool:
    """Whether a dense torch tensor has no data, as while PyTorch traces or transforms a function."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.device.type == "meta":
        return False
    if is_fake(tensor):
        return True
    try:
        return not tensor.data_ptr() and tensor.numel() > 0
    except RuntimeError:  # raised by torch.func's wrappers
        return True


def unread(value: Any) -> bool:
    """Whether a number is a tensor without dimensions whose value a call must not read: it has none yet (fake mode,
    torch.export, torch.func), or torch.jit.trace would keep it as a constant.
    """
    if type(value) in (float, int) or not is_torch(value) or value.dim():
        return False
    return traced() or stands_for_data(value)


def ready(name: str, array: Any, known: Facts) -> Any:
    """The array in the form that kernels require: unchanged if it is contiguous and aligned, else a copy.

    Raises
    ------
    ValueError
        If it needs a copy, and its library is neither PyTorch nor NumPy.
    """
    if is_torch(array):
        array = array.detach()
        if known.contiguous and known.aligned:
            return array
        # clone() allocates anew, and so aligned; contiguous() alone would keep an offset view.
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    if is_numpy(array):
        if not (known.contiguous and known.aligned):
            array = array.copy(order="C")
        return array
    if not known.contiguous or not known.aligned:
        what = "a non-contiguous" if not known.contiguous else "a misaligned"
        raise ValueError(
            f"{name}: got {what} array of another library, which is not copied; make a contiguous copy first"
        )
    return array


def converted(name: str, array: Any, dtype: str) -> Any:
    """A copy of the array given as the argument `name` in another dtype.

    Raises
    ------
    ValueError
        If its library is neither PyTorch nor NumPy.
    """
    if is_torch(array):
        return array.to(getattr(sys.modules["torch"], dtype))
    if is_numpy(array):
        return array.astype(dtype)
    raise ValueError(f"{name}: expected dtype {dtype} of an array that is neither torch's nor NumPy's")


def argument(array: Any) -> Any:
    """The object passed to the kernel for a prepared array."""
    if is_torch(array):
        return array
    import tvm_ffi

    if isinstance(array, tvm_ffi.Tensor):
        return array
    if is_numpy(array) and _name(array.dtype) == "bfloat16":
        array = _BfloatExport(array)
    return tvm_ffi.from_dlpack(array)


def empty(shape: tuple[int, ...], dtype: str, like: Any, known: Facts) -> Any:
    """A new uninitialised array of the same library and on the same device as `like`."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    import numpy as np

    from ..core.problem import numpy_dtype

    namespace = None if is_numpy(like) else getattr(like, "__array_namespace__", lambda: None)()
    if known.device == "cuda":
        if is_cupy(like):  # lacks the array API's namespace
            with like.device:
                return sys.modules["cupy"].empty(shape, numpy_dtype(dtype))
        if namespace is None:
            raise TypeError(
                f"out: {type(like).__name__} offers no way to make arrays on a GPU; pass the outputs as `out`"
            )
        return namespace.empty(shape, dtype=getattr(namespace, dtype), device=like.device)
    return np.empty(shape, numpy_dtype(dtype))


def full(shape: tuple[int, ...], value: float, dtype: str, like: Any, known: Facts) -> Any:
    """A new array as `empty` makes it, filled with `value`."""
    array = empty(shape, dtype, like, known)
    if is_torch(array):
        return array.fill_(value)
    if is_numpy(array) or is_cupy(array):
        array[...] = value
        return array
    namespace = array.__array_namespace__()
    return namespace.full(shape, value, dtype=array.dtype, device=array.device)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """An array with another shape, without a copy if it is contiguous.

    Raises
    ------
    TypeError
        If its library cannot reshape arrays.
    """
    if hasattr(array, "shape") and tuple(array.shape) == shape:
        return array
    if hasattr(array, "reshape"):
        return array.reshape(shape)
    reshape = getattr(getattr(array, "__array_namespace__", lambda: None)(), "reshape", None)
    if reshape is None:
        raise TypeError(f"{type(array).__name__} arrays have no reshape; expected one of shape {shape}")
    return reshape(array, shape)


def prototype(tensor: Any) -> Any:
    """A tensor with the shape, dtype and device of a torch tensor, which occupies a few bytes.

    `torch.empty_like` of it takes half as long as `torch.empty`.
    """
    index = tensor.device.index if tensor.is_cuda else None
    return kept(lambda: tensor.new_empty((1,) * tensor.dim()), index).expand(tensor.shape)


def kept(make: Callable[[], Any], index: int | None) -> Any:
    """A torch tensor that outlives the call in which it is made, by `make()`; on the CUDA device `index`, if given.

    On a GPU `make` runs in a thread of its own, for the device's current stream. What the caller's thread allocates
    while `torch.compile` prepares a CUDA graph (mode="reduce-overhead") belongs to the graph's memory, which PyTorch
    reuses without regard to tensors that are kept. A stream that is being captured takes no work of other threads.
    """
    if index is None:
        return make()
    torch = sys.modules["torch"]
    stream = torch.cuda.current_stream(index)

    def on_stream() -> Any:
        with torch.cuda.stream(stream):
            return make()

    if _captured(index):
        return on_stream()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(on_stream).result()


def _captured(index: int) -> bool:
    """Whether the current stream of a CUDA device is being captured."""
    cuda = sys.modules["torch"].cuda
    with cuda.stream(cuda.current_stream(index)):
        captured: bool = cuda.is_current_stream_capturing()
    return captured


def constant(shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
    """A torch tensor full of `value`, on the device of the torch tensor `like`, to be read alone.

    It is kept for later calls on the device's current stream, but for one that is filled while that is captured: its
    graph does so whenever it is replayed.
    """
    torch = sys.modules["torch"]
    index = like.device.index if like.is_cuda else None
    stream = 0 if index is None else torch._C._cuda_getCurrentRawStream(index)
    count = math.prod(shape)
    whole = 1 << max(0, count - 1).bit_length()  # so that few sizes are kept
    key = whole, value, dtype, index, stream
    found = _CONSTANTS.get(key)
    if found is None:

        def make() -> Any:
            with torch.inference_mode(False):
                return torch.full((whole,), value, dtype=getattr(torch, dtype), device=like.device)

        found = kept(make, index)
        if index is None or not _captured(index):
            _CONSTANTS[key] = found
    return found[:count].view(shape)


_CONSTANTS: dict[Any, Any] = {}


def returned(array: Any, like: Any) -> Any:
    """Convert an output made by `empty` to an array of the library of `like`."""
    if is_torch(array) or is_numpy(like):
        return array
    namespace = getattr(like, "__array_namespace__", lambda: None)()
    if is_numpy(array) and namespace is not None and hasattr(namespace, "from_dlpack"):
        return namespace.from_dlpack(_BfloatExport(array) if _name(array.dtype) == "bfloat16" else array)
    return array


def as_numpy(array: Any) -> Any:
    """An array on the host for NumPy, without a copy if its data are on the host."""
    import numpy as np

    if is_torch(array):
        return array.cpu().numpy()
    return array if is_numpy(array) else np.from_dlpack(array)


class _BfloatExport:
    """DLPack export of a NumPy bfloat16 array; NumPy itself exports only its own dtypes.

    In the capsule of the same bytes as uint16, the type code is overwritten by that of bfloat16.
    """

    def __init__(self, array: Any) -> None:
        import numpy as np

        self._bits = array.view(np.uint16)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._bits.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # Layout of DLTensor: data (8 bytes), device (8), ndim (4), then dtype, beginning with its code; kDLBfloat is 4.
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 4
        return capsule
