"""Templates of softmax + top-k over candidate tokens."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.registers import registers
from ..output_layer.rows import rows
from ..output_layer.streams import streams
from ..output_layer.warp_rings import warp_rings

candidate_rows = rows(name="candidate_rows", version=4, operator="candidate_topk")
candidate_streams = streams(name="candidate_streams", version=2, operator="candidate_topk")
candidate_warp_rings = warp_rings(name="candidate_warp_rings", version=1, operator="candidate_topk")
candidate_registers = registers(name="candidate_registers", version=1, operator="candidate_topk")
candidate_dots = dots(name="candidate_dots", version=1, operator="candidate_topk")

_CUDA = (candidate_streams, candidate_warp_rings, candidate_registers, candidate_dots)
TEMPLATES: tuple[Template, ...] = (candidate_rows, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (candidate_rows,), "cuda": _CUDA}
