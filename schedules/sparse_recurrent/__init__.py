"""Templates of the sparse recurrent layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .cluster_rows import cluster_rows
from .persistent_rows import barrier_rows, persistent_rows
from .step_kernels import step_kernels
from .step_rows import step_rows

TEMPLATES: tuple[Template, ...] = (
    step_rows,
    step_kernels,
    persistent_rows,
    cluster_rows,
    barrier_rows,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (step_rows,),
    "cuda": (cluster_rows, persistent_rows, step_kernels),
}
