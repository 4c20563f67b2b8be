"""Running CUDA kernels without a GPU: their source on the CPU thread by thread, or their schedules with threads as
loops.

For authors of templates and for tests. `run` lists what is reported and what cannot be detected; `translation` turns
the source into C++.
"""

from .run import EmulationError, cuda_source, keep_objects, launches, run_on_cpu
from .serialise import serialise

__all__ = ["EmulationError", "cuda_source", "keep_objects", "launches", "run_on_cpu", "serialise"]
