"""softmax, log_softmax and logsumexp on the CPU: as torch's, at every dtype and for every kind of array; bad input.

Kernels are compiled once for the module, into a temporary cache; the expected values are the problems' own references,
which are compared with torch's here.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SM90, calls_run, own_on_host, run_emulated, thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from test_calls import BAD_SOFTMAX, KINDS, logits_of, read_only, seed, to_numpy, to_torch

import tvm_sparse
from tvm_sparse.artifacts.compile import compile_candidate
from tvm_sparse.core import spaces
from tvm_sparse.core.machine import REGISTER_FILE
from tvm_sparse.core.problem import FLOATS, Problem, ProblemError, numpy_dtype
from tvm_sparse.core.registry import parse
from tvm_sparse.operators.logsumexp.problem import LogSumExp
from tvm_sparse.operators.softmax.problem import ALGORITHMS, Softmax
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

KEYS = (
    *(f"softmax/batch=7,vocab=61,dtype={dtype}" for dtype in FLOATS),
    *(f"softmax/batch=7,vocab=61,algorithm={algorithm}" for algorithm in ALGORITHMS[1:]),
    "softmax/batch=7,vocab=2050",
    "softmax/batch=7,vocab=2050,dtype=bfloat16,result=float32",
    "softmax/batch=7,vocab=61,dtype=float16,result=float32",
    *(f"logsumexp/batch=7,vocab=61,dtype={dtype}" for dtype in FLOATS),
    "logsumexp/batch=7,vocab=2050",
)
SMALL, SUM = "softmax/batch=7,vocab=61", "logsumexp/batch=7,vocab=61"
Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    "softmax": tvm_sparse.softmax,
    "log_softmax": tvm_sparse.log_softmax,
    "logsumexp": tvm_sparse.logsumexp,
}


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


def check(name: str, logits: Any, result: Any, algorithm: str = "online") -> None:
    """Compare with the reference of these very logits."""
    x = to_numpy(logits)
    problem: Problem
    if name == "logsumexp":
        problem, inputs = LogSumExp(*x.shape, str(x.dtype)), [x]
    else:
        problem, inputs = Softmax(*x.shape, algorithm, str(x.dtype)), [x, int(name == "log_softmax")]
    found = to_numpy(result)
    assert found.shape == problem.empty_outputs()[0].shape and found.dtype == problem.empty_outputs()[0].dtype
    problem.check(inputs, problem.reference(inputs), [found])


# ---- problems ------------------------------------------------------------------------------------


@given(st.integers(1, 10**5), st.integers(1, 2**20), st.sampled_from(ALGORITHMS), st.sampled_from(FLOATS))
def test_keys_round_trip(batch: int, vocab: int, algorithm: str, dtype: str) -> None:
    for problem in (Softmax(batch, vocab, algorithm, dtype), LogSumExp(batch, vocab, dtype)):
        assert parse(problem.key) == problem and problem.distance(problem) == 0
        assert problem.with_batch(7).batch_extent == 7


def test_keys_are_stable() -> None:
    """They stand in records on disk: a change here orphans what was measured."""
    assert parse("softmax/batch=10,vocab=25000").key == "softmax/batch=10,vocab=25000,algorithm=online,dtype=float32"
    assert parse("logsumexp/batch=10,vocab=25000").key == "logsumexp/batch=10,vocab=25000,dtype=float32"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("softmax/batch=1,vocab=2,algorithm=fast", "algorithm must be one of online, safe, naive, got 'fast'"),
        (
            "softmax/batch=1,vocab=2,result=float32",
            "result is float32, for logits of 16 bits, or absent, got 'float32'",
        ),
        ("softmax/batch=1,vocab=2,dtype=float16,result=float16", "result is float32, for logits of 16 bits, or absent"),
        ("softmax/batch=0,vocab=2", "batch must be an integer of at least 1, got 0"),
        ("softmax/batch=1,vocab=2147483648", "vocab must be below 2^31"),
        ("logsumexp/batch=1,vocab=0", "vocab must be an integer of at least 1, got 0"),
        ("logsumexp/batch=1,vocab=2,dtype=float64", "dtype must be one of float32, float16, bfloat16, got"),
    ],
)
def test_bad_keys_name_the_axis(key: str, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse(key)
    assert message in str(caught.value)


@pytest.mark.parametrize(("vocab", "dtype"), [(61, "float16"), (2050, "bfloat16")])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("structure", Softmax.structures)
def test_float32_results_of_16_bits(vocab: int, dtype: str, name: str, structure: str) -> None:
    problem = Softmax(7, vocab, dtype=dtype, result="float32")
    log = int(name == "log_softmax")
    logits, _ = problem.generate(seed(), structure)
    x, call = to_torch(logits), FUNCTIONS[name]
    want = problem.reference([logits, log])
    for asked, wide in (
        (logits, "float32"),
        (logits, np.float32),
        (x, torch.float32),
        (x.reshape(7, 1, vocab), "float32"),
    ):
        found = to_numpy(call(asked, dtype=wide))
        assert found.dtype == np.float32 and found.shape == asked.shape
        problem.check([logits, log], want, [found.reshape(7, vocab)])
    out = torch.empty(7, vocab)
    assert call(x, dtype=torch.float32, out=out) is out
    problem.check([logits, log], want, [out.numpy()])
    with pytest.raises(ValueError, match="out: expected shape .* and dtype float32"):
        call(x, dtype=torch.float32, out=torch.empty_like(x))
    narrow = call(x)
    assert narrow.dtype == x.dtype == call(x, dtype=x.dtype).dtype
    other = torch.float16 if dtype == "bfloat16" else torch.bfloat16
    for wrong in (other, "float64", np.int32, "f"):
        with pytest.raises(ValueError, match=f"dtype: expected float32, or {dtype} as the logits have, got "):
            call(x, dtype=wrong)


def test_float32_results_of_float32_are_what_there_is_anyway() -> None:
    x = torch.randn(7, 61)
    assert torch.equal(tvm_sparse.softmax(x, dtype=torch.float32), tvm_sparse.softmax(x))
    with pytest.raises(ValueError, match="dtype: expected float32, got float16"):
        tvm_sparse.softmax(x, dtype=torch.float16)


@pytest.mark.parametrize("structure", Softmax.structures)
@pytest.mark.parametrize("log", [0, 1])
def test_references_against_torch(structure: str, log: int) -> None:
    for algorithm in ALGORITHMS:
        problem = Softmax(24, 53, algorithm)
        logits = problem.generate(log, structure)[0]
        x = torch.from_numpy(logits.astype(np.float64))
        wanted = (torch.log_softmax if log else torch.softmax)(x, -1).numpy()
        # By Algorithm 1 a row with plus infinity is 0 (its logarithm minus infinity) elsewhere.
        # Where the largest logit is far from 0, its powers overflow or vanish.
        largest = logits.max(axis=1)
        near = np.isneginf(largest) | np.isnan(largest) | (np.abs(largest) < 80)
        same = near if algorithm == "naive" else slice(None)
        [found] = problem.reference([logits, log])
        np.testing.assert_allclose(found[same], wanted[same], rtol=1e-9, atol=1e-15 if log else 1e-37, equal_nan=True)
    logits = LogSumExp(24, 53).generate(log, structure)[0]
    [found] = LogSumExp(24, 53).reference([logits])
    wanted = torch.logsumexp(torch.from_numpy(logits.astype(np.float64)), -1).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, equal_nan=True)


def test_checks_reject_what_is_wrong_where_infinities_or_nan_are_right() -> None:
    for problem, chosen in ((Softmax(40, 61), {"log": 1}), (LogSumExp(40, 61), {})):
        inputs = problem.generate(0, "masked", chosen)
        expected = problem.reference(inputs)
        problem.check(inputs, expected, [expected[0].astype(np.float32)])
        assert np.isneginf(expected[0]).any()
        with pytest.raises(AssertionError, match="expected -inf"):
            problem.check(inputs, expected, [np.where(np.isneginf(expected[0]), -1e30, expected[0])])
    problem = Softmax(40, 61)
    inputs = problem.generate(0, "special")
    expected = problem.reference(inputs)
    with pytest.raises(AssertionError, match="expected nan"):
        problem.check(inputs, expected, [np.nan_to_num(expected[0])])


def test_reading_many_long_rows_overlaps_their_exponentials(tmp_path: Path) -> None:
    """By default no place of a tile is idle, and registers suffice for all threads of a multiprocessor."""
    problem, template = LogSumExp(4096, 32768, "bfloat16"), spaces.find("logsumexp_streamed")
    point = template.default(problem, SM90)
    resources = compile_candidate(problem, template.candidate(point), SM90, tmp_path / "kernel.so").resources
    assert problem.vocab // 8 % (point["threads"] * point["vectors"]) == 0
    assert resources is not None and resources["registers"] * 2048 <= REGISTER_FILE and 2048 % point["threads"] == 0


def test_spaces_load_no_compiler() -> None:
    """Look-up asks for them where no compiler is installed."""
    code = """
import sys
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
for key in sys.argv[1:]:
    for target in ("cpu", "sm_90a"):
        spaces.fallback(parse(key), machine.resolve(target))
        spaces.applicable(parse(key), machine.resolve(target))
assert not {"tvm", "tvm_ffi"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, *KEYS], check=True)


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", Softmax.structures)
@pytest.mark.parametrize("key", KEYS)
def test_results_equal_the_reference(key: str, structure: str) -> None:
    problem = parse(key)
    logits = to_torch(problem.generate(seed(), structure)[0])
    for x in (logits, logits[:1]):
        if isinstance(problem, LogSumExp):
            check("logsumexp", x, tvm_sparse.logsumexp(x))
        else:
            check("softmax", x, tvm_sparse.softmax(x, algorithm=problem.algorithm), problem.algorithm)
            if problem.algorithm == "online":
                check("log_softmax", x, tvm_sparse.log_softmax(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array(kind: str, dtype: str) -> None:
    convert, result = KINDS[kind]
    logits = parse(f"{SMALL},dtype={dtype}").generate(seed())[0]
    for name, function in FUNCTIONS.items():
        if name != "logsumexp" and kind == "array API" and dtype == "bfloat16":
            continue  # NumPy, behind this test's array-API class, does not take bfloat16 by DLPack
        found = function(convert(logits))
        assert type(found) is result
        check(name, logits, found)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.lists(
            st.one_of(
                st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3.4e38, -3.4e38]),
                st.floats(width=32, min_value=-200, max_value=200),
            ),
            min_size=61,
            max_size=61,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_values(rows: list[list[float]]) -> None:
    logits = np.array(rows, np.float32)
    for name, function in FUNCTIONS.items():
        check(name, logits, function(logits))
    check("softmax", logits, tvm_sparse.softmax(logits, algorithm="safe"), "safe")


def test_special_rows_one_by_one() -> None:
    inf, nan = np.inf, np.nan
    logits = np.zeros((5, 61), np.float32)
    logits[0] = -inf
    logits[1, 7] = inf
    logits[2, [7, 60]] = inf, nan
    logits[3, 1:] = -inf
    for x in (logits, to_torch(logits)):
        assert np.isnan(to_numpy(tvm_sparse.softmax(x))[:3]).all()
        assert np.isnan(to_numpy(tvm_sparse.log_softmax(x))[:3]).all()
        assert to_numpy(tvm_sparse.softmax(x))[3].tolist() == [1] + 60 * [0]
        assert to_numpy(tvm_sparse.log_softmax(x))[3].tolist() == [0] + 60 * [-inf]
        np.testing.assert_allclose(to_numpy(tvm_sparse.logsumexp(x)), [-inf, inf, nan, 0, np.log(61)], rtol=1e-6)


def test_the_naive_algorithm_overflows_as_its_formula_does() -> None:
    logits = np.zeros((4, 61), np.float32)
    logits[0, 3] = 100  # e^100 is infinite in float32: infinity over itself, and all else over infinity
    logits[1] = 88.0  # each finite, their sum not
    logits[2] = -200  # all 0
    found = tvm_sparse.softmax(logits, algorithm="naive")
    assert np.isnan(found[0, 3]) and not np.delete(found[0], 3).any()
    assert not found[1].any() and np.isnan(found[2]).all()
    check("softmax", logits, found, "naive")
    for algorithm in ("online", "safe"):
        found = tvm_sparse.softmax(logits, algorithm=algorithm)
        assert found[0, 3] == 1 and np.allclose(found[1:], 1 / 61)


@pytest.mark.parametrize("kind", ["numpy", "torch", "array API"])
def test_nothing_to_compute(kind: str) -> None:
    convert, result = KINDS[kind]
    for shape in ((0, 61), (3, 0), (0, 0)):
        for name in ("softmax", "log_softmax"):
            found = FUNCTIONS[name](convert(np.empty(shape, np.float32)))
            assert type(found) is result and to_numpy(found).shape == shape
        found = tvm_sparse.logsumexp(convert(np.empty(shape, np.float32)))
        assert type(found) is result and to_numpy(found).tolist() == shape[0] * [-np.inf]


@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_is_written_and_returned(name: str, kind: str) -> None:
    convert = KINDS[kind][0]
    logits = parse(SMALL).generate(seed())[0]
    for _ in range(2):  # the second time by the short way
        out = convert(parse(SUM if name == "logsumexp" else SMALL).empty_outputs()[0])
        assert FUNCTIONS[name](convert(logits), out=out) is out
        check(name, logits, out._array if kind == "dlpack" else out)


# ---- errors --------------------------------------------------------------------------------------

BAD_LOGITS = [case for case in BAD_SOFTMAX if not case.startswith(("k ", "k,", "out", "ids", "bias", "temp", "grad"))]


@pytest.mark.parametrize("case", BAD_LOGITS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_logits_are_named(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before a kernel is looked for, and whether or not a call of the same shape was right before."""
    make, error, message = BAD_SOFTMAX[case]
    FUNCTIONS[name](logits_of())
    monkeypatch.setattr(Dispatcher, "kernel", lambda *_: pytest.fail("a kernel was looked for"))
    with pytest.raises(error, match=message):
        FUNCTIONS[name](make()[0])


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.empty(4, 60), ValueError, r"out: expected shape \(4, 61\) and dtype float32, got \(4, 60\)"),
        (torch.empty(4, 61).half(), ValueError, "out: expected .*float32, got .*float16"),
        (torch.empty(61, 4).t(), ValueError, "out: expected a contiguous"),
        (np.zeros((4, 61), np.float32), ValueError, "out: expected a torch tensor, as the input is, got ndarray"),
        ((torch.empty(4, 61),) * 2, ValueError, r"out: expected 1 arrays \(out\), got 2"),
        (torch.empty(4, 61, device="meta"), TypeError, "out: expected a tensor on cpu or cuda, got one on meta"),
        (torch.empty(4, 61, requires_grad=True), RuntimeError, "out: requires a gradient"),
    ],
)
def test_bad_outputs_are_named(out: Any, error: type[Exception], message: str) -> None:
    tvm_sparse.softmax(logits_of())
    for name in ("softmax", "log_softmax"):
        with pytest.raises(error, match=message):
            FUNCTIONS[name](logits_of(), out=out)
        with pytest.raises(ValueError, match="out: expected a contiguous, writeable"):
            FUNCTIONS[name](logits_of().numpy(), out=read_only(np.zeros((4, 61), np.float32)))


@pytest.mark.parametrize("algorithm", ["fast", "logsumexp", "", None, 3, 5, ["online"]])
def test_unknown_algorithms(algorithm: Any) -> None:
    """Also those under which other functions keep what they remember of a shape."""
    tvm_sparse.logsumexp(logits_of())
    with pytest.raises(ValueError, match="algorithm: expected one of online, safe, naive, got"):
        tvm_sparse.softmax(logits_of(), algorithm=algorithm)


def test_without_gradients_a_parameter_is_an_array() -> None:
    logits = torch.nn.Parameter(torch.randn(4, 61))
    with torch.no_grad():
        for name, function in FUNCTIONS.items():
            found = function(logits)
            assert not found.requires_grad
            check(name, logits, found)


# ---- the short way of repeated calls -------------------------------------------------------------


def test_repeated_calls_between_others(dispatcher: Dispatcher) -> None:
    """What a call of a shape leaves behind serves only calls that are like it."""
    dispatcher.launchers = {}
    base = torch.randn(8 * 61)
    tensors = [
        base[: 7 * 61].view(7, 61),
        base[3 : 3 + 7 * 61].view(7, 61),  # offset by 12 bytes
        base[: 4 * 61].view(4, 61),
        base[: 7 * 61].view(7, 61).half(),
        torch.randn(61, 7).t(),
    ]
    for _ in range(3):
        for logits in tensors:
            for name, function in FUNCTIONS.items():
                check(name, logits.contiguous(), function(logits))
            if logits.dtype is torch.float32:
                check("softmax", logits.contiguous(), tvm_sparse.softmax(logits, algorithm="naive"), "naive")
    # softmax and log_softmax share one; the offset and the transposed share with the first.
    assert len(dispatcher.launchers) == 3 * 2 + 2


def test_the_short_way_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 61)
    first = [function(logits) for function in FUNCTIONS.values()]
    monkeypatch.setattr(arrays, "facts", lambda *_: pytest.fail("the long way was taken"))
    again = [function(logits) for function in FUNCTIONS.values()]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(first, again, strict=True))


def test_problems_of_other_algorithms_do_not_lend_their_records() -> None:
    softmax = parse(SMALL)
    assert isinstance(softmax, Softmax)
    assert softmax.distance(dataclasses.replace(softmax, algorithm="naive")) is None
    assert softmax.distance(parse(SUM)) is None


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "axes", "point"),
    [
        ("softmax_held", "vocab=1037,dtype=float32", {"threads": 128, "cluster": 1, "rows": 1}),
        thorough("softmax_held", "vocab=301,dtype=float32", {"threads": 32, "cluster": 1, "rows": 4}),
        thorough("softmax_held", "vocab=2050,dtype=float32", {"threads": 64, "cluster": 2, "rows": 1}),
        ("logsumexp_streamed", "vocab=1037,dtype=float32", {"threads": 128, "cluster": 1, "rows": 1, "vectors": 1}),
        ("logsumexp_streamed", "vocab=301,dtype=bfloat16", {"threads": 32, "cluster": 1, "rows": 4, "vectors": 1}),
    ],
)
def test_kernels_of_rows_whose_threads_differ(name: str, axes: str, point: dict[str, int]) -> None:
    """Threads' maxima lie far apart, and infinities anywhere: also in the elements before and after whole vectors."""
    template, seed = spaces.find(name), int.from_bytes(os.urandom(4), "little")
    problem = parse(f"{template.operator}/batch=9,{axes}")
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((9, problem.vocab)) * 10.0 ** rng.integers(-2, 3, (9, 1))
    logits += 30 * rng.standard_normal((9, -(-problem.vocab // 8))).repeat(8, axis=1)[:, : problem.vocab]
    for row in range(1, 9):
        places = rng.choice((0, 1, 2, *range(problem.vocab), problem.vocab - 1), rng.integers(1, 4))
        logits[row, places] = (-np.inf, np.inf, -np.inf)[row % 3] if template.operator == "logsumexp" else -np.inf
    logits[4] = -np.inf
    if template.operator == "logsumexp":
        logits[5, rng.choice((0, problem.vocab - 1))] = np.inf
    inputs = [logits.astype(numpy_dtype(problem.dtype)), *problem.generate(seed % 1000)[1:]]
    program = template.build(problem, point)
    run_emulated(program, problem, inputs, own_on_host(program, problem), seed % 1000)
