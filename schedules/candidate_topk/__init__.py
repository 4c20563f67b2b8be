"""Templates of softmax + top-k over candidate words."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.rows import rows
from ..output_layer.streams import streams
from ..output_layer.tiles import tiles

candidate_rows = rows("candidate_topk", "candidate_rows", 4)
candidate_tiles = tiles("candidate_topk", "candidate_tiles", 3)
candidate_streams = streams("candidate_topk", "candidate_streams", 2)
candidate_dots = dots("candidate_topk", "candidate_dots", 1)

TEMPLATES: tuple[Template, ...] = (candidate_rows, candidate_tiles, candidate_streams, candidate_dots)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (candidate_rows,),
    "cuda": (candidate_streams, candidate_tiles, candidate_dots),
}
