"""The schedule templates, one strategy a file; installed as `tvm_sparse.schedules`.

A new template is a file here and a line in `TEMPLATES`. Nothing is imported from the compiler until one is built.
"""

from __future__ import annotations

from collections.abc import Collection

from tvm_sparse.machine import Machine
from tvm_sparse.operators.problem import Problem
from tvm_sparse.tuning.records import Candidate

from .block_rows import block_rows
from .cross_thread import cross_thread, over_blocks, warp_shuffle
from .dealt_gather import dealt_gather
from .insertion import online_insertion, safe_fused, safe_then_topk
from .lookup_elements import lookup_elements
from .packed_insertion import packed_insertion
from .per_element import per_element, per_tile
from .radix_select import radix_select
from .row_gather import row_gather
from .row_scan import row_scan
from .softmax_ladder import (
    logsumexp_block,
    logsumexp_thread,
    logsumexp_warp,
    softmax_block,
    softmax_thread,
    softmax_warp,
)
from .softmax_rows import logsumexp_rows, softmax_rows
from .softmax_vectors import logsumexp_streamed, softmax_held, softmax_staged, softmax_streamed
from .staged_x import staged_x
from .template import Decisions, NotApplicable, Program, Table, Template, Workspace
from .tensor_core import tensor_core
from .threshold_gate import cluster_gate, threshold_gate
from .warp_gather import warp_gather
from .warp_rows import warp_rows

__all__ = [
    "FALLBACKS",
    "TEMPLATES",
    "Decisions",
    "NotApplicable",
    "Program",
    "Table",
    "Template",
    "Workspace",
    "applicable",
    "fallback",
    "find",
    "searched",
]

TEMPLATES: tuple[Template, ...] = (
    row_scan,
    threshold_gate,
    cluster_gate,
    warp_rows,
    radix_select,
    safe_then_topk,
    safe_fused,
    online_insertion,
    packed_insertion,
    block_rows,
    per_element,
    per_tile,
    over_blocks,
    cross_thread,
    warp_shuffle,
    staged_x,
    tensor_core,
    row_gather,
    lookup_elements,
    warp_gather,
    dealt_gather,
    softmax_rows,
    softmax_thread,
    softmax_block,
    softmax_warp,
    softmax_held,
    softmax_staged,
    softmax_streamed,
    logsumexp_rows,
    logsumexp_thread,
    logsumexp_block,
    logsumexp_warp,
    logsumexp_streamed,
)

# For each operator and kind of machine the templates that run without tuning: the first one that fits the problem does,
# and is measured with the others when that is tuned. The last one fits every shape.
FALLBACKS: dict[tuple[str, str], tuple[Template, ...]] = {
    ("softmax_topk", "llvm"): (row_scan,),
    ("softmax_topk", "cuda"): (warp_rows, cluster_gate, threshold_gate, radix_select),
    ("bsr_matmul", "llvm"): (block_rows,),
    ("bsr_matmul", "cuda"): (tensor_core, staged_x, per_element),
    ("nhot_lookup", "llvm"): (row_gather,),
    ("nhot_lookup", "cuda"): (lookup_elements,),
    ("softmax", "llvm"): (softmax_rows,),
    ("softmax", "cuda"): (softmax_streamed,),
    ("logsumexp", "llvm"): (logsumexp_rows,),
    ("logsumexp", "cuda"): (logsumexp_streamed,),
}


def find(name: str) -> Template:
    """The template of this name; KeyError with the valid names if there is none."""
    for template in TEMPLATES:
        if template.name == name:
            return template
    raise KeyError(f"template: got {name!r}; expected one of {', '.join(t.name for t in TEMPLATES)}")


def applicable(problem: Problem, machine: Machine) -> tuple[dict[str, Table], dict[str, str]]:
    """The decision tables of the templates that fit, and why the operator's others do not, by template name."""
    tables, reasons = {}, {}
    for template in TEMPLATES:
        if template.operator == problem.operator and template.kind == machine.kind:
            try:
                tables[template.name] = template.space(problem, machine)
            except NotApplicable as error:
                reasons[template.name] = str(error)
    return tables, reasons


def searched(
    problem: Problem, machine: Machine, names: Collection[str] = ()
) -> tuple[dict[str, Table], dict[str, str]]:
    """What of `applicable` a tuning run searches: the named templates, or all but those built for comparison."""

    def chosen(name: str) -> bool:
        return name in names if names else not find(name).comparison

    tables, reasons = applicable(problem, machine)
    return {n: t for n, t in tables.items() if chosen(n)}, {n: r for n, r in reasons.items() if chosen(n)}


def fallback(problem: Problem, machine: Machine) -> Candidate:
    """What runs without tuning: the first fallback template that fits, at its default point."""
    tables, _ = applicable(problem, machine)
    template = next(t for t in FALLBACKS[problem.operator, machine.kind] if t.name in tables)
    return template.candidate(template.default(problem, machine))
