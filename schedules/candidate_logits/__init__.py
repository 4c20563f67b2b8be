"""Templates of the gathered product."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.rows import rows
from ..output_layer.streams import streams
from ..output_layer.tiles import tiles

candidate_products = rows("candidate_logits", "candidate_products", 4)
candidate_tiles_product = tiles("candidate_logits", "candidate_tiles_product", 1)
candidate_stream_products = streams("candidate_logits", "candidate_stream_products", 1)
candidate_dot_products = dots("candidate_logits", "candidate_dot_products", 1)

TEMPLATES: tuple[Template, ...] = (
    candidate_products,
    candidate_tiles_product,
    candidate_stream_products,
    candidate_dot_products,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (candidate_products,),
    "cuda": (candidate_stream_products, candidate_tiles_product, candidate_dot_products),
}
