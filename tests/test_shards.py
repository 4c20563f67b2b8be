"""Results of the shards of a vocabulary, and what they are merged to, compared with the whole vocabulary in float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cases import calls_run
from foreign import Foreign

import tvm_sparse
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.formats.bitmap import pack_bits, unpack_bits
from tvm_sparse.operators.softmax_topk.reference import normalised, ranked
from tvm_sparse.operators.softmax_topk.rows import mixed

torch = pytest.importorskip("torch")

SEED = int(os.environ.get("TVM_SPARSE_TEST_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
LIBRARIES: dict[str, Callable[[Any], Any]] = {
    "torch": torch.from_numpy,
    "numpy": lambda array: array,
    "DLPack": lambda array: Foreign(torch.from_numpy(array)),
}
Part = tuple[Any, Any, Any]


@pytest.fixture(autouse=True)
def seed_shown() -> None:
    print(f"TVM_SPARSE_TEST_SEED={SEED}")  # beside a failure


def problem(rng: np.random.Generator, rows: int = 24) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Scores of all kinds of rows, the borders of uneven shards, some of them empty, k, and a temperature."""
    vocab = int(rng.integers(1, 90))
    k = int(rng.integers(1, vocab + 1))
    scores = rng.standard_normal((rows, vocab), dtype=np.float32)
    mixed(rng, scores, k, "float32")
    if rng.random() < 0.5:  # equal scores in several shards
        scores = np.round(scores)
    borders = np.sort(rng.integers(0, vocab + 1, int(rng.integers(0, 6))))
    return scores, np.array([0, *borders, vocab]), k, float(rng.uniform(0.2, 3))


def part_of(scores: np.ndarray, first: int, end: int, k: int, temperature: float) -> Part:
    """A part, by the reference of `softmax_topk`."""
    mine = scores[:, first:end]
    if first == end:
        best, normaliser = np.empty((len(scores), 0), np.int64), np.full(len(scores), -np.inf)
    else:
        best = ranked(mine, min(k, end - first))
        normaliser = normalised(mine.astype(np.float64), mine[:, :1], 1 / temperature, 1)[1]
    with np.errstate(over="ignore"):
        return np.take_along_axis(mine, best, 1), best + first, normaliser.astype(np.float32)


def parts_of(scores: np.ndarray, borders: np.ndarray, k: int, temperature: float) -> list[Part]:
    return [part_of(scores, *pair, k, temperature) for pair in itertools.pairwise(map(int, borders))]


def check(found: Sequence[Any], scores: np.ndarray, k: int, temperature: float) -> None:
    values, indices, normaliser = map(np.asarray, found)
    best = ranked(scores, k)
    assert (values.dtype, indices.dtype, normaliser.dtype) == (np.float32, np.int64, np.float32)
    np.testing.assert_array_equal(indices, best)
    np.testing.assert_array_equal(values, np.take_along_axis(scores, best, 1))
    wanted = normalised(scores.astype(np.float64), scores[:, :1], 1 / temperature, 1)[1]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(normaliser, wanted.astype(np.float32), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_merged_parts_are_the_whole(library: str) -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(60):
        scores, borders, k, temperature = problem(rng)
        parts = parts_of(scores, borders, k, temperature)
        order = rng.permutation(len(parts))
        given = [tuple(map(LIBRARIES[library], parts[i])) for i in order]
        found = tvm_sparse.merge_topk(given, k)
        assert isinstance(found[0], torch.Tensor if library == "torch" else np.ndarray)
        check(found, scores, k, temperature)


def test_a_tree_of_merges_is_one_merge() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(20):
        scores, borders, k, temperature = problem(rng)
        parts = [part for part in parts_of(scores, borders, k, temperature) if part[0].shape[1]]
        while len(parts) > 1:
            some, parts = parts[:2], parts[2:]
            parts.append(tvm_sparse.merge_topk(some, min(k, some[0][0].shape[1] + some[1][0].shape[1])))
        check(tvm_sparse.merge_topk(parts, k), scores, k, temperature)


def test_more_dimensions_and_one() -> None:
    rng = np.random.default_rng(SEED)
    scores = rng.standard_normal((6, 40), dtype=np.float32)
    parts = parts_of(scores, np.array([0, 13, 40]), 5, 1.0)
    found = tvm_sparse.merge_topk([(v.reshape(2, 3, -1), i.reshape(2, 3, -1), n.reshape(2, 3)) for v, i, n in parts], 5)
    assert found[0].shape == (2, 3, 5) and found[2].shape == (2, 3)
    check((found[0].reshape(6, 5), found[1].reshape(6, 5), found[2].reshape(6)), scores, 5, 1.0)
    found = tvm_sparse.merge_topk([tuple(torch.tensor(one[4]) for one in part) for part in parts], 5)
    check([one[None] for one in found], scores[4:5], 5, 1.0)


def test_nan_of_either_sign_and_zeros_of_both() -> None:
    """In torch and NumPy alike: by the order of the words."""
    bits = np.array([0xFFC00001, 0x80000000, 0x7FC00000, 0x00000000, 0xFF800000, 0x80000000], np.uint32)
    scores = bits.view(np.float32)[None]
    parts = [(scores[:, :3], np.array([[9, 2, 7]]), np.zeros(1, np.float32))]
    parts += [(scores[:, 3:], np.array([[1, 0, 3]]), np.zeros(1, np.float32))]
    for library in ("numpy", "torch"):
        given = [tuple(map(LIBRARIES[library], part)) for part in parts]
        assert np.asarray(tvm_sparse.merge_topk(given, 6)[1]).tolist() == [[7, 9, 1, 2, 3, 0]]


def test_merging_in_a_graph() -> None:
    rng = np.random.default_rng(SEED)
    scores = rng.standard_normal((6, 40), dtype=np.float32)
    given = [tuple(map(torch.from_numpy, part)) for part in parts_of(scores, np.array([0, 13, 40]), 5, 1.0)]
    compiled = torch.compile(tvm_sparse.merge_topk, fullgraph=True, backend="eager")
    check(compiled(given, 5), scores, 5, 1.0)

    class Merge(torch.nn.Module):
        def forward(self, *arrays: Any) -> Any:
            return tvm_sparse.merge_topk([arrays[:3], arrays[3:]], 5)

    for strict in (False, True):
        exported = torch.export.export(Merge(), tuple(itertools.chain(*given)), strict=strict).module()
        check(exported(*itertools.chain(*given)), scores, 5, 1.0)


def wrong_parts() -> Iterator[tuple[Any, int, type[Exception], str]]:
    good = (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64), np.zeros(2, np.float32))
    tensors = tuple(map(torch.from_numpy, good))
    yield [], 1, ValueError, "parts: expected at least one"
    yield good[0], 1, TypeError, "parts: expected a sequence"
    yield [good[:2]], 1, TypeError, "parts: expected a sequence of"
    yield [(good[0], good[1], 1.0)], 1, TypeError, r"parts\[0\] \(normaliser\): expected"
    yield [good], 4, ValueError, r"k: expected 1 <= k <= the words of all parts \(3\), got 4"
    yield [good], 0, ValueError, "k: expected 1 <= k"
    yield [good], 1.5, TypeError, "k: expected"
    yield [good, tensors], 1, ValueError, r"parts\[1\] \(values\): expected arrays of one library"
    yield [good, (good[0], good[1].astype(np.int32), good[2])], 1, ValueError, r"parts\[1\] \(indices\): .*int64"
    yield [good, (good[0], good[1][:, :2], good[2])], 1, ValueError, r"parts\[1\] \(indices\): expected shape \(2, 3\)"
    yield [good, tuple(one[:1] for one in good)], 1, ValueError, r"parts\[1\] \(values\): expected shape \(2, 3\)"
    yield [(good[2][0], good[2][0], good[2][0])], 1, (TypeError, ValueError), r"parts\[0\] \(values\)"


@pytest.mark.parametrize("case", [*wrong_parts()], ids=lambda case: case[3])
def test_wrong_parts(case: Any) -> None:
    parts, k, error, message = case
    with pytest.raises(error, match=message):
        tvm_sparse.merge_topk(parts, k)


# ---- calls ---------------------------------------------------------------------------------------

# A problem, with the borders of its shards. The one word of the middle shard is fewer than k.
SHARDED = {
    "softmax_topk/batch=13,vocab=61,k=20": (0, 32, 33, 61),
    "softmax_topk/batch=13,vocab=64,k=20,dtype=bfloat16,bias=1,allowed=1": (0, 32, 64),
    "head_topk/batch=4,vocab=61,hidden=24,k=20": (0, 32, 33, 61),
    "head_topk/batch=4,vocab=64,hidden=24,k=20,dtype=float16,bias=1": (0, 32, 64),
    "head_topk/batch=4,vocab=64,hidden=24,k=20,bias=1,capped=1": (0, 32, 64),
}
PADDING = 7


def shard_kernels() -> Iterator[str]:
    for key, borders in SHARDED.items():
        problem = parse(key)
        axes = {name: value for name, value in problem.axes.items() if name not in ("vocab", "k")}
        for words in {end - first for first, end in itertools.pairwise(borders)}:
            k = min(24, words)  # 20, rounded up
            more = ",".join(f"{name}={value}" for name, value in axes.items())
            yield f"{problem.operator}/{more},vocab={words},k={k}"
            if problem.operator == "head_topk":
                axes["bias"] *= 1 - axes["capped"]  # it is added to capped scores
                rest = ",".join(f"{name}={axes[name]}" for name in ("hidden", "dtype", "bias"))
                yield f"candidate_logits/lists={axes['batch']},beam=1,vocab={words},m={min(20, words)},{rest}"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with calls_run(shard_kernels(), tmp_path_factory.mktemp("kernels")):
        yield


def padded(array: np.ndarray, axis: int, by: int) -> np.ndarray:
    """The array with `by` entries of padding that would win, were they read."""
    shape = list(array.shape)
    shape[axis] = by
    return np.concatenate([array, np.full(shape, 1000).astype(array.dtype)], axis)


def by_shards(problem: Problem, given: dict[str, Any], borders: Sequence[int], library: str, k: int) -> list[Part]:
    """The parts of a problem's shards, the last of which has padding."""
    parts = []
    for first, end in itertools.pairwise(borders):
        by = PADDING if end == borders[-1] else 0
        bias = None if "bias" not in given else padded(given["bias"][first:end], 0, by)
        options = {"temperature": 1 / given["scale"], "shard": (first, borders[-1]), "soft_cap": given.get("cap")}
        if problem.operator == "head_topk":
            arrays = [given["hidden"], padded(given["embedding"][first:end], 0, by)]
        else:
            arrays = [padded(given["logits"][:, first:end], 1, by)]
            if "allowed" in given:
                mask = unpack_bits(given["allowed"], problem.axes["vocab"])[:, first:end]
                options["allowed"] = passed(pack_bits(padded(mask, 1, -(end - first) % 32 + 32)), library)
                options["allowed"] = options["allowed"][:, : -(-(end - first + by) // 32)]
        found = getattr(tvm_sparse, problem.operator)(
            *(passed(array, library) for array in arrays), k, bias=passed(bias, library), **options
        )
        parts.append(found)
    return parts


def scores_of(problem: Problem, given: dict[str, Any]) -> np.ndarray:
    """The float32 scores of `softmax_topk`."""
    with np.errstate(invalid="ignore"):
        scores = given["logits"].astype(np.float32) + given.get("bias", np.float32(0))
    mask = unpack_bits(given["allowed"], problem.axes["vocab"]) if "allowed" in given else True
    return np.where(mask, scores, np.float32(-np.inf))


def passed(array: Any, library: str) -> Any:
    if array is None or library == "numpy":
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("structure", ["random", "ties", "masked", "special", "mixed"])
@pytest.mark.parametrize("key", SHARDED)
def test_merged_shards_are_the_whole(key: str, structure: str, library: str) -> None:
    problem = parse(key)
    if structure not in problem.structures:
        pytest.skip("the operator does not draw such rows")
    for seed in (SEED, SEED + 1):
        inputs = problem.generate(seed, structure)
        given = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
        k = problem.axes["k"]
        parts = by_shards(problem, given, SHARDED[key], library, k)
        assert [part[0].shape[1] for part in parts] == [min(k, b - a) for a, b in itertools.pairwise(SHARDED[key])]
        scores, words, normaliser = map(np.asarray, tvm_sparse.merge_topk(parts, k))
        with np.errstate(invalid="ignore"):
            logs = scores * np.float64(np.float32(given["scale"])) - normaliser[:, None]
        values = (logs if given["log"] else np.exp(logs)).astype(np.float32)
        expected = problem.reference(inputs)
        # A float32 normaliser of such scores has no digits for the number of words.
        large = np.abs(normaliser) > 100
        values[large] = expected[0][large]
        found = [values, words, normaliser][: len(expected)]
        problem.check(inputs, expected, found)
        if problem.operator == "softmax_topk":
            check((scores, words, normaliser), scores_of(problem, given), k, 1 / given["scale"])


@pytest.mark.usefixtures("kernels")
def test_equal_rows_of_an_embedding_in_different_shards_are_equal() -> None:
    rng = np.random.default_rng(SEED)
    problem = parse("head_topk/batch=4,vocab=64,hidden=24,k=20,dtype=float16,bias=1")
    embedding = rng.standard_normal((64, 24), dtype=np.float32).astype(np.float16)
    some = np.sort(rng.permutation(64)[:12])
    embedding[some] = embedding[some[0]]
    hidden = (embedding[some[:1]] * np.array([[1], [0.7], [2], [3]])).astype(np.float16)  # so that these words are best
    given = {"hidden": hidden, "embedding": embedding, "bias": np.zeros(64, np.float32), "scale": 1 / 0.9}
    scores, words, _ = tvm_sparse.merge_topk(by_shards(problem, given, (0, 32, 64), "torch", 20), 12)
    assert words.tolist() == [some.tolist()] * 4
    assert torch.equal(scores, scores[:, :1].expand(4, 12))


@pytest.mark.usefixtures("kernels")
def test_a_shard_of_padding_alone_and_given_outputs() -> None:
    logits, states = torch.randn(13, 32), torch.randn(4, 24)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (tvm_sparse.softmax_topk, (logits,)),
        (tvm_sparse.head_topk, (states, torch.randn(32, 24))),
    ]
    for function, arrays in calls:
        for convert in (lambda array: array, lambda array: array.numpy(), Foreign):
            given = tuple(map(convert, arrays))
            nothing = function(*given, 5, shard=(90, 90))
            rows = len(arrays[0])
            assert [tuple(one.shape) for one in nothing] == [(rows, 0), (rows, 0), (rows,)]
            assert np.isneginf(np.asarray(nothing[2])).all()
            part = function(*given, 20, shard=(40, 72))
            whole = tvm_sparse.merge_topk([nothing, part], 20)
            assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(whole, part, strict=True))
            out = tuple(one * 0 for one in part)
            found = function(*given, 20, shard=(40, 72), out=out)
            assert found is out
            assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(out, part, strict=True))
        with pytest.raises(ValueError, match=r"out \(normaliser\): expected shape"):
            function(*arrays, 20, shard=(40, 72), out=(*(torch.tensor(one) for one in out[:2]), torch.zeros(3)))
        flat = arrays[-1].view(-1)
        with pytest.raises(ValueError, match=r"out \(normaliser\): shares memory with"):
            function(*arrays, 20, shard=(40, 72), out=(*out[:2], flat[:rows]))


@pytest.mark.usefixtures("kernels")
def test_shards_in_graphs() -> None:
    """And at other numbers, in the same graph."""
    states, words, logits = torch.randn(4, 24), torch.randn(61, 24), torch.randn(13, 61)
    allowed = torch.randint(-(2**31), 2**31 - 1, (13, 1), dtype=torch.int32)

    def both(states: Any, words: Any, logits: Any, allowed: Any, heat: float) -> Any:
        given = {"temperature": heat}
        heads = [
            tvm_sparse.head_topk(states, words[:32], 20, shard=(0, 60), **given),
            tvm_sparse.head_topk(states, words[32:60], 20, shard=(32, 65), **given),
        ]
        part = tvm_sparse.softmax_topk(logits[:, :32], 20, shard=(5, 90), allowed=allowed, **given)
        return *tvm_sparse.merge_topk(heads, 20), *part

    arrays = (states, words, logits, allowed)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for heat in (0.7, 1.3, 2.0):
        wanted = both(*arrays, heat)
        for one, other in zip(compiled(*arrays, heat), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

    class Both(torch.nn.Module):
        def forward(self, *arrays: Any) -> Any:
            return both(*arrays, 0.7)

    for strict in (False, True):
        exported = torch.export.export(Both(), arrays, strict=strict).module()
        for one, other in zip(exported(*arrays), both(*arrays, 0.7), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"shard": 3}, TypeError, r"shard: expected a pair \(offset, total\)"),
    ({"shard": (0,)}, TypeError, "shard: expected a pair"),
    ({"shard": (0, "9")}, TypeError, r"shard \(total\): expected an integer"),
    ({"shard": (-1, 9)}, ValueError, "shard: expected an offset of at least 0"),
    ({"shard": (0, 0)}, ValueError, "shard: expected .* a total of at least 1"),
    ({"shard": (0, 4)}, ValueError, r"k: expected 1 <= k <= the total of shard \(4\), got 5"),
    ({"shard": (0, 9), "log": True}, ValueError, "log: not with shard"),
    ({"shard": (0, 9), "ids": torch.zeros((2, 1), dtype=torch.int64)}, ValueError, "ids: not with shard"),
    ({"shard": (0, 9), "bias": torch.zeros(9)}, ValueError, r"bias: expected shape \(12,\)"),
    ({"shard": (0, 9), "temperature": 0}, ValueError, "temperature: expected"),
    ({"shard": (20, 9), "temperature": 0}, ValueError, "temperature: expected"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_shards(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tvm_sparse.softmax_topk(torch.zeros(2, 12), 5, **options)
    with pytest.raises(error, match=message):
        tvm_sparse.head_topk(torch.zeros(2, 8), torch.zeros(12, 8), 5, **options)


def test_no_gradient_goes_through_a_shard() -> None:
    with pytest.raises(RuntimeError, match="logits: requires a gradient"):
        tvm_sparse.softmax_topk(torch.zeros(2, 12, requires_grad=True), 5, shard=(0, 90))
    with pytest.raises(RuntimeError, match="embedding: requires a gradient"):
        tvm_sparse.head_topk(torch.zeros(2, 8), torch.zeros(12, 8, requires_grad=True), 5, shard=(0, 90))


@pytest.mark.usefixtures("kernels")
def test_vmap_and_libraries_that_numpy_does_not_read() -> None:
    logits = torch.randn(2, 13, 32)
    found = torch.vmap(lambda rows: tvm_sparse.softmax_topk(rows, 20, shard=(3, 50)))(logits)
    for i, rows in enumerate(logits):
        assert all(map(torch.equal, (one[i] for one in found), tvm_sparse.softmax_topk(rows, 20, shard=(3, 50))))
    with pytest.raises(ValueError, match="vmap over this argument .* call it in a loop"):
        torch.vmap(lambda rows: tvm_sparse.head_topk(rows, torch.zeros(32, 24), 20, shard=(3, 50)))(
            torch.zeros(2, 4, 24)
        )
    with pytest.raises(TypeError, match=r"logits: NumPy does not take it .*; pass torch.from_dlpack\(array\)"):
        tvm_sparse.softmax_topk(Foreign(logits[0].bfloat16()), 20, shard=(3, 50))
