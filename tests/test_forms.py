"""Every form of every argument of every public function, as its signature declares them: first, again, with other
values, at another batch, after another form, each compared with the reference.

Values are drawn with a seed of their own in every run, which a failure shows; TVM_SPARSE_TEST_SEED sets it.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import calls_run, thorough
from turns import once

torch = pytest.importorskip("torch")

import forms  # noqa: E402
from forms import BASE, CASES, SIGNATURES, Variant, draw, variants  # noqa: E402
from test_calls import to_numpy  # noqa: E402

import tvm_sparse  # noqa: E402
from tvm_sparse.core import machine  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.runtime import calls, repeat  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402
from tvm_sparse.runtime.signature import Number  # noqa: E402

SEED = int(os.environ.get("TVM_SPARSE_TEST_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
EACH = [(name, variant) for name in CASES for variant in variants(name)]
IDS = [f"{name}-{variant.argument}-{variant.label}" for name, variant in EACH]


# Kernels of rounded numbers of words: those of fewer are not compiled.
WIDE = (
    "softmax_topk/batch=7,vocab=61,k=8",
    "softmax_topk/batch=7,vocab=61,k=8,ids=8",
    "head_topk/batch=7,vocab=61,hidden=16,k=8",
    "head_topk/batch=7,vocab=61,hidden=16,k=8,ids=8",
    *(
        f"{key},per_row=1"
        for key in (
            "softmax_topk/batch=7,vocab=61,k=8",
            "softmax_topk/batch=7,vocab=61,k=8,bias=1,ids=8",
            "head_topk/batch=7,vocab=61,hidden=16,k=8",
            "head_topk/batch=7,vocab=61,hidden=16,k=8,bias=1,ids=8",
        )
    ),
    "head_topk/batch=7,vocab=61,hidden=16,k=8,stored=int8",
    "head_topk/batch=7,vocab=61,hidden=16,k=8,stored=float8_e4m3fn",
    "candidate_topk/lists=1,beam=6,vocab=61,hidden=16,m=10,k=8",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of kernels, which the processes of a run share."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("kernels")
    shared = tmp_path_factory.getbasetemp().parent / "kernels-of-forms"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module", autouse=True)
def dispatcher(kernels: Path) -> Iterator[Dispatcher]:
    with calls_run((*forms.keys(), *WIDE), kernels) as own:
        yield own


@pytest.fixture(autouse=True)
def nothing_remembered(dispatcher: Dispatcher) -> None:
    dispatcher.launchers = {}


def test_every_parameter_is_declared() -> None:
    """And every public function that takes arrays, with a case here."""
    public = {name for name in tvm_sparse.__all__ if isinstance(getattr(tvm_sparse, name), types.FunctionType)}
    of_operators = {name for name in public if ".operators." in getattr(tvm_sparse, name).__module__}
    assert set(SIGNATURES) == set(CASES) == of_operators - {"recurrent_weights", "block_recurrent_weights"}
    for name, signature in SIGNATURES.items():
        assert [argument.name for argument in signature.arguments] == forms.parameters(name), name


def check_sequence(name: str, variant: Variant, device: str = "cpu") -> None:
    seed = SEED
    for number, (form, other) in enumerate(
        [(variant, False), (variant, False), (variant, True), (BASE, False), (variant, False), (BASE, True)]
    ):
        call = draw(name, form, seed + number, other, device)
        for _ in range(2):
            call.check(call())


@pytest.mark.parametrize(("name", "variant"), EACH, ids=IDS)
def test_a_form(name: str, variant: Variant) -> None:
    check_sequence(name, variant)


@pytest.fixture
def in_python(dispatcher: Dispatcher) -> Iterator[None]:
    native = repeat.again is getattr(repeat.native, "again", None)
    repeat.use_native(False)
    yield
    repeat.use_native(native)


@pytest.mark.parametrize("name", CASES)
def test_the_forms_one_after_another_without_the_extension(name: str, in_python: None) -> None:
    for variant in variants(name):
        call = draw(name, variant, SEED)
        call.check(call())
        call.check(call())


# ---- outputs -------------------------------------------------------------------------------------


def made_like(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.full_like(one, -1) for one in results)


def given_out(name: str, outputs: tuple[Any, ...]) -> Any:
    return outputs if len(SIGNATURES[name].outputs) > 1 else outputs[0]


def written(call: forms.Call, results: Any) -> tuple[Any, ...]:
    """The outputs that may be given in `out`."""
    given = {one.name for one in SIGNATURES[call.name].outputs if one.given}
    return tuple(one for name, one in zip(call.names(), call.outputs(results), strict=True) if name in given)


def arrays_of(value: Any) -> list[Any]:
    """The tensors that a kernel reads of an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    kinds = (tvm_sparse.BsrWeight, tvm_sparse.CsrRows)
    return [one for one in value.arguments if isinstance(one, torch.Tensor)] if isinstance(value, kinds) else []


# With all optional arrays that may be given together.
FULL = {
    "softmax_sample": {"bias": 1, "per_row": 1, "seeded": 1},
    "softmax_topk": {"bias": 1, "ids": 3, "per_row": 1},
    "edit_logits": {"bias": 1, "penalties": 1, "per_row": 1},
    "head_topk": {"bias": 1, "ids": 3, "per_row": 1},
    "bsr_matmul": {"bias": 1},
    "candidate_topk": {"bias": 1},
    "candidate_logits": {"bias": 1},
    "sparse_recurrent": {"cell": "gru", "resets": 1},
    "block_recurrent": {"cell": "lstm"},
    "lsh_topk": {"bias": 1},
    "lsh_lookup": {"table": "cuckoo", "bits": 30},
}


def with_all(name: str, number: int = 0, device: str = "cpu") -> forms.Call:
    """A call with arrays that may be absent; each number has another values, and all the same flags."""
    call = draw(name, Variant("", "all", FULL.get(name, {})), SEED + number, device=device)
    flags = {"normaliser": True, "validate": False, "best": 0}
    call.arguments.update({flag: value for flag, value in flags.items() if flag in call.arguments})
    return call


def same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


def overlapping(array: Any, out: Any, device: str) -> tuple[Any, Any]:
    """Two tensors like these with the last bytes of the first one in the second, both where vector loads may begin."""
    start = (array.nbytes - 1) // 16 * 16
    memory = torch.zeros(start + max(out.nbytes, 16) + 16, dtype=torch.uint8, device=device)
    first = memory[: array.nbytes].view(array.dtype).view(array.shape).copy_(array)
    return first, memory[start : start + out.nbytes].view(out.dtype).view(out.shape)


def check_aliases(name: str, device: str) -> None:
    """Each output over each array that is read, and over each other output: at a first call, and at a repeated one."""
    call = with_all(name, device=device)
    first = written(call, call())
    arguments = {key: value for key, value in call.arguments.items() if arrays_of(value)}
    for place, like in enumerate(first):
        outputs = list(made_like(first))
        for key, value in arguments.items():
            if isinstance(value, torch.Tensor):
                moved, outputs[place] = overlapping(value, like, device)
                given = {**call.arguments, key: moved}
            else:
                # The memory of the structure itself.
                _, *parts = max((part.nbytes, i) for i, part in enumerate(arrays_of(value)))
                part = arrays_of(value)[parts[0]]
                if part.nbytes < like.nbytes:
                    continue
                outputs[place] = part.view(-1).view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)
                given = call.arguments
            before = [one.clone() for one in arrays_of(given[key])]
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"out.*: shares memory with {key}, which is read"):
                    getattr(tvm_sparse, name)(**given, out=given_out(name, tuple(outputs)))
                assert all(map(torch.equal, before, arrays_of(given[key])))
                call.check(call())
        for other in range(place):
            outputs = list(made_like(first))
            outputs[other], outputs[place] = overlapping(first[other], like, device)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"out.*: shares memory with out.*, another output"):
                    call(given_out(name, tuple(outputs)))
                call.check(call())
    outputs = made_like(first)
    for _ in range(2):
        call.check(call(given_out(name, outputs)))


@pytest.mark.parametrize("name", CASES)
def test_no_output_shares_memory_with_what_is_read(name: str) -> None:
    check_aliases(name, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_no_output_shares_memory_with_what_is_read_without_the_extension(name: str, in_python: None) -> None:
    check_aliases(name, "cpu")


def check_outs(name: str, device: str) -> None:
    """After an `out` that a call copies, or refuses, a good one is taken, and written."""
    call = with_all(name, device=device)
    with torch.no_grad():
        first = written(call, call())
    for bad in (
        tuple(torch.cat([one.new_zeros(1), one.flatten()])[1:].view(one.shape) for one in first),
        tuple(one.double() for one in first),
        tuple(one[:1] for one in first),
        (),
        tuple(None for _ in first),
    ):
        try:
            call.check(call(given_out(name, bad) if len(bad) == len(first) else bad))
        except (ValueError, TypeError) as error:
            assert str(error).startswith("out"), error
        for number in range(2):
            again = with_all(name, number, device)
            outputs = made_like(first)
            given = given_out(name, outputs)
            found = again(given)
            assert all(one is other for one, other in zip(written(again, found), outputs, strict=True))
            again.check(found)


@pytest.mark.parametrize("name", CASES)
def test_a_good_out_after_a_bad_one(name: str) -> None:
    check_outs(name, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_good_out_after_a_bad_one_without_the_extension(name: str, in_python: None) -> None:
    check_outs(name, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_what_is_remembered_does_not_grow_with_values(name: str, dispatcher: Dispatcher) -> None:
    call = with_all(name)
    call()
    before = len(dispatcher.launchers)
    for number in range(20):
        other = with_all(name, number).arguments
        numbers = {key: other[key] for key in forms.SETTINGS if key in other}
        getattr(tvm_sparse, name)(**{**call.arguments, **numbers})
    assert len(dispatcher.launchers) == before


# ---- ways of PyTorch -----------------------------------------------------------------------------


OPERATORS = [name for name in CASES if SIGNATURES[name].operator]
OTHERS = [name for name in CASES if not SIGNATURES[name].operator]


def tensors_of(call: forms.Call) -> dict[str, Any]:
    return {name: value for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}


def with_tensors(call: forms.Call, names: Any) -> Any:
    """The call as a function of its tensors."""

    def function(*tensors: Any) -> Any:
        return getattr(tvm_sparse, call.name)(**{**call.arguments, **dict(zip(names, tensors, strict=True))})

    return function


def check_contexts(name: str, device: str) -> None:
    """With and without gradients, and under autocast, a call returns the same."""
    call = with_all(name, device=device)
    dtype = torch.bfloat16
    for _ in range(2):
        with torch.no_grad():
            call.check(call())
        with torch.inference_mode():
            call.check(call())
        with torch.autocast(device, dtype=dtype):
            call.check(call())
        call.check(call())
    for argument in SIGNATURES[name].arguments:
        value = call.arguments[argument.name]
        if argument.array is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        given = {**call.arguments, argument.name: value.clone().requires_grad_()}
        function = getattr(tvm_sparse, name)
        with torch.no_grad():
            call.check(function(**given))
        if argument.array.gradient:
            found = call.outputs(function(**given))
            assert all(one.requires_grad for one in found)
            call.check(found if len(SIGNATURES[name].outputs) > 1 else found[0].detach())
        else:
            with pytest.raises(RuntimeError, match="requires a gradient"):
                function(**given)


@pytest.mark.parametrize("name", CASES)
def test_with_and_without_gradients_and_autocast(name: str) -> None:
    check_contexts(name, "cpu")


def check_trace(name: str, device: str) -> None:
    """What torch.jit.trace records computes other values, also after an eager call of the shape; or it is refused."""
    call, other = with_all(name, device=device), with_all(name, 1, device)
    call(), call()
    names = list(tensors_of(call))
    function = with_tensors(call, names)
    if not SIGNATURES[name].operator:
        with pytest.raises(TypeError, match="torch.jit.trace .* cannot record this function"):
            torch.jit.trace(function, tuple(tensors_of(call).values()), check_trace=False)
        return
    traced = torch.jit.trace(function, tuple(tensors_of(call).values()), check_trace=False)
    assert f"tvm_sparse::{name if name != 'log_softmax' else 'softmax'}" in str(traced.graph)
    given = tuple(tensors_of(other).values())
    same(call.outputs(traced(*given)), call.outputs(function(*given)))


@pytest.mark.parametrize("name", CASES)
def test_traces(name: str) -> None:
    check_trace(name, "cpu")


def numbers_of(name: str, call: Any) -> Iterator[tuple[str, list[Any], Callable[[Any], Any]]]:
    """The numbers of a function that may differ from call to call: name, some values, and the call with one of them."""
    rng = np.random.default_rng(SEED)
    for argument in SIGNATURES[name].arguments:
        form = next((one for one in argument.forms if isinstance(one, Number)), None)
        if form is None or form.kind == "bool" or argument.name in ("block", "max_top_k"):
            continue
        key = argument.name
        base = dict(call.arguments)
        if name == "softmax_sample":
            base |= {"temperature": 0.9, "top_p": 0.9, "min_p": 0.0, "top_k": 40 if key == "best" else None, "best": 0}
            base |= {"seed": 3, "offset": 0, "uniforms": None} if key in ("seed", "offset") else {}

        def run(value: Any, base: dict[str, Any] = base, key: str = key) -> Any:
            return getattr(tvm_sparse, name)(**{**base, key: value})

        if form.kind == "float":
            yield key, [float(one) for one in rng.uniform(form.least, form.most, 12)], run
        else:
            yield key, [int(one) for one in rng.permutation(range(3, 7 if key != "seed" else 20))], run


def check_numbers_of_graphs(name: str, device: str) -> None:
    """Each number of a call may take any value in one graph, or be a tensor of no dimension."""
    call = with_all(name, device=device)
    for key, values, run in numbers_of(name, call):
        graphs = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        for value in values:
            found = call.outputs(compiled(value))
            same(found, call.outputs(run(value)))
        assert len(graphs) <= 2, key
        if is_tensor_too(key, values):
            for value in values[:2]:
                found = call.outputs(compiled(torch.tensor(value)))
                same(found, call.outputs(run(torch.tensor(value))))


def is_tensor_too(key: str, values: Sequence[Any]) -> bool:
    """Whether a graph may have the number as a tensor of no dimension: the shapes of results do not depend on it."""
    return isinstance(values[0], float) or key in ("seed", "offset", "top_k")


def check_numbers_as_inputs(name: str) -> None:
    """A number that is a tensor of no dimension is an input of what torch.export and torch.jit.trace make of a call,
    and no constant; vmap goes over it, or refuses it by name.
    """
    call = with_all(name)
    for key, values, run in numbers_of(name, call):
        if not is_tensor_too(key, values):
            continue
        first, second = (torch.tensor(value) for value in values[:2])
        expected = call.outputs(run(second))
        for made in (
            torch.export.export(Exported(run), (first,), strict=False).module(),
            torch.jit.trace(run, (first,), check_trace=False),
        ):
            same(call.outputs(made(second)), expected)
        try:
            mapped = torch.vmap(run)(torch.stack([first, second]))
        except ValueError as error:
            assert str(error).startswith(f"{key}: "), error
        else:
            rows = mapped if isinstance(mapped, tuple) else (mapped,)
            one = tuple(each[1] for each in rows)
            same(call.outputs(one if isinstance(mapped, tuple) else one[0]), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_serves_every_number(name: str) -> None:
    check_numbers_of_graphs(name, "cpu")


class Exported(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Any) -> Any:
        return self.function(*tensors)


@pytest.mark.parametrize("name", OPERATORS)
def test_exports(name: str) -> None:
    call, other = with_all(name), with_all(name, 1)
    names = list(tensors_of(call))
    function = with_tensors(call, names)
    program = torch.export.export(Exported(function), tuple(tensors_of(call).values()), strict=False).module()
    given = tuple(tensors_of(other).values())
    same(call.outputs(program(*given)), call.outputs(function(*given)))


@pytest.mark.parametrize("name", OPERATORS)
def test_numbers_are_inputs_of_programs(name: str) -> None:
    check_numbers_as_inputs(name)


@pytest.mark.parametrize("name", [name if name == "compaction" else thorough(name) for name in OTHERS])
def test_what_is_no_operator_runs_between_graphs(name: str) -> None:
    call = with_all(name)
    torch._dynamo.reset()
    names = list(tensors_of(call))
    compiled = torch.compile(with_tensors(call, names), backend="eager")
    for number in range(2):
        other = with_all(name, number)
        given = tuple(tensors_of(other).values())
        same(call.outputs(compiled(*given)), call.outputs(with_tensors(call, names)(*given)))


# ---- long batches --------------------------------------------------------------------------------


# Elements of the longest row of each function's arrays, where it is not the vocabulary's 61.
WIDEST = {"bsr_matmul": 66, "csr_linear": 50, "candidate_topk": 16, "candidate_logits": 16}


@pytest.mark.parametrize("rows", [3, thorough(4), thorough(1)])
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "nhot_lookup"])
def test_what_is_too_long_for_a_kernel_is_computed_in_parts(
    name: str, library: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also into `out`, with the numbers of an integer seed, and by lists."""
    limit, axes = rows * WIDEST.get(name, 61) + 1, FULL.get(name, {})
    ways = [Variant("", "all", axes, library=library)]
    if name == "softmax_sample":
        ways += [Variant("", "seed", {"seeded": number}, library=library) for number in (0, 2, 3)]
    if name.startswith("candidate"):
        many = {**axes, "lists": 1, "beam": 6}, {**axes, "lists": 2, "beam": 3}
        ways = [Variant("", "lists", one, library=library) for one in many]
    for variant in ways:
        monkeypatch.setattr(calls, "LIMIT", limit)
        call = draw(name, variant, SEED)
        results = call()
        call.check(results)
        call.check(call())
        given = given_out(name, tuple(one * 0 - 1 for one in written(call, results)))
        call.check(call(given))
        monkeypatch.setattr(calls, "LIMIT", 2**31)
        for one, other in zip(call.outputs(results), call.outputs(call()), strict=True):
            np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


# ---- numbers of words ----------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", ["softmax_topk", "head_topk", "candidate_topk"])
def test_a_kernel_of_more_words_serves_fewer(
    name: str, library: str, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the one of just as many would have to be compiled; results are contiguous, also in `out`."""
    monkeypatch.setattr(Dispatcher, "_compile", lambda *_: pytest.fail("a kernel was compiled"))
    ways = [Variant("", "fewer", axes, library=library) for axes in ({}, {"ids": 2}, {"ids": 7})]
    if name == "candidate_topk":
        ways = [ways[0], Variant("counts", "absent", structure="random", library=library)]
    for k in (2, 4, 7, 8):
        for way in ways:
            call = draw(name, dataclasses.replace(way, axes={"k": k, **way.axes}), SEED + k)
            for _ in range(2):
                results = call()
                call.check(results)
                assert not any(hasattr(one, "is_contiguous") and not one.is_contiguous() for one in results)
                call.check(call(given_out(name, tuple(one * 0 - 1 for one in written(call, results)))))
    ready = dispatcher.kernel(parse(WIDE[0]), machine.cpu())
    assert dispatcher.serving(parse(CASES["softmax_topk"].key), ready.explanation, machine.cpu()).axes["k"] == 5


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu(dispatcher: Dispatcher, kernels: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this build of torch finds no CUDA GPU")
    where, keys = machine.gpu(), [parse(key) for key in (*forms.keys(), *WIDE)]
    assert where is not None
    (beside := kernels / "on_gpu").mkdir(exist_ok=True)
    once(beside, lambda: dispatcher.warmup(keys, where, machine.default_builders()))


ON_GPU = [(name, variant) for name, variant in EACH if variant.library == "torch"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "variant"), ON_GPU, ids=[f"{name}-{variant.argument}-{variant.label}" for name, variant in ON_GPU]
)
def test_a_form_on_a_gpu(name: str, variant: Variant, on_gpu: None) -> None:
    check_sequence(name, variant, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", [check_aliases, check_outs, check_contexts, check_trace])
def test_calls_on_a_gpu(check: Any, name: str, on_gpu: None) -> None:
    check(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_serves_every_number_on_a_gpu(name: str, on_gpu: None) -> None:
    check_numbers_of_graphs(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_a_compiled_call_becomes_a_cuda_graph(name: str, on_gpu: None) -> None:
    """torch.compile warms up, records and replays it in memory of its own, where only results may be kept."""
    call = with_all(name, device="cuda")
    names = list(tensors_of(call))
    function = with_tensors(call, names)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="cudagraphs", fullgraph=True)
    for number in (0, 1, 0, 1):
        given = tuple(tensors_of(with_all(name, number, "cuda")).values())
        same(call.outputs(compiled(*given)), call.outputs(function(*given)))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_captured_call_is_replayed_with_other_values(name: str, on_gpu: None) -> None:
    call, other = with_all(name, device="cuda"), with_all(name, 1, "cuda")
    call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for argument, value in tensors_of(call).items():
        if value.shape == other.arguments[argument].shape:
            value.copy_(other.arguments[argument])
    graph.replay()
    torch.cuda.synchronize()
    same(call.outputs(found), call.outputs(call()))
