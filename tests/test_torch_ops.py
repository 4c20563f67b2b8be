"""Custom operators of PyTorch: in graphs, under fake tensors and vmap, and their gradients against float64 PyTorch.

Kernels are compiled once for the module, into a temporary cache.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.bsr_matmul.weight import Structure
from tvm_sparse.runtime import custom, repeat
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")

PRODUCT = "bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.92"
KEYS = (
    "softmax/batch=7,vocab=61",
    "softmax/batch=7,vocab=61,dtype=bfloat16,result=float32",
    "logsumexp/batch=7,vocab=61",
    "softmax_topk/batch=7,vocab=61,k=5",
    "softmax_topk/batch=7,vocab=61,k=5,bias=1,ids=3",
    "softmax_topk/batch=7,vocab=61,k=5,per_row=1",
    "softmax_topk/batch=7,vocab=61,k=5,ids=3,per_row=1",
    "head_topk/batch=7,vocab=61,hidden=16,k=5,per_row=1",
    "softmax_sample/batch=7,vocab=61,k=61",
    "softmax_sample/batch=7,vocab=61,k=61,bias=1,per_row=1,seeded=1",
    PRODUCT,
    f"{PRODUCT},bias=1",
    f"{PRODUCT},bias=1,activation=relu",
    f"{PRODUCT},bias=1,activation=gelu",
    f"{PRODUCT},bias=1,activation=silu",
    "bsr_matmul/m=7,k=35,n=66,block=3x5,sparsity=0.92",  # the gradient of x
    "bsr_matmul/m=7,k=35,n=66,block=3x5,sparsity=0.92,turned=1",  # without a copy of the blocks
    f"{PRODUCT},precision=tf32",
    "bsr_matmul/m=7,k=35,n=66,block=3x5,sparsity=0.92,precision=tf32",
    "bsr_sddmm/m=7,k=66,n=35,block=5x3,sparsity=0.92",  # and of the stored blocks
    "csr_linear/m=7,k=66,n=7,sparsity=0.97",
    "csr_linear/m=7,k=7,n=66,sparsity=0.97",  # the gradient of x
    "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=2,weighted=1",
    "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=2,weighted=0",
    "nhot_lookup/rows=50,vocab=7,width=33,nonzeros=1,weighted=1",  # the gradient of the table
    "head_topk/batch=7,vocab=61,hidden=16,k=5",
    "candidate_topk/lists=1,beam=7,vocab=61,hidden=16,m=10,k=3",
    "candidate_logits/lists=1,beam=7,vocab=61,hidden=16,m=10",
)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ints(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


# Block row 1 and row 1 are empty, and columns stand in any order.
STARTS = ints(0, 3, 3, 5, 8, 9, 9, 12)
BLOCKS = torch.randn(12, 5, 3)
COLUMNS = ints(4, 0, 21, 7, 3, 1, 0, 20, 5, 2, 9, 8)
WEIGHT = tvm_sparse.BsrWeight((BLOCKS, COLUMNS, STARTS), columns=66)
TURNED = custom.module_of("bsr_matmul").turned(COLUMNS, STARTS, 66, (5, 3), 4)
BOTH = ints(0, 3, 3, 5, 8, 9, 12)
ENTRIES = ints(4, 0, 21, 7, 3, 1, 0, 49, 5, 2, 49, 8)
VALUES = torch.randn(12)
SPARSE = tvm_sparse.CsrRows((STARTS, COLUMNS, VALUES), columns=66)
ROWS = tvm_sparse.CsrRows((STARTS, ENTRIES, VALUES), columns=50)
LOGITS, X, TABLE = torch.randn(7, 61), torch.randn(7, 66), torch.randn(50, 33)
HIDDEN, EMBEDDING = torch.randn(7, 16), torch.randn(61, 16)
BIAS, IDS, WORDS = torch.randn(61), torch.randint(0, 61, (7, 3)), torch.arange(0, 20, 2, dtype=torch.int32)
PRODUCT_BIAS = torch.randn(35)
UNIFORMS, SEEDS, HEATS = torch.rand(7), torch.randint(0, 2**40, (7, 2)), torch.linspace(0, 2, 7)
TOP_KS = ints(1, 2, 3, 4, 5, 0, 0)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (lambda x: tvm_sparse.softmax(x * 2) + 1, (LOGITS,)),
    "log_softmax": (lambda x: tvm_sparse.log_softmax(x * 2) + 1, (LOGITS,)),
    "logsumexp": (lambda x: tvm_sparse.logsumexp(x * 2) + 1, (LOGITS,)),
    "softmax_topk": (lambda x: tvm_sparse.softmax_topk(x * 2, 5), (LOGITS,)),
    "softmax_topk with all": (
        lambda x, b, i: tvm_sparse.softmax_topk(x, 5, log=True, temperature=0.5, bias=b, ids=i),
        (LOGITS, BIAS, IDS),
    ),
    "softmax_topk with temperatures": (
        lambda x, t, i: tvm_sparse.softmax_topk(x, 5, log=True, temperature=t, ids=i),
        (LOGITS, HEATS, IDS),
    ),
    "softmax_sample": (lambda x, u: tvm_sparse.softmax_sample(x * 2, uniforms=u), (LOGITS, UNIFORMS)),
    "softmax_sample with all": (
        lambda x, t, k, b, s: tvm_sparse.softmax_sample(
            x, temperature=t, top_k=k, top_p=0.9, min_p=0.01, bias=b, seed=s, best=3
        ),
        (LOGITS, HEATS, TOP_KS, BIAS, SEEDS),
    ),
    "bsr_matmul": (lambda x: tvm_sparse.bsr_matmul(x * 2, WEIGHT), (X,)),
    "bsr_matmul with all": (
        lambda x, b: tvm_sparse.bsr_matmul(x, WEIGHT, bias=b, activation="gelu"),
        (X, PRODUCT_BIAS),
    ),
    "bsr_matmul of parts": (lambda x, *parts: tvm_sparse.bsr_matmul(x, parts), (X, BLOCKS, COLUMNS, STARTS)),
    "csr_linear": (lambda x: tvm_sparse.csr_linear(x * 2, SPARSE), (X,)),
    "csr_linear of parts": (lambda x, *parts: tvm_sparse.csr_linear(x, parts), (X, STARTS, COLUMNS, VALUES)),
    "nhot_lookup": (lambda table: tvm_sparse.nhot_lookup(ROWS, table * 2), (TABLE,)),
    "nhot_lookup means": (
        lambda table: tvm_sparse.nhot_lookup((STARTS, ENTRIES, None), table * 2, mode="mean"),
        (TABLE,),
    ),
    "nhot_lookup of parts": (
        lambda starts, at, table: tvm_sparse.nhot_lookup((starts, at, None), table),
        (STARTS, ENTRIES, TABLE),
    ),
    "head_topk": (lambda h, e: tvm_sparse.head_topk(h * 2, e, 5, normaliser=True), (HIDDEN, EMBEDDING)),
    "head_topk with temperatures": (
        lambda h, e, t: tvm_sparse.head_topk(h, e, 5, temperature=t),
        (HIDDEN, EMBEDDING, HEATS),
    ),
    "candidate_topk": (lambda h, e, c: tvm_sparse.candidate_topk(h * 2, e, c, 3), (HIDDEN, EMBEDDING, WORDS)),
    "candidate_logits": (lambda h, e, c: tvm_sparse.candidate_logits(h * 2, e, c), (HIDDEN, EMBEDDING, WORDS)),
}


def flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def every(*given: tuple[Any, ...]) -> list[Any]:
    """All of `CALLS` in one graph, which is traced in less time than many are."""
    return [one for (call, _), args in zip(CALLS.values(), given, strict=True) for one in flat(call(*args))]


ALL = tuple(args for _, args in CALLS.values())


def same(have: Any, want: Any) -> None:
    for one, other in zip(flat(have), flat(want), strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_holds_all(backend: str) -> None:
    compiled = torch.compile(every, backend=backend, fullgraph=True)
    same(compiled(*ALL), every(*ALL))


def test_a_function_is_compiled_by_itself_and_at_any_batch() -> None:
    compiled = torch.compile(tvm_sparse.softmax, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 5, 3):
        same(compiled(LOGITS[:rows]), tvm_sparse.softmax(LOGITS[:rows]))


def test_a_structure_is_packed_in_a_graph_of_any_shape() -> None:
    compiled = torch.compile(tvm_sparse.bsr_matmul, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 5):
        x, blocks = leaf(X[:rows]), leaf(BLOCKS)
        compiled(x, (blocks, COLUMNS, STARTS)).sum().backward()
        wanted = gradients(lambda y, b: y @ dense(b).T, (X[:rows], BLOCKS), torch.ones(rows, 35))
        torch.testing.assert_close([x.grad, blocks.grad], wanted, atol=2e-5, rtol=2e-5)


def test_into_out_in_a_graph() -> None:
    out, pair = torch.empty(7, 61), (torch.empty(7, 5), torch.empty(7, 5, dtype=torch.int64))
    compiled = torch.compile(tvm_sparse.softmax, backend="aot_eager", fullgraph=True)
    assert compiled(LOGITS, out=out) is out
    same(out, tvm_sparse.softmax(LOGITS))
    best = torch.compile(tvm_sparse.softmax_topk, backend="aot_eager", fullgraph=True)
    best(LOGITS, 5, out=pair)
    same(pair, tvm_sparse.softmax_topk(LOGITS, 5))
    for bad, message in ((torch.empty(7, 60), r"expected shape \(7, 61\)"), (out.half(), "dtype torch.float32, got")):
        with pytest.raises(ValueError, match=message):
            custom.written(tvm_sparse.softmax(LOGITS), bad)
    with pytest.raises(ValueError, match="out: expected 2 arrays, got 1"):
        custom.written(pair, pair[:1])
    with pytest.raises(RuntimeError, match="out: a gradient is wanted"):
        tvm_sparse.softmax(LOGITS.clone().requires_grad_(), out=out)


class Every(torch.nn.Module):
    def forward(self, *given: Any) -> Any:
        return every(*given)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    exported = torch.export.export(Every(), ALL, strict=strict)
    same(exported.module()(*ALL), every(*ALL))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert {f"tvm_sparse.{name.partition(' ')[0]}.default" for name in CALLS if name != "log_softmax"} <= targets


class Rows(torch.nn.Module):
    def forward(self, logits: Any, x: Any) -> Any:
        return (*tvm_sparse.softmax_topk(logits, 5), tvm_sparse.softmax(logits), tvm_sparse.bsr_matmul(x, WEIGHT))


def test_a_saved_program_is_loaded_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Every(), ALL), path)
    program = """
import sys, torch
import tvm_sparse.torch_ops
graph = torch.export.load(sys.argv[1]).graph
print(sorted({str(node.target) for node in graph.nodes if "tvm_sparse" in str(node.target)}))
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
    names = {name.partition(" ")[0] for name in CALLS if name != "log_softmax"}
    names |= {"softmax_topk_given", "bsr_matmul_epilogue", "nhot_lookup_rows", "nhot_lookup_bags"}
    assert done.stdout.strip() == str(sorted(f"tvm_sparse.{name}.default" for name in names))


def test_export_at_any_batch() -> None:
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(Rows(), (LOGITS, X), dynamic_shapes=(batch, batch)).module()
    for rows in (7, 5):
        same(exported(LOGITS[:rows], X[:rows]), Rows()(LOGITS[:rows], X[:rows]))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name: str) -> None:
    """Shapes, dtypes and devices are those of a call, without a kernel."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    call, args = CALLS[name]
    wanted = flat(call(*args))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = flat(call(*map(mode.from_tensor, args)))
    for have, want in zip(found, wanted, strict=True):
        assert isinstance(have, FakeTensor)
        assert (have.shape, have.dtype, have.device) == (want.shape, want.dtype, want.device)


def test_fake_tensors_are_checked() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits = FakeTensorMode().from_tensor(LOGITS)
    with pytest.raises(ValueError, match=r"k: expected 1 <= k <= vocab \(61\), got 62"):
        tvm_sparse.softmax_topk(logits, 62)
    with pytest.raises(ValueError, match="logits: expected dtype .* got float64"):
        tvm_sparse.softmax(logits.double())
    with pytest.raises(Exception, match=r"x: expected 66 columns, as the weight has"):
        torch.compile(CALLS["bsr_matmul"][0], backend="eager", fullgraph=True)(X[:, :63])


def test_a_mode_that_watches_sees_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    want = tvm_sparse.softmax(LOGITS)
    with Watch():
        same(tvm_sparse.softmax(LOGITS), want)
    assert seen[0] == "tvm_sparse.softmax.default"


def leaf(tensor: Any) -> Any:
    return tensor.clone().requires_grad_()


OPERATORS: dict[str, tuple[Any, ...]] = {
    "softmax": (leaf(LOGITS), "online", True),
    "logsumexp": (leaf(LOGITS),),
    "softmax_topk": (LOGITS, 5, False, 1.0, BIAS),
    "softmax_topk_given": (LOGITS, 5, IDS, False, 1.0, BIAS),
    "softmax_sample": (
        *(LOGITS, [1.0, 0.9, 0.01], 1, BIAS, None, SEEDS, None, 0, None, 3, None, HEATS, TOP_KS, None, None),
    ),
    "head_topk": (HIDDEN, EMBEDDING, 5, False, 1.0, None, None, True, True),
    "candidate_topk": (HIDDEN, EMBEDDING, WORDS, 3, None, 1, False, 1.0, None, True, False),
    "candidate_logits": (HIDDEN, EMBEDDING, WORDS, None, None, False),
    "csr_linear": (leaf(X), STARTS, COLUMNS, leaf(VALUES), True),
    "nhot_lookup": (STARTS, ENTRIES, leaf(VALUES), leaf(TABLE), True),
    "nhot_lookup_rows": (STARTS, ENTRIES, leaf(VALUES), leaf(TABLE)),
    "nhot_lookup_bags": (STARTS, ENTRIES, None, leaf(TABLE), "max", 3, False, True),
    "nhot_lookup_bags of two tables": (
        *(BOTH, ENTRIES % 20, leaf(VALUES), leaf(TABLE), "sum", 3, False, True, None, "", None, ints(0, 20), [20, 30]),
    ),
    "bsr_matmul": (leaf(X), leaf(BLOCKS), COLUMNS, STARTS, WEIGHT.order, WEIGHT.structure),
    "bsr_matmul_epilogue": (
        *(leaf(X), leaf(BLOCKS), COLUMNS, STARTS, WEIGHT.order, WEIGHT.structure, leaf(PRODUCT_BIAS), "gelu"),
    ),
    "bsr_sddmm": (leaf(torch.randn(7, 35)), leaf(X), COLUMNS, STARTS, 5, 3, "uniform"),
    "bsr_matmul_turned": (leaf(torch.randn(7, 35)), leaf(BLOCKS), *TURNED[1:], TURNED.places),
    "bsr_matmul_full": (
        *(leaf(X), leaf(BLOCKS), COLUMNS, STARTS, WEIGHT.order, WEIGHT.structure, leaf(PRODUCT_BIAS), "gelu"),
        *(*TURNED, False),
    ),
}
OF = {
    **{"softmax_topk_given": "softmax_topk", "nhot_lookup_rows": "nhot_lookup", "nhot_lookup_bags": "nhot_lookup"},
    **dict.fromkeys(("bsr_matmul_epilogue", "bsr_matmul_full", "bsr_matmul_turned", "bsr_sddmm"), "bsr_matmul"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_pytorch_finds_the_operator_right(name: str) -> None:
    operator, *_ = name.split()
    custom.module_of(OF.get(operator, operator))
    torch.library.opcheck(getattr(torch.ops.tvm_sparse, operator).default, OPERATORS[name])


@pytest.mark.parametrize(
    ("name", "given"),
    [("softmax", 1), ("softmax_topk", 2), ("head_topk", 3), ("candidate_topk", 4), ("candidate_logits", 3),
     ("nhot_lookup", 4)],
)  # fmt: skip
def test_operators_may_be_given_their_first_arguments_only(name: str, given: int) -> None:
    custom.module_of(name)
    operator = getattr(torch.ops.tvm_sparse, name).default
    args = [one.detach() if torch.is_tensor(one) else one for one in OPERATORS[name][:given]]
    defaults = [argument.default_value for argument in operator._schema.arguments[given:]]
    same(operator(*args), operator(*args, *defaults))
    torch.library.opcheck(operator, tuple(args))


# ---- repeated calls ------------------------------------------------------------------------------


RECALLED = (
    *("softmax", "logsumexp", "softmax_topk", "softmax_topk_given", "nhot_lookup_rows"),
    *("bsr_matmul", "bsr_matmul_epilogue", "bsr_matmul_full", "bsr_matmul_turned"),
)


@pytest.fixture(params=["native", "python"])
def slow(request: pytest.FixtureRequest, dispatcher: Dispatcher) -> Iterator[list]:
    """Arguments of the calls that went the long way, where launchers are found by the extension and without it."""
    tvm_sparse.softmax(LOGITS)
    native = repeat.recalled is getattr(repeat.native, "recalled", None)
    if request.param == "native" and not native:
        pytest.skip("the extension was not built, or PyTorch is older than 2.10")
    dispatcher.launchers = {}
    repeat.use_native(request.param == "native")
    found: list = []
    key_of = repeat.key_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "key_of", lambda what, given: found.append(given) or key_of(what, given))
        yield found
    repeat.use_native(native)
    dispatcher.launchers = {}


def operator_and_plain_arguments(name: str) -> tuple[Any, tuple[Any, ...]]:
    custom.module_of(OF.get(name, name))
    args = tuple(one.detach() if torch.is_tensor(one) else one for one in OPERATORS[name])
    return getattr(torch.ops.tvm_sparse, name).default, args


@pytest.mark.parametrize("name", RECALLED)
def test_an_operator_knows_calls_like_one_before(name: str, slow: list, dispatcher: Dispatcher) -> None:
    operator, args = operator_and_plain_arguments(name)
    # Other floats, and the same structure somewhere else.
    others = tuple(
        one if not torch.is_tensor(one) else one.flip(0) if one.is_floating_point() else one.clone() for one in args
    )
    first, second = operator(*args), operator(*others)
    dispatcher.launchers = {}
    slow.clear()
    same(operator(*others), second)
    assert slow  # launchers of before are void
    slow.clear()
    for given, wanted in ((args, first), (others, second)):
        same(operator(*given), wanted)
        with torch.no_grad():
            same(operator(*given), wanted)
        with torch.inference_mode():  # where PyTorch goes past what is registered for autograd
            same(operator(*given), wanted)
    assert not slow


def test_an_operator_looks_at_its_settings(slow: list) -> None:
    """Those that a launcher holds, or that its kernel takes."""
    import tvm_sparse.torch_ops

    ops = torch.ops.tvm_sparse
    for _ in range(2):
        for log, wanted in ((False, tvm_sparse.softmax(LOGITS)), (True, tvm_sparse.log_softmax(LOGITS))):
            same(ops.softmax(LOGITS, "online", log), wanted)
        for settings in ({}, {"temperature": 0.5}, {"log": True}, {"bias": BIAS}, {"temperature": 2.0, "log": True}):
            for k in (5, 1):
                same(ops.softmax_topk(LOGITS, k, **settings), tvm_sparse.softmax_topk(LOGITS, k, **settings))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_float32_results_of_16_bits_are_differentiable_and_stand_in_graphs(name: str) -> None:
    ours, theirs, logits = getattr(tvm_sparse, name), getattr(torch, name), LOGITS.bfloat16()
    weights = torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(0))
    [want] = gradients(lambda y: theirs(y, -1, dtype=torch.float32), (logits,), weights)
    for function in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        x = leaf(logits)
        found = function(x, dtype=torch.float32)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, theirs(logits, -1, dtype=torch.float32), rtol=2e-5, atol=1e-5)
        found.mul(weights).sum().backward()
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad, want, rtol=0.02, atol=1e-3)
    for _ in range(2):  # the second time by a launcher, which has the dtype of its result
        operator = torch.ops.tvm_sparse.softmax
        same(operator(logits, "online", name != "softmax", "float32"), ours(logits, dtype="float32"))
    torch.library.opcheck(operator.default, (leaf(logits), "online", True, "float32"))
    mapped = torch.vmap(lambda y: ours(y, dtype=torch.float32), 1, 1)(logits.t().contiguous())
    torch.testing.assert_close(mapped, ours(logits, dtype=torch.float32).t())


def test_what_is_not_plain_goes_the_long_way(slow: list) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    operator, _ = operator_and_plain_arguments("softmax")
    wanted = operator(LOGITS)
    same(operator(LOGITS), wanted)
    shifted = torch.cat([LOGITS.new_zeros(1), LOGITS.flatten()])[1:].view(7, 61)
    for given in (shifted, LOGITS.t().contiguous().t(), torch._neg_view(-LOGITS)):
        slow.clear()
        same(operator(given), wanted)
        assert slow
    x = leaf(LOGITS)
    operator(x).square().sum().backward()
    [want] = gradients(lambda y: torch.softmax(y, -1), (LOGITS,), 2 * wanted)
    torch.testing.assert_close(x.grad, want)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        same(operator(LOGITS), wanted)
    assert "tvm_sparse.softmax.default" in seen
    forward = torch.autograd.forward_ad
    with forward.dual_level(), pytest.raises(RuntimeError, match="tangent|forward"):
        operator(forward.make_dual(LOGITS, LOGITS))


def test_a_weight_that_is_validated_is_validated_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, args = operator_and_plain_arguments("bsr_matmul_full")
    checked = []
    monkeypatch.setattr(tvm_sparse.BsrWeight, "validate", lambda self: checked.append(self))
    for validate in (False, True, True):
        operator(*args[:-1], validate)
    assert len(checked) == 2


def test_a_structure_is_one_integer() -> None:
    for one in (
        Structure(66), Structure(0, 0, "skewed"), Structure(2**31 - 1, 2**29 - 2, "skewed", True, True),
        Structure(5, 1, "uniform", True),
    ):  # fmt: skip
        assert 0 <= one.packed() < 2**63 and Structure.unpacked(one.packed()) == one


def test_vmap_knows_the_arguments_that_were_left_out() -> None:
    import tvm_sparse.torch_ops

    several = torch.stack([LOGITS, LOGITS.flip(0)])
    found = torch.vmap(lambda logits: torch.ops.tvm_sparse.softmax_topk(logits, 5))(several)
    same(tuple(found), tvm_sparse.softmax_topk(several, 5))


def test_plain_tensors_do_not_go_through_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = (
        lambda: tvm_sparse.softmax(LOGITS),
        lambda: tvm_sparse.logsumexp(LOGITS),
        lambda: tvm_sparse.softmax_topk(LOGITS, 5),
        lambda: tvm_sparse.bsr_matmul(X, WEIGHT),
        lambda: tvm_sparse.nhot_lookup(ROWS, TABLE),
        lambda: tvm_sparse.head_topk(HIDDEN, EMBEDDING, 5),
        lambda: tvm_sparse.head_topk(HIDDEN, EMBEDDING, 5, normaliser=True),
    )
    wanted = [call() for call in calls]
    monkeypatch.setattr(custom, "transformed", lambda *_, **__: pytest.fail("an operator was asked for"))
    for call, want in zip(calls, wanted, strict=True):
        same(call(), want)


def test_parameters_take_the_short_way_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    table, embedding = torch.nn.Parameter(TABLE), torch.nn.Parameter(EMBEDDING)
    calls = (
        (lambda table, _: tvm_sparse.nhot_lookup(ROWS, table)),
        (lambda _, embedding: tvm_sparse.head_topk(HIDDEN, embedding, 5)),
    )
    wanted = [call(TABLE, EMBEDDING) for call in calls]
    monkeypatch.setattr(custom, "transformed", lambda *_, **__: pytest.fail("the long way was taken"))
    with torch.no_grad():
        for call, want in zip(calls, wanted, strict=True):
            same(call(table, embedding), want)


def test_a_compiler_is_told_before_there_is_pytorch() -> None:
    program = """
import sys
import tvm_sparse
for name in ("softmax", "log_softmax", "logsumexp", "softmax_topk", "bsr_matmul", "nhot_lookup", "head_topk"):
    assert getattr(tvm_sparse, name)._torchdynamo_inline.__name__ == name
assert tvm_sparse.wta_hash._torchdynamo_disable
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_vmap_over_tables(mode: str) -> None:
    def looked_up(table: Any) -> Any:
        tables = tvm_sparse.EmbeddingTables(table, (20, 30))
        return tvm_sparse.nhot_lookup((BOTH, ENTRIES % 20, None), tables, mode=mode, padding_idx=1)

    several = torch.randn(2, 50, 33)
    same(torch.vmap(looked_up)(several), torch.stack([looked_up(one) for one in several]))


def test_vmap() -> None:
    logits, x, tables, hidden = (torch.stack([a, -a], 1) for a in (LOGITS, X, TABLE, HIDDEN))
    ids = torch.stack([IDS, IDS.flip(0)])
    for function in (tvm_sparse.softmax, tvm_sparse.log_softmax, tvm_sparse.logsumexp):
        same(torch.vmap(function, 1)(logits), torch.stack([function(LOGITS), function(-LOGITS)]))
    found = torch.vmap(lambda y, i: tvm_sparse.softmax_topk(y, 5, ids=i), (1, 0))(logits, ids)
    for one, (y, i) in enumerate(((LOGITS, ids[0]), (-LOGITS, ids[1]))):
        same([array[one] for array in found], tvm_sparse.softmax_topk(y, 5, ids=i))
    same(torch.vmap(lambda i: tvm_sparse.softmax_topk(LOGITS, 5, ids=i))(ids)[2][0], found[2][0])
    heats = torch.stack([HEATS, HEATS.flip(0)])
    for call in (
        lambda t: tvm_sparse.softmax_topk(LOGITS, 5, temperature=t, ids=IDS),
        lambda t: tvm_sparse.head_topk(HIDDEN, EMBEDDING, 5, temperature=t),
    ):
        found = torch.vmap(call)(heats)
        for number, heat in enumerate(heats):
            same([array[number] for array in found], call(heat))
    found = torch.vmap(lambda y, u: tvm_sparse.softmax_sample(y, uniforms=u), (1, None))(logits, UNIFORMS)
    for one, y in enumerate((LOGITS, -LOGITS)):
        same([array[one] for array in found], tvm_sparse.softmax_sample(y, uniforms=UNIFORMS))
    for call, given, each in (
        (lambda y: tvm_sparse.bsr_matmul(y, WEIGHT), x, (X, -X)),
        (lambda y: tvm_sparse.bsr_matmul(y, WEIGHT, bias=PRODUCT_BIAS), x, (X, -X)),
        (lambda y: tvm_sparse.bsr_matmul(y, WEIGHT, validate=True), x, (X, -X)),
        (lambda t: tvm_sparse.nhot_lookup(ROWS, t), tables, (TABLE, -TABLE)),
    ):
        torch.testing.assert_close(torch.vmap(call, 1)(given), torch.stack([call(one) for one in each]))
    for call in (
        lambda h: tvm_sparse.head_topk(h, EMBEDDING, 5),
        lambda h: tvm_sparse.candidate_topk(h, EMBEDDING, WORDS, 3),
        lambda h: [tvm_sparse.candidate_logits(h, EMBEDDING, WORDS)],
    ):
        for have, *want in zip(torch.vmap(call, 1)(hidden), call(HIDDEN), call(-HIDDEN), strict=True):
            torch.testing.assert_close(have, torch.stack(want))


def test_vmap_over_what_has_no_rule() -> None:
    def pair(tensor: Any) -> Any:
        return torch.stack([tensor, tensor])

    for call, given, name in (
        (lambda b: tvm_sparse.softmax_topk(LOGITS, 5, bias=b), BIAS, "bias"),
        (lambda d: tvm_sparse.bsr_matmul(X, (d, COLUMNS, STARTS)), BLOCKS, "weight"),
        (lambda b: tvm_sparse.bsr_matmul(X, WEIGHT, bias=b), PRODUCT_BIAS, "bias"),
        (lambda v: tvm_sparse.nhot_lookup((STARTS, ENTRIES, v), TABLE), VALUES, "values"),
        (lambda v: tvm_sparse.csr_linear(X, (STARTS, COLUMNS, v)), VALUES, "values"),
        (lambda e: tvm_sparse.head_topk(HIDDEN, e, 5), EMBEDDING, "embedding"),
        (lambda c: tvm_sparse.candidate_topk(HIDDEN, EMBEDDING, c, 3), WORDS, "candidates"),
        (lambda h: tvm_sparse.candidate_topk(h, EMBEDDING, WORDS.expand(7, 10), 3), HIDDEN, "candidates"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            torch.vmap(call)(pair(given))


# ---- gradients -----------------------------------------------------------------------------------


def gradients(call: Callable[..., Any], given: tuple[Any, ...], towards: Any) -> list[Any]:
    inputs = [leaf(tensor) for tensor in given]
    call(*inputs).backward(towards)
    return [tensor.grad for tensor in inputs]


def check_gradients(ours: Callable[..., Any], theirs: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Eager and compiled, in float32, against PyTorch's in float64."""
    result = theirs(*(tensor.double() for tensor in given))
    towards = torch.randn(result.shape)
    torch.testing.assert_close(ours(*given).double(), result, atol=1e-5, rtol=1e-5)
    wanted = gradients(theirs, tuple(tensor.double() for tensor in given), towards.double())
    for call in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        for have, want in zip(gradients(call, given, towards), wanted, strict=True):
            assert have.dtype is torch.float32
            torch.testing.assert_close(have.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_gradients_of_rows(name: str) -> None:
    ours, theirs = getattr(tvm_sparse, name), getattr(torch, name)
    check_gradients(ours, lambda x: theirs(x, -1), (LOGITS,))
    x = LOGITS[:6].reshape(2, 3, 61)
    towards = torch.randn(ours(x).shape)
    [have] = gradients(ours, (x,), towards)
    [want] = gradients(lambda y: theirs(y, -1), (x.double(),), towards.double())
    torch.testing.assert_close(have.double(), want, atol=2e-6, rtol=2e-5)


def test_gradients_twice() -> None:
    x, y = leaf(LOGITS), leaf(LOGITS.double())
    found = []
    for tensor, function in ((x, tvm_sparse.logsumexp), (y, lambda z: torch.logsumexp(z, -1))):
        [first] = torch.autograd.grad(function(tensor).sum(), tensor, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), tensor)[0].double())
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def test_gradients_of_rows_of_nothing() -> None:
    x = LOGITS.clone()
    x[2] = -torch.inf
    x[3, 5:] = -torch.inf
    for ours, theirs in ((tvm_sparse.logsumexp, torch.logsumexp), (tvm_sparse.softmax, torch.softmax)):
        towards = torch.randn(ours(x).shape)
        [have], [want] = (gradients(call, (x,), towards) for call in (ours, lambda y, f=theirs: f(y, -1)))
        torch.testing.assert_close(have, want, equal_nan=True)


def dense(blocks: Any) -> Any:
    """The weight with its zeros, as a function of its blocks."""
    high = torch.repeat_interleave(torch.arange(7), STARTS.diff())
    grid = blocks.new_zeros(7, 22, 5, 3).index_put((high, COLUMNS.long()), blocks, accumulate=True)
    return grid.transpose(1, 2).reshape(35, 66)


ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("way", ["gathered", "dense", "sampled"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_of_a_product(activation: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks' gradient is gathered, some blocks at a time, or, as on a GPU, is part of a dense product or computed
    by a kernel. The gradient of x then takes the blocks as they are.
    """
    module = custom.module_of("bsr_matmul")
    monkeypatch.setattr(module, "GATHERED", 200)
    monkeypatch.setattr(module, "_all_at_once", lambda *_: way == "dense")
    monkeypatch.setattr(module, "_sampled", lambda *_: way == "sampled")
    monkeypatch.setattr(module, "_reads_turned", lambda *_: way == "sampled")

    def ours(x: Any, blocks: Any, bias: Any) -> Any:
        return tvm_sparse.bsr_matmul(x, (blocks, COLUMNS, STARTS), bias=bias, activation=activation)

    def theirs(x: Any, blocks: Any, bias: Any) -> Any:
        return ACTIVATIONS[activation](x @ dense(blocks).T + bias)

    check_gradients(ours, theirs, (X, BLOCKS, PRODUCT_BIAS))
    if activation is None:
        bare = lambda x, blocks: tvm_sparse.bsr_matmul(x, (blocks, COLUMNS, STARTS))  # noqa: E731
        check_gradients(bare, lambda x, blocks: x @ dense(blocks).T, (X, BLOCKS))


@pytest.mark.parametrize("way", ["dense", "sampled"])
def test_steps_of_training_repeat_their_calls(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first step nothing is looked up, for parameters, views of gradients and other values of both."""
    module = custom.module_of("bsr_matmul")
    monkeypatch.setattr(module, "_all_at_once", lambda *_: way == "dense")
    monkeypatch.setattr(module, "_sampled", lambda *_: way == "sampled")
    monkeypatch.setattr(module, "_reads_turned", lambda *_: way == "sampled")
    weight = tvm_sparse.BsrWeight((BLOCKS, COLUMNS, STARTS), columns=66)
    layer = tvm_sparse.nn.BsrLinear(weight, torch.zeros(35))

    def step() -> list[Any]:
        x = torch.randn(7, 66)
        found = gradients(layer, (x,), torch.randn(7, 35))
        layer(x).backward(torch.randn(7, 35))
        return found

    step()
    monkeypatch.setattr(Dispatcher, "kernel", lambda *_: pytest.fail("a kernel was looked up"))
    step()


def test_a_layer_asks_for_its_precision(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its product and in the gradient of x; 16 bits have none."""
    asked: list[Any] = []
    kernel = Dispatcher.kernel
    monkeypatch.setattr(Dispatcher, "kernel", lambda self, p, *rest: asked.append(p) or kernel(self, p, *rest))
    weight = tvm_sparse.BsrWeight((BLOCKS, COLUMNS, STARTS), columns=66)
    layer = tvm_sparse.nn.BsrLinear(weight, precision="tf32")
    assert "precision='tf32'" in repr(layer) and tvm_sparse.nn.BsrLinear(weight).precision is None
    x = leaf(X)
    exact = X.double() @ dense(BLOCKS.double()).T
    for call in (lambda: layer(x).sum().backward(), lambda: layer(X), lambda: layer.freeze()(X)):
        asked.clear()
        dispatcher.launchers = {}
        call()
        products = [problem for problem in asked if isinstance(problem, BsrMatmul)]
        assert products and all(problem.precision == "tf32" for problem in products)
    torch.testing.assert_close(layer(X).double(), exact, atol=1e-4, rtol=1e-4)
    assert {(p.k, p.n) for p in asked} == {(66, 35)}
    half = layer.half()
    assert half.precision == "tf32" and weight.half().problem(7, precision="tf32").precision == ""
    with pytest.raises(ValueError, match="^precision: expected 'tf32' or None, got 'tf16'"):
        tvm_sparse.nn.BsrLinear(weight, precision="tf16")
    with pytest.raises(ValueError, match="^precision: expected 'tf32'"):
        tvm_sparse.bsr_matmul(X, weight, precision="high")
    model = torch.nn.Sequential(torch.nn.Linear(66, 35))
    tvm_sparse.nn.sparsify(model, block=(5, 3), precision="tf32")
    assert model[0].precision == "tf32"


def test_gradients_of_a_sampled_product() -> None:
    """Second derivatives of a product come from these."""
    high = torch.repeat_interleave(torch.arange(7), STARTS.diff())
    sampled = torch.ops.tvm_sparse.bsr_sddmm

    def theirs(left: Any, right: Any) -> Any:
        whole = (left.T @ right).view(7, 5, 22, 3).transpose(1, 2)
        return whole[high, COLUMNS.long()]

    ours = lambda left, right: sampled(left, right, COLUMNS, STARTS, 5, 3, "uniform")  # noqa: E731
    check_gradients(ours, theirs, (torch.randn(7, 35), X))
    assert torch.equal(ours(torch.empty(0, 35), X[:0]), torch.zeros(12, 5, 3))
    with pytest.raises(ValueError, match="^left: vmap"):
        torch.vmap(ours, (0, None))(torch.randn(2, 7, 35), X)


def test_gradients_of_x_with_a_prepared_weight() -> None:
    """The transposed structure is found once, by eager calls; a graph takes it if it is there."""
    towards = torch.randn(2, 3, 35)
    x = X[:6].reshape(2, 3, 66)
    weight = tvm_sparse.BsrWeight((BLOCKS, COLUMNS, STARTS), columns=66)
    [want] = gradients(lambda y: y @ dense(BLOCKS.double()).T, (x.double(),), towards.double())
    for prepared in (False, True):
        compiled = torch.compile(lambda y: tvm_sparse.bsr_matmul(y, weight), backend="aot_eager", fullgraph=True)
        assert (weight.turned is not None) == prepared
        for call in (compiled, lambda y: tvm_sparse.bsr_matmul(y, weight)):
            [have] = gradients(call, (x,), towards)
            torch.testing.assert_close(have.double(), want, atol=2e-5, rtol=2e-5)
        torch._dynamo.reset()
    kept = weight.turned
    gradients(lambda y: tvm_sparse.bsr_matmul(y, weight), (x,), towards)
    assert weight.turned is kept


def test_gradients_of_a_sparse_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few entries are gathered at once."""
    high = torch.repeat_interleave(torch.arange(7), STARTS.diff())
    monkeypatch.setattr(custom.module_of("csr_linear"), "GATHERED", 20)

    def theirs(x: Any, values: Any) -> Any:
        dense = values.new_zeros(7, 66).index_put((high, COLUMNS.long()), values, accumulate=True)
        return x @ dense.T

    check_gradients(lambda x, v: tvm_sparse.csr_linear(x, (STARTS, COLUMNS, v)), theirs, (X, VALUES))
    check_gradients(lambda x: tvm_sparse.csr_linear(x, SPARSE), lambda x: theirs(x, VALUES.double()), (X,))


def test_gradients_of_a_lookup() -> None:
    high = torch.repeat_interleave(torch.arange(7), STARTS.diff())

    def theirs(values: Any, table: Any) -> Any:
        return values.new_zeros(7, 50).index_put((high, ENTRIES.long()), values, accumulate=True) @ table

    check_gradients(lambda v, t: tvm_sparse.nhot_lookup((STARTS, ENTRIES, v), t), theirs, (VALUES, TABLE))
    check_gradients(lambda t: tvm_sparse.nhot_lookup(ROWS, t), lambda t: theirs(VALUES.double(), t), (TABLE,))


def test_gradients_that_nobody_offers() -> None:
    best = lambda y: tvm_sparse.softmax_topk(y, 5)[0]  # noqa: E731
    for call in (
        lambda: best(leaf(LOGITS)),
        lambda: torch.compile(best, backend="eager", fullgraph=True)(leaf(LOGITS)).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match="logits: requires a gradient.*tvm_sparse.log_softmax"):
            call()
    for function in (torch.func.grad(lambda y: tvm_sparse.logsumexp(y).sum()), torch.func.jacrev(tvm_sparse.softmax)):
        with pytest.raises(RuntimeError, match="torch.func.grad, vjp, jvp .* use torch.autograd.grad"):
            function(LOGITS)
    for call, name in (
        (lambda: tvm_sparse.head_topk(leaf(HIDDEN), EMBEDDING, 5), "hidden"),
        (lambda: tvm_sparse.candidate_topk(HIDDEN, leaf(EMBEDDING), WORDS, 3), "embedding"),
        (lambda: tvm_sparse.bsr_matmul(leaf(X), [a.numpy() for a in (BLOCKS, COLUMNS, STARTS)]), "x"),
        (lambda: tvm_sparse.BsrWeight((leaf(BLOCKS), COLUMNS, STARTS), columns=66), "weight"),
        (lambda: tvm_sparse.nhot_lookup((STARTS.numpy(), ENTRIES.numpy(), None), leaf(TABLE)), "table"),
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: requires a gradient"):
            call()
    with pytest.raises(RuntimeError, match="^csr: requires a gradient"):
        tvm_sparse.nhot_lookup(torch.eye(7, 50).to_sparse_csr().requires_grad_(), leaf(TABLE))


def test_no_gradient_is_wanted() -> None:
    with torch.no_grad():
        assert not tvm_sparse.softmax(leaf(LOGITS)).requires_grad
        assert not tvm_sparse.bsr_matmul(leaf(X), WEIGHT).requires_grad
    with torch.inference_mode():
        np.testing.assert_array_equal(tvm_sparse.softmax(leaf(LOGITS)).numpy(), tvm_sparse.softmax(LOGITS).numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this build of torch finds no CUDA GPU")
def test_on_a_gpu() -> None:
    """Graphs and gradients there; `test_nn` and the rest of this file say the same of the CPU."""

    def moved(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(arg.cuda() for arg in args)

    weight, rows = WEIGHT.to("cuda"), tvm_sparse.CsrRows(moved((STARTS, ENTRIES, VALUES)), columns=50)

    def all_of(logits: Any, x: Any, table: Any, hidden: Any, embedding: Any) -> Any:
        found = [tvm_sparse.softmax(logits), tvm_sparse.logsumexp(logits), tvm_sparse.bsr_matmul(x, weight)]
        best = tvm_sparse.softmax_topk(logits, 5)
        return [*found, tvm_sparse.nhot_lookup(rows, table), *best, *tvm_sparse.head_topk(hidden, embedding, 5)]

    given = moved((LOGITS, X, TABLE, HIDDEN, EMBEDDING))
    wanted = all_of(*given)
    same(torch.compile(all_of, backend="aot_eager", fullgraph=True)(*given), wanted)
    grads = []
    for device in ("cpu", "cuda"):
        parts = tuple(tensor.to(device) for tensor in (BLOCKS, COLUMNS, STARTS))
        x, table, logits = (leaf(tensor.to(device)) for tensor in (X, TABLE, LOGITS))
        prepared, entries = (WEIGHT, ROWS) if device == "cpu" else (weight, rows)
        blocks = leaf(parts[0])
        sums = tvm_sparse.bsr_matmul(x, prepared).sin().sum() + tvm_sparse.nhot_lookup(entries, table).sin().sum()
        sums = sums + tvm_sparse.bsr_matmul(x, (blocks, *parts[1:])).sin().sum()
        (sums + tvm_sparse.logsumexp(logits).sum() + tvm_sparse.softmax(logits).square().sum()).backward()
        grads.append([tensor.grad.cpu() for tensor in (x, blocks, table, logits)])
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=2e-5)
    layer = tvm_sparse.nn.BsrLinear.from_dense(torch.nn.Linear(66, 35), (5, 3), 0.5)
    on_cpu = layer(X)
    torch.testing.assert_close(layer.cuda()(X.cuda()).cpu(), on_cpu, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", [True, False])
def test_rows_with_other_entries_take_the_same_launcher(native: bool, dispatcher: Dispatcher) -> None:
    """Minibatches differ in how many entries they have; the kernel takes any number, if rows are about as long."""
    from tvm_sparse.operators.nhot_lookup import call, torch_op

    if native and repeat.native is None:
        pytest.skip("the extension was not built")
    table = torch.randn(50, 33)
    repeat._prepare()
    before = repeat.again is not repeat._again
    repeat.use_native(native)
    dispatcher._forget()
    try:
        for number, total in enumerate((12, 13, 12, 14)):
            rng = np.random.default_rng(number)
            ends = np.sort(rng.integers(0, total, 8)).astype(np.int32)
            ends[[0, -1]] = 0, total
            given = (ends, rng.integers(0, 50, total).astype(np.int32), rng.standard_normal(total).astype(np.float32))
            csr = tuple(map(torch.from_numpy, given))
            found = call.repeated_lookup(csr, table, torch, checked=True)
            assert (found is None) == (number == 0)
            wanted = torch_op._call_rows(*csr, table) if found is None else found
            dense = np.zeros((7, 50))
            np.add.at(dense, (np.repeat(np.arange(7), np.diff(ends)), given[1]), given[2])
            np.testing.assert_allclose(wanted.numpy(), dense @ table.double().numpy(), atol=1e-5)
    finally:
        repeat.use_native(before)
        dispatcher._forget()


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_steps_of_training_are_repeated_without_look_up(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of parameters and of tensors that require a gradient, as calls of inference are."""
    layer = tvm_sparse.nn.BsrLinear.from_dense(torch.nn.Linear(32, 32, bias), 16, 0.5)
    x = torch.randn(6, 32, requires_grad=True)
    asked: list[Any] = []
    real = Dispatcher.kernel
    monkeypatch.setattr(Dispatcher, "kernel", lambda self, *given: asked.append(given) or real(self, *given))
    for step in range(3):
        before = len(asked)
        layer(x).square().sum().backward()
        assert step < 2 or len(asked) == before, asked[before:]
    assert asked
    # An x with more dimensions is one of as many rows.
    monkeypatch.setattr(custom.module_of("bsr_matmul").call, "bsr_matmul", lambda *_, **__: pytest.fail("not repeated"))
    wanted = layer(x)
    found = layer(x.view(2, 1, 3, 32))
    assert torch.equal(found.reshape(6, 32), wanted)
    found.square().sum().backward()
