"""Templates of softmax + top-k over candidate tokens."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.registers import registers
from ..output_layer.rows import rows
from ..output_layer.streams import streams
from ..output_layer.warp_rings import warp_rings

candidate_rows = rows("candidate_topk", "candidate_rows", 4)
candidate_streams = streams("candidate_topk", "candidate_streams", 2)
candidate_warp_rings = warp_rings("candidate_topk", "candidate_warp_rings", 1)
candidate_registers = registers("candidate_topk", "candidate_registers", 1)
candidate_dots = dots("candidate_topk", "candidate_dots", 1)

_CUDA = (candidate_streams, candidate_warp_rings, candidate_registers, candidate_dots)
TEMPLATES: tuple[Template, ...] = (candidate_rows, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (candidate_rows,), "cuda": _CUDA}
