"""Modules of PyTorch: they compute what PyTorch's dense ones do, and live as those: states, moves, copies, graphs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from cases import calls_run

import tvm_sparse
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")
nn = tvm_sparse.nn

PRODUCT = "bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5,bias=1"
LOOKUP = "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=2"
KEYS = (
    PRODUCT,
    f"{PRODUCT},dtype=bfloat16",
    f"{PRODUCT},activation=gelu",
    "bsr_matmul/m=7,k=35,n=66,block=3x5,sparsity=0.5",
    f"{LOOKUP},weighted=0",
    f"{LOOKUP},weighted=1",
    "nhot_lookup/rows=50,vocab=7,width=33,nonzeros=1,weighted=0",
    "nhot_lookup/rows=50,vocab=7,width=33,nonzeros=1,weighted=1",
)
X = torch.randn(7, 66)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


def linear(bias: bool = True) -> Any:
    return torch.nn.Linear(66, 35, bias)


def layer(sparsity: float | None = 0.5, **options: Any) -> Any:
    return nn.BsrLinear.from_dense(linear(), (5, 3), sparsity, **options)


def close(have: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)


# ---- BsrLinear -----------------------------------------------------------------------------------


def test_blocks_of_the_largest_norm_stay() -> None:
    dense = linear()
    made = nn.BsrLinear.from_dense(dense, (5, 3), 0.75)
    blocks = dense.weight.detach().reshape(7, 5, 22, 3).transpose(1, 2)
    norms = blocks.square().sum((2, 3)).flatten()
    kept = torch.zeros(154, dtype=torch.bool)
    kept[norms.argsort(descending=True)[:38]] = True  # round(0.25 * 154), of equal halves the even one
    wanted = (blocks * kept.view(7, 22, 1, 1)).transpose(1, 2).reshape(35, 66)
    assert torch.equal(made.to_dense().weight, wanted) and torch.equal(made.bias, dense.bias)
    with torch.no_grad():
        close(made(X), torch.nn.functional.linear(X, wanted, dense.bias))
    assert repr(made) == "BsrLinear(in_features=66, out_features=35, bias=True, block=5x3, sparsity=0.753)"


def test_zeros_of_a_pruned_layer_and_of_a_tensor_in_bsr_format() -> None:
    dense = linear()
    mask = (torch.rand(7, 22) < 0.3).float().kron(torch.ones(5, 3))
    with torch.no_grad():
        dense.weight.mul_(mask)
    made = nn.BsrLinear.from_dense(dense, (5, 3))
    other = nn.BsrLinear.from_torch(dense.weight.detach().to_sparse_bsr((5, 3)), dense.bias, activation="gelu")
    assert made.data.shape == other.data.shape and torch.equal(made.to_dense().weight, dense.weight)
    with torch.no_grad():
        close(made(X), dense(X))
        close(other(X), torch.nn.functional.gelu(dense(X)))
    assert "activation='gelu'" in repr(other)


@pytest.mark.parametrize("sparsity", [0, 1])
def test_all_blocks_and_none(sparsity: int) -> None:
    dense = linear()
    made = nn.BsrLinear.from_dense(dense, (5, 3), sparsity)
    wanted = dense(X) if not sparsity else dense.bias.expand(7, 35)
    close(made(X), wanted)
    made(X).sum().backward()
    assert made.data.grad.shape == made.data.shape


@pytest.mark.parametrize("way", ["sparse", "dense"])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_it_trains_as_a_dense_layer_does(way: str, activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.BsrLinear, "_trains_dense", lambda *_: way == "dense")
    made = layer(0.5, activation=activation)
    theirs = made.to_dense()
    act = torch.nn.functional.gelu if activation else torch.nn.Identity()
    mask = theirs.weight.detach() != 0
    for _ in range(2):
        found = []
        for module in (made, theirs):
            x = X.clone().requires_grad_()
            module.zero_grad()
            (act(module(x)) if module is theirs else module(x)).square().mean().backward()
            found.append((x.grad, module.bias.grad, module.bias.detach().clone()))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad * (mask if parameter is theirs.weight else 1)
        close(*(one[0] for one in found))
        close(*(one[1] for one in found))
        with torch.no_grad():
            close(made(X), act(theirs(X)))
    close(made.to_dense().weight, theirs.weight.detach())


def test_blocks_in_one_place_are_added_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dense products, too, which write blocks with distinct places without adding them up."""
    monkeypatch.setattr(nn.BsrLinear, "_trains_dense", lambda *_: True)
    parts = torch.randn(4, 5, 3), torch.tensor([1, 1, 0, 1]), torch.tensor([0, 2, 2, 4])
    twice, once = (nn.BsrLinear(tvm_sparse.BsrWeight(given, columns=6)) for given in (
        parts, (torch.stack([parts[0][:2].sum(0), parts[0][2], parts[0][3]]), parts[1][1:], torch.tensor([0, 1, 1, 3]))
    ))  # fmt: skip
    x = torch.randn(7, 6)
    for made in (twice, once):
        made(x).square().sum().backward()
    close(twice(x), once(x))
    close(twice.data.grad[1:], once.data.grad)
    close(twice.data.grad[0], once.data.grad[0])


@pytest.mark.parametrize(
    ("activation", "way"), [(None, "sparse"), ("gelu", "sparse"), ("silu", "sparse"), (None, "dense")]
)
def test_gradients_of_gradients(activation: str | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.BsrLinear, "_trains_dense", lambda *_: way == "dense")
    made = layer(0.5, activation=activation)
    theirs = made.to_dense()
    act = getattr(torch.nn.functional, activation) if activation else torch.nn.Identity()
    found = []
    for module, call in ((made, made), (theirs, lambda x: act(theirs(x)))):
        for _ in range(2):  # calls of the second one are repeated
            x = X.clone().requires_grad_()
            module.zero_grad()
            [first] = torch.autograd.grad(call(x).square().mean(), x, create_graph=True)
            first.square().sum().backward()
        found.append((x.grad, module.bias.grad, made.data.grad if module is made else theirs.weight.grad))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
    blocks = found[1][2].view(7, 5, 22, 3).transpose(1, 2)
    rows = torch.repeat_interleave(torch.arange(7), made.indptr.diff())
    close(found[0][2], blocks[rows, made.indices])


@pytest.mark.parametrize("block", [(16, 16), (5, 8), (8, 3)])
def test_a_layer_that_blocks_do_not_divide_is_padded(block: tuple[int, int]) -> None:
    """It computes, trains and is saved as a dense layer of its own shape; padding stays zero."""
    dense = linear()
    made = nn.BsrLinear.from_dense(dense, block, 0)
    rows, cols = block
    assert (made.out_features, made.in_features) == made.weight.shape == (35, 66)
    assert f"padded to {-(-35 // rows) * rows}x{-(-66 // cols) * cols}" in repr(made)
    assert torch.equal(made.to_dense().weight, dense.weight) and torch.equal(made.dense(), dense.weight)
    found = []
    for module in (made, dense):
        x = X.clone().requires_grad_()
        module(x).square().mean().backward()
        found.append((x.grad, module.bias.grad))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
    for one, other in zip(*found, strict=True):
        close(one, other)
    other = nn.BsrLinear.from_dense(linear(), block, 0.5)
    other.load_state_dict(made.state_dict())
    with torch.no_grad():
        for module in (made, other, copy.deepcopy(made), other.freeze(dense=True)):
            for x in (X, X, X[None, :3]):
                assert module(x).is_contiguous()
                close(module(x), dense(x))
    close(made.to_dense().weight, dense.weight)


def test_a_state_dict_holds_all_and_takes_another_structure() -> None:
    one, other = layer(0.5), layer(0.8)
    assert list(one.state_dict()) == ["data", "bias", "indices", "indptr"]
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        assert not torch.equal(one(X), other(X))
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(one(X), other(X))
    bad = one.state_dict()
    bad["indices"] = bad["indices"] + 22
    with pytest.raises(RuntimeError, match=r"BsrLinear: indices: indices\[0\]=.* is outside \[0, 22\)"):
        layer(0.5).load_state_dict(bad)
    with pytest.raises(RuntimeError, match="blocks of 5x3 of 35 rows expected"):
        layer(0.5).load_state_dict({**one.state_dict(), "indptr": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(RuntimeError, match="Missing key.*indices"):
        layer(0.5).load_state_dict({name: t for name, t in one.state_dict().items() if name != "indices"})


def test_copies_pickles_and_moves() -> None:
    made = layer(0.5)
    with torch.no_grad():
        wanted = made(X)
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.to("cpu")):
            assert torch.equal(other(X), wanted)
        changed = copy.deepcopy(made)
        changed.data.mul_(2)
        assert not torch.equal(changed(X), wanted) and torch.equal(made(X), wanted)
        changed.data = torch.nn.Parameter(made.data * 1)  # another tensor in its place is seen
        assert torch.equal(changed(X), wanted)
        half = made.bfloat16()
        assert half is made and half.data.dtype is torch.bfloat16 and half.indptr.dtype is torch.int32
        close(half(X.bfloat16()).float(), wanted, 0.05)
        empty = copy.deepcopy(made).to("meta").to_empty(device="cpu")
        empty.load_state_dict(made.state_dict())
        assert torch.equal(empty(X.bfloat16()), made(X.bfloat16()))


def test_autocast_casts_as_of_a_dense_layer() -> None:
    made = layer(0.5)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(X)
        found.float().sum().backward()
    assert found.dtype is torch.bfloat16 and made.data.grad.dtype is torch.float32
    close(found.float(), made(X), 0.05)


def test_in_graphs() -> None:
    model = torch.nn.Sequential(layer(0.5, activation="gelu"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
        exported = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        assert torch.equal(exported.module()(X[:5]), model(X[:5]))
    assert "0.indices" in exported.state_dict
    grads = []
    for call in (compiled, model):
        model.zero_grad()
        call(X).sum().backward()
        grads.append(model[0].data.grad.clone())
    close(*grads)
    torch._dynamo.reset()


def test_a_layer_that_cannot_be() -> None:
    for call, error, message in (
        (lambda: nn.BsrLinear.from_dense(X), TypeError, "linear: expected a torch.nn.Linear, got Tensor"),
        (
            lambda: nn.BsrLinear(tvm_sparse.BsrWeight(torch.ones(8, 8).to_sparse_bsr((4, 4))), features=(8, 4)),
            ValueError,
            r"features: blocks that cover \(8, 4\) make a weight of \(8, 4\), got \(8, 8\)",
        ),
        (lambda: nn.BsrLinear.from_dense(linear(), 16)(X[:, :65]), ValueError, "x: expected 66 columns"),
        (lambda: nn.BsrLinear.from_dense(linear(), (5, 0)), ValueError, "block: expected a positive number"),
        (lambda: nn.BsrLinear.from_dense(linear(), (5, 3), 1.5), ValueError, "sparsity: expected a number from 0 to 1"),
        (
            lambda: nn.BsrLinear.from_dense(linear().double(), (5, 3), 0.5),
            ValueError,
            "linear: expected a weight of float32",
        ),
        (lambda: nn.BsrLinear.from_torch(X), TypeError, "weight: expected a tensor of layout torch.sparse_bsr, got"),
        (lambda: layer(0.5, activation="tanh"), ValueError, "activation: expected one of relu, gelu, silu or None"),
        (
            lambda: nn.BsrLinear.from_torch(torch.ones(4, 4).to_sparse_bsr((2, 2)), torch.ones(5)),
            ValueError,
            r"bias: expected shape \(4,\)",
        ),
        (lambda: layer(0.5)(X[:, :63]), ValueError, "x: expected 66 columns"),
    ):
        with pytest.raises(error, match=message):
            call()
    dense = linear()
    dense.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match="linear: expected a weight without NaN"):
        nn.BsrLinear.from_dense(dense, (5, 3), 0.5)


# ---- sparsify ------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(70, 35)
        self.first = torch.nn.Sequential(linear(), torch.nn.ReLU())
        self.again = self.first[0]
        self.odd = torch.nn.Linear(36, 35)
        self.head = torch.nn.Linear(35, 70, bias=False)
        self.head.weight = self.embedding.weight


def test_the_linear_layers_of_a_model_are_swapped() -> None:
    model = Model()
    model.eval()
    found = nn.sparsify(model, block=(5, 11), sparsity=0.5)
    assert set(found) == {"first.0", "again"} and model.first[0] is model.again is found["again"]
    assert not model.again.training and type(model.head) is type(model.odd) is torch.nn.Linear
    assert nn.sparsify(model, block=(5, 11)) == {}
    named = nn.sparsify(model, block=(5, 6), sparsity=None, filter=lambda name, _: name == "odd")
    assert list(named) == ["odd"] and named["odd"].data.shape == (42, 5, 6)
    with pytest.raises(ValueError, match="block: .*: blocks of 64x64 do not divide"):
        nn.sparsify(model := Model(), block=64, filter=lambda name, _: name != "head")
    assert type(model.odd) is torch.nn.Linear
    with pytest.raises(TypeError, match="model: is a linear layer itself"):
        nn.sparsify(linear())


# ---- NHotEmbeddingBag ----------------------------------------------------------------------------

INDICES = torch.tensor([4, 0, 21, 7, 3, 1, 0, 49, 5, 2, 49, 8], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 3, 5, 8, 9, 12], dtype=torch.int32)  # the second and the last bag are empty
BIG = torch.randn(50, 33)
SMALL, GROUPED = tvm_sparse.quantize_embedding(BIG), tvm_sparse.quantize_embedding(BIG, group=11)


@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_pytorch(mode: str, padding: int | None) -> None:
    theirs = torch.nn.EmbeddingBag(50, 33, mode=mode, padding_idx=padding)
    made = nn.NHotEmbeddingBag.from_torch(theirs)
    shown = "" if padding is None else f", padding_idx={padding % 50}"
    assert made.weight is theirs.weight and repr(made) == f"NHotEmbeddingBag(50, 33, mode={mode!r}{shown})"
    own = nn.NHotEmbeddingBag(50, 33, mode=mode, padding_idx=padding)
    assert (own.weight == 0).any(1).nonzero().flatten().tolist() == ([] if padding is None else [padding % 50])
    weights = torch.randn(12) if mode == "sum" else None
    for given in ((INDICES, OFFSETS), (INDICES, OFFSETS, weights), (INDICES[:7].view(7, 1),)):
        found = []
        for module in (made, theirs):
            theirs.zero_grad()
            result = module(*given) if module is made or mode == "sum" else module(*given[:2])
            result.square().sum().backward()
            found.append((result, theirs.weight.grad.clone()))
        for have, want in zip(*found, strict=True):
            close(have, want)


@pytest.mark.parametrize("mode", ["sum", "max"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_bags_of_tables_in_eight_bits(stored: str, mode: str) -> None:
    """Through conversions, copies and state dicts; the table has no gradient, weights have one."""
    theirs = torch.nn.EmbeddingBag(50, 33, mode=mode, padding_idx=7)
    made = nn.NHotEmbeddingBag.from_torch(theirs, stored=stored)
    small = tvm_sparse.quantize_embedding(theirs.weight, stored)
    assert torch.equal(made.weight, small.octets) and not list(made.parameters())
    exact = torch.nn.EmbeddingBag.from_pretrained(small.dequantized(), mode=mode, padding_idx=7)
    wanted = exact(INDICES, OFFSETS)
    close(made(INDICES, OFFSETS), wanted)
    fresh = nn.NHotEmbeddingBag(50, 33, mode=mode, padding_idx=7, stored=stored, device="meta").to_empty(device="cpu")
    fresh.load_state_dict(made.state_dict())
    half = copy.deepcopy(made).half()
    assert half.scales.dtype is torch.float32 and half(INDICES, OFFSETS).dtype is torch.float16
    torch.testing.assert_close(half(INDICES, OFFSETS).float(), wanted, rtol=1e-3, atol=1e-3)
    for other in (fresh, pickle.loads(pickle.dumps(made)), half.float()):
        close(other(INDICES, OFFSETS), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(INDICES, OFFSETS), made(INDICES, OFFSETS))
    torch._dynamo.reset()
    if mode == "sum":
        grads = []
        for module in (made, exact):
            weights = torch.linspace(-1, 1, 12, requires_grad=True)
            module(INDICES, OFFSETS, weights).square().sum().backward()
            grads.append(weights.grad)
        close(*grads)


@pytest.mark.parametrize("stored", ["", "int8"])
@pytest.mark.parametrize(("mode", "padding"), [("sum", None), ("mean", 3), ("max", 0)])
def test_bags_of_several_tables(mode: str, padding: int | None, stored: str) -> None:
    """As single ones, in lists of both kinds and as one array, with gradients; through conversions and copies."""
    sizes = (50, 3, 21)
    single = [
        torch.nn.EmbeddingBag(size, 33, mode=mode, padding_idx=padding if padding != 3 else None) for size in sizes
    ]
    made = nn.NHotEmbeddingBags.from_torch(single, stored=stored)
    made.padding_idx = padding
    if stored:
        for number, bag in enumerate(single):
            bag.weight = torch.nn.Parameter(made._table()[number].dequantized())
    given = [INDICES % size for size in sizes]
    starts = [OFFSETS, OFFSETS.clone(), torch.tensor([0, 0, 0, 1, 7, 8, 8], dtype=torch.int32)]
    weights = [torch.randn(12, requires_grad=True) for _ in sizes] if mode == "sum" else None

    def wanted(*lists: Any) -> Any:
        found = []
        for number, (bag, size) in enumerate(zip(single, sizes, strict=True)):
            own = [one[number] if one is not None else None for one in lists]
            more = {"padding_idx": padding, "mode": mode} if padding is not None and padding < size else {"mode": mode}
            if own[0].dim() == 2:
                found.append(torch.nn.functional.embedding_bag(own[0], bag.weight, **more))
            else:
                found.append(
                    torch.nn.functional.embedding_bag(own[0], bag.weight, *own[1:2], **more, per_sample_weights=own[2])
                )
        return torch.cat(found, 1)

    right = wanted(given, starts, weights)
    found = made(given, starts, weights)
    close(found, right)
    joined = torch.cat([start + 12 * number for number, start in enumerate(starts)] + [torch.tensor([36])])
    plain = None if weights is None else torch.cat(weights)
    close(made(torch.cat(given), joined.int(), plain), right)
    two = [one.view(3, 4) for one in given]
    close(made(two), wanted(two, None, None))
    if not stored or weights:
        right.square().sum().backward()
        slopes = [None if weights is None else [one.grad.clone() for one in weights]]
        for one in weights or ():
            one.grad = None
        found.square().sum().backward()
        for have, want in zip([one.grad for one in weights or ()], slopes[0] or (), strict=True):
            close(have, want)
    if not stored:
        close(made.weight.grad, torch.cat([bag.weight.grad for bag in single]))
    fresh = nn.NHotEmbeddingBags(sizes, 33, mode=mode, padding_idx=padding, stored=stored)
    if padding is not None and not stored:
        assert (fresh.weight == 0).all(1).nonzero().flatten().tolist() == [0, 50, 53][:3] if padding == 0 else [3, 56]
    fresh.load_state_dict(made.state_dict())
    for other in (fresh, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        close(other(given, starts, weights), found)
        assert repr(other) == repr(made)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(given, starts, weights), found)
    torch._dynamo.reset()


def test_another_dtype_is_refused_after_a_call_like_it() -> None:
    rows = tvm_sparse.CsrRows((torch.cat([OFFSETS, OFFSETS[-1:]]), INDICES, None), columns=50)
    for dtype in (None, torch.float32, "float32"):
        for _ in range(2):
            close(tvm_sparse.nhot_lookup(rows, BIG, dtype=dtype), tvm_sparse.nhot_lookup(rows, BIG.clone()))
    with pytest.raises(ValueError, match="dtype: expected float32, as the table has, got float16"):
        tvm_sparse.nhot_lookup(rows, BIG, dtype="float16")


def test_several_tables_that_cannot_be() -> None:
    tables = tvm_sparse.EmbeddingTables.of([torch.randn(50, 33), torch.randn(7, 33)])
    last = torch.cat([OFFSETS, torch.tensor([12])]).int()
    two = torch.cat([last, last[1:] + 12]), torch.cat([INDICES, INDICES % 7]), None
    assert torch.equal(tables[1], tables.table[50:]) and len(list(tables)) == 2
    close(tvm_sparse.nhot_lookup(two, tables)[:, 33:], tvm_sparse.nhot_lookup((last, INDICES % 7, None), tables[1]))
    rows = tvm_sparse.CsrRows(two, columns=tables.sizes)
    assert pickle.loads(pickle.dumps(rows)).sizes == (50, 7)
    bags = nn.NHotEmbeddingBags((50, 7), 33)
    for call, message in (
        (
            lambda: tvm_sparse.EmbeddingTables(tables.table, (50, 8)),
            "sizes: expected numbers of at least 1 whose sum is 57",
        ),
        (lambda: tvm_sparse.EmbeddingTables.of([]), "tables: expected at least one"),
        (
            lambda: tvm_sparse.nhot_lookup(rows, tables.table),
            "csr: expected a CsrRows made with columns=57, got one for",
        ),
        (
            lambda: tvm_sparse.nhot_lookup((two[0][:-1], two[1][:24], None), tables),
            "indptr: expected as many rows for each",
        ),
        (lambda: tvm_sparse.nhot_lookup((two[0], two[1] + 1, None), tables), r"indices\[7\]=50 is outside \[0, 50\)"),
        (
            lambda: tvm_sparse.nhot_lookup((two[0], two[1].flip(0), None), tables),
            r"is outside \[0, 7\), the rows of table 1",
        ),
        (lambda: tvm_sparse.nhot_lookup(two, tables, padding_idx=-1), "padding_idx: expected an integer from 0 to 49"),
        (lambda: bags(INDICES), "input: expected a list for each table"),
        (lambda: bags([INDICES], [OFFSETS]), "input: expected a list of 2, one for each table"),
        (lambda: bags([INDICES, INDICES % 7], [OFFSETS, OFFSETS[:3]]), "input: expected equally many bags"),
        (lambda: nn.NHotEmbeddingBags((50, 0), 33), "sizes: expected at least one number, each at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_bags_of_other_kinds() -> None:
    made = nn.NHotEmbeddingBag(50, 33)
    wanted = made(INDICES, OFFSETS)
    last = torch.cat([OFFSETS, torch.tensor([12], dtype=torch.int32)])
    weights = torch.ones(12)
    for rows in ((last, INDICES, None), tvm_sparse.CsrRows((last, INDICES, weights), columns=50)):
        close(made(rows), wanted)
    close(made(torch.sparse_csr_tensor(last, INDICES, weights, (7, 50))), wanted)
    closed = torch.nn.EmbeddingBag(50, 33, mode="sum", include_last_offset=True)
    assert nn.NHotEmbeddingBag.from_torch(closed)(INDICES, last).shape == (7, 33)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(made, backend="aot_eager", fullgraph=True)(INDICES, OFFSETS), wanted)
    torch._dynamo.reset()
    other = nn.NHotEmbeddingBag(50, 33)
    other.load_state_dict(made.state_dict())
    for copied in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(copied(INDICES, OFFSETS), wanted)


def test_bags_that_cannot_be() -> None:
    made, mean = nn.NHotEmbeddingBag(50, 33), nn.NHotEmbeddingBag(50, 33, mode="mean")
    bag = torch.nn.EmbeddingBag
    for call, message in (
        (lambda: nn.NHotEmbeddingBag(50, 33, mode="least"), "mode: expected one of sum, mean, max, got 'least'"),
        (lambda: nn.NHotEmbeddingBag(50, 33, stored="int4"), "stored: expected '' or one of int8, float8_e4m3fn"),
        (lambda: tvm_sparse.nhot_lookup((OFFSETS, INDICES, None), GROUPED), "table: expected a scale a row, got 3"),
        (
            lambda: tvm_sparse.nhot_lookup((OFFSETS, INDICES, None), SMALL, dtype="int8"),
            "dtype: expected one of float32",
        ),
        (lambda: tvm_sparse.nhot_lookup((OFFSETS, INDICES, None), BIG, dtype="float16"), "dtype: expected float32, as"),
        (
            lambda: nn.NHotEmbeddingBag(50, 33, padding_idx=50),
            "padding_idx: expected an integer from -50 to 49, got 50",
        ),
        (lambda: nn.NHotEmbeddingBag.from_torch(bag(5, 3, sparse=True)), "bag: expected sparse=False"),
        (lambda: made(INDICES), "offsets: expected one dimension of int32 or int64, got None"),
        (lambda: made(INDICES, OFFSETS.short()), "offsets: expected one dimension of int32 or int64, got torch.int16"),
        (lambda: made(INDICES.view(4, 3), OFFSETS), "offsets: a two-dimensional input"),
        (lambda: made(INDICES.view(2, 2, 3)), "input: expected one or two dimensions"),
        (lambda: made(INDICES, OFFSETS, torch.ones(11)), r"per_sample_weights: expected shape \(12,\)"),
        (lambda: mean(INDICES, OFFSETS, torch.ones(12)), "per_sample_weights: expected the mode sum, got mean"),
        (lambda: mean((OFFSETS, INDICES, None), OFFSETS), "input: sparse rows have their own"),
        (lambda: mean((OFFSETS, INDICES, torch.ones(12))), "values: expected None for mode='mean', got float32"),
        (lambda: made(INDICES + 1, OFFSETS), r"indices\[7\]=50 is outside \[0, 50\)"),
        (lambda: made(INDICES, OFFSETS.flip(0)), "indptr"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="bag: expected a torch.nn.EmbeddingBag, got Linear"):
        nn.NHotEmbeddingBag.from_torch(linear())
