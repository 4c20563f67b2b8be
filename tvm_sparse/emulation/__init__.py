"""CUDA kernels on a machine without a GPU: their source on the CPU, thread by thread, or their threads as loops.

A tool for authors of templates and for tests; see `run` for what it reports and what it cannot see, and `translation`
for how the source becomes C++.
"""

from .run import EmulationError, cuda_source, launches, run_on_cpu
from .serialise import serialise

__all__ = ["EmulationError", "cuda_source", "launches", "run_on_cpu", "serialise"]
