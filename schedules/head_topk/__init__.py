"""Templates of the exact output layer."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..output_layer.dots import dots
from ..output_layer.registers import registers
from ..output_layer.rings import rings
from ..output_layer.rows import rows
from ..output_layer.warp_rings import warp_rings
from ..output_layer.warpgroups import warpgroups

head_rows = rows(name="head_rows", version=5, operator="head_topk")
head_warpgroups = warpgroups(name="head_warpgroups", version=3, operator="head_topk")
head_rings = rings(name="head_rings", version=2, operator="head_topk")
head_warp_rings = warp_rings(name="head_warp_rings", version=2, operator="head_topk")
head_registers = registers(name="head_registers", version=2, operator="head_topk")
head_dots = dots(name="head_dots", version=2, operator="head_topk")

_CUDA = (head_warpgroups, head_rings, head_warp_rings, head_registers, head_dots)
TEMPLATES: tuple[Template, ...] = (head_rows, *_CUDA)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {"llvm": (head_rows,), "cuda": _CUDA}
