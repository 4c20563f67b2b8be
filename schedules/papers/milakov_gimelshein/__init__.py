"""Softmax + top-k on a GPU as the benchmark of Milakov & Gimelshein has it, in its three forms, for comparison.

A thread block has a row. Each thread keeps the best of its own elements in registers, as a list in order, and inserts
every element that belongs among them; at the end the lists are joined. The cost grows with k, and a warp pays it for
every step in which one of its lanes has an element to insert. `threshold_gate` is the way out. The forms differ in how
often they read or write a row's elements:

`safe_then_topk`, five times: Algorithm 2, the softmax that subtracts the maximum, leaves all probabilities in memory
(three reads, one write), and a second kernel finds the k largest of these.
`safe_fused`, twice: a pass for the maximum, and one for the sum and the insertion.
`online_insertion`, once: Algorithm 4, which corrects the sum whenever the maximum rises.

**Equal probabilities** need not be those of equal elements, as exponentials are rounded and may vanish; the indices
would then be wrong. So the second kernel of `safe_then_topk` looks for one more than k. If each of these probabilities
exceeds the next by more than rounding explains, their elements are the right ones in the right order. If not, it goes
through the elements themselves.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template, Workspace
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from .space import Layout, default, space


def build(problem: SoftmaxTopk, decisions: Decisions, form: str) -> Program:
    from ...softmax_topk.interface import gpu_program
    from .kernel import fused, unfused

    layout = Layout(form, problem.vocab, problem.k, problem.ids, decisions["threads"], decisions["loads"])
    if form == "unfused":
        probabilities = Workspace("probabilities", ("batch", layout.vocab), "float32")
        return gpu_program(problem, unfused(layout), (probabilities,))
    return gpu_program(problem, fused(layout))


def _template(name: str, form: str, summary: str) -> Template:
    return Template(
        name=name,
        version=1,
        operator="softmax_topk",
        kind="cuda",
        summary=summary,
        space=space,
        default=default,
        program=partial(build, form=form),
        explicit_threads=True,
        comparison=True,
    )


safe_then_topk = _template(
    "safe_then_topk", "unfused", "for comparison: safe softmax to memory, then top-k by insertion"
)
safe_fused = _template("safe_fused", "safe", "for comparison: safe softmax fused with insertion, two reads")
online_insertion = _template("online_insertion", "online", "for comparison: Algorithm 4 with its insertion, one read")
