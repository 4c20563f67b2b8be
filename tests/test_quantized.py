"""Embeddings in eight bits: how they are rounded, what kernels make of them, and heads that take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import SM90, calls_run_without_gpu

torch = pytest.importorskip("torch")

import tvm_sparse  # noqa: E402
from tvm_sparse import QuantizedEmbedding, ScreenedHead, head_topk, quantize_embedding  # noqa: E402
from tvm_sparse.core.problem import numpy_dtype  # noqa: E402
from tvm_sparse.formats.quantized import STORED  # noqa: E402
from tvm_sparse.layers import screened_head  # noqa: E402
from tvm_sparse.runtime import dispatch  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
VOCAB, HIDDEN = 301, 48
# Columns for which a GPU has a kernel that reads eight bits.
WIDE = 512


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher | None]:
    with calls_run_without_gpu(tmp_path_factory.mktemp("kernels")) as found:
        yield found


def drawn(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


# ---- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("stored", STORED)
def test_values_are_the_nearest_of_their_scale(stored: str, group: int | None) -> None:
    embedding = drawn((60, HIDDEN), "bfloat16")
    embedding[3] *= 1e4
    embedding[4] = 0
    embedding[5, 1:] *= 1e-4  # in float8_e4m3fn subnormal numbers
    found = quantize_embedding(embedding, stored, group)
    assert found.stored == stored and found.shape == (60, HIDDEN) and found.groups == HIDDEN // (group or HIDDEN)
    assert found.nbytes == 60 * (HIDDEN + 4 * found.groups)
    wide = embedding.double().numpy().reshape(60, found.groups, -1)
    scales = found.scales.double().numpy()[:, :, None]
    np.testing.assert_allclose(scales[:4, :, 0], np.abs(wide[:4]).max(2) / STORED[stored], rtol=1e-6)
    # All values that there are, against the nearest of them.
    codes = np.arange(-128, 128).astype(np.int8)
    every = codes.view(numpy_dtype(stored)).astype(np.float64)
    every = np.unique(every[np.abs(every) <= STORED[stored]])
    off = np.abs(found.dequantized().double().numpy().reshape(wide.shape) - wide)
    nearest = np.abs(wide[..., None] / scales[..., None] - every).min(-1) * scales
    assert (off <= nearest + 1e-4 * scales).all()  # the quotient and the product are rounded to float32


@pytest.mark.parametrize("stored", STORED)
def test_numpy_and_torch_agree(stored: str) -> None:
    embedding = drawn((70, HIDDEN))
    embedding[0] = 1e-42  # below the smallest scale
    embedding[1] = 3e38
    ours, theirs = quantize_embedding(embedding, stored, 12), quantize_embedding(embedding.numpy(), stored, 12)
    np.testing.assert_array_equal(ours.octets.numpy(), theirs.octets)
    np.testing.assert_array_equal(ours.scales.numpy(), theirs.scales)
    assert np.isfinite(theirs.dequantized()).all()
    again = QuantizedEmbedding.of_octets(theirs.octets, theirs.factors, stored)
    np.testing.assert_array_equal(again.dequantized(), ours.dequantized().numpy())
    np.testing.assert_array_equal(theirs[5:9].dequantized(), theirs.dequantized()[5:9])


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda e: (e.tolist(),), TypeError, "embedding: expected a torch tensor or a NumPy array, got list"),
        (lambda e: (e[0],), ValueError, "expected shape"),
        (lambda e: (e.int(),), ValueError, "embedding: expected one of float32"),
        (lambda e: (e, "int4"), ValueError, "dtype: expected int8 or float8_e4m3fn, got 'int4'"),
        (lambda e: (e, "int8", 7), ValueError, "group: expected a divisor of the 48 columns, got 7"),
        (lambda e: (e, "int8", 0), ValueError, "group: expected a divisor"),
        (lambda e: (e, "int8", 2.5), TypeError, "group: expected an integer"),
        (lambda e: (e.index_fill(0, torch.tensor([7]), torch.nan),), ValueError, "NaN or infinity in row 7"),
    ],
)
def test_what_is_refused(change: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        quantize_embedding(*change(drawn((9, HIDDEN))))


def test_parts_that_do_not_fit() -> None:
    values, scales = torch.zeros((5, 8), dtype=torch.int8), torch.ones((5, 2))
    for parts, said in (
        ((values.float(), scales), "values: expected int8"),
        ((values, scales[:4]), "expected values"),
        ((values, torch.ones((5, 3))), "3 groups do not divide the 8 columns"),
        ((values, scales.double()), "scales: expected float32"),
    ):
        with pytest.raises(ValueError, match=said):
            QuantizedEmbedding(*parts)
    quantized, hidden = QuantizedEmbedding(values, scales), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="shard: not with a quantised embedding"):
        head_topk(hidden, quantized, 1, shard=(0, 5))
    with pytest.raises(ValueError, match="embedding: expected shape"):
        head_topk(torch.zeros(2, 9), quantized, 1)
    with pytest.raises(ValueError, match="library of hidden"):
        head_topk(hidden.numpy(), quantized, 1)


def test_bytes_as_pairs_of_16_bits() -> None:
    """Every byte, on a GPU's arithmetic emulated."""
    from tvm.script import tirx as T

    from tvm_sparse.artifacts.compile import target_of
    from tvm_sparse.emulation import run_on_cpu
    from tvm_sparse.schedules.device.words import FILLERS, PAIRS, pair_of_bytes

    kinds, words = list(PAIRS), np.arange(256, dtype=np.uint8).view(np.uint32)
    fillers = [FILLERS.get(kind, 0) for kind in kinds]

    # fmt: off
    @T.prim_func
    def main(given: T.Buffer((64,), "uint32"), out: T.Buffer((4, 128), "uint32"), half: T.Buffer((1,), "float16"),
             brain: T.Buffer((1,), "bfloat16")):
        T.device_entry()
        t = T.thread_id([64])
        out[0, 2 * t] = pair_of_bytes(*kinds[0], given[t], 0, T.uint32(fillers[0]))
        out[0, 2 * t + 1] = pair_of_bytes(*kinds[0], given[t], 1, T.uint32(fillers[0]))
        out[1, 2 * t] = pair_of_bytes(*kinds[1], given[t], 0, T.uint32(fillers[1]))
        out[1, 2 * t + 1] = pair_of_bytes(*kinds[1], given[t], 1, T.uint32(fillers[1]))
        out[2, 2 * t] = pair_of_bytes(*kinds[2], given[t], 0, T.uint32(fillers[2]))
        out[2, 2 * t + 1] = pair_of_bytes(*kinds[2], given[t], 1, T.uint32(fillers[2]))
        out[3, 2 * t] = pair_of_bytes(*kinds[3], given[t], 0, T.uint32(fillers[3]))
        out[3, 2 * t + 1] = pair_of_bytes(*kinds[3], given[t], 1, T.uint32(fillers[3]))
    # fmt: on
    import tvm

    out = np.zeros((4, 128), np.uint32)
    arguments = [words, out, np.zeros(1, np.float16), np.zeros(1, numpy_dtype("bfloat16"))]
    run_on_cpu(tvm.IRModule({"main": main}), target_of(SM90), arguments, pipeline="tirx")
    for (stored, dtype), found in zip(kinds, out, strict=True):
        numbers = found.view(numpy_dtype(dtype)).astype(np.float64)
        wanted = words.view(numpy_dtype(stored)).astype(np.float64)
        known = np.isfinite(wanted)  # no number is stored as NaN
        np.testing.assert_array_equal(numbers[known], wanted[known])


# ---- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize(("stored", "dtype"), [("int8", "bfloat16"), ("float8_e4m3fn", "float16"), ("int8", "float32")])
def test_a_head_of_dequantised_numbers(stored: str, dtype: str, group: int | None, place: str) -> None:
    hidden, bias = drawn((5, WIDE), dtype, 1) * 0.125, drawn((VOCAB,), seed=2)
    bias[7:80] = -torch.inf
    embedding = quantize_embedding(drawn((VOCAB, WIDE), dtype).to(place), stored, group)
    asked = torch.tensor([[3, 70], [0, 300], [5, 301], [1, 1], [7, -1]])
    scores = hidden.double() @ embedding.dequantized().double().cpu().T + bias
    wanted = (scores / 0.7).log_softmax(1)
    best = wanted.topk(6)
    given = [one.to(place) for one in (hidden, bias, asked)]
    for log in (True, False, True):
        found = head_topk(
            given[0], embedding, 6, log=log, temperature=0.7, bias=given[1], ids=given[2], normaliser=True
        )
        values, words, normaliser, probabilities = (one.cpu() for one in found)
        assert torch.equal(words, best.indices)
        torch.testing.assert_close((values if log else values.log()).double(), best.values, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(normaliser.double(), (scores / 0.7).logsumexp(1), atol=1e-4, rtol=1e-5)
        inside = (asked >= 0) & (asked < VOCAB)
        right = torch.where(inside, wanted.gather(1, asked.clamp(0, VOCAB - 1)), torch.nan)
        probabilities = probabilities if log else probabilities.log()
        torch.testing.assert_close(probabilities.double(), right, atol=1e-4, rtol=1e-5, equal_nan=True)
    if place == "cpu" and dtype == "float32":
        arrays = quantize_embedding(drawn((VOCAB, WIDE)).numpy(), stored, group)
        values, words = head_topk(hidden.numpy(), arrays, 6, log=True, temperature=0.7, bias=bias.numpy())
        assert (words == best.indices.numpy()).all()


@pytest.mark.parametrize("place", PLACES)
def test_more_rows_than_fit(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm_sparse.operators.head_topk import call

    hidden = drawn((70, WIDE), "bfloat16", 1).to(place)
    embedding = quantize_embedding(drawn((VOCAB, WIDE), "bfloat16").to(place))
    whole = head_topk(hidden, embedding, 4, log=True)
    monkeypatch.setattr(call, "rows_at_once", lambda *_: 32)
    for have, want in zip(head_topk(hidden, embedding, 4, log=True), whole, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{"top_k": 8}, {"top_p": 0.8, "temperature": 0.6}, {"temperature": 0.0}])
def test_draws_from_dequantised_numbers(options: dict[str, Any], place: str) -> None:
    hidden = drawn((5, WIDE), "bfloat16", 1)
    embedding = quantize_embedding(drawn((VOCAB, WIDE), "bfloat16").to(place), "int8")
    scores = (hidden.double() @ embedding.dequantized().double().cpu().T).float()
    uniforms = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    tokens, logprobs = tvm_sparse.head_sample(hidden.to(place), embedding, uniforms=uniforms.to(place), **options)
    wanted = tvm_sparse.softmax_sample(scores.to(place), uniforms=uniforms.to(place), **options)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(logprobs, wanted[1], atol=1e-4, rtol=1e-4)


def test_draws_of_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch invariance its scores do not depend on other rows."""
    hidden = drawn((3, WIDE), "bfloat16", 1)
    embedding = quantize_embedding(drawn((VOCAB, WIDE), "bfloat16"))
    monkeypatch.setattr(dispatch.dispatcher, "batch_invariant", True)
    from tvm_sparse.operators.head_topk.product import all_scores

    together = all_scores(hidden, embedding)
    assert all(torch.equal(all_scores(hidden[i : i + 1], embedding)[0], together[i]) for i in range(3))


def test_graphs_contain_quantised_heads() -> None:
    hidden = drawn((3, WIDE), "bfloat16", 1)
    embedding = quantize_embedding(drawn((VOCAB, WIDE), "bfloat16"))

    def both(states: Any) -> Any:
        tokens, _ = tvm_sparse.head_sample(states, embedding, seed=5)
        return (*head_topk(states, embedding, 4, normaliser=True), tokens)

    for have, want in zip(torch.compile(both, fullgraph=True)(hidden), both(hidden), strict=True):
        torch.testing.assert_close(have, want)


# ---- screening -----------------------------------------------------------------------------------


def columns(hidden: Any) -> Any:
    """Hidden states that are large in a few columns."""
    hidden[:, [3, 70]] *= 50
    return hidden


# Cases in which all words of a row survive.
MANY = ("fewer than k", "NaN", "an infinity", "zeros", "equal words")
# Changes of the drawn hidden states, embedding and bias.
SCREENED: dict[str, Any] = {
    "as drawn": lambda h, e, b: (h, e, None),
    "large columns": lambda h, e, b: (columns(h), e, None),
    "a bias": lambda h, e, b: (h, e, b),
    "few words that are not masked": lambda h, e, b: (h, e, b.index_fill(0, torch.arange(5, 1995), -torch.inf)),
    "fewer than k": lambda h, e, b: (h, e, b.index_fill(0, torch.arange(5, 1998), -torch.inf)),
    "NaN": lambda h, e, b: (h.index_fill(0, torch.tensor([1]), torch.nan), e, None),
    "an infinity": lambda h, e, b: (h.index_fill(1, torch.tensor([1]), torch.inf), e, None),
    "zeros": lambda h, e, b: (h * 0, e, None),
    "equal words": lambda h, e, b: (h, e[:1].expand(2000, WIDE).contiguous(), None),
    "pairs of equal words": lambda h, e, b: (h, e[torch.arange(2000) // 2], None),
    "tiny numbers": lambda h, e, b: (h * 1e-4, e * 1e-4, None),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SCREENED)
def test_screened_heads_are_exact(name: str, place: str) -> None:
    hidden, embedding, bias = SCREENED[name](
        drawn((4, WIDE), "bfloat16", 3), drawn((2000, WIDE), "bfloat16") * 0.125, drawn((2000,), seed=4)
    )
    hidden, embedding, bias = (None if one is None else one.to(place) for one in (hidden, embedding, bias))
    head, temperature = ScreenedHead(embedding, bias), 0.7
    wanted = head_topk(hidden, embedding, 9, bias=bias, shard=(0, 2000), temperature=temperature)
    scores = hidden.double() @ embedding.double().T + (0 if bias is None else bias)
    for synchronise in (None, False):
        found = head.topk(hidden, 9, temperature=temperature, normaliser=True, synchronise=synchronise)
        torch.testing.assert_close(found.values, wanted[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.indices, wanted[1])
        assert found.normaliser is not None and found.error is not None
        off = (found.normaliser - (scores / temperature).logsumexp(1)).abs()
        assert ((off <= found.error) | off.isnan()).all()
    survivors = head.survivors
    best, first = head.topk(hidden, 1), head_topk(hidden, embedding, 1, bias=bias, shard=(0, 2000))
    torch.testing.assert_close(best.values, first[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(best.indices, first[1])
    if place == "cpu":
        assert head.calls == 3 and head.exact_calls == 0 and survivors is not None
        most = int(survivors.max())
        assert most == 2000 if name in MANY else most < 250


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cap", [0.25, 3.0, 30.0])
@pytest.mark.parametrize("name", ["as drawn", "a bias", "large columns", "NaN", "zeros", "pairs of equal words"])
def test_screened_heads_are_exact_under_a_soft_cap(name: str, cap: float, place: str) -> None:
    """Also where it makes many scores equal, whose words are then in order."""
    hidden, embedding, bias = SCREENED[name](
        drawn((4, WIDE), "bfloat16", 3) * 4, drawn((2000, WIDE), "bfloat16") * 0.125, drawn((2000,), seed=4)
    )
    hidden, embedding, bias = (None if one is None else one.to(place) for one in (hidden, embedding, bias))
    head, options = ScreenedHead(embedding, bias), {"temperature": 0.7, "soft_cap": cap}
    wanted = head_topk(hidden, embedding, 9, bias=bias, shard=(0, 2000), **options)
    scores = hidden.double() @ embedding.double().T
    scores = cap * (scores / cap).tanh() + (0 if bias is None else bias)
    close = {"rtol": 1e-6, "atol": 2.0**-19 * cap, "equal_nan": True}
    for synchronise in (None, False):
        found = head.topk(hidden, 9, normaliser=True, synchronise=synchronise, **options)
        torch.testing.assert_close(found.values, wanted[0], **close)
        torch.testing.assert_close(found.values.double(), scores.gather(1, found.indices), **close)
        ordered = found.indices.sort(1).values
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
        equal = found.values[:, 1:] == found.values[:, :-1]
        assert (found.indices[:, 1:] > found.indices[:, :-1])[equal].all()
        off = (found.normaliser - (scores / 0.7).logsumexp(1)).abs()
        assert ((off <= found.error) | off.isnan()).all()
    if place == "cpu":
        assert head.exact_calls == 0
    with pytest.raises(ValueError, match="soft_cap"):
        head.topk(hidden, 9, soft_cap=-1.0)


@pytest.mark.parametrize("masked", [False, True])
def test_words_that_fill_the_last_tile(masked: bool) -> None:
    """As a GPU's kernels need them: no result shows them, even where all words survive."""
    hidden, embedding = drawn((3, WIDE), "bfloat16", 3), drawn((2001, WIDE), "bfloat16")
    bias = drawn((2001,), seed=4)
    bias[7 if masked else 2001 :] = -torch.inf
    head = ScreenedHead(embedding, bias)
    head._pad(-2001 % 32)
    found = head.topk(hidden, 9, normaliser=True)
    wanted = head_topk(hidden, embedding, 9, bias=bias, shard=(0, 2001))
    assert torch.equal(found.indices, wanted[1]) and torch.equal(found.values, wanted[0])
    assert ((found.normaliser - wanted[2]).abs() <= found.error + 1e-5).all()
    assert head.quantized.shape == (2001, WIDE) and int(head.survivors.max()) <= 2001


@pytest.mark.parametrize("place", PLACES)
def test_module_with_an_embedding_in_eight_bits(place: str) -> None:
    weight, bias = (torch.nn.Parameter(drawn(shape, "bfloat16")) for shape in ((VOCAB, WIDE), (VOCAB,)))
    module = tvm_sparse.LmHead(weight, bias, path="quantized", stored="int8").to(place)
    assert module.head is None  # nothing was hashed
    hidden = drawn((2, 3, WIDE), "bfloat16", 1).to(place)
    for _ in range(2):
        small = quantize_embedding(module.weight, "int8").dequantized()
        with torch.no_grad():
            logits = module(hidden)
        assert logits.dtype == torch.bfloat16 and logits.shape == (2, 3, VOCAB) and module.counts is None
        torch.testing.assert_close(logits.float(), hidden.float() @ small.T + module.bias.float(), atol=0.02, rtol=0.01)
        with torch.no_grad():
            module.weight.mul_(-2)
        module.rebuild()
    module(hidden.requires_grad_()).sum().backward()  # by the weight itself
    torch.testing.assert_close(hidden.grad[0, 0].float(), module.weight.float().sum(0), atol=0.3, rtol=0.05)
    module.path = "exact"
    with torch.no_grad():
        assert torch.equal(module(hidden), torch.nn.functional.linear(hidden, module.weight, module.bias))


def test_what_a_screened_head_leaves_to_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, embedding = drawn((20, WIDE), "bfloat16", 3), drawn((2000, WIDE), "bfloat16")
    head = ScreenedHead(embedding, groups=4)
    monkeypatch.setattr(screened_head, "CAPACITY", 4)
    for rows, k, exact in ((2, 5, 1), (20, 5, 2), (2, 300, 3)):
        found = head.topk(hidden[:rows], k, normaliser=True, soft_cap=9.0)
        wanted = head_topk(hidden[:rows], embedding, k, shard=(0, 2000), soft_cap=9.0)
        assert all(torch.equal(have, want) for have, want in zip(found, wanted, strict=False))
        assert head.exact_calls == exact and not found.error.any()


def test_bounds_hold_for_the_worst_hidden_state() -> None:
    """One in the direction of what rounding removed from a word, where the bound is as large as the error."""
    embedding = drawn((40, 128))
    head = ScreenedHead(embedding)
    removed = embedding.double() - head.quantized.dequantized().double()
    for word in range(40):
        hidden = removed[word] * 1000
        off = (hidden @ removed.T).abs()
        norms = hidden.view(head.groups, -1).norm(dim=1)
        bounds = norms @ head.bounds.double()
        assert (off <= bounds).all()
        assert off[word] > 0.9 * bounds[word] - 1e-4 * float(hidden.norm() * embedding[word].norm())


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda e: ScreenedHead(e.numpy()), TypeError, "embedding: expected a torch tensor, got ndarray"),
        (
            lambda e: ScreenedHead(e, groups=5),
            ValueError,
            "groups: expected a divisor of the 48 columns up to 32, got 5",
        ),
        (lambda e: ScreenedHead(e, torch.zeros(8)), ValueError, r"bias: expected shape \(9,\)"),
        (lambda e: ScreenedHead(e * torch.inf), ValueError, "NaN or infinity in row 0"),
    ],
)
def test_screened_heads_that_are_refused(make: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make(drawn((9, HIDDEN)))


@pytest.mark.parametrize("group", [None, 16])
def test_soft_cap_of_dequantised_scores(group: int | None) -> None:
    rng = np.random.default_rng(4)
    hidden, words = (torch.tensor(rng.standard_normal((n, 32)).astype(np.float32)) for n in (3, 67))
    quantised = tvm_sparse.quantize_embedding(words, group=group)
    scores = hidden.double() @ quantised.dequantized().double().T
    capped = 2.5 * torch.tanh(scores / 2.5)
    wanted, order = torch.log_softmax(capped / 0.7, -1).sort(descending=True)
    options = {"soft_cap": 2.5, "temperature": 0.7, "log": True, "normaliser": True}
    for _ in range(2):
        values, indices, normaliser = tvm_sparse.head_topk(hidden, quantised, 5, **options)
        assert torch.equal(indices, order[:, :5])
        torch.testing.assert_close(values.double(), wanted[:, :5], rtol=0, atol=1e-4)
        torch.testing.assert_close(normaliser.double(), (capped / 0.7).logsumexp(-1), rtol=0, atol=1e-4)
