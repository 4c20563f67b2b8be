"""The public call of softmax + top-k over candidate words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm_sparse.core.problem import FLOATS, width
from tvm_sparse.operators.head_topk.call import WHERE, pair_facts
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    by_parts,
    index_as,
    index_beside,
    inverse_temperature,
    launch,
    machine_of,
    most_rows,
    outputs_for,
    tensors_among,
    whole_number,
    with_scratch,
    without_gradient,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Absent, Array, Number, Output, Signature, Structure

from .problem import CandidateTopk

CANDIDATES: tuple[Any, ...] = (
    ("hidden", Array(("rows", "hidden"), FLOATS)),
    ("embedding", Array(("vocab", "hidden"))),
    ("candidates", Structure(("(m,)", "(rows, m)", "(lists, m)"))),
)
COUNTS: tuple[Any, ...] = ("counts", Absent(), Array(("lists",), ("int32", "int64"), below="m + 1"))
BIAS: tuple[Any, ...] = ("bias", Absent(), Array(("vocab",), ("float32",)))
SIGNATURES = {
    "candidate_topk": Signature(
        *CANDIDATES,
        ("n", Number("int", 1, "m")),
        COUNTS,
        ("block", Number("int", 1, 1)),
        ("log", Number("bool")),
        ("temperature", Number("float", 0.1, 3.0)),
        BIAS,
        ("normaliser", Number("bool")),
        ("validate", Number("bool")),
        outputs=(Output("values"), Output("indices"), Output("normaliser", asked="normaliser")),
    )
}
_SIGNATURE = SIGNATURES["candidate_topk"]


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
    """The n most probable candidate words: softmax over the candidates alone, and its n largest values.

    values[r, i] = exp((s[r, w_i] - m_r) / temperature) / sum_w exp((s[r, w] - m_r) / temperature),

    with s = hidden @ embedding.T + bias, w over the candidates of row r, m_r their largest score and w_i the one with
    the i-th largest. The candidates' rows of the embedding are not copied.

    Parameters
    ----------
    hidden
        Shape `(rows, hidden)`; float32, float16 or bfloat16. Sums are accumulated in float32.
    embedding
        Shape `(vocab, hidden)`, one row for each word, of the dtype and on the device of `hidden`.
    candidates
        int32 or int64 words in [0, vocab), without duplicates in a list: `(m,)` for one list that all rows share (the
        union of a beam's), `(rows, m)` for one list per row, or `(lists, m)` for lists each shared by rows / lists
        neighbouring rows (sentences that are decoded together). The kernel reads int32: int64, as `torch.topk` returns
        it, is copied at every call, on a GPU by two elementwise kernels.
    n
        1 <= n <= m * block.
    counts
        `(lists,)` int32 or int64 (`(1,)` for one shared list): only the first counts[l] candidates of list l are used.
        On a GPU it is not copied to the host. Values above m mean m.
    block
        A candidate c stands for `block` words, c * block to c * block + block - 1, and must be in [0, vocab / block).
    log, temperature, bias
        As for `head_topk`.
    normaliser
        Also return log(sum_w exp(s[r, w] / temperature)) over the candidates, `(rows,)` float32, as needed for
        acceptance tests in speculative decoding.
    validate
        Also check candidates and counts on a GPU, which costs a synchronisation; on the host they are always checked.
        Candidates out of range that are not checked are clamped.
    out
        Arrays to write into, in the number and order of the results.

    Returns
    -------
    values
        `(rows, n)` float32, descending; 0 (with `log` -inf) where a list has fewer than n words.
    indices
        `(rows, n)` int64 words; -1 where a list has fewer. Equal scores are in the order of the candidates.
    normaliser
        If requested.

    Raises
    ------
    TypeError
        If an argument is not an array, is on an unsupported device, or a number has another type.
    ValueError
        For another rank, shape, dtype or device, candidates out of range (naming the first), a number out of range, or
        an `out` that does not fit.
    RuntimeError
        If an argument requires a gradient.

    Notes
    -----
    When not to use it: with one list per row, if the lists together are as long as the vocabulary: `head_topk` then
    reads less, and is exact.

    Source: Shi, Xu & Knight 2018, "Fast Locality Sensitive Hashing for Beam Search on GPU", section 4.2 and figure 2.
    """
    scale = inverse_temperature(temperature)
    if type(embedding) is not type(hidden):
        embedding = without_gradient(embedding)
    block = block if type(block) is int else whole_number("block", block)
    if type(n) is int and not validate:
        what = ("candidate_topk", n, block, bool(normaliser))
        words, many = (_int32(*one) for one in (("candidates", candidates), ("counts", counts)))
        arguments = (hidden, embedding, words, many, scale, 1 if log else 0, bias)
        found = repeat.again(dispatcher.launchers, what, arguments, out)
        if found is not None:
            return found

    if custom.transformed(hidden, embedding, candidates, counts, bias, *tensors_among(temperature)):
        options = {"counts": counts, "block": block, "log": log, "temperature": temperature, "bias": bias}
        options |= {"normaliser": normaliser, "validate": validate, "out": out}
        return custom.module_of("candidate_topk").candidate_topk(hidden, embedding, candidates, n, **options)
    given = Lists.of(hidden, embedding, candidates, counts, block, validate)
    known, theirs = given.hidden, given.embedding
    n = whole_number("n", n)
    if not 1 <= n <= given.m * block:
        raise ValueError(f"n: expected 1 <= n <= the {given.m * block} words of a list, got {n}")
    rows, vocab = known.shape[0], theirs.shape[0]
    extra = None if bias is None else _SIGNATURE.beside("bias", bias, known, WHERE, vocab=vocab)
    wanted = (("values", (rows, n), "float32"), ("indices", (rows, n), "int64"), ("normaliser", (rows,), "float32"))
    outputs = outputs_for(out, wanted if normaliser else wanted[:2], hidden, known)
    _SIGNATURE.refuse_overlap(out, hidden=hidden, embedding=embedding, candidates=candidates, counts=counts, bias=bias)
    if not rows or arrays.is_fake(hidden):
        return out if out is not None else tuple(arrays.returned(array, hidden) for array in outputs)
    row = None if extra is None else arrays.ready(extra[0], extra[2], extra[1])
    most = given.most_rows(block)
    if rows > most:
        options = {"block": block, "log": log, "temperature": temperature, "bias": row, "normaliser": normaliser}

        def some(states: Any, words: Any, many: Any, into: list[Any]) -> Any:
            return candidate_topk(states, embedding, words, n, counts=many, out=tuple(into), **options)

        given.by_parts(some, most, hidden, candidates, counts, outputs)
        return out if out is not None else tuple(arrays.returned(array, hidden) for array in outputs)
    problem = CandidateTopk(
        given.lists, given.beam, vocab, known.shape[1], given.m, n, known.dtype, block, int(bias is not None)
    )
    where, numbers = machine_of("hidden", known), (scale, 1 if log else 0, row)
    states, table, words, many = given.arguments(hidden, embedding, candidates, counts)
    wider = replace(problem, k=width(n, given.m * block))
    unshown = [] if normaliser else outputs_for(None, wanted[2:], hidden, known)
    if arrays.is_torch(hidden):
        what = ("candidate_topk", n, block, bool(normaliser))
        given_ones: tuple[Any, ...] = (states.reshape(hidden.shape), table, words.reshape(candidates.shape))
        given_ones += (None if counts is None else many, *numbers)

        def around(kernel: Any) -> Any:
            known_counts = many if counts is None else None
            by_rows = _of_rows(kernel, given.lists, given.beam, known_counts, len(wanted))
            return by_rows if normaliser else with_scratch(by_rows, unshown[0], 0)

        # Candidates on the host are checked at every call.
        kept = known.device != "cpu" or None
        launch(dispatcher, problem, where, what, given_ones, outputs, kept=kept, around=around, wider=wider)
    else:
        parts = [
            arrays.reshaped(array, (given.lists, given.beam, *shape[1:]))
            for array, (_, shape, _) in zip((*outputs, *unshown), wanted, strict=True)
        ]
        of_lists = (states, table, words, many, *numbers)
        launch(dispatcher, problem, where, None, of_lists, parts, kept=None, wider=wider)
    return out if out is not None else tuple(arrays.returned(array, hidden) for array in outputs)


@dataclass(frozen=True)
class Lists:
    """Facts of hidden states, an embedding, and lists of candidates that fit them."""

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
            As in `candidate_topk`.
        """
        known, theirs = pair_facts(hidden, embedding)
        rows, width = known.shape
        if not width:
            raise ValueError(f"hidden: expected at least one column, got shape {known.shape}")
        if block < 1 or theirs.shape[0] % block:
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

    def most_rows(self, block: int = 1) -> int:
        """Number of rows that a kernel processes at once."""
        return most_rows(self.hidden.shape[1], self.m * block)

    def by_parts(
        self,
        call: Callable[[Any, Any, Any, list[Any]], Any],
        most: int,
        hidden: Any,
        candidates: Any,
        counts: Any,
        outputs: Sequence[Any],
    ) -> None:
        """Write outputs by several calls of (hidden states, candidates, counts, arrays to write into).

        Each call has whole lists, or, if all rows share one list, `most` rows.
        """
        rows = self.hidden.shape[0]
        if self.lists == 1:
            by_parts(lambda some, into: call(some[0], candidates, counts, into), rows, most, (hidden,), outputs)
            return
        first = 0

        def lists(some: list[Any], into: list[Any]) -> None:
            nonlocal first
            part = slice(first, first + some[0].shape[0] // self.beam)
            first = part.stop
            call(some[0], candidates[part], None if counts is None else counts[part], into)

        by_parts(lists, rows, max(1, most // self.beam) * self.beam, (hidden,), outputs)

    def arguments(self, hidden: Any, embedding: Any, candidates: Any, counts: Any) -> tuple[Any, Any, Any, Any]:
        """Hidden states, embedding and candidates prepared for kernels, and the counts as an array."""
        states = arrays.reshaped(
            arrays.ready("hidden", hidden, self.hidden), (self.lists, self.beam, self.hidden.shape[1])
        )
        words = arrays.reshaped(index_as("candidates", candidates, self.candidates, "int32"), (self.lists, self.m))
        if counts is None:
            many = arrays.full((self.lists,), self.m, "int32", hidden, self.hidden)
        else:
            many = index_as("counts", counts, arrays.facts("counts", counts), "int32")
        table = arrays.ready("embedding", embedding, self.embedding)
        return states, table, words, many


def _int32(name: str, array: Any) -> Any:
    """A plain int64 torch tensor as int32; anything else unchanged."""
    torch = sys.modules.get("torch")
    if torch is None or type(array) is not torch.Tensor or array.dtype is not torch.int64 or not repeat.is_plain(array):
        return array
    return index_as(name, array, arrays.facts(name, array), "int32")


def _of_rows(function: Any, lists: int, beam: int, many: Any, outputs: int) -> Any:
    """Wrap a kernel of lists for calls with torch tensors in the caller's form: rows of hidden states and of outputs.

    `many`: the counts, if the caller gives none. `outputs`: their number.
    """
    counts = () if many is None else (many,)

    def call(hidden: Any, embedding: Any, candidates: Any, *rest: Any) -> None:
        states, words = hidden.view(lists, beam, hidden.shape[1]), candidates.view(lists, -1)
        written = [one.view(lists, beam, *one.shape[1:]) for one in rest[-outputs:]]
        function(states, embedding, words, *counts, *rest[:-outputs], *written)

    return call


def check_candidates(candidates: Any, counts: Any, units: int, m: int) -> None:
    """Raise ValueError for a used candidate outside [0, units); copies the arrays to the host."""
    import numpy as np

    words = arrays.as_numpy(candidates).reshape(-1, m)
    many = np.full(len(words), m) if counts is None else np.clip(arrays.as_numpy(counts), 0, m)
    bad = ((words < 0) | (words >= units)) & (np.arange(m) < many[:, None])
    if bad.any():
        row, at = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"candidates: expected words in [0, {units}), got {words[row, at]} at [{row}, {at}]")
