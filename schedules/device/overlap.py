"""Programmatic dependent launch: a kernel that starts while the one before it still runs (compute capability 9.0 on).

Two kernels follow each other in a stream: the producer, then the consumer. Thread blocks
of a consumer that is launched so (`overlapping`) may start once every thread block of the producer has called
`start_consumer` or has ended. What the consumer then does before `wait_for_producer` must not depend on the producer,
or must be checked afterwards. `wait_for_producer` returns when the producer has ended and its writes are visible.

What the producer may write has to be read by `ld.global` (`T.ptx.ld.global_`, `words.load_words`), and not by indexing
a parameter's buffer: TVM marks parameters that a kernel only reads as such, and the compiler then uses the read-only
path (`ld.global.nc`), which is defined only for memory that nobody writes while the kernel runs. Here the producer
writes it while the kernel runs. What was read before the wait and is read again after it needs a load that bypasses
the L1 cache, which is not kept up to date: `T.ptx.ld.relaxed.gpu.global_`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

CACHE_LINE = 128  # bytes, which is what one prefetch brings
COUNT = """
__device__ __forceinline__ int multiprocessors() {
  unsigned int count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return (int)count;
}
"""


def multiprocessors() -> tirx.PrimExpr:
    """Multiprocessors of the GPU, or a few more: `%nsmid` also counts numbers that no multiprocessor has.

    Good enough to guess which thread blocks run side by side.
    """
    return T.cuda.func_call("multiprocessors", source_code=COUNT, return_type="int32")


@T.inline
def wait_for_producer():
    """Wait until the producer kernel has ended and what it wrote is visible."""
    T.ptx.griddepcontrol.wait()


@T.inline
def start_consumer():
    """Let thread blocks of the consumer kernel start, as soon as all thread blocks of this one have come here."""
    T.ptx.griddepcontrol.launch_dependents()


@T.inline
def wait_then_start_consumer():
    """`wait_for_producer`, then `start_consumer`: no more than two kernels of the stream run at a time."""
    wait_for_producer()
    start_consumer()


def overlapping(main: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, its kernel launched so that it may start before the producer kernel has ended."""
    # The attribute's spelling is TVM's.
    return main.with_attr("tirx.kernel_launch_params", ["tirx.use_programtic_dependent_launch"])
