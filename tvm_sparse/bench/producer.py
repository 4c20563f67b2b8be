"""A producer kernel before a timed kernel, which stands for the product that precedes it in a model.

In a model a kernel follows one that has read its own weights and written this kernel's inputs: the L2 cache then holds
the last of those weights and of those inputs, but nothing of this kernel's own weights and tables. A `Producer` leaves
the cache in the same state. It reads four times the L2 cache's size, and between these reads rewrites every array with
data of the batch's rows, part by part, with its present contents. So about three quarters of these data have left the
cache, as for the logits of a large vocabulary. Other arrays, outputs and workspaces are not touched.

It is a kernel, not a copy, since kernels launched with programmatic stream serialization overlap only with a preceding
kernel. It does not trigger the next launch early, so its consumer starts when its last thread block ends.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..artifacts.cuda import toolchain
from .buffers import bytes_of, empty
from .timing import driver_result

if TYPE_CHECKING:
    import numpy as np

# Bytes to read, in L2 cache sizes: earlier contents have then left the cache.
SWEEPS = 4
# Number of parts into which the reads and the writes are cut, which alternate.
PARTS = 16
# Thread blocks for a whole multiprocessor, so that all blocks run at once.
THREADS, BLOCKS_A_MULTIPROCESSOR = 512, 4
# 16-byte words that a thread has in flight.
IN_FLIGHT = 4
NAME = "producer"
SOURCE = f"""\
struct Array {{
  char *to;
  const char *from;
  unsigned long long bytes;
}};

extern "C" __global__ void __launch_bounds__({THREADS}, {BLOCKS_A_MULTIPROCESSOR})
{NAME}(const uint4 *sweep, unsigned long long words, unsigned *sink, const Array *arrays, int count) {{
  const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
  const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;

  unsigned sum = 0;
  for (int part = 0; part < {PARTS}; ++part) {{
    // Weights.
    unsigned long long i = words * part / {PARTS} + first;
    const unsigned long long end = words * (part + 1) / {PARTS};
    for (; i + ({IN_FLIGHT} - 1) * stride < end; i += {IN_FLIGHT} * stride) {{
      uint4 read[{IN_FLIGHT}];
#pragma unroll
      for (int k = 0; k < {IN_FLIGHT}; ++k) read[k] = sweep[i + k * stride];
#pragma unroll
      for (int k = 0; k < {IN_FLIGHT}; ++k) sum ^= read[k].x ^ read[k].y ^ read[k].z ^ read[k].w;
    }}
    for (; i < end; i += stride) sum ^= sweep[i].x ^ sweep[i].y ^ sweep[i].z ^ sweep[i].w;

    // Their results. The copy is read with a hint that it is to leave the cache first: a product has none.
    for (int a = 0; a < count; ++a) {{
      const Array array = arrays[a];
      unsigned long long whole = 0;
      if ((((unsigned long long)array.to | (unsigned long long)array.from) & 15) == 0) {{
        whole = array.bytes / 16;
        uint4 *to = (uint4 *)array.to;
        const uint4 *from = (const uint4 *)array.from;
        const unsigned long long until = whole * (part + 1) / {PARTS};
        for (unsigned long long j = whole * part / {PARTS} + first; j < until; j += stride) to[j] = __ldcs(from + j);
      }}
      const unsigned long long rest = array.bytes - 16 * whole, until = 16 * whole + rest * (part + 1) / {PARTS};
      for (unsigned long long j = 16 * whole + rest * part / {PARTS} + first; j < until; j += stride)
        array.to[j] = array.from[j];
    }}
  }}
  if (sum == 0x9e3779b9u) *sink = sum;  // never: the sweep is zero. Without a use the loads would be removed.
}}
"""


class Producer:
    """Launches the producer kernel for arrays on a device.

    Parameters
    ----------
    arrays
        Tensors on the first GPU, each with its contents on the host; these are copied to the device, which doubles the
        memory.
    sweep_bytes
        Least number of bytes to read. Default: `SWEEPS` L2 caches.

    Raises
    ------
    Fatal
        If the device has not enough memory.
    ToolchainError
        If the kernel cannot be compiled.
    RuntimeError
        If the driver does not load it.
    """

    def __init__(self, arrays: Sequence[tuple[Any, np.ndarray]], sweep_bytes: int = 0) -> None:
        import numpy as np

        some = [(array, bytes_of(content)) for array, content in arrays if content.nbytes]
        self._arrays = [array for array, _ in some]  # kept alive while the kernel writes them
        self._copies = [empty("cuda", content.shape, "uint8").copyfrom(content) for _, content in some]
        rows = [
            (array.data_ptr(), copy.data_ptr(), content.nbytes)
            for (array, content), copy in zip(some, self._copies, strict=True)
        ]
        listed = np.array(rows or [(0, 0, 0)], "uint64")
        self._table = empty("cuda", listed.shape, "uint64").copyfrom(listed)
        self._count = len(rows)
        self._kernel = _kernel(sweep_bytes)
        self.sweep_bytes = self._kernel.sweep_bytes
        self.launch(0)  # the driver may load a kernel at its first launch, which must not happen during a capture

    def launch(self, stream: int) -> None:
        """Launch it on a driver's stream, which may be capturing. Raises `RuntimeError` if that fails."""
        kernel = self._kernel
        sweep, words = kernel.sweep.data_ptr(), kernel.sweep_bytes // 16
        values = (sweep, words, sweep + kernel.sweep_bytes, self._table.data_ptr(), self._count)
        kinds = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        grid, block = (kernel.blocks, 1, 1), (THREADS, 1, 1)
        driver_result(kernel.driver.cuLaunchKernel(kernel.function, *grid, *block, 0, stream, (values, kinds), 0))


@dataclass(frozen=True)
class _Kernel:
    driver: Any  # the module that binds the driver
    function: Any
    blocks: int
    sweep: Any  # memory to read, followed by a word that is never written
    sweep_bytes: int


@functools.cache
def _kernel(least: int) -> _Kernel:
    """The kernel of this process and its memory to read, of at least `least` bytes, shared by all arrays."""
    import numpy as np
    from cuda.bindings import driver

    def fact(name: str) -> int:
        asked = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver_result(driver.cuDeviceGetAttribute(asked, device)))

    device = driver_result(driver.cuDeviceGet(0))
    sweep_bytes = max(SWEEPS * fact("L2_CACHE_SIZE"), least) // 16 * 16
    # Before the module is loaded: this makes the device's context current in this thread.
    sweep = empty("cuda", (sweep_bytes + 16,), "uint8")
    sweep.copyfrom(np.zeros(sweep_bytes + 16, np.uint8))
    arch = f"sm_{fact('COMPUTE_CAPABILITY_MAJOR')}{fact('COMPUTE_CAPABILITY_MINOR')}"
    module = driver_result(driver.cuModuleLoadData(toolchain.compiled(SOURCE, arch)))
    function = driver_result(driver.cuModuleGetFunction(module, NAME.encode()))
    blocks = BLOCKS_A_MULTIPROCESSOR * fact("MULTIPROCESSOR_COUNT")
    return _Kernel(driver, function, blocks, sweep, sweep_bytes)
