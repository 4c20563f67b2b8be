"""Edits of logits in place, the errors of the call, and edits before a draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import calls_run
from test_calls import to_numpy

torch = pytest.importorskip("torch")

import tvm_sparse  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.runtime import repeat  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

BOTH, PENALISED = (
    parse("edit_logits/batch=5,vocab=300,words=40,bias=1,per_row=1"),
    parse("edit_logits/batch=5,vocab=300,words=40,dtype=bfloat16"),
)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    keys = [problem.as_called().key for problem in (BOTH, PENALISED)]
    sampled = "softmax_sample/batch=5,vocab=300,k=8"
    with calls_run((*keys, sampled), tmp_path_factory.mktemp("kernels")) as own:
        yield own


def call_of(problem: Any, seed: int, convert: Any) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a call, and the problem's inputs."""
    inputs = problem.generate(seed, "full")
    given = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
    del given["copied"]
    names = {"repetitions": "repetition", "presences": "presence", "frequencies": "frequency"}
    named = {names.get(name, name): value for name, value in given.items()}
    found = {
        f"{name}_penalty" if name in names.values() else name: convert(value) if hasattr(value, "shape") else value
        for name, value in named.items()
    }
    return found, inputs


def as_torch(array: Any) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("convert", [as_torch, lambda array: array], ids=["torch", "numpy"])
@pytest.mark.parametrize("problem", [BOTH, PENALISED], ids=str)
def test_in_place_only_the_words_change(problem: Any, convert: Any, native: bool) -> None:
    """And a repeated call edits once more, with other values too."""
    before = repeat.again is getattr(repeat.native, "again", None)
    repeat.use_native(native and before)
    try:
        for seed in range(3):
            given, inputs = call_of(problem, seed, convert)
            wanted = problem.reference(inputs)
            logits = given.pop("logits")
            copy = logits.clone() if hasattr(logits, "clone") else logits.copy()
            found = tvm_sparse.edit_logits(copy, **given, out=copy)
            assert found is copy
            problem.check(inputs, wanted, [to_numpy(found) if hasattr(found, "clone") else found])
            aside = tvm_sparse.edit_logits(logits, **given)
            assert bool((aside == copy).all())
    finally:
        repeat.use_native(before)


def test_a_word_on_both_lists_is_biased_first() -> None:
    logits = np.zeros((5, 300), np.float32)
    words, rows = np.full((5, 2), -1, np.int32), np.ones(5, np.float32)
    words[:, 1] = 7
    found = tvm_sparse.edit_logits(
        logits, bias_ids=words, bias_values=np.full((5, 2), 6, np.float32), seen_ids=words,
        generated=np.full((5, 2), 3, np.int32), repetition_penalty=2 * rows, presence_penalty=0.5 * rows,
        frequency_penalty=0.25 * rows,
    )  # fmt: skip
    assert (found[:, 7] == 6 / 2 - 3 * 0.25 - 0.5).all()
    assert not np.delete(found, 7, axis=1).any()


def test_a_forbidden_word_is_never_drawn() -> None:
    logits = torch.zeros(5, 300)
    logits[:, 11] = 50.0
    words = torch.full((5, 40), -1, dtype=torch.int32)
    words[:, 3] = 11
    values = torch.full((5, 40), -torch.inf)
    ones = torch.ones(5)
    tvm_sparse.edit_logits(
        logits, bias_ids=words, bias_values=values, seen_ids=words, repetition_penalty=ones, presence_penalty=0 * ones,
        frequency_penalty=0 * ones, out=logits,
    )  # fmt: skip
    for seed in range(10):
        tokens, _ = tvm_sparse.softmax_sample(logits, top_k=8, uniforms=torch.full((5,), seed / 10))
        assert not (tokens == 11).any()


def test_a_compiled_call_edits_in_place() -> None:
    given, _ = call_of(BOTH, 3, as_torch)
    logits = given.pop("logits")
    wanted = tvm_sparse.edit_logits(logits, **given)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def edited(rows: Any) -> Any:
        tvm_sparse.edit_logits(rows, **given, out=rows)
        return rows * 1

    copy = logits.clone()
    assert torch.equal(edited(copy), wanted)
    assert torch.equal(copy, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias_values": None}, "bias_values: expected an array beside bias_ids"),
        ({"bias_ids": None}, "bias_ids: expected an array beside bias_values"),
        ({"seen_ids": None}, "generated: counts the words of seen_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a finite number above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected a finite number"),
        ({"soft_cap": 0.0}, "soft_cap: expected a finite number above 0"),
        ({"generated": torch.zeros(5, 3, dtype=torch.int32)}, r"generated: expected shape \(5, 40\)"),
        ({"out": torch.zeros(5, 299)}, r"out: expected shape \(5, 300\)"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    given, _ = call_of(BOTH, 1, as_torch)
    with pytest.raises(ValueError, match=message):
        tvm_sparse.edit_logits(**{**given, **change})


def test_a_view_of_the_logits_is_no_edit_in_place() -> None:
    given, _ = call_of(BOTH, 1, as_torch)
    with pytest.raises(ValueError, match="out: shares memory with logits"):
        tvm_sparse.edit_logits(**given, out=given["logits"].view(5, 300))


@pytest.mark.gpu
def test_a_cuda_graph_edits_in_place_and_draws() -> None:
    """Replays take the words, counts and logits of the time, and change nothing else."""
    given, inputs = call_of(BOTH, 5, lambda array: as_torch(array).cuda())
    source, logits = given.pop("logits"), torch.empty(5, 300, device="cuda")

    def step() -> Any:
        logits.copy_(source)
        tvm_sparse.edit_logits(logits, **given, out=logits)
        return tvm_sparse.softmax_sample(logits, top_k=8, uniforms=uniforms)

    uniforms = torch.rand(5, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = step()
    for seed in range(5, 8):
        other, inputs = call_of(BOTH, seed, lambda array: as_torch(array).cuda())
        source.copy_(other["logits"])
        for name, one in given.items():
            one.copy_(other[name])
        graph.replay()
        BOTH.check(inputs, BOTH.reference(inputs), [logits.cpu().numpy()])
        wanted, _ = tvm_sparse.softmax_sample(logits, top_k=8, uniforms=uniforms)
        assert torch.equal(tokens, wanted)
