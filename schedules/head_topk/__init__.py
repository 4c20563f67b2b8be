"""Templates of the exact output layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.rows import rows
from ..output_layer.tiles import tiles
from ..output_layer.warpgroups import warpgroups

head_rows = rows("head_topk", "head_rows", 5)
head_tiles = tiles("head_topk", "head_tiles", 9)
head_warpgroups = warpgroups("head_topk", "head_warpgroups", 2)
head_dots = dots("head_topk", "head_dots", 2)

TEMPLATES: tuple[Template, ...] = (head_rows, head_tiles, head_warpgroups, head_dots)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (head_rows,), "cuda": (head_warpgroups, head_tiles, head_dots)}
