"""The templates: kernels of `softmax_topk`, which end with a word drawn of the k best (`words`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..softmax_topk.radix_select import radix_select
from ..softmax_topk.row_scan import row_scan
from ..softmax_topk.threshold_gate import cluster_gate, threshold_gate
from ..softmax_topk.warp_rows import warp_rows
from . import space

Value = TypeVar("Value")


def slices(problem: SoftmaxSample, decisions: Decisions) -> Program:
    from .slices import build

    return build(problem, decisions)


def scan(problem: SoftmaxSample, decisions: Decisions) -> Program:
    from ..softmax_topk.row_scan.kernel import function
    from ..softmax_topk.row_scan.space import Extents
    from .interface import cpu_program
    from .words import on_cpu

    extents = Extents(problem.vocab, problem.k, 0, decisions["chunk"], decisions["simd"])
    ending = on_cpu(problem)
    return cpu_program(problem, function(extents, ending.own, ending))


def warps(problem: SoftmaxSample, decisions: Decisions) -> Program:
    from ..softmax_topk.warp_rows.kernel import kernel
    from ..softmax_topk.warp_rows.space import Layout
    from .interface import gpu_program
    from .words import on_gpu

    layout = Layout.of(problem.best, decisions)
    ending = on_gpu(problem, layout.threads)
    return gpu_program(problem, kernel(layout, ending.own, ending), overlapped=layout.overlapped)


def gates(problem: SoftmaxSample, decisions: Decisions) -> Program:
    from ..softmax_topk.threshold_gate.kernel import kernel
    from ..softmax_topk.threshold_gate.layout import Layout
    from .interface import gpu_program
    from .words import on_gpu

    layout = Layout.of(problem.best, decisions)
    ending = on_gpu(problem, layout.tiling.threads, layout.tiling.cluster)
    return gpu_program(problem, kernel(layout, ending.own, ending), overlapped=layout.overlap)


def radix(problem: SoftmaxSample, decisions: Decisions) -> Program:
    from ..softmax_topk.radix_select.kernel import kernel
    from .interface import gpu_program
    from .words import on_gpu

    threads = decisions["threads"]
    return gpu_program(problem, kernel(problem.best, threads, on_gpu(problem, threads)))


def without_lanes(decisions: Mapping[str, Value]) -> dict[str, Value]:
    """A table or a point of `warp_rows` where the row's warp draws a word: with all of its lanes."""
    return {name: value for name, value in decisions.items() if name != "lanes"}


def drawing(
    name: str,
    version: int,
    base: Template[Any],
    program: Callable[[SoftmaxSample, Decisions], Program],
    summary: str,
) -> Template[SoftmaxSample]:
    """A template with the space and the defaults of one of softmax_topk's, for the problem of the k best."""

    def base_space(problem: SoftmaxSample, machine: Machine) -> Table:
        if problem.whole and base is warp_rows:
            raise NotApplicable("a warp alone would take long to search the whole row")
        return without_lanes(base.space(problem.best, machine))

    def default(problem: SoftmaxSample, machine: Machine) -> Decisions:
        return without_lanes(base.default(problem.best, machine))

    def allowed(problem: SoftmaxSample, machine: Machine, decisions: Decisions) -> str | None:
        return base.allowed(problem.best, machine, decisions)

    return Template(
        name=name,
        version=version,
        operator="softmax_sample",
        kind=base.kind,
        summary=summary,
        space=base_space,
        default=default,
        program=program,
        allowed=allowed,
        explicit_threads=base.explicit_threads,
        declines=lambda problem, machine: base.declines(problem.best, machine),
    )


sample_scan = drawing("sample_scan", 7, row_scan, scan, "as row_scan, then a word drawn of the k best")
sample_gate = drawing("sample_gate", 6, threshold_gate, gates, "as threshold_gate, then one warp draws a word")
sample_cluster = drawing("sample_cluster", 7, cluster_gate, gates, "as cluster_gate, then one warp draws a word")
sample_warps = drawing("sample_warps", 3, warp_rows, warps, "as warp_rows, then the row's warp draws a word")
sample_radix = drawing("sample_radix", 4, radix_select, radix, "as radix_select, then one warp draws a word")
sample_slices = Template(
    name="sample_slices",
    version=3,
    operator="softmax_sample",
    kind="cuda",
    summary="sums of slices of columns, one of which is read again for the word",
    space=space.space,
    default=space.default,
    program=slices,
    allowed=space.allowed,
    launch=space.launch,
    explicit_threads=True,
)
