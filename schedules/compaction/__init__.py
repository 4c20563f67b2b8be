"""Templates of stream compaction."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .compact_rows import compact_rows

TEMPLATES: tuple[Template, ...] = (compact_rows,)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (compact_rows,),
    "cuda": (),
}
