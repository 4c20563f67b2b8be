"""Templates of winner-take-all hashing."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from .hash_elements import hash_elements
from .hash_rows import hash_rows
from .staged_hash import staged_hash

TEMPLATES: tuple[Template, ...] = (
    hash_rows,
    hash_elements,
    staged_hash,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (hash_rows,),
    "cuda": (staged_hash, hash_elements),
}
