"""`configure(batch_invariant=True)`: the bits of a row's result depend on nothing but the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import REALISTIC, SM80, SM90, calls_run, needs_cuda, own_on_host, run_emulated, thorough, use_dispatcher

torch = pytest.importorskip("torch")

import forms  # noqa: E402
from forms import CASES, SIGNATURES  # noqa: E402

import tvm_sparse  # noqa: E402
from tvm_sparse.core import machine, spaces  # noqa: E402
from tvm_sparse.core.problem import Problem, ProblemError  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.operators.bsr_matmul import call as bsr_call  # noqa: E402
from tvm_sparse.operators.head_topk import call as head_call  # noqa: E402
from tvm_sparse.runtime import whole_vectors  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

# Small problems of each public function, and large ones, in 16 bits, of those that serve a model: without the axes that
# count rows.
KEYS: dict[str, str] = {
    "softmax": "softmax/batch=1,vocab=701", "log_softmax": "softmax/batch=1,vocab=701",
    "logsumexp": "logsumexp/batch=1,vocab=701", "softmax_topk": "softmax_topk/batch=1,vocab=701,k=8,bias=1,ids=8",
    "softmax_sample": "softmax_sample/batch=1,vocab=701,k=128,per_row=1",
    "head_topk": "head_topk/batch=1,vocab=701,hidden=72,k=8,dtype=bfloat16,bias=1,ids=8",
    "candidate_topk": "candidate_topk/lists=1,beam=1,vocab=301,hidden=72,m=60,k=8",
    "candidate_logits": "candidate_logits/lists=1,beam=1,vocab=301,hidden=72,m=60",
    "bsr_matmul": "bsr_matmul/m=1,k=128,n=96,block=16,sparsity=0.5,bias=1",
    "nhot_lookup": "nhot_lookup/rows=1,vocab=50,width=33,nonzeros=5,weighted=1",
    "csr_linear": "csr_linear/m=1,k=96,n=40,sparsity=0.5",
    "wta_hash": "wta_hash/batch=1,hidden=40,k=8,units=2,bands=60",
    "lsh_lookup": "lsh_lookup/lists=1,beam=3,vocab=700,bands=60,bits=6",
    "lsh_candidates": "lsh_candidates/lists=1,beam=3,hidden=40,vocab=700,k=8,units=2,bands=60,capacity=50",
    "lsh_topk": "lsh_topk/lists=1,beam=3,hidden=40,vocab=700,frequent=50,n=8,k=8,units=2,bands=60",
    "sparse_recurrent": "sparse_recurrent/steps=4,batch=1,hidden=40,nonzeros=10,cell=lstm",
    "block_recurrent": "block_recurrent/steps=4,batch=1,hidden=32,nonzeros=4,cell=gru",
    "edit_logits": "edit_logits/batch=1,vocab=61,words=9,penalties=1",
    "compaction": "compaction/lists=1,vocab=700,capacity=50",
}  # fmt: skip
LARGE: dict[str, str] = {
    "nhot_lookup": "nhot_lookup/rows=1,vocab=50000,width=512,nonzeros=60,weighted=1,dtype=float16",
    "softmax": "softmax/batch=1,vocab=128256,dtype=bfloat16",
    "logsumexp": "logsumexp/batch=1,vocab=128256,dtype=bfloat16",
    "softmax_topk": "softmax_topk/batch=1,vocab=128256,k=20,dtype=bfloat16",
    "softmax_sample": "softmax_sample/batch=1,vocab=128256,k=64,per_row=1,dtype=bfloat16",
    "head_topk": "head_topk/batch=1,vocab=32000,hidden=1024,k=20,dtype=bfloat16",
    "bsr_matmul": "bsr_matmul/m=1,k=1024,n=1024,block=64,sparsity=0.8,dtype=bfloat16",
    "candidate_topk": "candidate_topk/lists=1,beam=1,vocab=32000,hidden=1024,m=2000,k=12,dtype=bfloat16",
}
BATCHES = (1, 5, 24)
MANY = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 384, 511, 512)


def rows_axis(problem: Problem) -> str:
    """The axis that counts a caller's rows."""
    return problem.row_axes[0] if problem.row_axes else problem.batch_axis


def in_batch(problem: Problem, rows: int) -> Problem:
    return dataclasses.replace(problem, **{rows_axis(problem): rows})


def batches_of(problem: Problem) -> tuple[int, ...]:
    """Few where each needs a program of its own."""
    return BATCHES[::2] if problem.row_axes else BATCHES


def of_rows(problem: Problem, inputs: list[Any], rows: np.ndarray) -> tuple[Problem, list[Any]]:
    """The problem of some rows of another one, and its inputs."""
    if not problem.row_axes:
        return problem.with_batch(len(rows)), problem.sample(inputs, rows)
    axis = problem.row_axes[0]
    found = [
        np.take(array, rows, argument.shape.index(axis)) if axis in argument.shape else array
        for argument, array in zip(problem.kernel_inputs, inputs, strict=True)
    ]
    return dataclasses.replace(problem, **{axis: len(rows)}), found


def call(name: str, problem: Problem, inputs: list[Any], device: str) -> list[tuple[str, np.ndarray]]:
    """The results of a public function, with the axis of rows first."""
    names = [argument.name for argument in problem.kernel_inputs]
    given = CASES[name].arguments(problem, {**dict(zip(names, inputs, strict=True)), **CASES[name].settings})
    wanted = {argument.name for argument in SIGNATURES[name].arguments}
    if name == "head_topk":
        given["normaliser"] = True
    passed = {key: forms.placed(value, "torch", device, "", problem) for key, value in given.items() if key in wanted}
    found = getattr(tvm_sparse, name)(**passed)
    found = found if isinstance(found, tuple) else (found,)
    axis = rows_axis(problem)
    result = []
    for output, array in zip(problem.kernel_outputs, found, strict=False):
        array = array.float().cpu().numpy() if array.is_floating_point() else array.cpu().numpy()
        place = output.shape.index(axis) if axis in output.shape and len(output.shape) == array.ndim else 0
        result.append((output.name, np.moveaxis(array, place, 0)))
    return result


def check(name: str, key: str, batches: tuple[int, ...], device: str) -> None:
    problem = parse(key)
    whole = in_batch(problem, max(batches))
    inputs = whole.generate(5)
    expected = call(name, whole, inputs, device)
    assert expected[0][1].size
    rng = np.random.default_rng(3)
    for batch in batches:
        rows = np.sort(rng.permutation(max(batches))[:batch])
        found = call(name, *of_rows(whole, inputs, rows), device)
        for (output, have), (_, want) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(have, want[rows], f"{name}: {output} of {batch} rows", strict=True)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run((), tmp_path_factory.mktemp("kernels")) as found:
        found.configure(batch_invariant=True)
        problems = [in_batch(parse(key), rows) for key in KEYS.values() for rows in batches_of(parse(key))]
        found.warmup([problem.as_called() for problem in problems], machine.cpu(), builders=2)
        yield found


def test_every_public_function_with_rows_has_a_problem() -> None:
    assert set(KEYS) == set(CASES)


@pytest.mark.parametrize("name", KEYS)
def test_bits_of_a_row_do_not_depend_on_its_batch(name: str, own: Dispatcher) -> None:
    check(name, KEYS[name], batches_of(parse(KEYS[name])), "cpu")


EMULATED = ("softmax_topk", "softmax_sample", "nhot_lookup", "bsr_matmul")
MORE_EMULATED = (
    "softmax",
    "logsumexp",
    "head_topk",
    "candidate_topk",
    "wta_hash",
    "lsh_candidates",
    "sparse_recurrent",
)


@needs_cuda
@pytest.mark.parametrize("name", [*EMULATED, *map(thorough, MORE_EMULATED)])
def test_bits_of_a_row_on_an_emulated_gpu(name: str) -> None:
    """Rows at other places of a batch, of the kernel that an H200 runs."""
    key = KEYS[name] if name == "head_topk" else KEYS[name].replace("vocab=701", "vocab=704")  # as calls copy rows
    whole = in_batch(parse(key), 6)
    inputs = whole.generate(5)
    results = []
    for rows in (np.arange(6), np.array([1, 2, 5]), np.array([4])):
        problem, given = of_rows(whole, inputs, rows)
        compiled_for, candidate = spaces.of_any_batch(problem, SM90)
        program = spaces.find(candidate.template, problem.operator).build(compiled_for, candidate.values)
        results.append((rows, run_emulated(program, problem, given, own_on_host(program, problem))))
    for rows, found in results[1:]:
        for output, have, want in zip(whole.kernel_outputs, found, results[0][1], strict=True):
            place = output.shape.index(rows_axis(whole)) if rows_axis(whole) in output.shape else 0
            np.testing.assert_array_equal(have, np.take(want, rows, place), output.name)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize(("dtype", "vocab"), [("float32", 61), ("float16", 61), ("float16", 64)])
def test_copies_in_whole_vectors_have_the_same_results(
    library: str, dtype: str, vocab: int, own: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made where a row's place decides how kernels on a GPU group its entries; masked words, NaN and words out
    of range are as before."""
    rng = np.random.default_rng()
    logits = rng.standard_normal((6, vocab)).astype(dtype)
    logits[1, 5:] = -np.inf
    logits[2, 3] = np.nan
    allowed = rng.integers(-(2**31), 2**31, (6, -(-vocab // 32))).astype(np.int32)
    allowed[:, 0] |= 16
    arrays = {
        "logits": logits,
        "bias": rng.standard_normal(vocab).astype(np.float32),
        "allowed": allowed,
        "ids": rng.integers(-2, vocab + 5, (6, 7)),
        "uniforms": rng.random(6, np.float32),
        "top_k": rng.integers(1, 40, 6).astype(np.int32),
    }
    put = {name: forms.placed(one, library, "cpu", "", None) for name, one in arrays.items()}
    calls: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
        ("softmax", {}, ()),
        ("log_softmax", {"dtype": "float32"}, ()),
        ("logsumexp", {}, ()),
        ("softmax_topk", {"k": 40, "log": True}, ()),
        ("softmax_topk", {"k": 40, "log": True}, ("ids", "bias", "allowed")),
        ("softmax_sample", {"best": 9}, ("uniforms", "top_k", "bias", "allowed")),
        ("softmax_sample", {"top_k": vocab}, ("uniforms",)),
    )
    copied, make = [], whole_vectors.copies

    def copies(*given: Any) -> Any:
        copied.append(given)
        return make(*given)

    def results() -> list[Any]:
        found = []
        for name, options, beside in calls:
            result = getattr(tvm_sparse, name)(put["logits"], **options, **{other: put[other] for other in beside})
            found += result if isinstance(result, tuple) else [result]
        return found

    wanted = results()
    own.configure(batch_invariant=True)  # so that no call repeats an earlier one
    monkeypatch.setattr(whole_vectors, "wanted", whole_vectors.ends_within_a_vector)
    monkeypatch.setattr(whole_vectors, "copies", copies)
    found = results()
    own.configure(batch_invariant=True)
    assert len(copied) == (len(calls) if vocab == 61 else 0)
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-3 if have.dtype == put["logits"].dtype else 1e-5)


ON_GPU = [*((name, key) for name, key in KEYS.items()), *((f"large {name}", key) for name, key in LARGE.items())]


def many_of(problem: Problem) -> tuple[int, ...]:
    """Few where each needs a program of its own."""
    return (1, 5, 64, 200) if problem.row_axes else MANY


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[None]:
    tvm_sparse.configure(batch_invariant=True)
    yield
    tvm_sparse.configure(batch_invariant=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "key"), ON_GPU, ids=[name for name, _ in ON_GPU])
def test_bits_of_a_row_on_a_gpu(name: str, key: str, on_gpu: None) -> None:
    problem = parse(key)
    tvm_sparse.warmup([in_batch(problem, rows).as_called() for rows in many_of(problem)], target="cuda")
    check(name.removeprefix("large "), key, many_of(problem), "cuda")


@pytest.mark.parametrize("where", [SM80, SM90, machine.cpu()], ids=str)
def test_one_kernel_serves_all_batches(where: machine.Machine) -> None:
    """Whatever records ship, and whatever libraries are there; and it is a point of its template's space."""
    own = Dispatcher()
    own.configure(batch_invariant=True)
    for key in (*REALISTIC, *KEYS.values(), *LARGE.values()):
        problem, found = key if isinstance(key, Problem) else parse(key), set()
        for rows in (1, 8, 33, 128, 512):
            try:
                asked = in_batch(problem, rows)
            except ProblemError:
                continue
            choice = own.choice(asked, where)
            assert not spaces.find(choice.candidate.template, problem.operator).cooperative
            refusal = spaces.refusal(choice.candidate, choice.compiled_for, where)
            assert refusal is None, (asked.key, refusal)
            compiled_for = dataclasses.replace(choice.compiled_for, **dict.fromkeys(problem.row_axes, 1))
            found.add((choice.candidate, compiled_for))
        assert len(found) == 1, problem.key


def test_neither_records_nor_other_ways_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the very problem decides without, and has no effect with it; products of PyTorch run without only."""
    own = Dispatcher()
    use_dispatcher(monkeypatch, own)
    tuned = parse("softmax_topk/batch=10,vocab=25000,k=5,dtype=float32")
    head = parse("head_topk/batch=2000,vocab=128256,hidden=4096,k=20,dtype=bfloat16")
    blocks = parse("bsr_matmul/m=4096,k=4096,n=4096,block=16,sparsity=0.5,dtype=bfloat16")

    def ways() -> tuple[str, ...]:
        return head_call.likely_way(head, SM90), bsr_call.likely_way(blocks, SM90).way

    assert own.explain(tuned, SM90).how == "exact" and ways() == ("product", "dense")
    own.configure(policy="exact", batch_invariant=True)
    found = own.explain(tuned, SM90)
    assert found.how == "fallback" and found.tune is None and "whatever the batch and the records" in found.why
    assert ways() == ("kernel", "kernel") and own.way(head, SM90) is None
    assert "must not depend on the batch" in head_call.told_way(head, SM90)
    assert own.serving(tuned, dataclasses.replace(tuned, k=8), SM90) == tuned
    own.configure(policy="any", batch_invariant=False)
    assert own.explain(tuned, SM90).how == "exact" and ways() == ("product", "dense")


def test_configure_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dispatcher(monkeypatch, dispatcher := Dispatcher())
    assert not dispatcher.batch_invariant
    launchers = dispatcher.launchers
    tvm_sparse.configure(batch_invariant=True)
    assert dispatcher.batch_invariant and dispatcher.launchers is not launchers
    tvm_sparse.configure(compile=True)  # what is not given stays
    assert dispatcher.batch_invariant
    tvm_sparse.configure(batch_invariant=False)
    assert not dispatcher.batch_invariant
