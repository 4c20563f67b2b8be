"""Templates of look-up by band codes."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .count_slices import count_slices

TEMPLATES: tuple[Template, ...] = (count_slices,)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (count_slices,),
    "cuda": (),
}
