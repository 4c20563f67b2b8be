"""The draw of `head_sample` without filters, by its kernel: it is no public function."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.operators.head_topk import call as head
from tvm_sparse.operators.softmax_sample import seeds
from tvm_sparse.operators.softmax_sample.call import NUMBERS
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import facts_beside, launch, machine_of, outputs_for, passed, scales_of
from tvm_sparse.runtime.dispatch import UNCHANGING, dispatcher
from tvm_sparse.runtime.loading import Miss
from tvm_sparse.runtime.signature import Signature

from .problem import HeadDraw

SIGNATURES: dict[str, Signature] = {}


def head_draw(
    hidden: Any,
    embedding: Any,
    *,
    temperature: Any = 1.0,
    bias: Any = None,
    uniforms: Any = None,
    seed: Any = None,
    offset: Any = 0,
    soft_cap: float | None = None,
    constant: bool = False,
) -> tuple[Any, ...]:
    """The `(tokens, logprobs)` that `head_sample` without filters returns.

    Parameters
    ----------
    hidden, embedding
        As for `head_topk`, whose errors this raises, with a row at least; of one library.
    temperature
        A number from 1e-5 to 1e6, or `(batch,)` float32.
    bias, uniforms, seed, offset, soft_cap
        As for `softmax_sample`.
    constant
        As for `head_topk`.
    """
    launchers = dispatcher.launchers
    kind, numbers = seeds.told(uniforms, seed, offset) or seeds.fresh(hidden)
    scale, heats = scales_of(temperature)
    what, given = ("head_draw", kind), (scale, heats, 1 if constant else 0, soft_cap)
    found = repeat.again(launchers, what, (hidden, embedding, *given, bias, *numbers), None)
    if found is not None:
        return found
    known, theirs = head.pair_facts(hidden, embedding)
    axes = {"bias": int(bias is not None), "per_row": int(heats is not None), "seeded": kind}
    problem, machine = _problem(known, theirs, **axes, capped=int(soft_cap is not None))
    batch = problem.batch

    def beside(name: str, array: Any, dtype: str, *shape: int) -> Any:
        return passed(facts_beside(name, array, shape, dtype, known, head.WHERE))

    heats = None if heats is None else beside("temperature", heats, "float32", batch)
    row = None if bias is None else beside("bias", bias, "float32", problem.vocab)
    name, dtype, rest = NUMBERS[kind]
    drawn = [one if type(one) is int else beside(name, one, dtype, batch, *rest) for one in numbers]
    outputs = outputs_for(None, (("tokens", (batch,), "int32"), ("logprobs", (batch,), "float32")), hidden, known)
    ready = arrays.ready("hidden", hidden, known), arrays.ready("embedding", embedding, theirs)
    launch(dispatcher, problem, machine, what, (*ready, scale, heats, *given[2:], row, *drawn), outputs)
    return tuple(outputs)


def _problem(known: Facts, theirs: Facts, **axes: int) -> tuple[HeadDraw, Machine]:
    """The problem of hidden states and an embedding, and the machine."""
    return HeadDraw(known.shape[0], theirs.shape[0], known.shape[1], known.dtype, **axes), machine_of("hidden", known)


def if_faster(hidden: Any, embedding: Any, **options: Any) -> tuple[Any, ...] | None:
    """`head_draw` of torch tensors; None where a product and `softmax_sample` are likely to be faster, or there is no
    kernel, which is remembered until other kernels are loaded.
    """
    launchers = dispatcher.launchers
    asked = ("head_draw by", hidden.shape, embedding.shape, hidden.dtype, hidden.device)
    if asked not in launchers:
        launchers[asked] = likely_way(*_problem(*head.pair_facts(hidden, embedding)))
    if launchers[asked] == head.KERNEL:
        try:
            return head_draw(hidden, embedding, **options)
        except Miss:
            launchers[asked] = head.PRODUCT
    return None


def likely_way(problem: HeadDraw, machine: Machine) -> str:
    """The way likely to be faster: the kernel, as far as that of `head_topk` for the best word is."""
    if machine.kind != "cuda" or dispatcher.batch_invariant:
        return head.PRODUCT
    return head.likely_way(problem.head, machine)


def told_way(problem: HeadDraw, machine: Machine) -> str:
    """For `explain`: the way of calls with torch tensors, and why."""
    if likely_way(problem, machine) == head.KERNEL:
        return "the kernel: likely faster by rows, columns and words"
    why = "likely faster by rows, columns and words" if machine.kind == "cuda" else "on a CPU"
    why = UNCHANGING if dispatcher.batch_invariant else why
    return f"the product's float32 scores and softmax_sample: {why}"
