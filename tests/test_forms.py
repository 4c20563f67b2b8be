"""Every form of every argument of every public function, as its signature declares them: first, again, with other
values, at another batch, after another form, each compared with the reference.

Values are drawn with a seed of their own in every run, which a failure shows; TVM_SPARSE_TEST_SEED sets it.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator

import pytest
from cases import calls_run

torch = pytest.importorskip("torch")

import forms  # noqa: E402
from forms import BASE, CASES, SIGNATURES, Variant, draw, variants  # noqa: E402

import tvm_sparse  # noqa: E402
from tvm_sparse.runtime import repeat  # noqa: E402
from tvm_sparse.runtime.dispatch import Dispatcher  # noqa: E402

SEED = int(os.environ.get("TVM_SPARSE_TEST_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
EACH = [(name, variant) for name in CASES for variant in variants(name)]
IDS = [f"{name}-{variant.argument}-{variant.label}" for name, variant in EACH]


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(forms.keys(), tmp_path_factory.mktemp("kernels")) as own:
        yield own


@pytest.fixture(autouse=True)
def nothing_remembered(dispatcher: Dispatcher) -> None:
    dispatcher.launchers = {}


def test_every_parameter_is_declared() -> None:
    """And every public function that takes arrays, with a case here."""
    public = {name for name in tvm_sparse.__all__ if isinstance(getattr(tvm_sparse, name), types.FunctionType)}
    of_operators = {name for name in public if ".operators." in getattr(tvm_sparse, name).__module__}
    assert (
        set(SIGNATURES)
        == set(CASES)
        == of_operators - {"recurrent_weights", "block_recurrent_weights", "softmax_sample"}
    )
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


def arrays_of(value: Any) -> list[Any]:
    """The tensors that a kernel reads of an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    kinds = (tvm_sparse.BsrWeight, tvm_sparse.CsrRows)
    return [one for one in value.arguments if isinstance(one, torch.Tensor)] if isinstance(value, kinds) else []


# With all optional arrays that may be given together.
FULL = {
    "softmax_topk": {"bias": 1, "ids": 3}, "head_topk": {"bias": 1, "ids": 3}, "bsr_matmul": {"bias": 1},
    "sparse_recurrent": {"cell": "gru", "resets": 1}, "block_recurrent": {"cell": "lstm"},
    "candidate_topk": {"bias": 1}, "lsh_topk": {"bias": 1}, "lsh_lookup": {"table": "cuckoo", "bits": 30},
}  # fmt: skip


def with_all(name: str, number: int = 0, device: str = "cpu") -> forms.Call:
    return draw(name, Variant("", "all", FULL.get(name, {})), SEED + number, device=device)


def overlapping(array: Any, out: Any, device: str) -> tuple[Any, Any]:
    """Two tensors like these with the last bytes of the first one in the second, both where vector loads may begin."""
    start = (array.nbytes - 1) // 16 * 16
    memory = torch.zeros(start + max(out.nbytes, 16) + 16, dtype=torch.uint8, device=device)
    first = memory[: array.nbytes].view(array.dtype).view(array.shape).copy_(array)
    return first, memory[start : start + out.nbytes].view(out.dtype).view(out.shape)


def check_aliases(name: str, device: str) -> None:
    """Each output over each array that is read, and over each other output: at a first call, and at a repeated one."""
    call = with_all(name, device=device)
    first = call.outputs(call())
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
        first = call.outputs(call())
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
            assert str(error).startswith("out"), error  # noqa: PT017
        for number in range(2):
            again = with_all(name, number, device)
            outputs = made_like(first)
            given = given_out(name, outputs)
            found = again(given)
            assert found is given
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
