"""Templates of plain kernels (`naive`), which fit any shape: their only decision is the size of a thread block.

Loads no compiler.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Template, powers

THREADS = powers(32, 512)

plain = partial(
    Template,
    kind="cuda",
    space=lambda problem, machine: {"threads": THREADS},
    default=lambda problem, machine: {"threads": 128},
    explicit_threads=True,
)
