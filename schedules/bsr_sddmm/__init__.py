"""Templates of the sampled dense-dense product."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .block_columns import block_columns
from .elements import sampled_elements
from .warpgroups import sampled_warpgroups

TEMPLATES: tuple[Template, ...] = (block_columns, sampled_elements, sampled_warpgroups)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (block_columns,),
    "cuda": (sampled_warpgroups, sampled_elements),
}
