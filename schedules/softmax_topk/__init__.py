"""Templates of softmax + top-k."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..papers.argueta_chiang_topk import packed_insertion
from ..papers.milakov_gimelshein import online_insertion, safe_fused, safe_then_topk
from .held_rows import held_rows
from .radix_select import radix_select
from .row_scan import row_scan
from .threshold_gate import cluster_gate, threshold_gate
from .warp_rows import warp_rows

TEMPLATES: tuple[Template, ...] = (
    row_scan,
    threshold_gate,
    cluster_gate,
    held_rows,
    warp_rows,
    radix_select,
    safe_then_topk,
    safe_fused,
    online_insertion,
    packed_insertion,
)

# Those that run without tuning, by kind of machine: the first that fits the problem does, the last fits every shape.
FALLBACKS: dict[str, tuple[Template, ...]] = {
    "llvm": (row_scan,),
    "cuda": (
        warp_rows,
        held_rows,
        cluster_gate,
        threshold_gate,
        radix_select,
    ),
}
