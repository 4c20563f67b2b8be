"""`head_topk` with a bitmap of the words that each row allows, compared with scores in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import calls_run_without_gpu
from foreign import Foreign

torch = pytest.importorskip("torch")

import tvm_sparse  # noqa: E402
from tvm_sparse.formats.bitmap import pack_bits  # noqa: E402
from tvm_sparse.operators.head_topk import call  # noqa: E402
from tvm_sparse.runtime import dispatch  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

SEED = int(os.environ.get("TVM_SPARSE_TEST_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
PLACES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
BATCH, VOCAB, HIDDEN, K = 7, 333, 48, 9
LIBRARIES = {"torch": lambda one: one, "numpy": lambda one: one.numpy(), "DLPack": Foreign}
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "all": ("log", "bias", "ids", "temperature", "soft_cap"),
    "log": ("log", "temperature"),
    "soft cap": ("soft_cap",),
    "bias and ids": ("bias", "ids"),
}


@pytest.fixture(scope="module", autouse=True)
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher | None]:
    with calls_run_without_gpu(tmp_path_factory.mktemp("kernels")) as found:
        yield found


@pytest.fixture(autouse=True)
def seed_shown() -> None:
    print(f"TVM_SPARSE_TEST_SEED={SEED}")  # beside a failure


def drawn(dtype: str = "float32", place: str = "cpu", batch: int = BATCH, vocab: int = VOCAB) -> dict[str, Any]:
    """Every argument. The last row but one allows no word, the last one fewer than k."""
    rng = np.random.default_rng(SEED)
    mask = rng.random((batch, vocab)) < rng.uniform(0.05, 1)
    mask[:, :K] = True
    mask[-2] = False
    mask[-1, K // 2 :] = False
    spare = rng.random((batch, -vocab % 32)) < 0.5
    arrays = {
        "hidden": torch.tensor(rng.standard_normal((batch, HIDDEN))).to(getattr(torch, dtype)),
        "embedding": torch.tensor(rng.standard_normal((vocab, HIDDEN)) / 3).to(getattr(torch, dtype)),
        "allowed": torch.tensor(pack_bits(np.concatenate([mask, spare], 1))),
        "mask": torch.tensor(mask),
        "bias": torch.tensor(rng.standard_normal(vocab), dtype=torch.float32),
        "ids": torch.tensor(rng.integers(-3, vocab + 3, (batch, 4))),
        "temperature": torch.tensor(rng.uniform(0.3, 2, batch), dtype=torch.float32),
    }
    return {name: one.to(place) for name, one in arrays.items()} | {"log": True, "soft_cap": 2.5}


def check(found: Any, given: dict[str, Any], names: tuple[str, ...], embedding: Any = None, off: float = 2e-5) -> None:
    """Values, indices, normaliser and given probabilities against float64."""
    given = {name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    values, indices, normaliser, *probabilities = (
        one.cpu() if isinstance(one, torch.Tensor) else torch.from_dlpack(one) for one in found
    )
    embedding = given["embedding"] if embedding is None else embedding.cpu()
    scores = given["hidden"].double() @ embedding.double().T
    scores = given["soft_cap"] * (scores / given["soft_cap"]).tanh() if "soft_cap" in names else scores
    scores = scores + given["bias"] if "bias" in names else scores
    scores = scores.masked_fill(~given["mask"], -torch.inf)
    scores = scores / given["temperature"][:, None] if "temperature" in names else scores
    logs = scores.log_softmax(1)
    named = {"atol": off, "rtol": off, "equal_nan": True}
    torch.testing.assert_close(normaliser.double(), scores.logsumexp(1), **named)
    some = given["mask"].sum(1) >= K
    assert (given["mask"].gather(1, indices) | ~some[:, None]).all()
    torch.testing.assert_close(scores.gather(1, indices), scores.topk(K).values, **named)
    values = values if "log" in names else values.log()
    torch.testing.assert_close(
        values.double(), logs.topk(K).values.where(given["mask"].any(1)[:, None], torch.nan), **named
    )
    if "ids" in names:
        ids = given["ids"]
        inside = (ids >= 0) & (ids < scores.shape[1])
        wanted = logs.gather(1, ids.clamp(0, scores.shape[1] - 1)).where(inside, torch.nan)
        got = probabilities[0] if "log" in names else probabilities[0].log()
        torch.testing.assert_close(got.double(), wanted, **named)


def chosen(given: dict[str, Any], names: tuple[str, ...], library: str = "torch") -> dict[str, Any]:
    passed = LIBRARIES[library]
    every = ("hidden", "embedding", "allowed", *names)
    return {name: passed(given[name]) if isinstance(given[name], torch.Tensor) else given[name] for name in every}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_words_that_are_not_allowed_do_not_count(name: str, dtype: str, place: str) -> None:
    given, names = drawn(dtype, place), OPTIONS[name]
    for _ in range(2):
        check(tvm_sparse.head_topk(k=K, normaliser=True, **chosen(given, names)), given, names)


@pytest.mark.parametrize("library", ["numpy", "DLPack"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_other_libraries(name: str, library: str) -> None:
    given, names = drawn(), tuple(one for one in OPTIONS[name] if (one, library) != ("temperature", "DLPack"))
    check(tvm_sparse.head_topk(k=K, normaliser=True, **chosen(given, names, library)), given, names)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("batch", [1, 2, 3, 70])
def test_rows_in_chunks(batch: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, names = drawn(batch=max(2, batch), place=place), OPTIONS["all"]
    monkeypatch.setattr(call, "rows_at_once", lambda *_: 3)
    check(tvm_sparse.head_topk(k=K, normaliser=True, **chosen(given, names)), given, names)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("stored", "group"), [("int8", None), ("float8_e4m3fn", None), ("int8", 16)])
def test_embeddings_in_eight_bits(stored: str, group: int | None, place: str) -> None:
    given = drawn("bfloat16", place, vocab=352)
    small = tvm_sparse.quantize_embedding(given["embedding"], stored, group)
    for name in ("plain", "all"):
        options = {**chosen(given, OPTIONS[name]), "embedding": small}
        found = tvm_sparse.head_topk(k=K, normaliser=True, **options)
        check(found, given, OPTIONS[name], small.dequantized())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_shards(library: str, place: str) -> None:
    """With padding, whose bits are set."""
    if place == "cuda" and library != "torch":
        pytest.skip("arrays on the host")
    given, passed = drawn("bfloat16" if library == "torch" else "float32", place), LIBRARIES[library]
    given["temperature"][:] = 0.7
    names = ("bias", "temperature", "soft_cap")
    parts = []
    for first, end, padding in ((0, 128, 0), (128, VOCAB, 19)):
        rows = torch.nn.functional.pad(given["embedding"][first:end], (0, 0, 0, padding), value=torch.nan)
        bias = torch.nn.functional.pad(given["bias"][first:end], (0, padding), value=50.0)
        mask = torch.nn.functional.pad(given["mask"][:, first:end], (0, padding), value=True)
        arrays = {"embedding": rows, "bias": bias, "allowed": torch.tensor(pack_bits(mask.cpu().numpy())).to(place)}
        options = {key: passed(one.contiguous()) for key, one in (arrays | {"hidden": given["hidden"]}).items()}
        heat = 0.7 if library == "DLPack" else passed(given["temperature"])
        parts.append(tvm_sparse.head_topk(k=K, shard=(first, VOCAB), temperature=heat, soft_cap=2.5, **options))
    values, indices, normaliser = tvm_sparse.merge_topk(parts, K)
    as_torch = [torch.as_tensor(one) if library == "numpy" else torch.from_dlpack(one) for one in (values, normaliser)]
    logs = as_torch[0] / given["temperature"][:, None] - as_torch[1][:, None]
    logs = logs.where(given["mask"].any(1)[:, None], torch.nan)
    check((logs, torch.from_dlpack(indices), as_torch[1]), given, (*names, "log"))


def test_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch invariance its bits do not depend on other rows."""
    given, names = drawn(batch=5), OPTIONS["all"]
    options = chosen(given, names)
    monkeypatch.setattr(dispatch.dispatcher, "batch_invariant", True)
    monkeypatch.setattr(dispatch.dispatcher, "launchers", {})
    together = tvm_sparse.head_topk(k=K, normaliser=True, **options)
    check(together, given, names)
    for row in range(5):
        own = ("hidden", "allowed", "ids", "temperature")
        rows = {name: one[row : row + 1] if name in own else one for name, one in options.items()}
        alone = tvm_sparse.head_topk(k=K, normaliser=True, **rows)
        for have, want in zip(alone, together, strict=True):
            torch.testing.assert_close(have[0], want[row], rtol=0, atol=0, equal_nan=True)


def test_in_graphs_and_maps() -> None:
    given = drawn(batch=6)
    options = {"k": K, "log": True, "normaliser": True}

    def best(states: Any, bits: Any) -> Any:
        return tvm_sparse.head_topk(states, given["embedding"], allowed=bits, **options)

    def part(states: Any, bits: Any) -> Any:
        return tvm_sparse.head_topk(states, given["embedding"], K, allowed=bits, shard=(7, 7 + VOCAB))

    arrays = given["hidden"], given["allowed"]
    for function in (best, part):
        wanted = function(*arrays)
        for have, want in zip(torch.compile(function, fullgraph=True)(*arrays), wanted, strict=True):
            torch.testing.assert_close(have, want, equal_nan=True)
    mapped = torch.func.vmap(best)(*(one.unflatten(0, (2, 3)) for one in arrays))
    for have, want in zip(mapped, best(*arrays), strict=True):
        torch.testing.assert_close(have.flatten(0, 1), want, equal_nan=True)


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (lambda one: one.long(), ValueError, "allowed.*int32"),
        (lambda one: one[:, :-1], ValueError, r"allowed.*\(7, 11\)"),
        (lambda one: one[:1], ValueError, r"allowed.*\(7, 11\)"),
        (lambda one: one.tolist(), TypeError, "allowed"),
    ],
)
def test_bitmaps_that_are_refused(bad: Any, kind: type[Exception], said: str) -> None:
    given = drawn()
    for shard in (None, (0, VOCAB)):
        with pytest.raises(kind, match=said):
            tvm_sparse.head_topk(given["hidden"], given["embedding"], K, allowed=bad(given["allowed"]), shard=shard)
