"""The public functions on CUDA tensors: results, streams, graphs, memory, errors.

Kernels are compiled for the GPU that is there, into a cache of the tests' own; expected values are the problems'
references.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import BUILDS, number_of_builds, use_dispatcher

import tvm_sparse
from tvm_sparse.bench.compare import compare
from tvm_sparse.bench.timing import time_cuda
from tvm_sparse.core import machine
from tvm_sparse.core.problem import FLOATS, Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.logsumexp.problem import LogSumExp
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup
from tvm_sparse.operators.softmax.problem import Softmax
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk
from tvm_sparse.records import Log
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.tuning import plans, session

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        machine.gpu() is not None and not torch.cuda.is_available(), reason="this build of torch finds no CUDA GPU"
    ),
]

TOPK = "softmax_topk/batch=7,vocab=2051,k=5"  # rows of odd length: only every fourth is aligned to 16 bytes
BLOCKS = "bsr_matmul/m=7,k=192,n=96,block=16x32,sparsity=0.5"
LOOKUP = "nhot_lookup/rows=7,vocab=300,width=136,nonzeros=10,weighted=1"
PROBLEMS = {
    "softmax_topk": TOPK,
    "softmax": "softmax/batch=7,vocab=2051",
    "logsumexp": "logsumexp/batch=7,vocab=2051",
    "bsr_matmul": BLOCKS,
    "nhot_lookup": LOOKUP,
}
numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    kept = os.environ.get(BUILDS)
    cache = Path(kept) / "calls" if kept else tmp_path_factory.mktemp("kernels")
    own = Dispatcher(logs=(), shipped=cache / "none", cache=cache)
    with pytest.MonkeyPatch.context() as patch:
        use_dispatcher(patch, own)
        yield own


def cuda(array: np.ndarray) -> Any:
    """On the GPU, in an allocation of whole vectors that are written to their end: sanitizers have a copy read all 16
    bytes (cp.async) that is told to read the fewer ones that are the row's."""
    bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
    held = torch.from_numpy(bits)
    room = torch.zeros((held.nbytes + 15) // 16 * 16, dtype=torch.uint8, device="cuda")
    placed = room[: held.nbytes].view(held.dtype).view(held.shape).copy_(held)
    return placed.view(torch.bfloat16) if bits is not array else placed


def drawn(*shape: int) -> Any:
    """Standard normal float32 numbers on the GPU."""
    return cuda(np.random.default_rng(next(numbers)).standard_normal(shape, np.float32))


def host(tensor: Any) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def poisoned(problem: Problem) -> tuple[Any, ...]:
    return tuple(cuda(array) for array in problem.empty_outputs())


def check_topk(logits: Any, outputs: Any, log: int = 0) -> None:
    """Compare with the reference of these very logits, wherever they lie."""
    values, indices = outputs
    inputs = [host(logits), 1.0, log]
    problem = SoftmaxTopk(*logits.shape, values.shape[1], str(logits.dtype).removeprefix("torch."))
    problem.check(inputs, problem.reference(inputs), [host(values), host(indices)])


def check_softmax(name: str, logits: Any, result: Any) -> None:
    dtype = str(logits.dtype).removeprefix("torch.")
    problem = LogSumExp(*logits.shape, dtype) if name == "logsumexp" else Softmax(*logits.shape, "online", dtype)
    inputs = [host(logits), *([] if name == "logsumexp" else [int(name == "log_softmax")])]
    problem.check(inputs, problem.reference(inputs), [host(result)])


def check_product(problem: Problem, inputs: list[Any], y: Any) -> None:
    problem = dataclasses.replace(problem, m=len(inputs[0]))
    problem.check(inputs, problem.reference(inputs), [host(y)])


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", SoftmaxTopk.structures)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("key", [TOPK, "softmax_topk/batch=3,vocab=61,k=61", "softmax_topk/batch=2,vocab=50257,k=100"])
def test_softmax_topk_equals_the_reference(key: str, dtype: str, structure: str) -> None:
    problem = parse(f"{key},dtype={dtype}")
    for log in (0, 1):
        logits = cuda(problem.generate(next(numbers), structure)[0])
        for batch in (problem.batch, 1):
            out = tuple(array[:batch] for array in poisoned(problem))
            assert tvm_sparse.softmax_topk(logits[:batch], problem.k, log=bool(log), out=out) is out
            check_topk(logits[:batch], out, log)
            fresh = tvm_sparse.softmax_topk(logits[:batch], problem.k, log=bool(log))
            assert all(array.device == logits.device for array in fresh)
            check_topk(logits[:batch], fresh, log)


@pytest.mark.parametrize("number", range(24))
def test_softmax_topk_of_any_shape(number: int) -> None:
    """Shapes, dtypes, structures and extras drawn at random; a failure's message holds what was drawn."""
    rng = np.random.default_rng([number_of_builds(), number])
    vocab = int(2 ** rng.uniform(0, np.log2(200_000)))
    k = min(vocab, int(2 ** rng.uniform(0, 10)))
    problem = SoftmaxTopk(
        int(rng.integers(1, 40)), vocab, k, str(rng.choice(FLOATS)), int(rng.integers(2)), int(rng.integers(3))
    )
    rng = np.random.default_rng(next(numbers))
    settings = problem.settings[rng.integers(len(problem.settings))]
    inputs = problem.generate(int(rng.integers(2**31)), str(rng.choice(problem.structures)), settings)
    logits, scale, log, *rest = (cuda(a) if isinstance(a, np.ndarray) else a for a in inputs)
    extras = dict(zip((a.name for a in problem.kernel_inputs[3:]), rest, strict=True))
    outputs = tvm_sparse.softmax_topk(logits, k, log=bool(log), temperature=1 / scale, **extras)
    problem.check(inputs, problem.reference(inputs), [host(array) for array in outputs])


@pytest.mark.parametrize("structure", BsrMatmul.structures)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("key", [BLOCKS, "bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5"])
def test_bsr_matmul_equals_the_reference(key: str, dtype: str, structure: str) -> None:
    problem = parse(f"{key},dtype={dtype}")
    inputs = problem.generate(next(numbers), structure)
    x, data, indices, indptr = map(cuda, inputs[:4])
    weights = [(data, indices, indptr), (data, indices.long(), indptr.long())]
    weights.append(tvm_sparse.BsrWeight(weights[0], columns=problem.k))
    weights.append(torch.sparse_bsr_tensor(indptr.long(), indices.long(), data, size=(problem.n, problem.k)))
    for weight in weights:
        for rows in (problem.m, 1):
            [out] = poisoned(dataclasses.replace(problem, m=rows))
            assert tvm_sparse.bsr_matmul(x[:rows], weight, out=out, validate=True) is out
            check_product(problem, [inputs[0][:rows], *inputs[1:]], out)
            check_product(problem, [inputs[0][:rows], *inputs[1:]], tvm_sparse.bsr_matmul(x[:rows], weight))


@pytest.mark.parametrize("structure", NhotLookup.structures)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("key", [LOOKUP, "nhot_lookup/rows=7,vocab=53,width=33,nonzeros=3,weighted=0,index=int64"])
def test_nhot_lookup_equals_the_reference(key: str, dtype: str, structure: str) -> None:
    problem = parse(f"{key},dtype={dtype}")
    inputs = problem.generate(next(numbers), structure)
    indptr, indices, *values, table = map(cuda, inputs)
    parts = (indptr, indices, values[0] if values else None)
    sparse: list[Any] = [parts, tvm_sparse.CsrRows(parts, columns=problem.vocab)]
    if values:
        sparse.append(torch.sparse_csr_tensor(*parts, size=(problem.rows, problem.vocab)))
    wide = [indptr.long(), indices.long(), parts[2]]
    sparse.append(tuple(wide))
    for csr in sparse:
        [out] = poisoned(problem)
        assert tvm_sparse.nhot_lookup(csr, table, out=out, validate=True) is out
        expected = problem.reference(inputs)
        problem.check(inputs, expected, [host(out)])
        for _ in range(2):  # the second call takes the short way
            problem.check(inputs, expected, [host(tvm_sparse.nhot_lookup(csr, table))])


def test_lookups_of_other_lengths_take_the_short_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches differ in their entries: as long as rows are about as long, the kernel is the same."""
    problem = parse(LOOKUP)
    inputs = problem.generate(next(numbers))
    table = cuda(inputs[-1])
    tvm_sparse.nhot_lookup(tuple(map(cuda, inputs[:3])), table)
    monkeypatch.setattr(arrays, "facts", lambda *_: pytest.fail("the long way was taken"))
    for total in (60, 75, 90):
        indptr = np.sort(np.random.default_rng(total).integers(0, total, 8)).astype(np.int32)
        indptr[[0, -1]] = 0, total
        indices = np.random.default_rng(total).integers(0, 300, total).astype(np.int32)
        given = [indptr, indices, np.ones(total, np.float32), inputs[-1]]
        out = tvm_sparse.nhot_lookup(tuple(map(cuda, given[:3])), table)
        problem.check(given, problem.reference(given), [host(out)])


@pytest.mark.alone
@pytest.mark.large
def test_rows_of_a_table_beyond_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    table = torch.zeros(70_000, 40_000, device="cuda")
    some = [0, 53_688, 69_999]
    table[some] = torch.randn(3, 40_000, device="cuda")
    indptr = torch.arange(0, 8, 2, device="cuda")
    indices = torch.tensor([0, 53_688, 69_999, 1, 69_999, 0], device="cuda")
    out = tvm_sparse.nhot_lookup((indptr, indices, None), table)
    assert torch.equal(out, table[indices[0::2]] + table[indices[1::2]])
    del table, out
    torch.cuda.empty_cache()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_and_activation(dtype: str, activation: str | None) -> None:
    """Twice each, because a second call is a shorter one; with a bias between 16-byte boundaries; without blocks."""
    problem = dataclasses.replace(parse(f"{BLOCKS},dtype={dtype}"), bias=1, activation=activation or "")
    inputs = problem.generate(next(numbers), "special")
    x, data, indices, indptr, bias = map(cuda, (*inputs[:4], inputs[-1]))
    weight = tvm_sparse.BsrWeight((data, indices, indptr), columns=problem.k)
    moved = torch.empty(problem.n + 1, dtype=bias.dtype, device="cuda")[1:].copy_(bias)
    for row in (bias, bias, moved, bias):
        y = tvm_sparse.bsr_matmul(x, weight, bias=row, activation=activation)
        problem.check(inputs, problem.reference(inputs), [host(y)])
    empty = [inputs[0], inputs[1][:0], inputs[2][:0], inputs[3] * 0, *inputs[4:]]
    y = tvm_sparse.bsr_matmul(x, tuple(map(cuda, empty[1:4])), bias=bias, activation=activation)
    problem.check(empty, problem.reference(empty), [host(y)])


@pytest.mark.parametrize("structure", Softmax.structures)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [1, 61, 2051, 50257, 128256])
def test_softmax_equals_the_reference(vocab: int, dtype: str, structure: str) -> None:
    """Rows for a warp, a block, and more than a block's registers; lengths that are no multiple of a vector."""
    problem = Softmax(7, vocab, "online", dtype)
    logits = cuda(problem.generate(next(numbers), structure)[0])
    for name in ("softmax", "log_softmax", "logsumexp"):
        function = getattr(tvm_sparse, name)
        for rows in (logits, logits[:1]):
            [out] = poisoned(LogSumExp(len(rows), vocab) if name == "logsumexp" else problem.with_batch(len(rows)))
            assert function(rows, out=out) is out
            check_softmax(name, rows, out)
            check_softmax(name, rows, function(rows))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("algorithm", ["naive", "safe"])
def test_the_algorithms_of_the_paper(algorithm: str, dtype: str) -> None:
    problem = Softmax(7, 2051, algorithm, dtype)
    for structure in Softmax.structures:
        inputs = [problem.generate(next(numbers), structure)[0], 0]
        problem.check(
            inputs, problem.reference(inputs), [host(tvm_sparse.softmax(cuda(inputs[0]), algorithm=algorithm))]
        )


def test_softmax_of_misaligned_views(dispatcher: Dispatcher) -> None:
    dispatcher.launchers = {}
    flat, wide = torch.randn(7 * 2051 + 8, device="cuda"), torch.randn(7, 2052, device="cuda")
    for _ in range(2):
        for view in (flat[1 : 1 + 7 * 2051].view(7, 2051), wide[:, 1:], flat[: 7 * 2051].view(7, 2051)):
            for name in ("softmax", "log_softmax", "logsumexp"):
                check_softmax(name, view, getattr(tvm_sparse, name)(view))


@pytest.mark.alone
@pytest.mark.large
def test_softmax_of_rows_beyond_2_to_the_31_elements() -> None:
    rows, vocab = 70_000, 40_000
    if torch.cuda.mem_get_info()[0] < 15e9:
        pytest.skip("needs 15 GB of free GPU memory")
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.float16)
    some = [0, 1, 2**31 // vocab, 2**31 // vocab + 1, rows - 2, rows - 1]
    logits[some] = torch.randn(len(some), vocab, device="cuda").half()
    found = tvm_sparse.softmax(logits)
    check_softmax("softmax", logits[some], found[some])
    rest = torch.ones(rows, dtype=torch.bool, device="cuda")
    rest[some] = False
    assert (found.sum(dim=1, dtype=torch.float32)[rest] - 1).abs().max() < 1e-2
    check_softmax("logsumexp", logits[some], tvm_sparse.logsumexp(logits)[some])
    del logits, found
    torch.cuda.empty_cache()


def test_nothing_to_compute() -> None:
    values, indices = tvm_sparse.softmax_topk(torch.empty(0, 2051, device="cuda"), 5)
    assert values.shape == indices.shape == (0, 5) and values.is_cuda and indices.is_cuda
    inputs = parse(BLOCKS).generate(next(numbers))
    x, data, indices, indptr = map(cuda, inputs[:4])
    assert tvm_sparse.bsr_matmul(x[:0], (data, indices, indptr)).shape == (0, 96)
    out = torch.full((7, 96), float("nan"), device="cuda")
    tvm_sparse.bsr_matmul(x, (data[:0], indices[:0], indptr * 0), out=out)
    assert not out.any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_misaligned_views(dtype: str, dispatcher: Dispatcher) -> None:
    """Views that start between 16-byte boundaries, contiguous or not, before and after an aligned call of the shape.

    All of an array is whole vectors of 16 bytes: what memcheck says of others is in docs/faults.md.
    """
    kind = getattr(torch, dtype)
    flat = torch.randn(8 * 2051 + 8, device="cuda").to(kind)
    wide = torch.randn(8, 2052, device="cuda").to(kind)
    views = [flat[1 : 1 + 8 * 2051].view(8, 2051), wide[:, 1:], flat[: 8 * 2051].view(8, 2051)]
    assert [view.is_contiguous() for view in views] == [True, False, True]
    assert [view.data_ptr() % 16 == 0 for view in views] == [False, False, True]
    dispatcher.launchers = {}
    for view in [*views, *views]:
        check_topk(view, tvm_sparse.softmax_topk(view, 5))

    problem = parse(f"{BLOCKS},dtype={dtype}")
    inputs = problem.generate(next(numbers))
    x, data, indices, indptr = map(cuda, inputs[:4])

    def behind(tensor: Any) -> Any:
        moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape)
        return moved.copy_(tensor)

    weight = tvm_sparse.BsrWeight(tuple(map(behind, (data, indices, indptr))), columns=problem.k)
    for rows in (x, behind(x), x, behind(x)):
        check_product(problem, inputs, tvm_sparse.bsr_matmul(rows, weight))
    with pytest.raises(ValueError, match="out: expected a contiguous, writeable and aligned array"):
        tvm_sparse.bsr_matmul(x, weight, out=behind(torch.zeros(7, 96, dtype=kind, device="cuda")))


def test_a_large_vocabulary() -> None:
    logits = drawn(2, 1_000_003)
    check_topk(logits, tvm_sparse.softmax_topk(logits, 5))


@pytest.mark.alone
@pytest.mark.large
def test_rows_beyond_2_to_the_31_elements() -> None:
    """Offsets of logits must be 64-bit: the last rows begin 2.8e9 elements after the first."""
    rows, vocab = 70_000, 40_000
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    logits = torch.empty(rows, vocab, device="cuda")
    logits.zero_()
    some = [0, 1, 2**31 // vocab, 2**31 // vocab + 1, 2**32 // vocab % rows, rows - 2, rows - 1]
    logits[some] = torch.randn(len(some), vocab, device="cuda")
    values, indices = tvm_sparse.softmax_topk(logits, 5)
    check_topk(logits[some], (values[some], indices[some]))
    rest = torch.ones(rows, dtype=torch.bool, device="cuda")
    rest[some] = False
    assert (indices[rest] == torch.arange(5, device="cuda")).all()
    assert torch.allclose(values[rest], torch.tensor(1 / vocab, device="cuda"), rtol=2e-5)
    del logits, values, indices, rest
    torch.cuda.empty_cache()


@pytest.mark.allocator  # a captured graph allocates
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", ["vocab=301,k=32", "vocab=50257,k=64,bias=1", "vocab=50257,k=128"])
def test_sampled_words_are_those_of_the_reference(axes: str, dtype: str) -> None:
    """And a graph draws anew when offsets change."""
    problem = parse(f"softmax_sample/batch=9,{axes},dtype={dtype},per_row=1,seeded=1,whole=1")  # as calls have it
    for number, structure in enumerate(problem.structures):
        inputs = problem.generate(next(numbers), structure, problem.settings[number % len(problem.settings)])
        logits, *filters, seeds = map(cuda, inputs)
        options = dict(zip(("temperature", "top_k", "top_p", "min_p", "bias"), filters, strict=False))
        options |= {"seed": seeds, "max_top_k": problem.k, "best": problem.k}
        outputs = tvm_sparse.softmax_sample(logits, **options)
        problem.check(inputs, problem.reference(inputs), list(map(host, outputs)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = tvm_sparse.softmax_sample(logits, **options)
        seeds[:, 1] += 1
        inputs[-1][:, 1] += 1
        graph.replay()
        problem.check(inputs, problem.reference(inputs), list(map(host, captured)))


# ---- streams, graphs, memory ---------------------------------------------------------------------


def calls() -> dict[str, tuple[Any, Any, Any]]:
    """For each function: a static input, the call into given outputs, and the check of input and outputs."""
    problem = parse(BLOCKS)
    inputs = problem.generate(next(numbers))
    weight = tvm_sparse.BsrWeight(tuple(map(cuda, inputs[1:4])), columns=problem.k)
    lookup = parse(LOOKUP)
    *entries, _ = lookup.generate(next(numbers))
    rows = tvm_sparse.CsrRows(tuple(map(cuda, entries)), columns=lookup.vocab)
    return {
        "softmax_topk": (
            drawn(7, 2051),
            lambda logits, out: tvm_sparse.softmax_topk(logits, 5, out=out),
            lambda logits, out: check_topk(logits, out),
        ),
        "softmax": (
            drawn(7, 2051),
            lambda logits, out: tvm_sparse.softmax(logits, out=out),
            lambda logits, out: check_softmax("softmax", logits, out),
        ),
        "logsumexp": (
            drawn(7, 2051),
            lambda logits, out: tvm_sparse.logsumexp(logits, out=out),
            lambda logits, out: check_softmax("logsumexp", logits, out),
        ),
        "bsr_matmul": (
            drawn(7, problem.k),
            lambda x, out: tvm_sparse.bsr_matmul(x, weight, out=out),
            lambda x, out: check_product(problem, [host(x), *inputs[1:]], out),
        ),
        "nhot_lookup": (
            drawn(300, 136),
            lambda table, out: tvm_sparse.nhot_lookup(rows, table, out=out),
            lambda table, out: lookup.check(
                [*entries, host(table)], lookup.reference([*entries, host(table)]), [host(out)]
            ),
        ),
    }


def outputs_of(name: str) -> Any:
    found = poisoned(parse(PROBLEMS[name]))
    return found if name == "softmax_topk" else found[0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_current_stream_is_used(name: str) -> None:
    """The input is written on a side stream behind a long wait, where only work of the same stream sees it."""
    static, call, check = calls()[name]
    call(static, out := outputs_of(name))  # compiled and loaded
    fresh = torch.randn_like(static)
    stream = torch.cuda.Stream()
    for how in ("out", "new"):
        # Tens of milliseconds to seconds: under a sanitizer a call takes long. One that waits always ends behind them.
        for wait in (50_000_000, 500_000_000, 5_000_000_000):
            static.fill_(float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(wait)
                static.copy_(fresh)
                result = call(static, out if how == "out" else None)
            pending = not stream.query()
            stream.synchronize()
            if pending:
                break
        assert pending, "the call waited for the stream"
        check(fresh, result)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("how", ["out", pytest.param("new", marks=pytest.mark.allocator)])
def test_graph_capture_and_replay(name: str, how: str) -> None:
    static, call, check = calls()[name]
    out = outputs_of(name) if how == "out" else None
    call(static, out)  # a first call loads the kernel, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(static, out)
    for _ in range(3):
        static.copy_(torch.randn_like(static))
        for array in result if isinstance(result, tuple) else (result,):
            array.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        check(static, result)


@pytest.mark.allocator
@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_is_allocated_but_outputs(name: str) -> None:
    static, call, check = calls()[name]
    out = outputs_of(name)
    if name == "softmax_topk":  # a kernel of more words, which may stand in, writes arrays of its own
        tvm_sparse.warmup([TOPK])
    call(static, out)
    call(static, None)
    torch.cuda.synchronize()

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    def free_stays() -> bool:
        """Of the whole device, whose other users may come in between."""
        free = torch.cuda.mem_get_info()[0]
        for _ in range(10):
            call(static, out)
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] >= free

    before = allocations()
    assert any(free_stays() for _ in range(50))  # nothing is allocated by anyone but PyTorch,
    assert allocations() == before  # nor by PyTorch
    call(static, None)
    assert allocations() - before == (2 if name == "softmax_topk" else 1)
    check(static, out)


def test_threads_on_two_streams() -> None:
    problem = parse(BLOCKS)
    inputs = problem.generate(next(numbers))
    weight = tvm_sparse.BsrWeight(tuple(map(cuda, inputs[1:4])), columns=problem.k)
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        stream, rng = torch.cuda.Stream(), np.random.default_rng(seed)
        with torch.cuda.stream(stream):
            for _ in range(20):
                logits = cuda(rng.standard_normal((7, 2051), np.float32))
                x = rng.standard_normal((7, problem.k), np.float32)
                torch.cuda._sleep(500_000)
                top, y = tvm_sparse.softmax_topk(logits, 5), tvm_sparse.bsr_matmul(cuda(x), weight)
                stream.synchronize()
                check_topk(logits, top)
                check_product(problem, [x, *inputs[1:]], y)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (next(numbers), next(numbers))))


def test_both_devices_in_one_process() -> None:
    """CPU tensors, pinned ones too, are served by CPU kernels between calls on the GPU."""
    for logits in (torch.randn(7, 61), torch.randn(7, 61).pin_memory(), drawn(7, 61), torch.randn(7, 61)):
        outputs = tvm_sparse.softmax_topk(logits, 5)
        assert {array.device for array in outputs} == {logits.device}
        check_topk(logits, outputs)
    problem = parse("bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5")
    inputs = problem.generate(next(numbers))
    for move in (torch.from_numpy, cuda, torch.from_numpy):
        x, *weight = map(move, inputs[:4])
        check_product(problem, inputs, tvm_sparse.bsr_matmul(x, tuple(weight)))


FAILS = """
import torch
from tvm_sparse.bench.timing import time_cuda
x = torch.randn(4096, device="cuda")
found = time_cuda({"graph": lambda: x + 1, "eager": lambda: x.sum().item()}, 2)
assert {name: how for name, (how, _) in found.items()} == {"graph": "graph", "eager": "eager"}, found
x.uniform_()
"""


def test_a_process_ends_well_after_a_capture_that_failed() -> None:
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_graph_is_captured_while_another_thread_tunes(tmp_path: Path) -> None:
    """Candidates are built and measured in processes of their own: a capture here sees nothing of them."""
    gpu = machine.gpu()
    assert gpu is not None
    problem = parse("logsumexp/batch=7,vocab=2051")
    log = Log(tmp_path, gpu.arch, problem.operator)
    static, call, check = calls()["softmax_topk"]
    call(static, out := outputs_of("softmax_topk"))
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        tuned = pool.submit(session.tune, plans.make_plan(problem, gpu, 6, log, builders=1), log)
        captures = 0
        while not tuned.done() or not captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(static, out)
            for array in out:
                array.fill_(-7)
            static.copy_(torch.randn_like(static))
            graph.replay()
            torch.cuda.synchronize()
            check(static, out)
            captures += 1
            time.sleep(0.2)
        assert tuned.result().problem == problem.key and captures > 1
    assert len(log.read().trials) == 6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_in_one_process() -> None:
    """Each call runs where its input lies, on that GPU's current stream, also from a thread for each."""

    def work(index: int) -> None:
        with torch.cuda.device(index):
            for _ in range(20):
                logits = torch.randn(7, 2051, device=f"cuda:{index}")
                outputs = tvm_sparse.softmax_topk(logits, 5)
                assert {array.device.index for array in outputs} == {index}
                check_topk(logits, outputs)

    for index in range(torch.cuda.device_count()):
        work(index)
    with ThreadPoolExecutor(torch.cuda.device_count()) as pool:
        list(pool.map(work, range(torch.cuda.device_count())))
    far = torch.randn(7, 2051, device="cuda:1")  # without a change of the current device
    check_topk(far, tvm_sparse.softmax_topk(far, 5))


# ---- errors --------------------------------------------------------------------------------------


def test_devices_must_agree() -> None:
    inputs = parse(BLOCKS).generate(next(numbers))
    x, data, indices, indptr = map(torch.from_numpy, inputs[:4])
    on_gpu = tuple(array.cuda() for array in (data, indices, indptr))
    logits = torch.randn(7, 2051)
    cpu_out = torch.empty(7, 5), torch.empty(7, 5, dtype=torch.int64)
    for wrong, message in (
        (lambda: tvm_sparse.bsr_matmul(x, on_gpu), "x: expected an array on cuda:0, as the weight is, got cpu:0"),
        (lambda: tvm_sparse.bsr_matmul(x.cuda(), (data, indices, indptr)), "x: expected an array on cpu:0.*got cuda:0"),
        (
            lambda: tvm_sparse.bsr_matmul(x.cuda(), (on_gpu[0], indices, on_gpu[2])),
            "indices: .* on cuda:0.* got one on cpu:0",
        ),
        (lambda: tvm_sparse.bsr_matmul(x.cuda(), (*on_gpu[:2], indptr)), "indptr: .* on cuda:0.* got one on cpu:0"),
        (lambda: tvm_sparse.bsr_matmul(x.cuda(), on_gpu, out=torch.empty(7, 96)), "out: .* on cuda:0, got cpu:0"),
        (lambda: tvm_sparse.softmax_topk(logits.cuda(), 5, out=cpu_out), r"out \(values\): .* on cuda:0, got cpu:0"),
        (
            lambda: tvm_sparse.softmax_topk(logits, 5, out=tuple(array.cuda() for array in cpu_out)),
            r"out \(values\): .* on cpu:0, got cuda:0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("indices", lambda a: a.__setitem__(3, 6), r"indices\[3\]=6 is outside \[0, 6\)"),
        ("indices", lambda a: a.__setitem__(0, -1), r"indices\[0\]=-1 is outside"),
        ("indptr", lambda a: a.__setitem__(0, 1), "must start at 0"),
        ("indptr", lambda a: a.__setitem__(-1, 10_000), "must start at 0 and end at"),
        ("indptr", lambda a: a.__setitem__(2, 10_000), "must never fall"),
    ],
)
def test_validate_finds_what_is_wrong_on_the_gpu(name: str, spoil: Any, message: str) -> None:
    inputs = parse(BLOCKS).generate(next(numbers))
    x, *arrays = map(cuda, inputs[:4])
    prepared = tvm_sparse.BsrWeight(tuple(arrays), columns=192, validate=True)
    spoil(arrays[("data", "indices", "indptr").index(name)])
    spoil(getattr(prepared, name))
    for weight in (tuple(arrays), prepared):
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            tvm_sparse.bsr_matmul(x, weight, validate=True)
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        tvm_sparse.BsrWeight(tuple(arrays), columns=192, validate=True)


def test_validate_finds_what_is_wrong_with_rows_on_the_gpu() -> None:
    *inputs, table = map(cuda, parse(LOOKUP).generate(next(numbers)))
    for name, at, value, message in (
        ("indices", 3, 300, r"indices\[3\]=300 is outside \[0, 300\)"),
        ("indptr", 2, 10_000, "must never fall"),
        ("indptr", -1, 69, "must start at 0 and end at 70"),
    ):
        parts = [part.clone() for part in inputs]
        rows = tvm_sparse.CsrRows(tuple(parts), columns=300, validate=True)
        parts[("indptr", "indices").index(name)][at] = value
        for csr in (tuple(parts), rows):
            with pytest.raises(ValueError, match=f"{name}: .*{message}"):
                tvm_sparse.nhot_lookup(csr, table, validate=True)
    with pytest.raises(ValueError, match="csr: expected arrays on cuda:0, as the table is, got cpu:0"):
        tvm_sparse.nhot_lookup(tuple(part.cpu() for part in inputs), table)
    with pytest.raises(ValueError, match="values: expected an array on cuda:0, as indptr is, got one on cpu:0"):
        tvm_sparse.nhot_lookup((*inputs[:2], inputs[2].cpu()), table)


def test_lengths_on_the_gpu_are_checked_without_being_asked() -> None:
    """They cost no synchronisation."""
    x, data, indices, indptr = map(cuda, parse(BLOCKS).generate(next(numbers))[:4])
    with pytest.raises(ValueError, match="indices: expected .* entries"):
        tvm_sparse.bsr_matmul(x, (data, indices[:-1], indptr))
    with pytest.raises(ValueError, match="indptr: expected at least 1 entry"):
        tvm_sparse.bsr_matmul(x, (data, indices, indptr[:0]))


def test_cupy_arrays_go_in_and_come_back() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed (pip install cupy-cuda13x)")
    problem = parse(TOPK)
    inputs = problem.generate(next(numbers))
    whole = cupy.zeros(-(-inputs[0].size // 4) * 4, "float32")  # as `cuda` has them
    logits = whole[: inputs[0].size].reshape(inputs[0].shape)
    logits.set(inputs[0])
    outputs = tvm_sparse.softmax_topk(logits, 5)
    cupy.cuda.get_current_stream().synchronize()
    assert all(isinstance(one, cupy.ndarray) for one in outputs)
    problem.check([inputs[0], 1.0, 0], problem.reference([inputs[0], 1.0, 0]), [cupy.asnumpy(one) for one in outputs])


# ---- host time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_host_time_of_a_call(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: the aim is below 8 us. What is asserted is that the calls timed were right."""
    static, call, check = calls()[name]
    times = {}
    for how, out in (("out", outputs_of(name)), ("new", None)):
        for _ in range(50):
            call(static, out)
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):  # fewer than the launch queue holds
                result = call(static, out)
            best = min(best, (time.perf_counter() - start) / 50)
        times[how] = best * 1e6
        check(static, result)
    with capsys.disabled():
        print(f"\n{name}: host time of a call {times['new']:.1f} us, with out= {times['out']:.1f} us")


def test_what_cannot_be_captured_is_timed_without_a_graph() -> None:
    """And leaves nothing behind: PyTorch draws random numbers as before."""
    x = torch.zeros(8, device="cuda")

    def waits() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    found = time_cuda({"waits": waits, "adds": lambda: x.add_(1)}, rounds=2)
    assert {name: how for name, (how, _) in found.items()} == {"waits": "eager", "adds": "graph"}
    assert torch.randn(3, device="cuda").isfinite().all()


def test_rotated_inputs_are_timed_and_compared() -> None:
    problem = parse("bsr_matmul/m=4,k=4096,n=4096,block=16,sparsity=0.75")
    gpu = machine.gpu()
    assert gpu is not None
    hot, cold = (compare(problem, gpu, peers=(), host=False, rotated=rotated) for rotated in (False, True))
    assert hot.ours.correct and cold.ours.correct and cold.rotated and not hot.rotated
    assert cold.ours.median and hot.ours.median
