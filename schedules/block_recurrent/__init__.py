"""Templates of the recurrent layer with a weight in blocks."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .persistent_tiles import persistent_tiles
from .step_tiles import step_tiles
from .tile_rows import tile_rows

TEMPLATES: tuple[Template, ...] = (
    tile_rows,
    step_tiles,
    persistent_tiles,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (tile_rows,),
    "cuda": (persistent_tiles, step_tiles),
}
