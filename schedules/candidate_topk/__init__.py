"""Templates of softmax + top-k over candidate words."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.rows import rows

candidate_rows = rows("candidate_topk", "candidate_rows")

TEMPLATES: tuple[Template, ...] = (candidate_rows,)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (candidate_rows,), "cuda": ()}
