"""A step of an LSH head by way of lists that hold any candidates: kernels of `lsh_candidates` and of `candidate_topk`.

`listed_rows` is for CPUs. `listed_dots`, made of plain kernels, is for shapes that no other template for GPUs fits.
Both go through as many places as the vocabulary has words. Where lists are much shorter, calling the two operators one
after the other is less work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, Template, Workspace
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ..lsh.slices import sliced

# Decisions for the CPU's product and for the plain kernels: the defaults of their own templates, which are the same on
# any CPU.
PRODUCT: Decisions = {"tile_m": 4, "tile_n": 4, "simd": 16, "prefetch": 2, "dots": 0}
THREADS, SEARCH_THREADS = 128, 512


def _ranked(problem: LshTopk, io: Any) -> Any:
    """The arguments of `candidate_topk` among those of a step, with its lists and scores in workspaces."""
    from tvm_sparse.core.arguments import beside

    return beside(io, {"problem": problem.ranking, "vocab": problem.vocab})


def _both(problem: LshTopk, candidates: Callable[..., Any], ranking: Callable[..., Any]) -> Phase:
    from tvm.script import tirx as T

    from tvm_sparse.core.arguments import beside

    # fmt: off
    @T.inline
    def body(given):
        io = T.meta_var(beside(given, {"capacity": problem.vocab}))
        candidates(io)
        ranked = T.meta_var(_ranked(problem, io))
        ranking(ranked)
    # fmt: on
    return body


def _lists(problem: LshTopk) -> tuple[Workspace, ...]:
    return (
        Workspace("chosen", ("lists", bitmap_words(problem.vocab)), "int32"),
        Workspace("candidates", ("lists", problem.vocab), "int32"),
        Workspace("scores", ("lists", problem.beam, problem.vocab), "float32"),
    )


def _build_rows(problem: LshTopk, decisions: Decisions) -> Program:
    from ..interface import cpu_program
    from ..lsh_candidates.lsh_stages import stages
    from ..output_layer.rows.kernel import body

    own = (Workspace("codes", ("lists", problem.beam, "bands"), "int32"), *_lists(problem))
    candidates = stages(problem.hashing, decisions["chunk"])
    return cpu_program(problem, _both(problem, candidates, body(problem.ranking, PRODUCT)), own, index="int32")


def _build_dots(problem: LshTopk, decisions: Decisions) -> Program:
    from ..interface import gpu_program
    from ..lsh_candidates.plain_steps import steps
    from ..output_layer.dots.kernel import body

    candidates = steps(problem.hashing, THREADS)
    own = (
        Workspace("codes", ("rows", "bands"), "int32"),
        *_lists(problem),
        Workspace("hits", ("rows", problem.vocab), "int32"),
        Workspace("places", ("lists", bitmap_words(problem.vocab)), "int32"),
    )
    return gpu_program(problem, _both(problem, candidates, body(problem.ranking, decisions["threads"])), own)


listed_rows = sliced(
    name="listed_rows",
    version=4,
    operator="lsh_topk",
    summary="lists of candidates, then a vectorised product of tiles of words and a scan of each row",
    program=_build_rows,
)
listed_dots = Template(
    name="listed_dots",
    version=1,
    operator="lsh_topk",
    kind="cuda",
    summary="plain kernels for lists of candidates, a warp a score, radix passes over a row",
    space=lambda problem, machine: {"threads": (256, SEARCH_THREADS, 1024)},
    default=lambda problem, machine: {"threads": SEARCH_THREADS},
    program=_build_dots,
    explicit_threads=True,
)
