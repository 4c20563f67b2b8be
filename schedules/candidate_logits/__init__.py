"""Templates of the gathered product."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.rows import rows

candidate_products = rows("candidate_logits", "candidate_products")

TEMPLATES: tuple[Template, ...] = (candidate_products,)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (candidate_products,), "cuda": ()}
