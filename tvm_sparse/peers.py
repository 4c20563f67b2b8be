"""Other libraries doing the same work, and the comparison with them: all in one process, checked, in turn.

A peer is a name and a function that prepares one call. Its result is compared with the reference before it is timed,
in the accuracy that its dtype gives: a peer that computes something else has no time. Libraries are imported when a
peer is prepared; one that is absent is listed as absent.

Inputs are "hot" unless asked for otherwise: what fits into a GPU's L2 cache is read from there, by all alike. On CUDA
every contender is captured in a CUDA graph, so that no Python time is counted; what cannot be captured is timed eagerly
and says so. On the CPU a call is timed from Python, allocation of the result included, as its user would see it.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .machine import Machine
from .operators import BsrMatmul, LogSumExp, NhotLookup, Problem, Softmax, SoftmaxTopk
from .operators.bsr_matmul import activated
from .operators.problem import Mismatch

Call = Callable[[], Any]

ROUNDS = {"cpu": 15, "cuda": 30}
# On the CPU one round of a contender lasts about this long: many calls of a short one, one of a long one.
ROUND_SECONDS = 0.02
REST_SECONDS = 0.06
# Calls in one CUDA graph: about this long together, within the bounds.
GRAPH_SECONDS = 0.001
FEWEST_CALLS, MOST_CALLS = 10, 50
# Calls from Python that are timed for the host's cost: fewer than a GPU's queue holds.
HOST_CALLS = 200

# Rows that are compared with the reference, spread over the batch: it is in float64 and sorts, and a batch of 4000 by
# 25000 would take it minutes.
CHECKED_ROWS = 64

# What a peer's result may differ by, relative to the largest value: other libraries add in other orders, and in
# half precision some round in between. It tells the same computation from another one.
PEER_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Peer:
    """Another library's way to compute an operator.

    `prepare(problem, inputs, device)` does what is done once (copies, conversions to its sparse format) and returns
    the call to be timed. It may raise: the message becomes the peer's line.
    """

    name: str
    operator: str
    needs: str  # the module that has to be importable
    devices: tuple[str, ...]
    prepare: Callable[[Any, Sequence[Any], str], Call]


@dataclass(frozen=True)
class Timing:
    """One contender's line: times, or why there are none."""

    name: str
    seconds: tuple[float, ...] = ()  # of one call, one entry a round
    how: str = ""  # "graph" or "eager"
    correct: bool | None = None
    note: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Comparison:
    """All contenders on one problem. Ours is the first."""

    problem: Problem
    machine: Machine
    timings: tuple[Timing, ...]
    host_seconds: float | None  # of one call of our public function from Python; on the CPU, beyond the kernel's own
    how: str  # our kernel was chosen: one of `runtime.dispatch.HOW`
    kernel: str  # the candidate that it is
    threads: str  # of the CPU's libraries
    rotated: bool = False  # inputs, past the GPU's L2 cache

    @property
    def ours(self) -> Timing:
        return self.timings[0]

    @property
    def best_peer(self) -> Timing | None:
        """The fastest peer that was right."""
        timed = [t for t in self.timings[1:] if t.median is not None]
        return min(timed, key=lambda t: t.median or 0.0, default=None)


# ---------------------------------------------------------------------------------------------------- contenders


def _torch_tensor(array: Any, device: str) -> Any:
    import numpy as np
    import torch

    if array.dtype.name == "bfloat16":  # NumPy's is unknown to torch: the same bits by way of integers
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _plain_logits(problem: SoftmaxTopk, inputs: Sequence[Any]) -> Any:
    """Logits that need no temperature any more: peers are not charged for it."""
    if problem.bias or problem.ids:
        raise NotImplementedError("compared without bias and ids only")
    logits, scale = inputs[:2]
    return logits if scale == 1 else (logits * scale).astype(logits.dtype)


def _torch_softmax_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = _torch_tensor(_plain_logits(problem, inputs), device)
    return lambda: torch.topk(torch.softmax(x, -1, dtype=torch.float32), problem.k)


def _torch_topk_logsumexp(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = _torch_tensor(_plain_logits(problem, inputs), device)

    def call() -> Any:
        values, indices = torch.topk(x, problem.k)
        return torch.exp(values.float() - torch.logsumexp(x, -1, keepdim=True).float()), indices

    return call


def _numpy_softmax_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x, k = _plain_logits(problem, inputs), problem.k

    def call() -> Any:
        e = np.exp(x.astype(np.float32, copy=False) - x.max(axis=1, keepdims=True).astype(np.float32))
        total = e.sum(axis=1, keepdims=True)
        some = np.argpartition(e, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(e, some, axis=1), axis=1, kind="stable")
        indices = np.take_along_axis(some, order, axis=1)
        return np.take_along_axis(e, indices, axis=1) / total, indices

    return call


def _torch_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, function = _torch_tensor(inputs[0], device), torch.log_softmax if inputs[1] else torch.softmax
    return lambda: function(x, -1)


def _torch_compiled_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, function = _torch_tensor(inputs[0], device), torch.log_softmax if inputs[1] else torch.softmax
    compiled = torch.compile(lambda logits: function(logits, -1), fullgraph=True, dynamic=False)
    compiled(x)
    return lambda: compiled(x)


def _numpy_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x, log = inputs

    def call() -> Any:
        shifted = (x - x.max(axis=1, keepdims=True)).astype(np.float32, copy=False)
        e = np.exp(shifted)
        total = e.sum(axis=1, keepdims=True)
        return (shifted - np.log(total) if log else e / total).astype(x.dtype, copy=False)

    return call


def _torch_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = _torch_tensor(inputs[0], device)
    return lambda: torch.logsumexp(x, -1)


def _torch_compiled_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = _torch_tensor(inputs[0], device)
    compiled = torch.compile(lambda logits: torch.logsumexp(logits, -1), fullgraph=True, dynamic=False)
    compiled(x)
    return lambda: compiled(x)


def _numpy_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x = inputs[0]

    def call() -> Any:
        top = x.max(axis=1, keepdims=True)
        return np.log(np.exp((x - top).astype(np.float32, copy=False)).sum(axis=1)) + top[:, 0].astype(np.float32)

    return call


def dense_weight(problem: BsrMatmul, inputs: Sequence[Any]) -> Any:
    """The weight of the inputs as a dense `(n, k)` array."""
    import numpy as np

    _, data, indices, indptr, *_ = inputs
    rows, cols = problem.block_shape
    block_rows, block_cols = problem.grid
    blocks = np.zeros((block_rows, block_cols, rows, cols), data.dtype)
    at = np.repeat(np.arange(block_rows), np.diff(indptr))
    blocks[at, indices] = data
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3).reshape(problem.n, problem.k))


def _torch_finish(problem: BsrMatmul, inputs: Sequence[Any], device: str, product: Call) -> Call:
    """A product of PyTorch followed by the problem's bias and activation, as its users write it."""
    import torch

    bias = [_torch_tensor(array, device) for array in problem.biases(inputs)]
    activation = getattr(torch.nn.functional, problem.activation) if problem.activation else None

    def call() -> Any:
        y = product()
        if bias:
            y = y + bias[0]
        return activation(y) if activation else y

    return call if bias or activation else product


def _numpy_finish(problem: BsrMatmul, inputs: Sequence[Any], product: Call) -> Call:
    """A product of NumPy or SciPy followed by the problem's bias and activation."""
    bias = problem.biases(inputs)
    if not bias and not problem.activation:
        return product
    return lambda: activated(product() + (bias[0] if bias else 0), problem.activation)


def _torch_dense(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, weight = _torch_tensor(inputs[0], device), _torch_tensor(dense_weight(problem, inputs), device)
    return _torch_finish(problem, inputs, device, lambda: torch.nn.functional.linear(x, weight))


def _torch_bsr_tensor(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Any:
    import warnings

    import torch

    data, indices, indptr = (_torch_tensor(a, device) for a in inputs[1:4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        return torch.sparse_bsr_tensor(indptr, indices, data, size=(problem.n, problem.k))


def _torch_bsr(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    x, weight = _torch_tensor(inputs[0], device), _torch_bsr_tensor(problem, inputs, device)
    return _torch_finish(problem, inputs, device, lambda: (weight @ x.T).T)


def _torch_bsr_triton(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    from torch.sparse._triton_ops import bsr_dense_mm

    x, weight = _torch_tensor(inputs[0], device), _torch_bsr_tensor(problem, inputs, device)
    return _torch_finish(problem, inputs, device, lambda: bsr_dense_mm(weight, x.T).T)


def _scipy_bsr(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    import scipy.sparse

    x, data, indices, indptr, *_ = inputs
    if problem.dtype != "float32":
        raise TypeError(f"SciPy has no {problem.dtype}")
    weight = scipy.sparse.bsr_array((data, indices, indptr), shape=(problem.n, problem.k))
    return _numpy_finish(problem, inputs, lambda: (weight @ x.T).T)


def _numpy_dense(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    x, weight = inputs[0], dense_weight(problem, inputs)
    return _numpy_finish(problem, inputs, lambda: x @ weight.T)


def _nhot_tensors(problem: NhotLookup, inputs: Sequence[Any], device: str) -> tuple[Any, Any, Any, Any]:
    """indptr, indices, values or None, and the table, on the device."""
    indptr, indices, *values, table = (_torch_tensor(a, device) for a in inputs)
    return indptr, indices, values[0] if values else None, table


def _torch_embedding_bag(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import torch

    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    return lambda: torch.nn.functional.embedding_bag(
        indices, table, indptr, mode="sum", per_sample_weights=values, include_last_offset=True
    )


def _torch_embedding(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import torch

    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    if values is not None or not bool((torch.diff(indptr) == 1).all()):
        raise ValueError("an embedding has one entry a row, without a value")
    return lambda: torch.nn.functional.embedding(indices, table)


def _torch_csr(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import warnings

    import torch

    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    if values is None:
        values = torch.ones(len(indices), dtype=table.dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        a = torch.sparse_csr_tensor(indptr, indices, values, size=(len(indptr) - 1, problem.vocab))
    return lambda: a @ table


def _dense_rows(problem: NhotLookup, inputs: Sequence[Any]) -> Any:
    """The sparse rows of the inputs as a dense `(rows, vocab)` array."""
    import numpy as np

    indptr, indices, *values, table = inputs
    dense = np.zeros((len(indptr) - 1, problem.vocab), np.float32)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    np.add.at(dense, (rows, indices), values[0].astype(np.float32) if values else np.float32(1))
    return dense.astype(table.dtype)


def _torch_dense_rows(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    a, table = _torch_tensor(_dense_rows(problem, inputs), device), _torch_tensor(inputs[-1], device)
    return lambda: a @ table


def _scipy_csr(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np
    import scipy.sparse

    indptr, indices, *values, table = inputs
    if problem.dtype != "float32":
        raise TypeError(f"SciPy has no {problem.dtype}")
    data = values[0] if values else np.ones(len(indices), table.dtype)
    a = scipy.sparse.csr_array((data, indices, indptr), shape=(len(indptr) - 1, problem.vocab))
    return lambda: a @ table


BOTH, CPU, CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)

PEERS: tuple[Peer, ...] = (
    Peer("torch softmax, topk", "softmax_topk", "torch", BOTH, _torch_softmax_topk),
    Peer("torch topk, logsumexp", "softmax_topk", "torch", BOTH, _torch_topk_logsumexp),
    Peer("NumPy exp, argpartition", "softmax_topk", "numpy", CPU, _numpy_softmax_topk),
    Peer("torch dense linear", "bsr_matmul", "torch", BOTH, _torch_dense),
    Peer("torch BSR @ dense", "bsr_matmul", "torch", BOTH, _torch_bsr),
    Peer("torch bsr_dense_mm (Triton)", "bsr_matmul", "triton", CUDA, _torch_bsr_triton),
    Peer("SciPy BSR @ dense", "bsr_matmul", "scipy", CPU, _scipy_bsr),
    Peer("NumPy dense", "bsr_matmul", "numpy", CPU, _numpy_dense),
    Peer("torch embedding_bag", "nhot_lookup", "torch", BOTH, _torch_embedding_bag),
    Peer("torch embedding", "nhot_lookup", "torch", BOTH, _torch_embedding),
    Peer("torch CSR @ dense", "nhot_lookup", "torch", BOTH, _torch_csr),
    Peer("torch dense", "nhot_lookup", "torch", BOTH, _torch_dense_rows),
    Peer("SciPy CSR @ dense", "nhot_lookup", "scipy", CPU, _scipy_csr),
    Peer("torch softmax", "softmax", "torch", BOTH, _torch_softmax),
    Peer("torch.compile softmax", "softmax", "triton", CUDA, _torch_compiled_softmax),
    Peer("NumPy exp", "softmax", "numpy", CPU, _numpy_softmax),
    Peer("torch logsumexp", "logsumexp", "torch", BOTH, _torch_logsumexp),
    Peer("torch.compile logsumexp", "logsumexp", "triton", CUDA, _torch_compiled_logsumexp),
    Peer("NumPy exp", "logsumexp", "numpy", CPU, _numpy_logsumexp),
)


def _ours_softmax_topk(
    problem: SoftmaxTopk, inputs: Sequence[Any], convert: Callable[[Any], Any]
) -> tuple[Call, Problem]:
    from .functional import softmax_topk

    logits, scale, log, *rest = inputs
    x, extras = convert(logits), dict(zip((a.name for a in problem.kernel_inputs[3:]), map(convert, rest), strict=True))
    return lambda: softmax_topk(x, problem.k, log=bool(log), temperature=1 / scale, **extras), problem


def _ours_bsr_matmul(problem: BsrMatmul, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    from .functional import bsr_matmul
    from .layers import BsrWeight

    x, data, indices, indptr = map(convert, inputs[:4])
    # As at inference, where nobody writes a weight.
    weight = BsrWeight((data, indices, indptr), columns=problem.k, constant=True)
    [bias] = map(convert, problem.biases(inputs) or [None])
    extras: dict[str, Any] = {"bias": bias, "activation": problem.activation or None}
    return lambda: bsr_matmul(x, weight, **extras), weight.problem(problem.m, problem.bias, problem.activation)


def _ours_nhot_lookup(
    problem: NhotLookup, inputs: Sequence[Any], convert: Callable[[Any], Any]
) -> tuple[Call, Problem]:
    from .functional import nhot_lookup
    from .layers import CsrRows

    indptr, indices, *values, table = map(convert, inputs)
    rows = CsrRows((indptr, indices, values[0] if values else None), columns=problem.vocab, validate=True)
    return lambda: nhot_lookup(rows, table), rows.problem(problem.width, problem.dtype)


def _ours_softmax(problem: Softmax, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    from .functional import log_softmax, softmax

    logits, log = inputs
    x = convert(logits)
    if log:
        return lambda: log_softmax(x), dataclasses.replace(problem, algorithm="online")
    return lambda: softmax(x, algorithm=problem.algorithm), problem


def _ours_logsumexp(problem: LogSumExp, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    from .functional import logsumexp

    x = convert(inputs[0])
    return lambda: logsumexp(x), problem


# The call of our public function, and the problem that it finds in its arguments: of a sparse weight that is read off
# the pattern, and decides which record is used.
OURS: Mapping[str, Callable[..., tuple[Call, Problem]]] = {
    "softmax_topk": _ours_softmax_topk,
    "bsr_matmul": _ours_bsr_matmul,
    "nhot_lookup": _ours_nhot_lookup,
    "softmax": _ours_softmax,
    "logsumexp": _ours_logsumexp,
}
NAME = "tvm_sparse"


# ------------------------------------------------------------------------------------------------------ comparison


def compare(
    problem: Problem,
    machine: Machine,
    *,
    seed: int = 0,
    structure: str | None = None,
    peers: Sequence[Peer] = PEERS,
    host: bool = True,
    rotated: bool = False,
) -> Comparison:
    """Check and time our public function and the peers on one problem, with inputs of one of its structures.

    `host` also times what Python costs of ours. `rotated`, for GPUs, gives every call in turn other copies of the
    inputs, which together take twice the L2 cache (or as many as a graph has calls): each call then reads memory.

    Raises
    ------
    Mismatch
        If our own result is wrong: nothing of it is worth timing.
    ModuleNotFoundError
        On CUDA without PyTorch, which holds the arrays there.
    """
    from .runtime.dispatch import dispatcher

    device = machine.device
    if device == "cuda" and not has_torch("cuda"):
        raise ModuleNotFoundError(
            'comparing on CUDA needs PyTorch with CUDA: pip install "tvm_sparse[torch]"', name="torch"
        )
    inputs = problem.generate(seed, structure)
    copies = 1
    if rotated:
        size = sum(array.nbytes for array in inputs if hasattr(array, "nbytes"))
        copies = min(math.ceil(2 * _l2_bytes() / size), MOST_CALLS)
    sample = _Sample(problem, inputs)
    with_torch = has_torch(device)

    def convert(argument: Any) -> Any:
        # PyTorch's arrays where it is there: its users' way to call, and the peers' own.
        return _torch_tensor(argument, device) if with_torch and hasattr(argument, "dtype") else argument

    ours, called = OURS[problem.operator](problem, inputs, convert)
    others = [OURS[problem.operator](problem, inputs, convert)[0] for _ in range(copies - 1)]
    problem.check(sample.inputs, sample.expected, sample.of(as_numpy(ours())))
    calls: dict[str, Call] = {NAME: in_turn([ours, *others])}
    lines: dict[str, Timing] = {NAME: Timing(NAME, correct=True)}
    for peer in peers:
        if peer.operator != problem.operator or device not in peer.devices:
            continue
        lines[peer.name], call = _admit(peer, problem, inputs, sample, device)
        if call is not None:
            calls[peer.name] = in_turn([call, *(peer.prepare(problem, inputs, device) for _ in range(copies - 1))])

    timed = time_cuda(calls) if device == "cuda" else _time_cpu(calls)
    for name, (how, seconds) in timed.items():
        line = lines[name]
        if isinstance(seconds, str):
            lines[name] = Timing(name, correct=line.correct, note=seconds)
        else:
            lines[name] = Timing(name, tuple(seconds), how, line.correct)
    explained = dispatcher.explain(called, machine)
    return Comparison(
        problem,
        machine,
        tuple(lines.values()),
        _host_seconds(called, machine, ours, inputs) if host else None,
        explained.how,
        explained.candidate,
        _threads(device),
        rotated,
    )


def _l2_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties().L2_cache_size)


def in_turn(calls: Sequence[Call]) -> Call:
    """One call after the other, and again from the first."""
    if len(calls) == 1:
        return calls[0]
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


class _Sample:
    """Some rows of a problem, the first and the last among them, and what the reference says of them."""

    def __init__(self, problem: Problem, inputs: Sequence[Any]) -> None:
        import numpy as np

        self._rows = np.unique(np.linspace(0, problem.batch_extent - 1, CHECKED_ROWS).astype(int))
        self.inputs = problem.sample(inputs, self._rows)
        self.expected = problem.with_batch(len(self._rows)).reference(self.inputs)

    def of(self, outputs: Sequence[Any]) -> list[Any]:
        return [array[self._rows] for array in outputs]


def has_torch(device: str) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return device == "cpu" or torch.cuda.is_available()


def _admit(
    peer: Peer, problem: Problem, inputs: Sequence[Any], sample: _Sample, device: str
) -> tuple[Timing, Call | None]:
    """Prepare a peer and compare its result with the reference."""
    if importlib.util.find_spec(peer.needs) is None:
        return Timing(peer.name, note=f"absent: {peer.needs} is not installed"), None
    try:
        call = peer.prepare(problem, inputs, device)
        outputs = as_numpy(call())
    except Exception as error:  # whatever another library does not support
        reason = str(error).strip().partition("\n")[0] or repr(error)
        return Timing(peer.name, note=f"not available: {reason[:120]}"), None
    try:
        agree(problem, sample.inputs, sample.expected, sample.of(outputs))
    except Mismatch as error:
        return Timing(peer.name, correct=False, note=str(error)), None
    return Timing(peer.name, correct=True), call


def as_numpy(outputs: Any) -> list[Any]:
    """The outputs of a call as NumPy arrays; half precision as float32, which every library can convert to."""
    import numpy as np

    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    arrays = []
    for array in outputs:
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            array = (array.float() if array.is_floating_point() else array).numpy()
        arrays.append(np.asarray(array))
    return arrays


def agree(problem: Problem, inputs: Sequence[Any], expected: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise `Mismatch` unless a peer computed the same, within what its dtype allows; ties may go either way."""
    import numpy as np

    tolerance = PEER_TOLERANCE[problem.axes["dtype"]]
    values, wanted = np.asarray(outputs[0]).astype(np.float64), expected[0]
    if values.shape != wanted.shape or len(outputs) != len(expected):
        raise Mismatch(f"shape {values.shape}, expected {wanted.shape}")
    worst = float(np.max(np.abs(values - wanted), initial=0.0)) / max(float(np.max(np.abs(wanted), initial=0.0)), 1e-30)
    if not worst <= tolerance:
        raise Mismatch(f"{problem.kernel_outputs[0].name} differ by {worst:.1e} of the largest")
    if len(outputs) > 1:
        logits = np.asarray(inputs[0]).astype(np.float64)
        columns = (np.asarray(indices).astype(np.int64) for indices in (outputs[1], expected[1]))
        chosen, best = (np.take_along_axis(logits, c, axis=1) for c in columns)
        if not np.array_equal(chosen, best):
            raise Mismatch("indices are not those of the largest logits")


# ---------------------------------------------------------------------------------------------------------- timing

Times = dict[str, tuple[str, Any]]  # by name: how, and seconds or why there are none


def clock(call: Call, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def _time_cpu(contenders: Mapping[str, Call], rounds: int = ROUNDS["cpu"]) -> Times:
    """Seconds a call by wall clock, in rounds that every contender takes part in."""
    counts = {}
    for name, call in contenders.items():
        calls, spent = 1, clock(call, 1)
        while spent < ROUND_SECONDS and calls < 1 << 20:
            calls = max(calls * 2, int(calls * ROUND_SECONDS / max(spent, 1e-7)))
            spent = clock(call, calls)
        counts[name] = calls
    times: dict[str, list[float]] = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in contenders.items():
                # The libraries' threads spin after their work, OpenBLAS's for 2^26 cycles: each begins at rest.
                time.sleep(REST_SECONDS)
                call()
                # The median call of the round: on a shared machine one in many waits for a core that was taken away.
                times[name].append(statistics.median(clock(call, 1) for _ in range(counts[name])))
    finally:
        if collecting:
            gc.enable()
    return {name: ("eager", seconds) for name, seconds in times.items()}


def time_cuda(contenders: Mapping[str, Call], rounds: int = ROUNDS["cuda"]) -> Times:
    """Seconds a call by events around replays of a graph of many calls, in rounds, each after one that warms up."""
    import torch

    torch.cuda.synchronize()  # what was prepared on the default stream
    stream = torch.cuda.Stream()
    result: Times = {}
    runs: dict[str, tuple[Call, int]] = {}
    for name, call in contenders.items():
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        stream.synchronize()
        try:
            single, _kept = _captured(call, 1, stream)
            once = min(_replay(single.replay, stream) for _ in range(5))
            calls = max(FEWEST_CALLS, min(MOST_CALLS, int(GRAPH_SECONDS / max(once, 1e-7))))
            graph, _kept = _captured(call, calls, stream)
            result[name], runs[name] = ("graph", []), (graph.replay, calls)
        except Exception:  # a library that synchronises or allocates by itself cannot be captured
            torch.cuda.synchronize()

            def eager(call: Call = call) -> None:
                for _ in range(FEWEST_CALLS):
                    call()

            result[name], runs[name] = ("eager", []), (eager, FEWEST_CALLS)
    for _ in range(rounds):
        for name, (run, calls) in runs.items():
            _replay(run, stream)
            result[name][1].append(_replay(run, stream) / calls)
    return result


def _captured(call: Call, calls: int, stream: Any) -> tuple[Any, list[Any]]:
    """A graph of `calls` calls, and their results: memory of the graph's own that must outlive it."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for _ in range(calls)]
    return graph, kept


def _replay(run: Call, stream: Any) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        run()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _host_seconds(problem: Problem, machine: Machine, ours: Call, inputs: Sequence[Any]) -> float | None:
    """What Python costs of one call of ours.

    A GPU works while Python goes on, so there it is the time of the call itself. On the CPU the kernel's own time is
    taken off: the same function is called directly, in turn with the public one.
    """
    if machine.device == "cuda":
        import torch

        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            times.append(clock(ours, HOST_CALLS) / HOST_CALLS)
            torch.cuda.synchronize()
        return statistics.median(times)
    import numpy as np

    from .runtime import arrays
    from .runtime.dispatch import dispatcher

    kernel = dispatcher.kernel(problem, machine)
    given = (*inputs, *problem.empty_outputs())
    arguments = [arrays.argument(a) if isinstance(a, np.ndarray) else a for a in given]
    timed = _time_cpu({"public": ours, "kernel": lambda: kernel.function(*arguments)}, rounds=9)
    public, bare = (statistics.median(timed[name][1]) for name in ("public", "kernel"))
    return max(public - bare, 0.0)


def _threads(device: str) -> str:
    if device == "cuda":
        return ""
    import os

    counts = [f"tvm {os.environ.get('TVM_NUM_THREADS', '?')}"]
    if has_torch("cpu"):
        import torch

        counts.append(f"torch {torch.get_num_threads()}")
    return ", ".join(counts)
