"""Templates of the gathered product."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.registers import registers
from ..output_layer.rows import rows
from ..output_layer.streams import streams
from ..output_layer.warp_rings import warp_rings

candidate_products = rows(name="candidate_products", version=4, operator="candidate_logits")
candidate_stream_products = streams(name="candidate_stream_products", version=1, operator="candidate_logits")
candidate_warp_rings_product = warp_rings(name="candidate_warp_rings_product", version=1, operator="candidate_logits")
candidate_registers_product = registers(name="candidate_registers_product", version=1, operator="candidate_logits")
candidate_dot_products = dots(name="candidate_dot_products", version=1, operator="candidate_logits")

_CUDA = (
    candidate_stream_products,
    candidate_warp_rings_product,
    candidate_registers_product,
    candidate_dot_products,
)
TEMPLATES: tuple[Template, ...] = (candidate_products, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (candidate_products,), "cuda": _CUDA}
