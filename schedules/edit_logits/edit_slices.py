"""Edits of logits on a GPU: a row's columns are cut into slices, and a thread block edits the words of its slice.

1. `copy`: the thread block copies its slice, with a soft cap if there is one. Without one nothing is copied if the
   caller has the logits there already.
2. `bias`: threads go through all of the row's biased words, and add the biases of those in the slice.
3. `penalise`: the same with the words that were seen.

Words of a slice belong to one thread block, so that a barrier is enough where a word is on both lists.
"""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv, powers
from tvm_sparse.operators.edit_logits.penalties import PENALTIES
from tvm_sparse.operators.edit_logits.problem import EditLogits

THREADS = powers(64, 1024)
# More slices copy a single row faster; each goes through all words of the row.
SLICES = powers(1, 16)
# Thread blocks of a multiprocessor up to which the default has more slices.
MOST_BLOCKS = 4
USUAL_THREADS = 512


def space(problem: EditLogits, machine: Machine) -> Table:
    return {"threads": THREADS, "slices": SLICES, "overlap": (0, 1) if machine.has_clusters else (0,)}


def allowed(problem: EditLogits, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["slices"] > 1 and ceildiv(problem.vocab, decisions["slices"]) < THREADS[0]:
        return f"{decisions['slices']} slices of {problem.vocab} words are too small"
    return None


def default(problem: EditLogits, machine: Machine) -> Decisions:
    """As many slices as the multiprocessors can copy at the same time; where there is one, whose time is that of the
    longest list if nothing is copied, a thread has a word or few of them. A thread block that has a multiprocessor for
    itself is large where lists are long or tanh is computed.
    """
    most = max(MOST_BLOCKS * machine.cores // problem.batch, 1)
    slices = max(n for n in SLICES if n <= most and (n == 1 or not allowed(problem, machine, {"slices": n})))
    if problem.batch * slices <= machine.cores and (problem.capped or problem.words > USUAL_THREADS):
        threads = THREADS[-1]
    elif slices > 1 or problem.capped:
        threads = USUAL_THREADS
    else:
        threads = min(n for n in THREADS if n >= min(problem.words, USUAL_THREADS))
    return {"threads": threads, "slices": slices, "overlap": int(machine.has_clusters)}


# fmt: off
def build(problem: EditLogits, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.overlap import wait_then_start_consumer
    from ..interface import gpu_program

    threads, slices, overlap = decisions["threads"], decisions["slices"], bool(decisions["overlap"])
    each, biased, seen = ceildiv(problem.vocab, slices), bool(problem.bias), bool(problem.penalties)
    capped = bool(problem.capped)
    copy, bias, penalise = copy_slice(threads), add_biases(problem, threads), penalise_seen(problem, threads)

    @T.inline
    def body(io):
        T.device_entry()
        row, part = T.cta_id([io.batch, slices])
        t = T.thread_id([threads])
        first = T.meta_var(part * each)
        end = T.meta_var(T.min(first + each, problem.vocab))
        if overlap:
            wait_then_start_consumer()
        if capped or io.copied != 0:
            copy(io, T.Cast("int64", row), t, first, end)
            T.cuda.cta_sync()
        if biased:
            bias(io, T.Cast("int64", row), t, first, end)
            if seen:
                T.cuda.cta_sync()
        if seen:
            penalise(io, T.Cast("int64", row), t, first, end)
    return gpu_program(problem, body, overlapped=overlap)


def copy_slice(threads: int) -> Phase:
    """Reads: the slice of the logits. Writes: that of the edited row. Barriers: none."""
    from tvm.script import tirx as T

    from tvm_sparse.operators.edit_logits.definition import soft_capped

    from ..device.arithmetic import tanh_on_gpu

    @T.inline
    def phase(io, row, t, first, end):
        for i in T.serial((end - first - t + (threads - 1)) // threads):
            io.edited[row, first + i * threads + t] = soft_capped(
                io, io.logits[row, first + i * threads + t], tanh_on_gpu
            )

    return phase


def word_at(ids: Any, row: Any, place: Any) -> Any:
    """The word in a place, by a load that sees what a producer kernel has written."""
    from tvm.script import tirx as T

    from ..device.words import load_word

    return T.reinterpret("int32", load_word(ids.ptr_to([row, place])))


def add_biases(problem: EditLogits, threads: int) -> Phase:
    """Reads: the row's biased words. Writes: those of the slice. Barriers: none."""
    from tvm.script import tirx as T

    from ..device.words import load_element

    dtype = problem.dtype

    @T.inline
    def phase(io, row, t, first, end):
        word = T.alloc_local([1], "int32")
        for i in T.serial((io.biased - t + (threads - 1)) // threads):
            word[0] = word_at(io.bias_ids, row, i * threads + t)
            if word[0] >= first and word[0] < end:
                io.edited[row, word[0]] = T.Cast(
                    dtype, load_element(dtype, io.edited.ptr_to([row, word[0]])) + load_element(
                        "float32", io.bias_values.ptr_to([row, i * threads + t])))
    return phase


def penalise_seen(problem: EditLogits, threads: int) -> Phase:
    """Reads: the row's words that were seen, and its penalties. Writes: those of the slice. Barriers: none."""
    from tvm.script import tirx as T

    from tvm_sparse.operators.edit_logits.definition import penalised

    from ..device.words import load_element

    dtype, per_row = problem.dtype, bool(problem.per_row)

    def penalty(io: Any, name: str, row: Any) -> Any:
        return load_element("float32", getattr(io, PENALTIES[name]).ptr_to([row])) if per_row else getattr(io, name)

    @T.inline
    def phase(io, row, t, first, end):
        word = T.alloc_local([1], "int32")
        own = T.alloc_local([3], "float32")
        own[0] = penalty(io, "repetition", row)
        own[1] = penalty(io, "presence", row)
        own[2] = penalty(io, "frequency", row)
        for i in T.serial((io.seen - t + (threads - 1)) // threads):
            word[0] = word_at(io.seen_ids, row, i * threads + t)
            if word[0] >= first and word[0] < end:
                io.edited[row, word[0]] = T.Cast(dtype, penalised(
                    load_element(dtype, io.edited.ptr_to([row, word[0]])),
                    word_at(io.generated, row, i * threads + t), own[0], own[1], own[2]))
    return phase
# fmt: on


edit_slices = Template(
    name="edit_slices",
    version=3,
    operator="edit_logits",
    kind="cuda",
    summary="a thread block a slice of a row, a thread a word at a time",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
