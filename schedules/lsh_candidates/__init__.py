"""Templates of candidate words by hashing."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .lsh_stages import lsh_stages
from .plain_steps import plain_steps
from .row_clusters import row_clusters

TEMPLATES: tuple[Template, ...] = (lsh_stages, row_clusters, plain_steps)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (lsh_stages,), "cuda": (row_clusters, plain_steps)}
