"""Results of the shards of a vocabulary, and what they are merged to, compared with the whole vocabulary in float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from foreign import Foreign

import tvm_sparse
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
        np.testing.assert_allclose(normaliser, wanted.astype(np.float32), rtol=3e-7, atol=3e-7)


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
        parts = parts_of(scores, borders, k, temperature)
        while len(parts) > 1:
            some, parts = parts[:2], parts[2:]
            parts.append(tvm_sparse.merge_topk(some, max(1, min(k, some[0][0].shape[1] + some[1][0].shape[1]))))
            if not parts[-1][0].shape[1]:
                parts.pop()
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
