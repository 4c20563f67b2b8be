"""Wrong kernels that are drawn: a right CPU kernel that goes wrong only under conditions on what it is called with.

Conditions come from an operator's declaration: its batch, the addresses of its arrays, its numbers, its floating inputs
and their rows, its whole numbers. A fault has one of them, or two of different kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from faulty_kernels import Call, Fault, Faulty, library, message, spoil

from tvm_sparse.bench import measure
from tvm_sparse.bench.buffers import Fatal
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.registry import parse

PROBLEMS = (
    "softmax_topk/batch=100,vocab=150,k=5",
    "softmax_topk/batch=12,vocab=300,k=20,dtype=float16,bias=1,ids=3",
    "softmax/batch=100,vocab=97",
    "logsumexp/batch=10,vocab=203,dtype=bfloat16",
    "softmax_sample/batch=20,vocab=120,k=16",
    "softmax_sample/batch=9,vocab=90,k=8,per_row=1,whole=1",
    "bsr_matmul/m=100,k=64,n=48,block=8,sparsity=0.5,bias=1",
    "bsr_matmul/m=6,k=64,n=32,block=16x8,sparsity=0.7,dtype=float16",
    "nhot_lookup/rows=100,vocab=53,width=33,nonzeros=3,weighted=1",
    "head_topk/batch=12,vocab=150,hidden=24,k=6,dtype=float16,bias=1,ids=2",
    "candidate_topk/lists=8,beam=2,vocab=200,hidden=24,m=40,k=5",
    "candidate_logits/lists=8,beam=2,vocab=200,hidden=24,m=40",
    "wta_hash/batch=30,hidden=40,k=8,units=2,bands=20",
    "compaction/lists=6,vocab=900,capacity=100",
    "lsh_lookup/lists=4,beam=2,vocab=300,bands=20,bits=5",
    "lsh_topk/lists=4,beam=2,hidden=24,vocab=300,frequent=30,n=5,k=8,units=2,bands=20",
    "sparse_recurrent/steps=20,batch=3,hidden=24,nonzeros=4,cell=gru,ragged=1,resets=1",
    "block_recurrent/steps=12,batch=2,hidden=24,nonzeros=2,dtype=float16,resets=1",
    "recurrent_backward/steps=20,batch=3,hidden=24,nonzeros=12,cell=gru,ragged=1,resets=1",
)

# Whether a call, or which rows of its batch, meet a condition.
Condition = Callable[[Call], Any]


@dataclass(frozen=True)
class Wrong:
    """A kernel that is wrong."""

    problem: Problem
    what: str
    fault: Fault

    def passes(self, number: int) -> bool:
        """Whether the check of candidates and that of winners let it pass."""
        load = measure.load(library(self.problem).path, "llvm")
        faulty = Faulty(self.problem, load, self.fault)
        before, measure.load = measure.load, lambda *_: faulty
        try:
            measure.handle(message(self.problem, steps=("verify", "check", "prove"), draw=number))
        except (Mismatch, Fatal):
            return False
        finally:
            measure.load = before
        return True


def rows(call: Call) -> int:
    return len(call.first)


# ---- conditions, by kind -------------------------------------------------------------------------


def of_batch(problem: Problem, rng: np.random.Generator) -> tuple[str, Condition]:
    timed, n = problem.batch_extent, int(rng.integers(9, 34))
    many = [
        ("at 2 to 4 rows", lambda call: 2 <= rows(call) <= 4),
        (f"from {n} rows on", lambda call: rows(call) >= n),
        (f"beyond {timed} rows", lambda call: rows(call) > timed),
        (f"at {n // 2} to {n} rows", lambda call: n // 2 <= rows(call) <= n),
        (f"at rows that {n % 5 + 2} divides", lambda call: rows(call) % (n % 5 + 2) == 0),
    ]
    if timed > 80:
        many.append((f"from 68 to {timed - 1} rows", lambda call: 68 <= rows(call) < timed))
    if problem.sequential:
        many = [(what, when) for what, when in many if "beyond" not in what and "from" not in what] + [many[1]]
    return many[rng.integers(len(many))]


def of_addresses(problem: Problem, rng: np.random.Generator) -> tuple[str, Condition]:
    names = [one.name for one in (*problem.kernel_inputs, *problem.kernel_outputs) if one.shape]
    name = names[rng.integers(len(names))]
    rest = [step for step in (8, 12, 4) if step % min(8, _itemsize(problem, name)) == 0]
    step = int(rest[rng.integers(len(rest))])
    many = [
        (f"with {name} at {step} modulo 16", lambda call: call[name].ctypes.data % 16 == step),
        (f"with {name} not at a multiple of 64", lambda call: call[name].ctypes.data % 64 != 0),
        (
            "with outputs aligned otherwise than inputs",
            lambda call: call.outputs[-1].ctypes.data % 64 != call.inputs[0].ctypes.data % 64,
        ),
        (f"with {name} at 32 modulo 64", lambda call: call[name].ctypes.data % 64 == 32),
    ]
    return many[rng.integers(len(many))]


def _itemsize(problem: Problem, name: str) -> int:
    spec = next(one for one in (*problem.kernel_inputs, *problem.kernel_outputs) if one.name == name)
    return {"float32": 4, "int32": 4, "int64": 8}.get(problem.dtype_of(spec), 2)


def of_numbers(problem: Problem, rng: np.random.Generator) -> tuple[str, Condition] | None:
    """Of `scale`, `log`, `temperature`, `top_k`, `top_p`, `min_p`, `threshold`, `constant`, where there are."""
    known = {one.name for one in problem.kernel_inputs if not one.shape}
    many = {
        "scale": [
            ("scale above 3", lambda v: v > 3),
            ("scale of 0.2 and below", lambda v: v <= 0.2),
            ("scale neither 1 nor one that is declared", lambda v: v not in (1.0, 0.625, 1.7)),
        ],
        "log": [("logarithms", lambda v: v != 0), ("probabilities", lambda v: v == 0)],
        "temperature": [("temperature above 3", lambda v: v > 3), ("temperature of 0.3 to 0", lambda v: 0 < v < 0.3)],
        "top_k": [("top_k of 1", lambda v: v == 1), ("top_k of 4 and above", lambda v: v >= 4)],
        "top_p": [("top_p below 0.4", lambda v: v < 0.4), ("top_p of 0.6 to 1", lambda v: 0.6 < v < 1)],
        "min_p": [("min_p", lambda v: v > 0), ("min_p below 0.1", lambda v: 0 < v < 0.1)],
        "threshold": [("threshold of 3 to 20", lambda v: 3 <= v <= 20), ("threshold of 2", lambda v: v == 2)],
    }
    names = sorted(known & set(many))
    if not names:
        return None
    name = names[rng.integers(len(names))]
    what, holds = many[name][rng.integers(len(many[name]))]
    return f"with {what}", lambda call: holds(call[name])


def of_floats(problem: Problem, rng: np.random.Generator) -> tuple[str, Condition] | None:
    """Of magnitudes and special values of a floating input, in rows of the batch where it has them."""
    names = [one.name for one in problem.kernel_inputs if one.name in problem.scaled]
    if not names:
        return None
    name = names[rng.integers(len(names))]

    def of_rows(holds: Callable[[np.ndarray], np.ndarray]) -> Condition:
        """In those rows; of an array that all rows share, in all."""

        def when(call: Call) -> Any:
            x = call[name].astype(np.float64)
            x = x.reshape(len(x), -1)
            if len(x) == rows(call) and name not in ("embedding", "data", "table", "bias"):
                return holds(x)
            return holds(x.reshape(1, -1)).any() if x.size else False

        return when

    def largest(x: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(x), np.abs(x), 0).max(axis=1, initial=0)

    many = [
        ("above 80", of_rows(lambda x: largest(x) > 80)),
        ("of 1000 and more", of_rows(lambda x: largest(x) > 1000)),
        ("below 1e-3 throughout", of_rows(lambda x: (0 < largest(x)) & (largest(x) < 1e-3))),
    ]
    if name == "logits":
        k = problem.axes.get("k", 1)
        with_special = [
            ("below -90 throughout", of_rows(lambda x: (x < -90).all(axis=1) & np.isfinite(x).all(axis=1))),
            ("subnormal", of_rows(lambda x: (0 < largest(x)) & (largest(x) < 1.2e-38))),
            ("NaN twice", of_rows(lambda x: np.isnan(x).sum(axis=1) >= 2)),
            ("infinite twice", of_rows(lambda x: np.isposinf(x).sum(axis=1) >= 2)),
            ("finite less than k times", of_rows(lambda x: _between(np.isfinite(x).sum(axis=1), 1, k))),
            ("descending", of_rows(lambda x: _ordered(-x))),
            ("after a row with NaN", _after_nan),
            ("largest in the last column", of_rows(lambda x: np.argmax(np.nan_to_num(x, nan=-9), axis=1) == _last(x))),
            ("equal and negative", of_rows(lambda x: (x == x[:, :1]).all(axis=1) & (x[:, 0] < 0))),
        ]
        many = [*many, *(one for one in with_special if problem.axes["dtype"] == "float32" or one[0] != "subnormal")]
    what, when = many[rng.integers(len(many))]
    return f"with {name} {what}", when


def _between(counts: np.ndarray, low: int, high: int) -> np.ndarray:
    return (low <= counts) & (counts < max(high, low + 1))


def _ordered(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (np.diff(x, axis=1) >= 0).all(axis=1) & (x[:, 0] < x[:, -1])


def _last(x: np.ndarray) -> int:
    return x.shape[1] - 1


def _after_nan(call: Call) -> np.ndarray:
    found = np.isnan(call["logits"].astype(np.float32)).any(axis=1)
    return np.concatenate([[False], found[:-1]]) & ~found


def of_integers(problem: Problem, rng: np.random.Generator) -> tuple[str, Condition] | None:
    """Of structures, lists and marks."""
    names = {one.name for one in problem.kernel_inputs}
    many: list[tuple[str, Condition]] = []
    if "resets" in names:
        many += [
            ("with a positive reset", lambda call: (call["resets"] > 0).any()),
            ("with a negative reset", lambda call: (call["resets"] < 0).any()),
            ("with resets of both signs", lambda call: (call["resets"] < 0).any() & (call["resets"] > 0).any()),
        ]
    if "lengths" in names:
        many.append(("with a sequence of no steps", lambda call: (call["lengths"] == 0).any()))
    if "ids" in names and "logits" in names | {"hidden"} and problem.operator != "lsh_topk":
        many += [
            ("with ids above 2^32", lambda call: (call["ids"] > 2**32).any(axis=1)),
            ("with ids of -2 and below", lambda call: (call["ids"] < -1).any(axis=1)),
        ]
    if "uniforms" in names:
        many += [
            ("at a uniform number of 0.5", lambda call: call["uniforms"] == 0.5),
            ("at a uniform number of 0", lambda call: call["uniforms"] == 0),
            ("at the largest uniform number", lambda call: call["uniforms"] > 0.9999999),
        ]
    if problem.operator == "bsr_matmul":
        expected = problem.nnzb  # type: ignore[attr-defined]
        many += [
            ("with columns in no order", lambda call: _unsorted(call["indptr"], call["indices"])),
            ("with a column twice", lambda call: _twice(call["indptr"], call["indices"])),
            ("with more blocks than expected", lambda call: len(call["indices"]) > expected),
        ]
    if problem.operator == "nhot_lookup":
        many += [
            ("with columns in no order", lambda call: _unsorted(call["indptr"], call["indices"])),
            ("with a row of 7 entries", lambda call: np.diff(call["indptr"]) == 7),
        ]
    if "counts" in names:
        many += [
            ("with an empty list", lambda call: call["counts"] == 0),
            ("with a list of one", lambda call: call["counts"] == 1),
        ]
    if problem.operator == "lsh_topk":
        many.append(("with all words frequent", lambda call: len(call["ids"]) > 250))
    return many[rng.integers(len(many))] if many else None


def _spans(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(map(int, starts))


def _unsorted(starts: np.ndarray, columns: np.ndarray) -> bool:
    return any((np.diff(columns[a:b]) < 0).any() for a, b in _spans(starts))


def _twice(starts: np.ndarray, columns: np.ndarray) -> bool:
    return any(len(np.unique(columns[a:b])) < b - a for a, b in _spans(starts))


KINDS = (of_batch, of_addresses, of_numbers, of_floats, of_integers)


# ---- what goes wrong -----------------------------------------------------------------------------


def spoiled_where(call: Call, where: np.ndarray) -> None:
    spoil(call.first, where)


def last_element_where(call: Call, where: np.ndarray) -> None:
    """Only the last element of the first such row."""
    row = int(np.flatnonzero(where)[0])
    call.first[row : row + 1].reshape(-1)[-1:] = 0 if call.first[row].reshape(-1)[-1] != 0 else 1


EFFECTS = {"rows are wrong": spoiled_where, "an element is wrong": last_element_where}


def wrong_kernels(seed: int, count: int) -> list[Wrong]:
    """So many wrong kernels, those of one problem side by side."""
    rng = np.random.default_rng(seed)
    found = [_drawn(parse(PROBLEMS[number % len(PROBLEMS)]), rng) for number in range(count)]
    return sorted(found, key=lambda one: one.problem.key)


def _drawn(problem: Problem, rng: np.random.Generator) -> Wrong:
    conditions: list[tuple[str, Condition]] = []
    wanted = int(rng.integers(1, 3))
    for kind in rng.permutation(len(KINDS)):
        one = KINDS[kind](problem, rng)
        if one is not None and len(conditions) < wanted:
            conditions.append(one)
    effects = list(EFFECTS) if not problem.sequential else ["rows are wrong"]
    effect = effects[rng.integers(len(effects))]

    def fault(call: Call) -> None:
        call.run()
        where = np.ones(rows(call), bool)
        for _, when in conditions:
            where &= np.broadcast_to(np.asarray(when(call)), where.shape)
        if where.any():
            EFFECTS[effect](call, where)

    return Wrong(problem, f"{' and '.join(what for what, _ in conditions)}: {effect}", fault)
