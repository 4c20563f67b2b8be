"""Templates of candidate words by hashing."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .candidate_rows import candidate_rows
from .row_clusters import row_clusters

TEMPLATES: tuple[Template, ...] = (
    candidate_rows,
    row_clusters,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (candidate_rows,),
    "cuda": (row_clusters,),
}
