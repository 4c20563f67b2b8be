"""Templates of the exact output layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.registers import registers
from ..output_layer.rings import rings
from ..output_layer.rows import rows
from ..output_layer.warp_rings import warp_rings
from ..output_layer.warpgroups import warpgroups

head_rows = rows("head_topk", "head_rows", 5)
head_warpgroups = warpgroups("head_topk", "head_warpgroups", 2)
head_rings = rings("head_topk", "head_rings", 1)
head_warp_rings = warp_rings("head_topk", "head_warp_rings", 1)
head_registers = registers("head_topk", "head_registers", 1)
head_dots = dots("head_topk", "head_dots", 2)

_CUDA = (head_warpgroups, head_rings, head_warp_rings, head_registers, head_dots)
TEMPLATES: tuple[Template, ...] = (head_rows, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (head_rows,), "cuda": _CUDA}
