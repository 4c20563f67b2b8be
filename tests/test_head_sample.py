"""`head_sample`: the draws of `softmax_sample` from scores that a product would make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
from cases import SM90, calls_run_without_gpu

torch = pytest.importorskip("torch")

import forms  # noqa: E402

import tvm_sparse  # noqa: E402
from tvm_sparse.core import machine as machines  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.layers import head_sample as module  # noqa: E402
from tvm_sparse.operators.head_draw import call  # noqa: E402
from tvm_sparse.operators.head_draw.problem import HeadDraw  # noqa: E402
from tvm_sparse.operators.head_topk import product  # noqa: E402
from tvm_sparse.runtime import dispatch  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402
from tvm_sparse.runtime.loading import Miss  # noqa: E402

PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
BATCH, VOCAB, HIDDEN = 9, 301, 48
# Arguments, and whether the best words of `head_topk` decide the draw.
CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "temperature": ({"temperature": 0.6}, False),
    "top_p": ({"top_p": 0.7, "temperature": 1.3}, False),
    "min_p": ({"min_p": 0.05}, False),
    "top_k": ({"top_k": 20}, True),
    "all filters": ({"top_k": 27, "top_p": 0.8, "min_p": 0.01, "temperature": 0.8, "best": 4}, True),
    "arrays beside top_k": ({"top_k": 20, "top_p": "rows", "min_p": "rows"}, True),
    "one word": ({"top_k": 1, "best": 1}, True),
    "greedy": ({"temperature": 0.0, "top_p": 0.3}, True),
    "greedy with the best": ({"temperature": 1e-6, "best": 28}, True),
    "cold": ({"temperature": 1e-4, "top_k": 29}, True),
    "infinite temperature": ({"temperature": float("inf"), "top_k": 29}, False),
    "large top_k": ({"top_k": 290}, False),
    "top_k by row": ({"top_k": "rows", "temperature": "rows", "best": 3}, False),
    "temperature by row": ({"temperature": "rows", "top_k": 20, "top_p": 0.9, "best": 4}, True),
    "allowed": ({"allowed": "rows", "top_k": 20}, False),
    "temperatures alone": ({"temperature": "rows"}, False),
    "soft cap alone": ({"soft_cap": 2.5, "top_k": 0}, False),
    "soft cap": ({"soft_cap": 2.5, "temperature": 0.7, "top_p": 0.9}, False),
    "soft cap and top_k": ({"soft_cap": 2.5, "top_k": 20, "min_p": 0.01, "best": 3}, True),
}
# Those without a filter, which have a kernel of their own, where that is taken.
ALONE = ("plain", "temperature", "temperatures alone", "soft cap alone")


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws without a filter are by the kernel, on a CPU as well."""
    monkeypatch.setattr(call, "likely_way", lambda problem, machine: "kernel")
    monkeypatch.setattr(call.dispatcher, "launchers", {})


def drawn_alone(name: str, place: str, dtype: str) -> bool:
    problem = HeadDraw(BATCH, VOCAB, HIDDEN, dtype)
    return name in ALONE and call.likely_way(problem, machines.resolve(place)) == "kernel"


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher | None]:
    with calls_run_without_gpu(tmp_path_factory.mktemp("kernels")) as found:
        yield found


def drawn(dtype: str = "float32", seed: int = 0, special: bool = False) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    hidden, embedding = rng.standard_normal((BATCH, HIDDEN)), rng.standard_normal((VOCAB, HIDDEN)) / 3
    bias = rng.standard_normal(VOCAB).astype(np.float32)
    bias[rng.permutation(VOCAB)[:40]] = -np.inf
    if special:
        hidden[1, 3] = np.nan
        hidden[2] = 0  # all words are alike
    kind = getattr(torch, dtype)
    return torch.tensor(hidden).to(kind), torch.tensor(embedding).to(kind), torch.tensor(bias)


def options_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    rows = {
        "temperature": np.append(np.float32([0, np.inf]), rng.uniform(0.3, 2, BATCH - 2).astype(np.float32)),
        "top_k": rng.integers(0, 60, BATCH).astype(np.int32),
        "top_p": rng.uniform(0.3, 1, BATCH).astype(np.float32),
        "min_p": rng.uniform(0, 0.1, BATCH).astype(np.float32),
        "allowed": rng.integers(-(2**31), 2**31, (BATCH, -(-VOCAB // 32))).astype(np.int32),
    }
    return {key: rows[key] if isinstance(value, str) else value for key, value in CALLS[name][0].items()}


def named(name: str, request: pytest.FixtureRequest) -> str:
    """A name among `CALLS`; "by kernel" is the plain call by the kernel of its own."""
    if name == "by kernel":
        request.getfixturevalue("by_kernel")
    return "plain" if name == "by kernel" else name


def placed(value: Any, library: str, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.to(place)
        return value if library == "torch" else value.numpy() if library == "numpy" else forms.Foreign(value)
    return placed(torch.tensor(value), library, place) if isinstance(value, np.ndarray) else value


def as_tensors(results: Any) -> list[Any]:
    return [one.cpu() if isinstance(one, torch.Tensor) else torch.from_dlpack(one) for one in results]


def check(found: Any, scores: Any, uniforms: Any, bias: Any, options: dict[str, Any]) -> None:
    """A token is that of `softmax_sample`, or u is as close to the bound between both as sums are rounded."""
    wanted = as_tensors(tvm_sparse.softmax_sample(scores, uniforms=uniforms, bias=bias, **options))
    found = as_tensors(found)
    moved = [
        tvm_sparse.softmax_sample(scores, uniforms=(uniforms + by).clamp(0, 1 - 2**-24), bias=bias, **options)[0].cpu()
        for by in (-3e-5, 3e-5)
    ]
    same = found[0] == wanted[0]
    assert (same | (found[0] == moved[0]) | (found[0] == moved[1])).all()
    assert found[0].dtype == torch.int32
    off = 1e-3 if float(torch.as_tensor(options.get("temperature", 1.0)).min()) < 0.01 else 2e-4
    torch.testing.assert_close(found[1][same], wanted[1][same], rtol=1e-4, atol=off, equal_nan=True)
    assert len(found) == len(wanted)
    for have, want in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=off, equal_nan=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CALLS), ("plain", "bfloat16"), ("all filters", "bfloat16"), ("greedy", "float16")],
)
def test_draws_are_those_of_the_scores(name: str, dtype: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, embedding, bias = drawn(dtype)
    rng = np.random.default_rng(7)
    options = {key: placed(value, "torch", place) for key, value in options_of(name, rng).items()}
    uniforms = torch.tensor(rng.random(BATCH, np.float32), device=place)
    written = []
    monkeypatch.setattr(module, "scores_of", lambda *args: written.append(1) or product.float_scores(*args))
    scores = (hidden.double() @ embedding.double().T).float().to(place)
    for row in (None, bias.to(place)) if name == "all filters" else (bias.to(place),):
        for _ in range(2):
            found = tvm_sparse.head_sample(
                hidden.to(place), embedding.to(place), uniforms=uniforms, bias=row, **options
            )
            check(found, scores, uniforms, row, options)
    assert len(written) == (0 if CALLS[name][1] or drawn_alone(name, place, dtype) else 2)


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in ALONE), ("plain", "bfloat16")])
def test_draws_by_their_own_kernel_are_those_of_the_scores(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_draws_are_those_of_the_scores(name, dtype, "cpu", monkeypatch)


def test_draws_have_their_own_kernel_where_that_is_likely_faster() -> None:
    def way(batch: int, words: int = 128256, columns: int = 4096, machine: Any = SM90) -> bool:
        problem = parse(f"head_draw/batch={batch},vocab={words},hidden={columns},dtype=bfloat16")
        assert ("softmax_sample" in call.told_way(problem, machine)) == (call.likely_way(problem, machine) == "product")
        return call.likely_way(problem, machine) == "kernel"

    assert [way(rows) for rows in (1, 16, 64, 128, 129)] == [True] * 4 + [False]
    assert not way(4, columns=4097) and not way(4, machine=machines.cpu())


@pytest.mark.usefixtures("by_kernel")
def test_a_draw_without_its_own_kernel_is_from_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*args: Any, **how: Any) -> None:
        raise Miss("none")

    hidden, embedding, _ = drawn()
    uniforms = torch.rand(BATCH)
    wanted = tvm_sparse.softmax_sample(hidden @ embedding.T, uniforms=uniforms)
    monkeypatch.setattr(call, "launch", no_kernel)
    for _ in range(2):
        same(tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms), wanted)
    monkeypatch.setattr(call, "head_draw", None)  # not tried again
    same(tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms), wanted)


@pytest.mark.parametrize("name", ["plain", "all filters", "greedy", "by kernel"])
def test_rows_without_a_distribution(name: str, request: pytest.FixtureRequest) -> None:
    """NaN, and rows of equal scores: the first word of the order, with NaN; words in their order."""
    hidden, embedding, _ = drawn(special=True)
    uniforms, options = torch.rand(BATCH), options_of(named(name, request), np.random.default_rng(0))
    found = tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, **options)
    scores = torch.nn.functional.linear(hidden, embedding)
    check(found, scores, uniforms, None, options)
    assert found[1][1].isnan() and found[0][1] == 0
    masked = torch.full((VOCAB,), -torch.inf)
    tokens, logprobs, *_ = tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, bias=masked, **options)
    assert logprobs.isnan().all() and (tokens[2:] == 0).all()


@pytest.mark.parametrize(
    ("name", "library"),
    [(name, library) for library in ("numpy", "dlpack") for name in ("plain", "all filters", "allowed")]
    + [("top_k by row", "numpy")],  # the sampler's filters are no arrays of other libraries
)
@pytest.mark.parametrize("rows", [BATCH, 4])
def test_other_libraries(name: str, library: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(product.SCORE_BYTES, "cpu", 4 * VOCAB * rows)
    hidden, embedding, bias = drawn()
    rng = np.random.default_rng(7)
    options, uniforms = options_of(name, rng), torch.tensor(rng.random(BATCH, np.float32))
    given = {
        key: placed(value, library, "cpu") for key, value in {**options, "uniforms": uniforms, "bias": bias}.items()
    }
    found = tvm_sparse.head_sample(placed(hidden, library, "cpu"), placed(embedding, library, "cpu"), **given)
    check(found, hidden @ embedding.T, uniforms, bias, {k: placed(v, "torch", "cpu") for k, v in options.items()})


SEEDS: dict[str, dict[str, Any]] = {
    "integer": {"seed": 5, "offset": 3},
    "of rows": {"seed": np.arange(2 * BATCH).reshape(BATCH, 2), "offset": np.arange(BATCH)},
    "offsets": {"seed": 5, "offset": np.arange(BATCH)},
    "uniforms": {"uniforms": np.linspace(0, 0.99, BATCH, dtype=np.float32)},
}


@pytest.mark.parametrize("way", ["plain", "all filters", "by kernel"])
@pytest.mark.parametrize("kind", SEEDS)
def test_random_numbers_are_those_of_the_sampler(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also for rows in chunks, whose numbers in the batch count."""
    hidden, embedding, _ = drawn()
    way = named(way, request)
    options = {key: placed(value, "torch", "cpu") for key, value in options_of(way, np.random.default_rng(3)).items()}
    given = {key: placed(value, "torch", "cpu") for key, value in SEEDS[kind].items()}
    wanted = tvm_sparse.softmax_sample(hidden @ embedding.T, **options, **given)
    for rows in (BATCH, 4, 1):
        monkeypatch.setitem(product.SCORE_BYTES, "cpu", 4 * VOCAB * rows)
        found = tvm_sparse.head_sample(hidden, embedding, **options, **given)
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", ["plain", "all filters", "by kernel"])
def test_draws_have_their_probabilities(way: str, request: pytest.FixtureRequest) -> None:
    """Chi-square over 50,000 draws, with seeds of PyTorch's generator."""
    way = named(way, request)
    generator = torch.Generator().manual_seed(11)
    row, embedding = torch.randn(1, 8, generator=generator), torch.randn(30, 8, generator=generator) / 2
    options = {"top_k": 12, "top_p": 0.9} if way == "all filters" else {}
    torch.manual_seed(5)
    tokens = tvm_sparse.head_sample(row.expand(50_000, 8), embedding, **options)[0]
    p = torch.softmax((row @ embedding.T)[0].double(), -1)
    if options:
        order = p.argsort(descending=True)[:12]
        kept = order[p[order].cumsum(0) - p[order] < 0.9 * p[order].sum()]
        p = torch.zeros_like(p).index_copy(0, kept, p[kept])
    p = p / p.sum()
    counts = torch.bincount(tokens, minlength=30)
    assert counts[p == 0].sum() == 0
    assert scipy.stats.chisquare(counts[p > 0], p[p > 0] * 50_000).pvalue > 1e-4
    again = tvm_sparse.head_sample(row.expand(50_000, 8), embedding, **options)[0]
    assert not torch.equal(again, tokens)
    torch.manual_seed(5)
    assert torch.equal(tvm_sparse.head_sample(row.expand(50_000, 8), embedding, **options)[0], tokens)


def same(found: Any, wanted: Any) -> None:
    """Tokens, and what PyTorch's product of another number of rows rounds otherwise."""
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all filters", "greedy", "temperature by row", "allowed"])
def test_graphs(name: str) -> None:
    """torch.compile without a break, torch.export, and torch.jit.trace; each gives what the eager call gives."""
    hidden, embedding, bias = drawn()
    options = {key: placed(value, "torch", "cpu") for key, value in options_of(name, np.random.default_rng(3)).items()}
    uniforms = torch.rand(BATCH)

    def call(states: Any, numbers: Any) -> Any:
        return tvm_sparse.head_sample(states, embedding, uniforms=numbers, bias=bias, **options)

    wanted = call(hidden, uniforms)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    traced = torch.jit.trace(call, (hidden, uniforms), check_trace=False)
    for found in (compiled(hidden, uniforms), traced(hidden, uniforms)):
        same(found, wanted)
    other = torch.rand(BATCH)
    same(compiled(hidden + 1, other), call(hidden + 1, other))
    mapped = torch.func.vmap(call)(torch.stack([hidden, hidden + 1]), torch.stack([uniforms, other]))
    same([one[1] for one in mapped], call(hidden + 1, other))


@pytest.mark.parametrize("name", ["plain", "all filters"])
def test_out(name: str) -> None:
    hidden, embedding, _ = drawn()
    options, uniforms = options_of(name, np.random.default_rng(3)), torch.rand(BATCH)
    wanted = tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, **options)
    out = torch.full((BATCH,), -1, dtype=torch.int32), torch.full((BATCH,), -1.0)
    found = tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, out=out, **options)
    assert found[0] is out[0] and found[1] is out[1]
    for have, want in zip(found, wanted, strict=True):
        assert torch.equal(have, want)
    with pytest.raises(ValueError, match=r"out \(tokens\): expected shape \(9,\) and dtype int32"):
        tvm_sparse.head_sample(hidden, embedding, out=(out[0][:4], out[1]))
    nothing = tvm_sparse.head_sample(hidden[:0], embedding, **options)
    assert nothing[0].shape == nothing[1].shape == (0,)


@pytest.mark.parametrize("name", ["plain", "all filters"])
def test_bits_do_not_depend_on_the_batch(name: str, own: Dispatcher | None) -> None:
    hidden, embedding, _ = drawn()
    options, uniforms = options_of(name, np.random.default_rng(3)), torch.rand(BATCH)
    used = own or dispatch.dispatcher
    used.configure(batch_invariant=True)
    try:
        whole = tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, **options)
        for rows in ([4], [0, 3, 8], list(range(1, 9))):
            some = tvm_sparse.head_sample(hidden[rows], embedding, uniforms=uniforms[rows], **options)
            for have, want in zip(some, whole, strict=True):
                assert torch.equal(have, want[rows])
    finally:
        used.configure(batch_invariant=False)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": ({"embedding": torch.zeros(30, 7)}, ValueError, "embedding: expected shape"),
    "rank": ({"hidden": torch.zeros(8)}, ValueError, "hidden: expected 2 dimensions"),
    "no columns": ({"hidden": torch.zeros(4, 0), "embedding": torch.zeros(30, 0)}, ValueError, "at least one column"),
    "temperature": ({"temperature": -1.0}, ValueError, "temperature: expected a number of at least 0"),
    "text": ({"temperature": "hot", "top_k": 3}, TypeError, "temperature: expected a number"),
    "top_p": ({"top_p": 1.5, "top_k": 4}, ValueError, r"top_p: expected a number in \(0, 1\]"),
    "top_p of a greedy draw": ({"top_p": 1.5, "temperature": 0}, ValueError, r"top_p: expected a number in \(0, 1\]"),
    "top_k": ({"top_k": 2.5}, TypeError, "top_k: expected an integer"),
    "best": ({"top_k": 4, "best": 5}, ValueError, "best: expected at most the 4 words that top_k leaves, got 5"),
    "max_top_k": ({"top_k": 4, "max_top_k": 8}, ValueError, "max_top_k: comes with an array top_k"),
    "both": ({"top_k": 4, "seed": 1, "uniforms": torch.rand(4)}, ValueError, "uniforms: expected these or a seed"),
    "uniforms": ({"uniforms": torch.rand(3), "top_k": 4}, ValueError, r"uniforms: expected shape \(4,\)"),
    "bias": ({"bias": torch.zeros(29), "top_k": 4}, ValueError, r"bias: expected shape \(30,\)"),
    "gradient": ({"embedding": torch.zeros(30, 8, requires_grad=True)}, RuntimeError, "requires a gradient"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    changed, error, message = WRONG[case]
    arguments = {"hidden": torch.zeros(4, 8), "embedding": torch.zeros(30, 8), **changed}
    with pytest.raises(error, match=message):
        tvm_sparse.head_sample(**arguments)


@pytest.mark.gpu
def test_a_graph_on_a_gpu_draws_anew() -> None:
    hidden, embedding, _ = (one.cuda() for one in drawn("bfloat16"))
    for options in ({}, {"top_k": 20, "top_p": 0.9}):
        offset = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
        seeds = torch.arange(2 * BATCH, device="cuda").reshape(BATCH, 2)
        for _ in range(3):
            tvm_sparse.head_sample(hidden, embedding, seed=seeds, offset=offset, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = tvm_sparse.head_sample(hidden, embedding, seed=seeds, offset=offset, **options)[0]
        found = []
        for number in range(20):
            offset.fill_(number)
            graph.replay()
            found.append(tokens.clone())
            wanted = tvm_sparse.head_sample(hidden, embedding, seed=seeds, offset=offset, **options)[0]
            assert torch.equal(found[-1], wanted)
        assert len({tuple(one.tolist()) for one in found}) > 1
