"""Random numbers of inputs, and large arrays part by part: how many cores take part does not matter."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tvm_sparse.core import drawing, parts
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.head_topk import scores

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AT_ONCE", 1000)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_cores_does_not_matter(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cores in (1, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found.append(drawing.normal(np.random.default_rng(7), (61, 101), dtype, 0.25))
    assert found[0].shape == (61, 101) and found[0].dtype == numpy_dtype(dtype)
    assert found[0].tobytes() == found[1].tobytes()
    numbers = found[0].astype(np.float64)
    assert abs(numbers.mean()) < 0.02 and abs(numbers.std() - 0.25) < 0.02
    # No part is another one again.
    parts = {numbers.reshape(-1)[at : at + 50].tobytes() for at in range(0, numbers.size - 50, 1000)}
    assert len(parts) == 7


@pytest.mark.usefixtures("small_parts")
def test_whole_numbers_are_all_as_likely() -> None:
    found = drawing.whole(np.random.default_rng(3), -1, 2, (6000,), "bfloat16").astype(np.float64)
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [-1, 0, 1] and counts.min() > 1800


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_numbers_are_those_of_the_generator(dtype: str) -> None:
    found = drawing.normal(np.random.default_rng(5), (3, 70), dtype)
    drawn = np.random.default_rng(5).standard_normal((3, 70), dtype=np.float32)
    assert found.tobytes() == drawn.astype(numpy_dtype(dtype)).tobytes()


def test_bfloat16_is_rounded_to_the_nearest_and_to_even() -> None:
    bits = np.concatenate([
        np.random.default_rng(1).integers(0, 0x7F000000, 5000, dtype=np.uint32),
        np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0, 0x80000000, 1, 0x00008000], np.uint32),
    ])  # fmt: skip
    numbers = np.concatenate([bits, bits | 0x80000000]).astype(np.uint32).view(np.float32)
    out = np.empty(len(numbers), numpy_dtype("bfloat16"))
    parts.round_into(numbers, out)
    assert out.tobytes() == numbers.astype(numpy_dtype("bfloat16")).tobytes()
    assert parts.float32_of(out).tobytes() == out.astype(np.float32).tobytes()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_many_words_are_those_of_one_product(dtype: str) -> None:
    rng = np.random.default_rng(2)
    states, words = drawing.normal(rng, (3, 70), dtype), drawing.normal(rng, (101, 70), dtype)
    words[5, 7], words[100, 69] = np.inf, np.nan
    with np.errstate(invalid="ignore"):
        wanted = states.astype(np.float64) @ words.astype(np.float64).T
    np.testing.assert_allclose(scores.scores(states, words), wanted, rtol=1e-12)
    finite = np.where(np.isfinite(words.astype(np.float64)), words.astype(np.float64), 0)
    lengths = np.linalg.norm(states.astype(np.float64), axis=1), np.linalg.norm(finite, axis=1).max()
    np.testing.assert_allclose(
        scores.rounding(states, words), scores.SUMMATION * (lengths[0] * lengths[1] + 1e-6), rtol=1e-5
    )


@pytest.mark.usefixtures("small_parts")
def test_an_error_in_a_part_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        parts.of_each(lambda n: 1 // n, [2, 1, 0])
