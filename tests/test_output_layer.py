"""The output layer's public calls: `head_topk`, `candidate_topk`, `candidate_logits`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases import SM90

import tvm_sparse
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import ProblemError, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.head_topk import call as head_call
from tvm_sparse.operators.head_topk import product
from tvm_sparse.operators.head_topk.call import KERNEL, PRODUCT

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.drawn

HEADS = (
    "head_topk/batch=5,vocab=301,hidden=40,k=7",
    "head_topk/batch=3,vocab=97,hidden=35,k=97,dtype=float16,bias=1",
    "head_topk/batch=2,vocab=211,hidden=64,k=3,dtype=bfloat16,bias=1,ids=4",
)
LISTS = (
    "candidate_topk/lists=1,beam=5,vocab=301,hidden=40,m=60,k=7",
    "candidate_topk/lists=4,beam=1,vocab=97,hidden=35,m=30,k=5,dtype=float16,bias=1",
    "candidate_topk/lists=2,beam=3,vocab=240,hidden=64,m=9,k=12,dtype=bfloat16,block=8",
)
PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def there(array: Any, place: str) -> Any:
    """A torch tensor of an array, bfloat16 included."""
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.astype(np.float32), device=place).bfloat16()
    return torch.tensor(array, device=place)


def host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("structure", ["random", "ties", "special", "masked"])
@pytest.mark.parametrize("key", HEADS)
def test_head_equals_the_reference(key: str, structure: str, place: str) -> None:
    problem = parse(key)
    for seed, settings in enumerate(problem.settings):
        inputs = problem.generate(seed, structure, settings)
        states, words, scale, log, constant, *_ = inputs
        bias, ids = problem.extras(inputs)
        given = {
            "bias": there(bias, place) if problem.bias else None,
            "ids": there(ids, place) if problem.ids else None,
        }
        found = tvm_sparse.head_topk(
            there(states, place), there(words, place), problem.k, log=bool(log), temperature=1 / scale,
            normaliser=True, constant=bool(constant), **given,
        )  # fmt: skip
        problem.check(inputs, problem.reference(inputs), [host(array) for array in found])
        fewer = tvm_sparse.head_topk(
            there(states, place), there(words, place), problem.k, log=bool(log), temperature=1 / scale, **given
        )
        # On a GPU values without a normaliser may come from another kernel, whose sums have another order.
        for array, same in zip((*found[:2], *found[3:]), fewer, strict=True):
            np.testing.assert_allclose(host(array), host(same), rtol=4e-6 if place == "cuda" else 0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("structure", ["random", "ties", "few", "special"])
@pytest.mark.parametrize("key", LISTS)
def test_candidates_equal_the_reference(key: str, structure: str, place: str) -> None:
    problem = parse(key)
    for seed, settings in enumerate(problem.settings):
        inputs = problem.generate(seed, structure, settings)
        states, words, candidates, counts, scale, log, *bias = inputs
        found = tvm_sparse.candidate_topk(
            there(states.reshape(-1, problem.hidden), place), there(words, place), there(candidates, place), problem.k,
            counts=there(counts, place), block=problem.block, log=bool(log), temperature=1 / scale,
            bias=there(bias[0], place) if bias else None, normaliser=True,
        )  # fmt: skip
        shaped = [host(array).reshape(problem.lists, problem.beam, *array.shape[1:]) for array in found]
        problem.check(inputs, problem.reference(inputs), shaped)


@pytest.mark.parametrize("place", PLACES)
def test_candidates_in_their_three_forms_agree(place: str) -> None:
    rng = np.random.default_rng()
    states, words = rng.standard_normal((4, 24), np.float32), rng.standard_normal((64, 24), np.float32)
    union = np.arange(0, 64, 3, dtype=np.int32)
    one = tvm_sparse.candidate_topk(there(states, place), there(words, place), there(union, place), 5)
    each = tvm_sparse.candidate_topk(there(states, place), there(words, place), there(np.tile(union, (4, 1)), place), 5)
    pairs = tvm_sparse.candidate_topk(
        there(states, place), there(words, place), there(np.tile(union, (2, 1)), place), 5
    )
    for found in (each, pairs):
        np.testing.assert_array_equal(host(found[1]), host(one[1]))
        np.testing.assert_allclose(host(found[0]), host(one[0]), rtol=1e-5)
    blocks = np.array([1, 4, 7], np.int32)
    rows = (blocks[:, None] * 8 + np.arange(8, dtype=np.int32)).reshape(-1)
    by_block = tvm_sparse.candidate_topk(there(states, place), there(words, place), there(blocks, place), 6, block=8)
    by_word = tvm_sparse.candidate_topk(there(states, place), there(words, place), there(rows, place), 6)
    np.testing.assert_array_equal(host(by_block[1]), host(by_word[1]))


@pytest.mark.parametrize("place", PLACES)
def test_all_words_as_candidates_are_the_exact_head(place: str) -> None:
    rng = np.random.default_rng()
    states, words = (there(rng.standard_normal(s, np.float32), place) for s in ((3, 40), (150, 40)))
    every = there(np.arange(150, dtype=np.int32), place)
    some, all_words = tvm_sparse.candidate_topk(states, words, every, 9), tvm_sparse.head_topk(states, words, 9)
    np.testing.assert_array_equal(host(some[1]), host(all_words[1]))
    np.testing.assert_allclose(host(some[0]), host(all_words[0]), rtol=1e-5)
    logits = host(tvm_sparse.candidate_logits(states, words, every))
    np.testing.assert_allclose(logits, host(states @ words.T), rtol=1e-4, atol=1e-4)


def test_logits_beyond_the_count_are_minus_infinity() -> None:
    rng = np.random.default_rng()
    states, words = rng.standard_normal((2, 8), np.float32), rng.standard_normal((30, 8), np.float32)
    bias = rng.standard_normal(30, np.float32)
    candidates, out = np.array([[3, 29, 7], [5, 0, -1]], np.int32), np.empty((2, 3), np.float32)
    found = tvm_sparse.candidate_logits(
        states, words, candidates, counts=np.array([3, 2], np.int32), bias=bias, out=out
    )
    assert found is out
    expected = np.einsum("rh,rmh->rm", states, words[candidates]) + bias[candidates]
    expected[1, 2] = -np.inf
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_stays_in_its_row(place: str) -> None:
    rng = np.random.default_rng()
    states, words = rng.standard_normal((3, 16), np.float32), rng.standard_normal((60, 16), np.float32)
    whole = tvm_sparse.head_topk(there(states, place), there(words, place), 4)
    states[1, 5] = np.nan
    values, indices = map(host, tvm_sparse.head_topk(there(states, place), there(words, place), 4))
    assert np.isnan(values[1]).all()
    np.testing.assert_array_equal(indices[[0, 2]], host(whole[1])[[0, 2]])
    np.testing.assert_array_equal(values[[0, 2]], host(whole[0])[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 17, 70])
def test_many_rows_on_a_gpu(rows: int) -> None:
    """On either side of the number from which the framework makes the product; its logits, and the bias, end at whole
    vectors of 16 bytes, of which memcheck has copies read all."""
    generator = torch.Generator("cuda").manual_seed(rows)
    states = torch.randn(rows, 64, device="cuda", generator=generator)
    words, bias = (torch.randn(s, device="cuda", generator=generator) for s in ((5004, 64), (5004,)))
    logits = states.double() @ words.double().T + bias
    wanted = torch.topk(torch.log_softmax(logits / 0.7, -1), 6)
    values, indices, normaliser = tvm_sparse.head_topk(
        states, words, 6, log=True, temperature=0.7, bias=bias, normaliser=True
    )
    torch.testing.assert_close(values.double(), wanted.values, rtol=1e-4, atol=1e-3)
    assert (indices == wanted.indices).float().mean() > 0.99
    torch.testing.assert_close(normaliser.double(), torch.logsumexp(logits / 0.7, -1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("way", [KERNEL, PRODUCT])
def test_a_call_takes_the_way_that_it_is_told(
    way: str, rounded: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that repeat, too; and arrays that are no torch tensors know one way only."""
    problem = parse("head_topk/batch=3,vocab=500,hidden=48,k=5,dtype=bfloat16,bias=1,ids=2")
    where, products = machine.resolve(place), []
    name = "rounded_scores" if rounded else "all_scores"
    multiply = getattr(head_call, name)
    monkeypatch.setattr(head_call, name, lambda *args: products.append(1) or multiply(*args))
    inputs = problem.generate(0)
    bias, ids = (there(one, place) for one in problem.extras(inputs))
    states, words = (there(one, place) for one in inputs[:2])
    logits = states.double() @ words.double().T + bias
    expected = torch.topk(torch.log_softmax(logits, -1), 5).values
    options = {"log": True, "ids": ids, "normaliser": True, "rounded": rounded}
    off = 0.05 if rounded and way == PRODUCT else 1e-4
    with head_call.dispatcher.taking(problem, where, way):
        for count in (1, 2):
            found = tvm_sparse.head_topk(states, words, 5, bias=bias, **options)
            torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=off)
            torch.testing.assert_close(found[2].double(), torch.logsumexp(logits, -1), rtol=0, atol=off)
            assert len(products) == (count if way == PRODUCT else 0)
        nothing = tvm_sparse.head_topk(states, words, 5, bias=torch.full_like(bias, -torch.inf), **options)
        assert nothing[0].isnan().all() and nothing[2].isneginf().all()
        plain = dataclasses.replace(problem, bias=0, ids=0, dtype="float32")
        with head_call.dispatcher.taking(plain, where, way):
            tvm_sparse.head_topk(host(states.float()), host(words.float()), 5, rounded=rounded)
        assert len(products) == (3 if way == PRODUCT else 0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("structure", ["random", "ties", "special", "masked"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scores_of_the_product_are_exact(dtype: str, structure: str, place: str) -> None:
    """Within the tolerance of kernels, whose sums are float32; far beyond what float16 holds, too."""
    problem = parse(f"head_topk/batch=5,vocab=301,hidden=64,k=7,dtype={dtype},bias=1,ids=3")
    with head_call.dispatcher.taking(problem, machine.resolve(place), PRODUCT):
        for seed, settings in enumerate(problem.settings):
            inputs = problem.generate(seed, structure, settings)
            states, words, scale, log, constant, bias, ids = (there(one, place) for one in inputs)
            found = tvm_sparse.head_topk(
                states, words, 7, log=bool(log), temperature=1 / scale, bias=bias, ids=ids, normaliser=True,
                constant=bool(constant),
            )  # fmt: skip
            problem.check(inputs, problem.reference(inputs), [host(array) for array in found])
        large = [torch.full(shape, 200.0, dtype=getattr(torch, dtype), device=place) for shape in ((5, 64), (301, 64))]
        values, indices, normaliser, _ = tvm_sparse.head_topk(
            *large, 7, bias=torch.zeros_like(bias), ids=ids, normaliser=True
        )
        assert (normaliser > 65_504).all() and torch.equal(indices[0].cpu(), torch.arange(7))
        torch.testing.assert_close(values, torch.full_like(values, 1 / 301), rtol=1e-5, atol=0)


@pytest.mark.parametrize("converted", [1 << 30, 4 * 64 * 50])
def test_without_float32_results_of_16_bit_products_parts_of_the_embedding_are_converted(
    converted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "CONVERTED_BYTES", converted)
    states, words = torch.randn(5, 64).bfloat16(), torch.randn(301, 64).bfloat16()
    found = product.float_scores(states, words)
    torch.testing.assert_close(found.double(), states.double() @ words.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab", [1000, 151_936, 256_001, 100_000_000])
def test_scores_of_the_rows_at_once_are_within_their_bytes(vocab: int, device: str) -> None:
    rows = product.rows_at_once(vocab, 64, device)
    assert rows * vocab * 4 <= product.SCORE_BYTES[device] or rows == 1
    assert rows < product.TILE or rows % product.TILE == 0


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("way", [KERNEL, PRODUCT])
def test_rows_in_chunks_are_those_of_one_call(way: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk has more rows than `rows_at_once`, by the kernel or by the product."""
    problem, held = parse("head_topk/batch=50,vocab=61,hidden=16,k=5,dtype=float32,bias=1,ids=3"), []
    inputs = problem.generate(3)
    states, words, _, _, _, bias, ids = (there(one, "cpu") if library == "torch" else one for one in inputs)
    options = {"bias": bias, "ids": ids, "normaliser": True}
    whole = tvm_sparse.head_topk(states, words, 5, **options)
    monkeypatch.setitem(product.SCORE_BYTES, "cpu", 4 * 61 * 20)
    monkeypatch.setattr(head_call, "way", lambda axes, known: way)
    for name in ("launch", "run"):
        call = getattr(head_call, name)

        def counted(*args: Any, call: Any = call, place: int = ("launch", "run").index(name), **named: Any) -> None:
            held.append(args[5 - place][0].shape[0])
            call(*args, **named)

        monkeypatch.setattr(head_call, name, counted)
    head_call.dispatcher.launchers = {}
    for _ in range(2):
        chunked = tvm_sparse.head_topk(states, words, 5, **options)
        for have, want in zip(chunked, whole, strict=True):
            np.testing.assert_allclose(host(have), host(want), rtol=1e-5)
    head_call.dispatcher.launchers = {}  # whose launchers hold the product
    assert held and max(held) == 16 and (library == "torch" or len(held) == 8)


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [0, 4])
def test_a_long_prompt_needs_bounded_memory(ids: int) -> None:
    """8,192 rows of 151,936 words: k best, ids and normaliser with at most 256 MB beside the results."""
    states = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
    words = torch.randn(151_936, 64, device="cuda", dtype=torch.bfloat16)
    given = torch.randint(151_936, (8192, ids), device="cuda") if ids else None
    for _ in range(2):
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = tvm_sparse.head_topk(states, words, 8, log=True, ids=given, normaliser=True)
        results = sum(one.nbytes for one in found)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before - results <= 256_000_000
        left = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert free - left - results <= 256_000_000  # of a call that has loaded its kernels before
    rows = torch.tensor([0, 383, 384, 8191], device="cuda")
    logits = states[rows].double() @ words.double().T
    torch.testing.assert_close(found[2][rows].double(), logits.logsumexp(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_the_kernel_is_the_likely_way_where_it_reads_words_once(arch: str, dtype: str) -> None:
    """Its tile has all rows, whose hidden states a thread block has room for, or a part of a few more."""
    where = machine.resolve(arch)
    for kilobytes, batch in itertools.product((6, 8, 9, 10, 12, 13, 16, 32, 36), (1, 8, 9, 16, 17, 64, 128, 129)):
        axes = f"hidden={kilobytes * 1024 // numpy_dtype(dtype).itemsize},k=20,dtype={dtype}"
        problem = parse(f"head_topk/batch={batch},vocab=128256,{axes}")
        chosen = spaces.fallback(problem, where)
        if launch := spaces.find(chosen.template).launch:
            assert launch(problem, chosen.values).dynamic_shared_bytes <= where.block_shared_bytes
        most = 128 if chosen.template == "head_warpgroups" else 16
        once = batch <= most and chosen.values.get("tile_m", 0) >= batch
        assert head_call.likely_way(problem, where) == (KERNEL if once else PRODUCT), problem.key
    for change in ({"hidden": 1001}, {"k": 257}):
        problem = dataclasses.replace(parse(f"head_topk/batch=1,vocab=50257,hidden=1024,k=256,dtype={dtype}"), **change)
        assert spaces.fallback(problem, where).template == "head_dots"
        assert head_call.likely_way(problem, where) == PRODUCT
    assert head_call.likely_way(problem, machine.resolve("cpu")) == KERNEL


@pytest.mark.parametrize(
    ("axes", "rows"),
    [("vocab=32000,hidden=5120", 48), ("vocab=262144,hidden=5376", 48), ("vocab=64000,hidden=6864", 48),
     ("vocab=6000,hidden=5376", 0), ("vocab=129280,hidden=7168", 48), ("vocab=128256,hidden=8192", 48),
     ("vocab=128256,hidden=8208", 0)],
)  # fmt: skip
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_eight_bits_have_a_kernel_up_to_some_rows_and_columns(stored: str, axes: str, rows: int) -> None:
    for batch, way in ((max(rows, 1), KERNEL if rows else PRODUCT), (rows + 1, PRODUCT)):
        problem = parse(f"head_topk/batch={batch},k=20,dtype=bfloat16,stored={stored},{axes}")
        assert head_call.likely_way(problem, SM90) == way
        assert way == PRODUCT or spaces.fallback(problem, SM90).template in ("head_rings", "head_warp_rings")
    problem = parse(f"head_topk/batch=1,k=20,dtype=bfloat16,stored={stored},vocab=262144,hidden=5376")
    assert head_call.likely_way(problem, machine.resolve("sm_120")) == PRODUCT


MOST_ROWS = {
    "vocab=32000,hidden=1024": 64,
    "vocab=65536,hidden=1024": 128,
    "vocab=65536,hidden=1024,ids=2": 32,
    "vocab=65536,hidden=1000": 16,
    "vocab=50257,hidden=1000,ids=2": 512,
}


@pytest.mark.parametrize("axes", MOST_ROWS)
def test_rows_up_to_which_products_of_warpgroups_are_the_likely_way(axes: str) -> None:
    for rows, way in ((MOST_ROWS[axes], KERNEL), (MOST_ROWS[axes] + 1, PRODUCT)):
        assert head_call.likely_way(parse(f"head_topk/batch={rows},k=20,dtype=bfloat16,{axes}"), SM90) == way


STATES, WORDS = np.zeros((4, 16), np.float32), np.zeros((50, 16), np.float32)
BAD_HEADS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"hidden": STATES[0]}, ValueError, "hidden: expected 2 dimensions"),
    "width": ({"embedding": np.zeros((50, 15), np.float32)}, ValueError, "embedding: expected shape"),
    "dtype": ({"embedding": WORDS.astype(np.float16)}, ValueError, "embedding: .*float32, got"),
    "integers": ({"hidden": STATES.astype(np.int32)}, ValueError, "hidden: expected dtype"),
    "no array": ({"embedding": [[1.0]]}, TypeError, "embedding: expected a torch tensor"),
    "k": ({"k": 51}, ValueError, r"k: expected 1 <= k <= vocab \(50\), got 51"),
    "k of a kind": ({"k": 2.5}, TypeError, "k: expected an integer"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature: expected a finite number above 0"),
    "bias": ({"bias": np.zeros(49, np.float32)}, ValueError, r"bias: expected shape \(50,\)"),
    "ids": ({"ids": np.zeros((4, 2), np.int16)}, ValueError, "ids: .*int64"),
    "out": ({"out": (np.zeros((4, 3), np.float32),)}, ValueError, "out: expected 2 arrays"),
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_head_names_what_is_wrong(case: str) -> None:
    changed, error, message = BAD_HEADS[case]
    arguments = {"hidden": STATES, "embedding": WORDS, "k": 3, **changed}
    with pytest.raises(error, match=message):
        tvm_sparse.head_topk(**arguments)


def test_a_gradient_is_refused() -> None:
    words = torch.zeros(50, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="embedding: requires a gradient"):
        tvm_sparse.head_topk(torch.zeros(4, 16), words, 3)


LIST = np.array([0, 7, 49], np.int32)
BAD_LISTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "above": ({"candidates": np.array([0, 50, 1], np.int32)}, ValueError, r"expected words in \[0, 50\), got 50 at"),
    "below": ({"candidates": np.array([-1, 5, 1], np.int32)}, ValueError, "got -1 at"),
    "beyond the blocks": ({"candidates": np.array([10], np.int32), "block": 5}, ValueError, r"in \[0, 10\), got 10"),
    "block": ({"block": 7}, ValueError, r"block: expected a divisor of vocab \(50\), got 7"),
    "dtype": ({"candidates": LIST.astype(np.int16)}, ValueError, "candidates: .*int32 or int64, got .*int16"),
    "lists": ({"candidates": np.tile(LIST, (3, 1))}, ValueError, "divides the 4 rows of hidden, got 3 lists"),
    "empty": ({"candidates": LIST[:0]}, ValueError, "candidates: expected at least one"),
    "n": ({"n": 4}, ValueError, "n: expected 1 <= n <= the 3 words of a list, got 4"),
    "counts": ({"counts": np.zeros(2, np.int32)}, ValueError, r"counts: expected shape \(1,\)"),
    "out": ({"out": (np.zeros((4, 2), np.float64), None)}, ValueError, "out"),
}


@pytest.mark.parametrize("case", BAD_LISTS)
def test_candidates_name_what_is_wrong(case: str) -> None:
    changed, error, message = BAD_LISTS[case]
    arguments = {"hidden": STATES, "embedding": WORDS, "candidates": LIST, "n": 2, **changed}
    with pytest.raises(error, match=message):
        tvm_sparse.candidate_topk(**arguments)


@pytest.mark.gpu
def test_candidates_on_a_gpu_are_looked_at_on_request() -> None:
    states, words = torch.zeros(4, 16, device="cuda"), torch.zeros(50, 16, device="cuda")
    bad = torch.tensor([0, 50], dtype=torch.int32, device="cuda")
    tvm_sparse.candidate_topk(states, words, bad, 1)  # unlooked at it reads no memory that is not there
    with pytest.raises(ValueError, match="got 50 at"):
        tvm_sparse.candidate_topk(states, words, bad, 1, validate=True)


@pytest.mark.parametrize(
    ("key", "template"),
    [
        ("head_topk/batch=16,vocab=1000,hidden=100000,k=5", "head_dots"),  # no room for a hidden state
        ("head_topk/batch=2,vocab=2000000,hidden=64,k=5", "head_dots"),  # nor for the best of all tiles
        ("candidate_topk/lists=70000,beam=2,vocab=500,hidden=64,m=16,k=5", "candidate_dots"),  # an axis of the grid
        ("candidate_topk/lists=1,beam=1,vocab=5000,hidden=64,m=1000,k=300", "candidate_dots"),
        ("candidate_topk/lists=70000,beam=1,vocab=500,hidden=64,m=16,k=5", "candidate_streams"),
        ("candidate_topk/lists=2,beam=1,vocab=9000,hidden=64,m=5000,k=5", "candidate_registers"),
        ("head_topk/batch=16,vocab=262144,hidden=5376,k=20,dtype=bfloat16", "head_rings"),
    ],
)
def test_what_does_not_fit_goes_another_way(key: str, template: str) -> None:
    problem, machine = parse(key), Machine("cuda", "sm_90a", "sm_90a", cores=132)
    chosen = spaces.fallback(problem, machine)
    assert chosen.template == template and spaces.refusal(chosen, problem, machine) is None


@pytest.mark.parametrize(
    "key",
    [
        "head_topk/batch=20000,vocab=128256,hidden=64,k=5",
        "candidate_topk/lists=9000,beam=300,vocab=5000,hidden=64,m=1000,k=5",
        "candidate_logits/lists=1,beam=1,vocab=5000,hidden=2000000,m=10",
    ],
)
def test_extents_beyond_32_bits_are_refused(key: str) -> None:
    with pytest.raises(ProblemError, match=r"below 2\^"):
        parse(key)


def test_no_rows() -> None:
    values, indices = tvm_sparse.head_topk(STATES[:0], WORDS, 3)
    assert values.shape == indices.shape == (0, 3)
    values, indices = tvm_sparse.candidate_topk(STATES[:0], WORDS, LIST, 2)
    assert values.shape == (0, 2)
