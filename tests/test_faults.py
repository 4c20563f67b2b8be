"""Kernels that are wrong, each in its own way, and what becomes of them in the measuring child: none is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
from cases import case_id, of_each_operator
from faulty_build_worker import HUGE
from faulty_kernels import (
    FAULTS,
    PROBLEMS,
    Fault,
    Faulty,
    beside,
    counts_in_a_workspace,
    has_nan,
    logits_rows,
    message,
    refuses_what_is_misaligned,
    spoiled,
    writes_an_input,
)
from hypothesis import given
from hypothesis import strategies as st

from tvm_sparse.bench import measure, verification
from tvm_sparse.bench.buffers import GUARD_BYTES, Fatal, Guarded
from tvm_sparse.core.problem import Mismatch, Problem, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.runtime import loading
from tvm_sparse.workers import processes


def measured(monkeypatch: pytest.MonkeyPatch, problem: Problem, fault: Fault, **more: Any) -> dict[str, Any]:
    load = measure.load
    monkeypatch.setattr(measure, "load", lambda *where: Faulty(problem, load(*where), fault))
    return measure.handle(message(problem, **more))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All problems have the cases of large ones."""
    monkeypatch.setattr(verification, "LARGE", -1)
    measure.prepared.cache_clear()
    yield
    measure.prepared.cache_clear()


@pytest.mark.drawn
@pytest.mark.parametrize("cases", ["cases", "few_cases"])
@pytest.mark.parametrize(
    ("operator", "name"), [(operator, name) for operator, faults in FAULTS.items() for name in faults]
)
def test_a_faulty_kernel_is_rejected(
    operator: str, name: str, cases: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cases == "few_cases":
        request.getfixturevalue(cases)
    fault = FAULTS[operator][name]
    with pytest.raises(Fatal if fault is refuses_what_is_misaligned else Mismatch):
        measured(monkeypatch, parse(PROBLEMS[operator]), fault)


def test_a_kernel_that_leaves_its_workspace_dirty_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces = [{"name": "count", "shape": ["batch"], "dtype": "int32", "fill": 0}]
    with pytest.raises(Mismatch):
        measured(monkeypatch, parse(PROBLEMS["softmax"]), counts_in_a_workspace, workspaces=workspaces)


def test_a_workspace_without_room_is_told_before_memory_is_filled_and_is_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a host lends its processes more than it has, filling half a terabyte lasts longer than a trial may."""
    room = tvm.runtime.empty

    def empty(shape: tuple[int, ...], *rest: Any) -> Any:
        if shape == tuple(HUGE["shape"]):
            raise RuntimeError("CUDA: out of memory")
        return room(shape, *rest)

    monkeypatch.setattr(tvm.runtime, "empty", empty)
    monkeypatch.setattr(loading, "on_host", lambda *_: pytest.fail("the host's memory is filled first"))
    with pytest.raises(Fatal, match="^RuntimeError: CUDA: out of memory$") as caught:
        measured(monkeypatch, parse(PROBLEMS["softmax"]), lambda call: call.run(), workspaces=[HUGE])
    assert processes._WANTING.search(str(caught.value))


def test_the_message_says_what_is_wrong_and_with_which_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(PROBLEMS["softmax_topk"])
    said = r"^(special|mixed), scale [\d.]+, log [01],.* batch \d+, draw \d+-\d+-\d+: values\[\d+, 0\] is 0, expected"
    with pytest.raises(Mismatch, match=said):
        measured(monkeypatch, problem, spoiled(lambda call: call["scale"] > 1.5 and logits_rows(has_nan)(call)))
    monkeypatch.undo()
    with pytest.raises(Mismatch, match=r"indices: up to 8 bytes behind it were written"):
        measured(monkeypatch, problem, beside(0))


# ---- right kernels: that those of every shape pass is in test_templates.py -----------------------


@pytest.mark.parametrize("operator", PROBLEMS)
def test_a_right_kernel_is_timed(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = measured(monkeypatch, parse(PROBLEMS[operator]), lambda call: call.run())
    assert len(reply["seconds"]) == 5 and all(0 < seconds < 1 for seconds in reply["seconds"])


def test_references_are_made_before_the_first_library_comes() -> None:
    problem = parse(PROBLEMS["nhot_lookup"])
    assert measure.handle({"problem": problem.key, "kind": "llvm", "seed": 3}) == {}
    before = measure.prepared.cache_info()
    measure.handle(message(problem, seed=3, steps=("verify", "check")))
    assert measure.prepared.cache_info().misses == before.misses


def test_steps_may_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is what is timed, and what is looked at afterwards."""
    monkeypatch.setattr(measure, "_checked", None)
    problem = parse(PROBLEMS["softmax_topk"])
    for steps in (("time",), ("recheck",)):
        with pytest.raises(RuntimeError, match="was not checked in this process"):
            measured(monkeypatch, problem, lambda call: call.run(), steps=steps)
    times = [
        len(measured(monkeypatch, problem, lambda call: call.run(), steps=(step,))["seconds"])
        for step in ("verify", "prove", "check", "time", "recheck")
    ]
    assert times == [0, 0, 0, 5, 0]
    with pytest.raises(RuntimeError, match="was not checked in this process"):  # that was all
        measured(monkeypatch, problem, lambda call: call.run(), steps=("time",))


def test_cases_may_be_drawn_before_and_a_proof_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step checks the cases that were drawn for its library and seed, and draws all of its own if there are none."""
    checked: list[int] = []
    monkeypatch.setattr(measure, "_drawn", None)
    monkeypatch.setattr(measure, "verify", lambda function, kind, cases, workspaces: checked.append(len(cases)))
    problem = parse(PROBLEMS["softmax_topk"])

    def ask(*steps: str, **more: Any) -> dict[str, Any]:
        return measured(monkeypatch, problem, lambda call: call.run(), steps=steps, draw=7, **more)

    ask("prove")
    whole = checked.copy()
    checked.clear()
    while ask("draw", proof=True)["left"]:
        before = len(checked)
        ask("prove")
        assert len(checked) == before + 1
    assert checked == whole and len(whole) > 5
    ask("prove")  # nothing is left of what was drawn
    assert checked == 2 * whole
    assert ask("draw")["left"] and not ask("draw")["left"]


def test_candidates_are_timed_with_the_same_arrays_unless_one_was_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a faulty one may be spoilt, and nothing of it is to be the next one's fault."""
    monkeypatch.setattr(measure, "_kept", None)
    problem = parse(PROBLEMS["softmax_topk"])

    def kept_of(fault: Fault, **more: Any) -> verification.Arguments | None:
        with pytest.MonkeyPatch.context() as patch:
            measured(patch, problem, fault, steps=measure.WITHOUT_VERIFY, **more)
        return measure._kept and measure._kept.arguments

    def sound(call: Any) -> None:
        call.run()

    workspaces = [{"name": "count", "shape": ["batch"], "dtype": "int32", "fill": 0}]
    first = kept_of(sound)
    assert first is not None
    assert kept_of(sound) is first
    assert kept_of(sound, workspaces=workspaces) is first
    with pytest.raises(Mismatch):
        kept_of(writes_an_input)
    assert kept_of(sound) is not first
    monkeypatch.setattr(measure, "MOST_KEPT", 0)  # large ones make room for those of the next one's small cases
    assert kept_of(sound) is None


# ---- what they are compared with -----------------------------------------------------------------


@pytest.mark.parametrize("problem", of_each_operator(), ids=case_id)
def test_a_reference_in_parts_is_the_whole_one(problem: Problem) -> None:
    """As it is made of large batches."""
    problem = problem.with_batch(7)
    for seed, structure in enumerate(problem.structures):
        inputs = problem.generate(seed, structure)
        expected = problem.reference(inputs)
        parts, bounds = verification.reference(problem, inputs, elements=1)
        for part, whole in zip(parts, expected, strict=True):
            np.testing.assert_allclose(part, whole, rtol=1e-12)
        for part, bound in zip(bounds, problem.tolerance(inputs, expected), strict=True):
            assert (part is None) == (bound is None)
            if bound is not None:
                np.testing.assert_allclose(part, bound, rtol=1e-5)


@given(st.sampled_from(["float32", "float16", "bfloat16", "int64"]), st.integers(0, 5), st.integers(0, 64))
def test_guarded_arrays_hold_what_is_written(dtype: str, extent: int, offset: int) -> None:
    kind = numpy_dtype(dtype)
    room = Guarded("llvm", 3 * extent * kind.itemsize, 64)
    for shape in ((3, extent), (extent, 2), (0,)):
        tensor = room.place(shape, dtype, offset)
        assert tuple(tensor.shape) == shape and str(tensor.dtype) == dtype
        assert not shape[0] * extent or (tensor.data_ptr() - GUARD_BYTES - offset) % 64 == 0
        content = np.arange(np.prod(shape)).reshape(shape).astype(kind)
        room.write(content)
        assert room.read().tobytes() == content.tobytes() and room.read().shape == shape
        room.write(0x5A)
        assert set(room.read().tobytes()) <= {0x5A}
