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

from dataclasses import dataclass
from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, Workspace, ceildiv, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

THREADS = powers(128, 512)
# Elements that a thread loads before it looks at the first.
LOADS = (1, 4)
# A thread's list takes two registers a key.
MAX_K = 32


@dataclass(frozen=True)
class Layout:
    """The extents of one point's kernel or kernels."""

    form: str  # "unfused", "safe" or "online"
    vocab: int
    k: int
    ids: int  # given columns of a row
    threads: int  # of a thread block
    loads: int  # elements of a thread that are loaded together

    @property
    def warps(self) -> int:
        """Warps of a thread block."""
        return self.threads // 32

    @property
    def tile(self) -> int:
        """Elements of a row that a thread block loads together."""
        return self.threads * self.loads

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return ceildiv(self.vocab, self.tile)

    @property
    def kept(self) -> int:
        """Keys of a list. One more than k shows whether the k-th probability is above all that are left out."""
        return min(self.k + 1, self.vocab) if self.form == "unfused" else self.k


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: every thread keeps k keys in registers")
    return {"threads": THREADS, "loads": LOADS}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"threads": 256, "loads": 4}


def build(problem: SoftmaxTopk, decisions: Decisions, form: str) -> Program:
    from .insertion_kernel import fused, unfused
    from .interface import gpu_program

    layout = Layout(form, problem.vocab, problem.k, problem.ids, decisions["threads"], decisions["loads"])
    if form == "unfused":
        probabilities = Workspace("probabilities", ("batch", layout.vocab), "float32")
        return gpu_program(problem, unfused(layout), workspace=probabilities)
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
