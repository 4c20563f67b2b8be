"""What filters leave and where tokens stand, and draws from parts of a vocabulary, compared with float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.softmax_sample import reference
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

ROWS, VOCAB = 12, 90
PROBLEMS = {
    "numbers": "softmax_sample/batch=12,vocab=90,k=8",
    "by row": "softmax_sample/batch=12,vocab=90,k=90,per_row=1,bias=1,allowed=1",
    "none": "softmax_sample/batch=12,vocab=90,k=90,allowed=1",
}
RUN = (
    *PROBLEMS.values(), "softmax_sample/batch=12,vocab=90,k=1,whole=1,allowed=1",
    "softmax_sample/batch=12,vocab=90,k=90", "softmax_sample/batch=12,vocab=90,k=1,whole=1",
    *(f"softmax_topk/batch=12,vocab={n},k={min(n, 8)}" for n in (20, 3, 67)),
    *(f"softmax_sample/batch=12,vocab={n},k=1,whole=1" for n in (20, 67)),
    *(f"softmax_sample/batch=4000,vocab={n},k=1,whole=1" for n in (20, 40)),
    *(f"softmax_sample/batch=4000,vocab=40,{rest}" for rest in ("k=8", "k=8,seeded=2", "k=1,whole=1,seeded=2")),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(RUN, tmp_path_factory.mktemp("kernels")) as own:
        yield own


def as_torch(array: Any) -> Any:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def expected(problem: Any, inputs: list[Any], tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """The fields, with two bounds of counts and masses, by the reference of the sampler."""
    filters, words = problem._filters(inputs), problem.words
    indices, values = problem._ranked(inputs, VOCAB)
    limits = filters.limits(words)
    place = (indices == tokens[:, None]).argmax(1)
    logprobs = values[np.arange(ROWS), place]
    cuts = [
        reference.kept(np.exp(values), limits, np.minimum(filters.top_p + slack, 1) * (filters.top_p < 1)
                       + (filters.top_p >= 1), filters.min_p * (1 - slack))
        for slack in (-1e-5, 1e-5)
    ]  # fmt: skip
    return logprobs, place + 1, *cuts, np.exp(values).cumsum(1)


@pytest.mark.parametrize("structure", ["random", "ties", "masked", "special", "zipf"])
@pytest.mark.parametrize("key", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "any token"])
def test_details_equal_the_reference(key: str, structure: str, drawn: bool) -> None:
    problem = parse(key)
    rng = np.random.default_rng(5)
    for number, settings in enumerate([*problem.settings, problem.draw_settings(rng)]):
        settings = {**settings, "top_k": 8 if "k=8" in key and not settings["top_k"] else int(settings["top_k"])}
        inputs = problem.generate(number, structure, settings)
        inputs[0] = inputs[0].astype(numpy_dtype("float32"))
        names = [argument.name.removesuffix("s") if argument.name.startswith(("temp", "top", "min")) else argument.name
                 for argument in problem.kernel_inputs]  # fmt: skip
        given = dict(zip(names, map(as_torch, inputs), strict=True))
        uniforms = given.pop("uniforms")
        tokens, logprobs = tvm_sparse.softmax_sample(**given, uniforms=uniforms)
        if not drawn:
            tokens = torch.from_numpy(rng.integers(0, VOCAB, ROWS))
        found = tvm_sparse.sample_details(tokens=tokens, **given)
        wanted, ranks, fewest, most, sums = expected(problem, inputs, tokens.numpy())
        defined = ~np.isnan(sums[:, 0])
        assert (found.ranks.numpy() == ranks).all()
        assert np.isnan(found.mass.numpy()[~defined]).all()
        assert np.isnan(found.left_logprobs.numpy()[~defined]).all()
        assert (found.counts.numpy()[~defined] == 1).all()
        counts = found.counts.numpy()
        assert ((fewest <= counts) & (counts <= most))[defined].all()
        within = defined & (wanted > -1e37)  # beyond that float32 may end on the way
        np.testing.assert_allclose(found.logprobs.numpy()[within], wanted[within], rtol=1e-5, atol=1e-5)
        mass = np.take_along_axis(sums, counts[:, None] - 1, 1)[:, 0]
        np.testing.assert_allclose(found.mass.numpy()[defined], mass[defined], rtol=2e-5)
        left = np.where(ranks <= counts, wanted - np.log(mass), -np.inf)
        np.testing.assert_allclose(found.left_logprobs.numpy()[within], left[within], rtol=1e-5, atol=3e-5)
        if drawn:
            np.testing.assert_allclose(found.logprobs.numpy()[defined], logprobs.numpy()[defined], rtol=1e-5, atol=1e-5)
            # A draw is left, but where top_p ends within rounding.
            assert (ranks <= most)[defined].all()


def test_details_in_a_graph_and_of_more_dimensions() -> None:
    logits = torch.randn(3, 4, VOCAB)
    tokens = torch.randint(0, VOCAB, (3, 4))
    wanted = tvm_sparse.sample_details(logits, tokens, temperature=0.7, top_k=8, top_p=0.9)
    compiled = torch.compile(
        lambda x, t: tvm_sparse.sample_details(x, t, temperature=0.7, top_k=8, top_p=0.9),
        backend="aot_eager",
        fullgraph=True,
    )
    for have, want in zip(compiled(logits, tokens), wanted, strict=True):
        assert have.shape == (3, 4)
        torch.testing.assert_close(have, want)


# ---- parts of a vocabulary -----------------------------------------------------------------------

BORDERS = (0, 20, 20, 23, VOCAB)


def parts_of(logits: Any, k: int, temperature: float) -> list[Any]:
    return [
        tvm_sparse.softmax_topk(logits[:, first:end].contiguous(), k, shard=(first, VOCAB), temperature=temperature)
        if end > first
        else (torch.zeros(ROWS, 0), torch.zeros(ROWS, 0, dtype=torch.int64), torch.full((ROWS,), -torch.inf))
        for first, end in zip(BORDERS, BORDERS[1:], strict=False)
    ]


def test_a_merged_draw_in_a_graph() -> None:
    parts, uniforms = parts_of(torch.randn(ROWS, VOCAB), 8, 1.0), torch.rand(ROWS)
    compiled = torch.compile(
        lambda some, u: tvm_sparse.merge_sample(some, u, top_k=8, top_p=0.9), backend="aot_eager", fullgraph=True
    )
    wanted = tvm_sparse.merge_sample(parts, uniforms, top_k=8, top_p=0.9)
    for have, want in zip(compiled(parts, uniforms), wanted, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("structure", ["random", "ties", "masked", "special"])
def test_a_merged_draw_is_that_of_the_whole_vocabulary(structure: str) -> None:
    problem = parse(PROBLEMS["numbers"])
    rng = np.random.default_rng(7)
    for seed in range(6):
        settings = {**problem.draw_settings(rng), "top_k": 8}
        settings["temperature"] = max(settings["temperature"], 0.1)
        inputs = problem.generate(seed, structure, settings)
        logits, uniforms = torch.from_numpy(inputs[0]), torch.from_numpy(inputs[-1])
        filters = {name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        parts = parts_of(logits, 8, filters["temperature"])
        tokens, logprobs = tvm_sparse.merge_sample(parts, uniforms, **filters)
        expected = problem.reference(inputs)
        # A float32 normaliser does not tell probabilities of words of a magnitude like 1e23, which masks may have.
        far = (logits.abs().nan_to_num(0, 0).amax(1) / settings["temperature"] > 2**20).numpy()
        found = np.where(far, expected[1], logprobs.numpy())
        problem.agree(
            inputs, expected, problem.tolerance(inputs, expected),
            [tokens.int().numpy(), found.astype(np.float32), *expected[2:]],
        )  # fmt: skip


def test_one_drawn_word_of_each_shard() -> None:
    """Tokens have their probabilities, by chi-square; the number that chooses the shard is independent of theirs."""
    rng = np.random.default_rng(1)
    rows, vocab, borders = 4000, 60, (0, 20, 60)
    logits = torch.from_numpy(rng.standard_normal(vocab).astype(np.float32) * 1.5).expand(rows, vocab).contiguous()
    temperature, counts = 0.8, np.zeros(vocab)
    for turn in range(3):
        parts = []
        for number, (first, end) in enumerate(zip(borders, borders[1:], strict=False)):
            own = logits[:, first:end].contiguous()
            tokens, logprobs = tvm_sparse.softmax_sample(
                own, temperature=temperature, uniforms=torch.from_numpy(rng.random(rows, np.float32))
            )
            scores = own.gather(1, tokens.long()[:, None])
            parts.append((scores, tokens.long()[:, None] + first, scores[:, 0] / temperature - logprobs))
            assert number < 2 and turn < 3
        tokens, logprobs = tvm_sparse.merge_sample(
            parts, torch.from_numpy(rng.random(rows, np.float32)), temperature=temperature
        )
        wanted = (logits / temperature).log_softmax(1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, wanted, rtol=1e-5, atol=1e-5)
        counts += np.bincount(tokens.numpy(), minlength=vocab)
    chances = (logits[0].double() / temperature).softmax(0).numpy()
    expected = chances * counts.sum()
    common = expected >= 5
    assert ((counts - expected)[common] ** 2 / expected[common]).sum() < common.sum() + 5 * (2 * common.sum()) ** 0.5
    assert counts[chances == 0].sum() == 0


def test_what_a_merged_draw_does_not_take() -> None:
    part = (torch.zeros(ROWS, 2), torch.zeros(ROWS, 2, dtype=torch.int64), torch.zeros(ROWS))
    uniforms = torch.zeros(ROWS)
    for change, message in (
        ({"top_k": 0}, "top_k: expected 1"), ({"top_p": 0.5}, "top_p: filters of the whole"),
        ({}, "expected one drawn word, got 2"), ({"top_k": 2, "uniforms": torch.zeros(3)}, "uniforms: expected shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tvm_sparse.merge_sample(**{"parts": [part], "uniforms": uniforms, **change})


# ---- speculative sampling ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_of_speculative_sampling_have_the_large_models_distribution(count: int) -> None:
    """The first and the second token of each row, by chi-square, for two models that often disagree."""
    path = Path(__file__).parent.parent / "examples" / "speculative.py"
    spec = importlib.util.spec_from_file_location("speculative", path)
    assert spec is not None and spec.loader is not None
    speculative = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speculative)
    torch.manual_seed(count)
    rows, vocab, filters = 4000, 40, {"temperature": 0.9, "top_k": 8, "top_p": 0.9}
    large = torch.randn(vocab, vocab) * 1.5
    small = large + torch.randn(vocab, vocab)
    context = torch.zeros(rows, 1, dtype=torch.int64)
    drafted, theirs = speculative.draft(lambda tokens: small[tokens[:, -1]], context, count, filters)
    kept, following = speculative.verify(drafted, theirs, large[torch.cat([context, drafted], 1)], filters)
    assert 0 < (kept == 0).float().mean() < 1
    tokens = torch.cat([drafted, following[:, None]], 1)
    tokens[torch.arange(rows), kept] = following
    wanted = speculative.left_distribution(large, filters).double().numpy()
    two = kept > 0  # these rows have a second token
    found = {0: np.bincount(tokens[:, 0], minlength=vocab)}
    expected = {0: rows * wanted[0]}
    found[1] = np.bincount(tokens[two, 1], minlength=vocab)
    expected[1] = wanted[tokens[two, 0]].sum(0)
    for place, counts in found.items():
        assert not counts[expected[place] == 0].any()
        common = expected[place] >= 5
        chi = ((counts - expected[place])[common] ** 2 / expected[place][common]).sum()
        assert chi < common.sum() + 5 * (2 * common.sum()) ** 0.5, (place, chi)
