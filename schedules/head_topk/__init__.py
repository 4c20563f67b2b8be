"""Templates of the exact output layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.rows import rows

head_rows = rows("head_topk", "head_rows")

TEMPLATES: tuple[Template, ...] = (head_rows,)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (head_rows,), "cuda": ()}
