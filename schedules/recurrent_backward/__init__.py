"""Templates of the gradient of a recurrent layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .back_kernels import back_kernels
from .persistent_back import persistent_back
from .step_back import step_back

TEMPLATES: tuple[Template, ...] = (step_back, back_kernels, persistent_back)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (step_back,), "cuda": (persistent_back, back_kernels)}
