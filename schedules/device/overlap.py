"""Launches that overlap the end of the kernel before: programmatic dependent launch, from compute capability 9.0 on.

The blocks of such a kernel may start as soon as the kernel before has no more blocks to start, and do then what needs
nothing of it. Global memory has to be read by `ld.global` after `await_previous`, not as TVM reads a parameter: that
would be through the read-only path, which is for what nobody writes while the kernel runs.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

# Bytes that one prefetch brings.
LINE = 128
COUNT = """
__device__ __forceinline__ int multiprocessors() {
  unsigned int count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return (int)count;
}
"""


def multiprocessors() -> tirx.PrimExpr:
    """How many the GPU has, or a few more: good enough to guess which blocks of threads run side by side."""
    return T.cuda.func_call("multiprocessors", source_code=COUNT, return_type="int32")


@T.inline
def await_previous():
    """Until the kernel before is done and what it wrote is visible; then let the one behind start its blocks."""
    T.ptx.griddepcontrol.wait()
    T.ptx.griddepcontrol.launch_dependents()


def overlapping(main: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, launched so."""
    return main.with_attr("tirx.kernel_launch_params", ["tirx.use_programtic_dependent_launch"])
