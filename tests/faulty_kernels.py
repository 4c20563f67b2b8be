"""Kernels that are wrong, each in its own way: a fault stands between the caller and a right CPU kernel, as a function
that is called with the same arguments. `test_faults.py` and `scripts/faults.py` hand them to the measuring code.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tvm_sparse.artifacts.compile import Compiled, compile_candidate
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.problem import Problem, numpy_dtype

# More than 64 rows, for one of the faults; small, as there are many.
PROBLEMS = {
    "softmax_topk": "softmax_topk/batch=100,vocab=150,k=5",
    "softmax": "softmax/batch=100,vocab=97",
    "logsumexp": "logsumexp/batch=100,vocab=97,dtype=float16",
    "bsr_matmul": "bsr_matmul/m=100,k=64,n=48,block=8,sparsity=0.5,bias=1",
    "nhot_lookup": "nhot_lookup/rows=100,vocab=53,width=33,nonzeros=3,weighted=1",
}


@functools.cache
def library(problem: Problem) -> Compiled:
    """The fallback's."""
    path = Path(tempfile.mkdtemp(dir=folder().name)) / "kernel.so"
    return compile_candidate(problem, spaces.fallback(problem, cpu()), cpu(), path)


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """Of all tests here; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="tvm_sparse-")


def message(problem: Problem, **more: Any) -> dict[str, Any]:
    built = library(problem)
    known = {"library": built.path, "workspaces": built.workspaces}
    return {"problem": problem.key, "kind": "llvm", **known, "seed": 0, **more}


# ---- a call of a kernel, and what may go wrong with it -------------------------------------------


class Call:
    """One call: its arguments by name, arrays as they lie in memory."""

    def __init__(self, problem: Problem, right: Any, arguments: tuple[Any, ...], number: int, kept: dict) -> None:
        self.number = number  # of this call, from 1
        self.kept = kept  # what the kernel remembers
        self._right, self._arguments = right, list(arguments)
        self._specs = [*problem.kernel_inputs, *problem.kernel_outputs]
        self._outputs = {spec.name for spec in problem.kernel_outputs}

    def __getitem__(self, name: str) -> Any:
        argument = self._arguments[[spec.name for spec in self._specs].index(name)]
        return in_place(argument) if hasattr(argument, "data_ptr") else argument

    def run(self, **scalars: Any) -> None:
        """Do what is right, but for these arguments."""
        names = [spec.name for spec in self._specs]
        given = [scalars.get(name, argument) for name, argument in zip(names, self._arguments, strict=False)]
        self._right(*given)

    @property
    def inputs(self) -> list[np.ndarray]:
        named = [self[spec.name] for spec in self._specs if spec.name not in self._outputs]
        return [array for array in named if isinstance(array, np.ndarray)]

    @property
    def outputs(self) -> list[np.ndarray]:
        return [self[spec.name] for spec in self._specs if spec.name in self._outputs]

    @property
    def workspace(self) -> np.ndarray:
        return in_place(self._arguments[len(self._specs)])

    @property
    def first(self) -> np.ndarray:
        """The first output, which has a row a row of the batch."""
        return self.outputs[0]


def in_place(tensor: Any) -> np.ndarray:
    return at(tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype))


def at(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = numpy_dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), kind).reshape(shape)


def spoil(array: np.ndarray, rows: Any = slice(None)) -> None:
    """Write what is wrong whatever is right."""
    with np.errstate(invalid="ignore"):
        array[rows] = np.where(np.abs(array[rows].astype(float)) < 0.5, 1, 0)


def left(call: Call, rows: Any) -> None:
    """Do what is right, but write nothing into some rows."""
    before = [array.copy() for array in call.outputs]
    call.run()
    for array, old in zip(call.outputs, before, strict=True):
        array[rows] = old[rows]


Fault = Callable[[Call], None]


def spoiled(when: Callable[[Call], Any]) -> Fault:
    """The first output is wrong where, or if, `when` says it."""

    def fault(call: Call) -> None:
        call.run()
        spoil(call.first, np.broadcast_to(np.asarray(when(call)), len(call.first)))

    return fault


def unwritten(when: Callable[[Call], Any]) -> Fault:
    def fault(call: Call) -> None:
        left(call, np.broadcast_to(np.asarray(when(call)), len(call.first)))

    return fault


def beside(offset: int) -> Fault:
    """Writes an element beside the last output: `offset` elements from its end, or before its beginning."""

    def fault(call: Call) -> None:
        call.run()
        last = call.outputs[-1]
        place = last.ctypes.data + (last.nbytes if offset >= 0 else 0) + offset * last.itemsize
        at(place, (1,), last.dtype.name)[0] = 7

    return fault


def writes_an_input(call: Call) -> None:
    call.run()
    call.inputs[0].reshape(-1)[-1:] += 1


def writes_before_an_input(call: Call) -> None:
    call.run()
    at(call.inputs[-1].ctypes.data - 1, (1,), "int8")[0] = 7


def reads_behind_an_input(call: Call) -> None:
    """And adds nothing of what it has read, if that is a number."""
    call.run()
    x = call.inputs[0]
    behind = at(x.ctypes.data + x.nbytes, (1,), "float32")
    call.first.reshape(-1)[-1] += 0 * behind[0]


def remembers(call: Call) -> None:
    """Gives again what it has computed for an input at this address."""
    place = call.inputs[0].ctypes.data, call.first.shape
    if place not in call.kept:
        call.run()
        call.kept[place] = [array.copy() for array in call.outputs]
    for array, known in zip(call.outputs, call.kept[place], strict=True):
        array[...] = known


def differs_in_the_last_bit(call: Call) -> None:
    call.run()
    if call.number % 2:
        first = call.first
        first[...] = np.nextafter(first, first.dtype.type(np.inf))


def counts_in_a_workspace(call: Call) -> None:
    """Takes for granted that its workspace is as it was filled, and does not leave it so."""
    call.run()
    call.workspace[0] += 1
    if call.workspace[0] > 1:
        spoil(call.first)


def refuses_what_is_misaligned(call: Call) -> None:
    if misaligned(call):
        raise ValueError("expected arrays aligned to 64 bytes")
    call.run()


def misaligned(call: Call) -> bool:
    return any(array.ctypes.data % 64 for array in (*call.inputs, *call.outputs))


def is_timed(call: Call) -> bool:
    """The whole batch is computed twice before."""
    call.kept["whole"] = call.kept.get("whole", 0) + (len(call.first) == 100)
    return call.kept["whole"] > 2


def rows(call: Call) -> np.ndarray:
    return np.arange(len(call.first))


ANYWHERE: dict[str, Fault] = {
    "rows from the 65th on are not computed": unwritten(lambda call: rows(call) >= 64),
    "row 64 is wrong": spoiled(lambda call: rows(call) == 64),
    "the last row is wrong": spoiled(lambda call: rows(call) == len(call.first) - 1),
    "the last of many rows is wrong": spoiled(
        lambda call: (len(call.first) > 64) & (rows(call) == len(call.first) - 1)
    ),
    "a batch of 1 is wrong": spoiled(lambda call: len(call.first) == 1),
    "a batch that no tile divides is wrong": spoiled(lambda call: len(call.first) % 4 != 0),
    "wrong from the 7th call on": spoiled(lambda call: call.number >= 7),
    "wrong once in ten calls": spoiled(lambda call: call.number % 10 == 0),
    "the first call alone is right": spoiled(lambda call: call.number > 1),
    "the first call is wrong": spoiled(lambda call: call.number == 1),
    "nothing is written": lambda call: None,
    "wrong while it is timed": spoiled(is_timed),
    "nothing is written while it is timed": lambda call: None if is_timed(call) else call.run(),
    "an element behind an output is written": beside(0),
    "an element some way behind an output is written": beside(20),
    "an element before an output is written": beside(-1),
    "an input is written": writes_an_input,
    "a byte before an input is written": writes_before_an_input,
    "misaligned arrays are taken for aligned ones": spoiled(misaligned),
    "misaligned arrays are refused": refuses_what_is_misaligned,
    "results are remembered by address": remembers,
    "runs differ in the last bit": differs_in_the_last_bit,
}

# ---- faults of single operators ------------------------------------------------------------------


def logits_rows(when: Callable[[np.ndarray], np.ndarray]) -> Callable[[Call], np.ndarray]:
    """For `spoiled`: the rows whose logits are so."""
    return lambda call: when(call["logits"].astype(np.float64))


def has_nan(x: np.ndarray) -> np.ndarray:
    return np.isnan(x).any(axis=1)


def has_infinity(x: np.ndarray) -> np.ndarray:
    return np.isposinf(x).any(axis=1)


def is_masked(x: np.ndarray) -> np.ndarray:
    return np.isneginf(x).all(axis=1)


def is_partly_masked(x: np.ndarray) -> np.ndarray:
    return np.isneginf(x).any(axis=1) & ~is_masked(x)


def is_ascending(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (np.diff(x, axis=1) >= 0).all(axis=1) & (x[:, 0] < x[:, -1])


def is_constant(x: np.ndarray) -> np.ndarray:
    return (x == x[:, :1]).all(axis=1) & np.isfinite(x[:, 0])


def is_large(x: np.ndarray) -> np.ndarray:
    return (np.isfinite(x) & (x > 100)).any(axis=1)


OF_ROWS: dict[str, Fault] = {
    "constant rows are wrong": spoiled(logits_rows(is_constant)),
    "rows with NaN are wrong": spoiled(logits_rows(has_nan)),
    "rows with NaN are not written": unwritten(logits_rows(has_nan)),
    "rows with infinity are wrong": spoiled(logits_rows(has_infinity)),
    "rows of nothing but -inf are wrong": spoiled(logits_rows(is_masked)),
    "rows of nothing but -inf are not written": unwritten(logits_rows(is_masked)),
    "rows with some -inf are wrong": spoiled(logits_rows(is_partly_masked)),
    "ascending rows are wrong": spoiled(logits_rows(is_ascending)),
    "what is read behind the logits counts": reads_behind_an_input,
}


def takes_the_later_of_equals(call: Call) -> None:
    call.run()
    x, indices = call["logits"], call["indices"]
    for row, chosen in zip(x, indices, strict=True):
        equal = np.flatnonzero(row == row[chosen[-1]])
        if len(equal):
            chosen[-1] = equal[-1]


def in_half_precision(call: Call) -> None:
    call.run()
    call.first[...] = call.first.astype(np.float16)


OF_TOPK: dict[str, Fault] = {
    "log is ignored": lambda call: call.run(log=0),
    "log is always taken": lambda call: call.run(log=1),
    "the temperature is ignored": lambda call: call.run(scale=1.0),
    "the temperature is ignored for probabilities": lambda call: call.run(scale=call["scale"] if call["log"] else 1.0),
    "the temperature is ignored for logarithms": lambda call: call.run(scale=1.0 if call["log"] else call["scale"]),
    "logarithms at temperature 1 are wrong": spoiled(lambda call: call["log"] and call["scale"] == 1),
    "constant rows are wrong as logarithms": spoiled(lambda call: bool(call["log"]) & logits_rows(is_constant)(call)),
    "the later of equal elements is chosen": takes_the_later_of_equals,
    "values have half precision": in_half_precision,
}
OF_SOFTMAX: dict[str, Fault] = {
    "log is ignored": lambda call: call.run(log=0),
    "large logits overflow": spoiled(logits_rows(is_large)),
    "logarithms of large logits overflow": spoiled(lambda call: bool(call["log"]) & logits_rows(is_large)(call)),
    "values have half precision": in_half_precision,
}
OF_LOGSUMEXP: dict[str, Fault] = {"large logits overflow": spoiled(logits_rows(is_large))}


def block_rows(call: Call) -> np.ndarray:
    """How many blocks each has."""
    return np.diff(call["indptr"])


def leaves_empty_block_rows(call: Call) -> None:
    y, before = call["y"], call["y"].copy()
    call.run()
    empty = np.repeat(block_rows(call) == 0, 8)
    y[:, empty] = before[:, empty]


def has_no_bias_in_empty_block_rows(call: Call) -> None:
    call.run()
    call["y"][:, np.repeat(block_rows(call) == 0, 8)] = 0


def drops_nan(call: Call) -> None:
    call.run()
    call.first[...] = np.nan_to_num(call.first)


OF_BSR: dict[str, Fault] = {
    "all blocks in one block row are wrong": spoiled(lambda call: (block_rows(call) > 0).sum() == 1),
    "empty block rows are not written": leaves_empty_block_rows,
    "empty block rows lack the bias": has_no_bias_in_empty_block_rows,
    "a weight that nobody has looked at is wrong": spoiled(lambda call: call["long"] < 0),
    "a weight that is not constant is wrong": spoiled(lambda call: not call["constant"]),
    "NaN and infinities become numbers": drops_nan,
}


def entries(call: Call) -> np.ndarray:
    """How many each row has."""
    return np.diff(call["indptr"])


def counts_duplicates_once(call: Call) -> None:
    call.run()
    starts, indices = call["indptr"], call["indices"]
    for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if len(np.unique(indices[start:stop])) < stop - start:
            spoil(call.first, row)


OF_NHOT: dict[str, Fault] = {
    "empty rows are not written": unwritten(lambda call: entries(call) == 0),
    "long rows are cut off": spoiled(lambda call: entries(call) > 32),
    "rows of one entry are wrong": spoiled(lambda call: entries(call) == 1),
    "equal columns count once": counts_duplicates_once,
    "rows of different lengths are wrong": spoiled(lambda call: len(set(entries(call))) > 2),
    "NaN and infinities become numbers": drops_nan,
}

FAULTS: dict[str, dict[str, Fault]] = {
    "softmax_topk": {**ANYWHERE, **OF_ROWS, **OF_TOPK},
    "softmax": {**ANYWHERE, **OF_ROWS, **OF_SOFTMAX},
    "logsumexp": {**ANYWHERE, **OF_ROWS, **OF_LOGSUMEXP},
    "bsr_matmul": {**ANYWHERE, **OF_BSR},
    "nhot_lookup": {**ANYWHERE, **OF_NHOT},
}


class Faulty:
    """A right kernel with a fault."""

    def __init__(self, problem: Problem, right: Any, fault: Fault) -> None:
        self._problem, self._right, self._fault = problem, right, fault
        self._calls = 0
        self._kept: dict = {}

    def __call__(self, *arguments: Any) -> None:
        self._calls += 1
        self._fault(Call(self._problem, self._right, arguments, self._calls, self._kept))
