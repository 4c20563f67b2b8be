"""The kernel in front of a timed one: what stands for the product that a model runs there.

In a model a kernel runs behind one that has read its own weights, and meanwhile written the inputs of this one: the L2
cache holds the end of the weights and the end of what was written, and nothing of the kernel's own weights and tables.
A `Producer` leaves it in the same state. It reads as many bytes as four L2 caches, and meanwhile, part by part, writes
every array that holds data of the batch's rows anew, with the contents that it has. So some three quarters of these
have left the cache, as of the logits of a large vocabulary. Arrays that hold no such data are not touched, nor are
outputs and workspaces.

It is a kernel, not a copy: ours are launched with programmatic stream serialization, and overlap with the end of a
kernel in front only. It does not trigger that launch before its end, so that a kernel behind it begins when the last
of its thread blocks ends.
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

# Of the L2 cache, that are read: what was there before has left it.
SWEEPS = 4
# In which the reads and the writes are cut, by turns.
PARTS = 16
# All that a multiprocessor holds at once, so that no block waits for another to end.
THREADS, BLOCKS_A_MULTIPROCESSOR = 512, 4
# 16-byte words that a thread has under way.
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
    """Launches the kernel for these arrays of a device.

    Parameters
    ----------
    arrays
        Tensors on the first GPU, each with its contents on the host, which are copied to the device: as much memory
        again.
    sweep_bytes
        What is read beside, at least. Default: `SWEEPS` L2 caches.

    Raises
    ------
    Fatal
        If the device has no room.
    ToolchainError
        If the kernel cannot be compiled.
    RuntimeError
        If the driver does not load it.
    """

    def __init__(self, arrays: Sequence[tuple[Any, np.ndarray]], sweep_bytes: int = 0) -> None:
        import numpy as np

        some = [(array, bytes_of(content)) for array, content in arrays if content.nbytes]
        self._arrays = [array for array, _ in some]  # as long as it writes them
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
        self.launch(0)  # the driver may load a kernel when it is launched first, which is not to be in a capture

    def launch(self, stream: int) -> None:
        """Launch it on a stream of the driver's, which may be capturing. Raises `RuntimeError` if that fails."""
        kernel = self._kernel
        sweep, words = kernel.sweep.data_ptr(), kernel.sweep_bytes // 16
        values = (sweep, words, sweep + kernel.sweep_bytes, self._table.data_ptr(), self._count)
        kinds = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        grid, block = (kernel.blocks, 1, 1), (THREADS, 1, 1)
        driver_result(kernel.driver.cuLaunchKernel(kernel.function, *grid, *block, 0, stream, (values, kinds), 0))


@dataclass(frozen=True)
class _Kernel:
    driver: Any  # the module
    function: Any
    blocks: int
    sweep: Any  # what is read, and a word behind it that nothing is written to
    sweep_bytes: int


@functools.cache
def _kernel(least: int) -> _Kernel:
    """The kernel of this process, and what it reads, so many bytes at least: one for all arrays."""
    import numpy as np
    from cuda.bindings import driver

    def fact(name: str) -> int:
        asked = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver_result(driver.cuDeviceGetAttribute(asked, device)))

    device = driver_result(driver.cuDeviceGet(0))
    sweep_bytes = max(SWEEPS * fact("L2_CACHE_SIZE"), least) // 16 * 16
    # Before the module is loaded: this makes the device's context the thread's.
    sweep = empty("cuda", (sweep_bytes + 16,), "uint8")
    sweep.copyfrom(np.zeros(sweep_bytes + 16, np.uint8))
    arch = f"sm_{fact('COMPUTE_CAPABILITY_MAJOR')}{fact('COMPUTE_CAPABILITY_MINOR')}"
    module = driver_result(driver.cuModuleLoadData(toolchain.compiled(SOURCE, arch)))
    function = driver_result(driver.cuModuleGetFunction(module, NAME.encode()))
    blocks = BLOCKS_A_MULTIPROCESSOR * fact("MULTIPROCESSOR_COUNT")
    return _Kernel(driver, function, blocks, sweep, sweep_bytes)
