"""The public call of softmax + top-k over candidate words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tvm_sparse.operators.head_topk.call import WHERE, pair_facts, whole_number
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    facts_beside,
    index_as,
    index_beside,
    inverse_temperature,
    machine_of,
    outputs_for,
    without_gradient,
)
from tvm_sparse.runtime.dispatch import dispatcher

from .problem import CandidateTopk


def candidate_topk(
    hidden: Any,
    embedding: Any,
    candidates: Any,
    n: int,
    *,
    counts: Any = None,
    block: int = 1,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    normaliser: bool = False,
    validate: bool = False,
    out: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """The n most probable of candidate words: softmax over these alone, and its n best.

    values[r, i] = exp((s[r, w_i] - m_r) / temperature) / sum_w exp((s[r, w] - m_r) / temperature),

    with s = hidden @ embedding.T + bias, w over the candidates of row r, m_r their largest score and w_i the one with
    the i-th largest. Rows of the embedding are multiplied where they are; no copy of them is made.

    Parameters
    ----------
    hidden
        Shape `(rows, hidden)`; float32, float16 or bfloat16. Sums are made in float32.
    embedding
        Shape `(vocab, hidden)`, a row a word, of the dtype and on the device of `hidden`.
    candidates
        int32 or int64 words in [0, vocab), which no list should hold twice: `(m,)` for one list that all rows share
        (the union of a beam's), `(rows, m)` for a list a row, or `(lists, m)` for lists each shared by rows / lists
        neighbouring rows (sentences that are decoded together). The kernel reads int32: int64, as `torch.topk` returns
        it, is copied at every call, on a GPU by two elementwise kernels.
    n
        1 <= n <= m * block.
    counts
        `(lists,)` int32 or int64 (of one shared list: `(1,)`): only the first counts[l] candidates of list l count. It
        may have been made on the device, and is never brought to the host. Values above m mean m.
    block
        A candidate c stands for the `block` words from c * block on, and must lie in [0, vocab / block).
    log, temperature, bias
        As for `head_topk`.
    normaliser
        Return also log(sum_w exp(s[r, w] / temperature)) over the candidates, `(rows,)` float32: what an acceptance
        test of a draft model needs.
    validate
        Also check candidates and counts that lie on a GPU, which costs a synchronisation; those on the host are always
        checked. Unchecked candidates out of range are taken as the nearest word that there is.
    out
        Arrays to write into, as many as are returned and in their order.

    Returns
    -------
    values
        `(rows, n)` float32, descending; 0 (with `log` -inf) where a list has fewer than n words.
    indices
        `(rows, n)` int64 words; -1 there. Equal scores come in the order of the candidates.
    normaliser
        If asked for.

    Raises
    ------
    TypeError
        If an argument is no array, lies on another kind of device, or a number is none.
    ValueError
        For another rank, shape, dtype or device, candidates out of range (naming the first), a number out of range, or
        an `out` that does not fit.
    RuntimeError
        If an argument requires a gradient.

    When not to use it: with a list a row, once the lists together are as long as the vocabulary: `head_topk` then reads
    less, and is exact.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2 and figure 2.
    """
    scale = inverse_temperature(temperature)
    if type(embedding) is not type(hidden):
        embedding = without_gradient(embedding)
    what, tensors = ("candidate_topk", n, block), (hidden, embedding, candidates, counts, bias)
    if type(n) is int and out is None and not validate:
        found = repeat.repeated(dispatcher.launchers, what, tensors)
        if found is not None:
            function, beam, given, *likes = found
            words, many = _int32("candidates", candidates), _int32("counts", counts)
            lists = words if words.dim() == 2 else words[None]
            states = hidden.view(lists.shape[0], beam, hidden.shape[1])
            results = [sys.modules["torch"].empty_like(like) for like in likes]
            extras = [] if bias is None else [bias]
            many = given if counts is None else many
            function(states, embedding, lists, many, scale, 1 if log else 0, *extras, *results)
            shown = [array.view(hidden.shape[0], *array.shape[2:]) for array in results]
            return tuple(shown) if normaliser else tuple(shown[:2])

    if custom.transformed(hidden, embedding, candidates, counts, bias):
        options = {"counts": counts, "block": block, "log": log, "temperature": temperature, "bias": bias}
        options |= {"normaliser": normaliser, "validate": validate, "out": out}
        return custom.module_of("candidate_topk").candidate_topk(hidden, embedding, candidates, n, **options)
    given = Lists.of(hidden, embedding, candidates, counts, block, validate)
    known, theirs = given.hidden, given.embedding
    n = whole_number("n", n)
    if not 1 <= n <= given.m * block:
        raise ValueError(f"n: expected 1 <= n <= the {given.m * block} words of a list, got {n}")
    rows, vocab = known.shape[0], theirs.shape[0]
    extras = [] if bias is None else [facts_beside("bias", bias, (vocab,), "float32", known, WHERE)]
    wanted = [("values", (rows, n), "float32"), ("indices", (rows, n), "int64"), ("normaliser", (rows,), "float32")]
    outputs = outputs_for(out, tuple(wanted if normaliser else wanted[:2]), hidden, known)
    shown = list(outputs)
    if not normaliser:
        outputs += outputs_for(None, (wanted[2],), hidden, known)
    if rows and not arrays.is_fake(hidden):
        problem = CandidateTopk(
            given.lists, given.beam, vocab, known.shape[1], given.m, n, known.dtype, block, int(bias is not None)
        )
        launchers = dispatcher.launchers
        function = dispatcher.kernel(problem, machine_of("hidden", known)).function
        parts = [
            arrays.reshaped(array, (given.lists, given.beam, *facts.shape[1:]))
            for array, facts in ((array, arrays.facts("out", array)) for array in outputs)
        ]
        states, table, words, many = given.arguments(hidden, embedding, candidates, counts)
        function(
            states,
            table,
            words,
            arrays.argument(many),
            scale,
            1 if log else 0,
            *(arrays.argument(arrays.ready(name, array, facts)) for name, facts, array in extras),
            *map(arrays.argument, parts),
        )
        if arrays.is_torch(hidden) and known.device != "cpu":  # candidates on the host are looked at every time
            repeat.put_down(
                launchers,
                ("candidate_topk", n, block),
                tensors,
                (function, given.beam, many, *map(arrays.prototype, parts)),
            )
    return out if out is not None else tuple(arrays.returned(array, hidden) for array in shown)


@dataclass(frozen=True)
class Lists:
    """What is known of hidden states, an embedding, and lists of candidates that fit them."""

    hidden: Facts
    embedding: Facts
    candidates: Facts
    lists: int
    beam: int
    m: int

    @classmethod
    def of(cls, hidden: Any, embedding: Any, candidates: Any, counts: Any, block: Any, validate: bool) -> Lists:
        """Check the arguments of a gathered product.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `candidate_topk`.
        """
        known, theirs = pair_facts(hidden, embedding)
        rows, width = known.shape
        if not width:
            raise ValueError(f"hidden: expected at least one column, got shape {known.shape}")
        if whole_number("block", block) < 1 or theirs.shape[0] % block:
            raise ValueError(f"block: expected a divisor of vocab ({theirs.shape[0]}), got {block}")
        _, facts, _ = index_beside("candidates", candidates, (("m",), ("lists", "m")), known, WHERE)
        lists, m = facts.shape if len(facts.shape) == 2 else (1, facts.shape[0])
        if not m:
            raise ValueError(f"candidates: expected at least one, got shape {facts.shape}")
        if rows and (not lists or rows % lists):
            raise ValueError(
                f"candidates: expected a number of lists that divides the {rows} rows of hidden, got {lists} lists"
                f" (shape {facts.shape})"
            )
        if counts is not None:
            index_beside("counts", counts, ((lists,),), known, WHERE)
        if (known.device == "cpu" or validate) and not arrays.is_fake(candidates):
            check_candidates(candidates, counts, theirs.shape[0] // block, m)
        return cls(known, theirs, facts, lists, rows // max(lists, 1), m)

    def arguments(self, hidden: Any, embedding: Any, candidates: Any, counts: Any) -> tuple[Any, Any, Any, Any]:
        """Hidden states, embedding and candidates as kernels take them, and the counts as an array."""
        states = arrays.reshaped(
            arrays.ready("hidden", hidden, self.hidden), (self.lists, self.beam, self.hidden.shape[1])
        )
        words = arrays.reshaped(index_as("candidates", candidates, self.candidates, "int32"), (self.lists, self.m))
        if counts is None:
            many = arrays.full((self.lists,), self.m, "int32", hidden, self.hidden)
        else:
            many = index_as("counts", counts, arrays.facts("counts", counts), "int32")
        table = arrays.ready("embedding", embedding, self.embedding)
        return arrays.argument(states), arrays.argument(table), arrays.argument(words), many


def _int32(name: str, tensor: Any) -> Any:
    """A torch tensor of int32 or int64, which a kernel takes as it is, in int32; None as it is."""
    if tensor is None or tensor.dtype is sys.modules["torch"].int32:
        return tensor
    return index_as(name, tensor, arrays.facts(name, tensor), "int32")


def check_candidates(candidates: Any, counts: Any, units: int, m: int) -> None:
    """Raise ValueError for a candidate outside [0, units) that counts; the arrays are brought to the host."""
    import numpy as np

    words = arrays.as_numpy(candidates).reshape(-1, m)
    many = np.full(len(words), m) if counts is None else np.clip(arrays.as_numpy(counts), 0, m)
    bad = ((words < 0) | (words >= units)) & (np.arange(m) < many[:, None])
    if bad.any():
        row, at = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"candidates: expected words in [0, {units}), got {words[row, at]} at [{row}, {at}]")
