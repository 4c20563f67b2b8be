"""Templates of sampling."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .templates import sample_cluster, sample_gate, sample_radix, sample_scan, sample_slices, sample_warps

TEMPLATES: tuple[Template, ...] = (sample_scan, sample_slices, sample_gate, sample_cluster, sample_warps, sample_radix)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (sample_scan,),
    "cuda": (sample_slices, sample_warps, sample_cluster, sample_gate, sample_radix),
}
