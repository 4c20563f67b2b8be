"""Gradients of recurrent layers and stacks: float64 autograd of the masked dense layer is the reference."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
from typing import Any

import numpy as np
import pytest
from cases import thorough

import tvm_sparse
from tvm_sparse.core.problem import FLOATS
from tvm_sparse.layers import recurrent
from tvm_sparse.operators.sparse_recurrent.problem import GATES

torch = pytest.importorskip("torch")
from dense_layers import OF_TORCH  # noqa: E402

from tvm_sparse.operators.recurrent_backward.autograd import differentiable  # noqa: E402

numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))
CELLS = tuple(GATES)
LIMIT = 0.4  # of the clipped relu
# Largest error of a gradient, as a share of its largest element.
TOLERANCE = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
CALLS = {"entries": tvm_sparse.sparse_recurrent, "blocks": tvm_sparse.block_recurrent}
PREPARE = {"entries": tvm_sparse.recurrent_weights, "blocks": tvm_sparse.block_recurrent_weights}


def dense_layer(
    cell: str, weight: Any, x: Any, h: Any, c: Any, bias: Any, lengths: Any, resets: Any, positive: Any = None
) -> list[Any]:
    """Outputs and last states of a layer, by torch's operators.

    `positive` `(steps, batch, hidden)`: where a relu passes its sum, since a sum near 0 may have another sign after
    rounding; None: where the sum is positive.
    """
    outputs, steps = [], len(x)
    lengths = torch.full((x.shape[1],), steps) if lengths is None else lengths
    for t in range(steps):
        lives = (t < lengths)[:, None]
        before, cell_before = h, c
        if resets is not None:
            begins = (resets[t] != 0)[:, None]
            before = torch.where(begins, torch.zeros_like(h), h)
            cell_before = None if c is None else torch.where(begins, torch.zeros_like(c), c)
        sums, new_c = before @ weight.T, None
        width = h.shape[1]
        if cell == "lstm":
            i, f, g, o = (x[t] + sums).chunk(4, 1)
            new_c = f.sigmoid() * cell_before + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * new_c.tanh()
        elif cell == "gru":
            (xr, xz, xn), (ur, uz, un) = x[t].chunk(3, 1), sums.chunk(3, 1)
            z = (xz + uz).sigmoid()
            new_h = (1 - z) * torch.tanh(xn + (xr + ur).sigmoid() * (un + bias)) + z * before
        elif cell == "gru_reset_before":
            r, z = (x[t, :, : 2 * width] + sums[:, : 2 * width]).sigmoid().chunk(2, 1)
            n = torch.tanh(x[t, :, 2 * width :] + (r * before) @ weight[2 * width :].T)
            new_h = (1 - z) * n + z * before
        elif cell == "relu" and positive is not None:
            new_h = torch.where(positive[t], x[t] + sums, torch.zeros_like(sums))
        elif cell == "clipped_relu" and positive is not None:
            new_h = torch.where(positive[t], x[t] + sums, (x[t] + sums).detach().clamp(0, LIMIT))
        else:
            new_h = getattr(torch, cell)(x[t] + sums)
        outputs.append(torch.where(lives, new_h, torch.zeros_like(new_h)))
        h = torch.where(lives, new_h, h)
        c = None if c is None else torch.where(lives, new_c, c)
    return [torch.stack(outputs), h, *([] if c is None else [c])]


def gradients_agree(
    rng: random.Random, cell: str, dtype: str, form: str, device: str = "cpu", hidden: int = 0, batch: int = 0
) -> None:
    """All gradients of a drawn layer, with its values as a parameter and without."""
    torch.manual_seed(rng.randrange(2**31))
    kind, gates = getattr(torch, dtype), GATES[cell]
    hidden = hidden or rng.randint(1, 60)
    steps, batch, density = rng.randint(1, 9), batch or rng.randint(1, 18), rng.choice((0.0, 0.03, 0.2, 0.5, 1.0))
    kept = torch.rand(gates * hidden, hidden) < density
    weight = (torch.randn(gates * hidden, hidden) * kept * 0.5 / max(1.0, hidden * density) ** 0.5).to(kind)
    weights = PREPARE[form](weight, gates)
    rows, columns, stored = weights.coordinates()
    values = torch.from_numpy(stored).to(kind)
    x, h0 = torch.randn(steps, batch, gates * hidden).to(kind), 0.5 * torch.randn(batch, hidden).to(kind)
    c0 = 0.5 * torch.randn(batch, hidden).to(kind) if cell == "lstm" else None
    bias = 0.3 * torch.randn(hidden).to(kind) if cell == "gru" else None
    lengths = torch.randint(0, steps + 1, (batch,)) if rng.random() < 0.5 else None
    resets = torch.rand(steps, batch) < 0.3 if rng.random() < 0.5 else None

    placed = [None if one is None else one.to(device).requires_grad_() for one in (values, x, h0, c0, bias)]
    beside = [None if one is None else one.to(device) for one in (lengths, resets)]
    run = functools.partial(CALLS[form], cell=cell)
    limit = LIMIT if cell == "clipped_relu" else None
    found = differentiable(run, weights, *placed[1:], limit, *beside, cell=cell, values=placed[0])

    exact = [None if one is None else one.detach().double().requires_grad_() for one in (values, x, h0, c0, bias)]
    places = torch.from_numpy(rows), torch.from_numpy(columns)
    dense = torch.zeros(gates * hidden, hidden, dtype=torch.double).index_put(places, exact[0])
    passes = (found[0] > 0) & (found[0] < torch.tensor(LIMIT if limit else np.inf, dtype=kind, device=device))
    wanted = dense_layer(cell, dense, *exact[1:], lengths, resets, passes.cpu())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            one.detach().cpu().double(), other.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
    weighed = [torch.randn_like(one).to(kind) for one in wanted]
    leaves = [one for one in exact if one is not None]
    expected = torch.autograd.grad(wanted, leaves, [one.double() for one in weighed], allow_unused=True)

    own = [one for one in placed if one is not None]
    given = [one.to(device) for one in weighed]
    gradients = torch.autograd.grad(found, own, given)
    for one, other, leaf in zip(gradients, expected, own, strict=True):
        other = torch.zeros(leaf.shape, dtype=torch.double) if other is None else other
        assert one.dtype is kind and one.shape == other.shape
        allowed = TOLERANCE[dtype] * (other.abs().max().item() if other.numel() else 0.0) + 1e-7
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=allowed)
    _, x, h0, c0, bias = placed
    public = run(weights, x, h0, c0, hidden_bias=bias, limit=limit, lengths=beside[0], resets=beside[1])
    for one, other in zip(torch.autograd.grad(public, own[1:], given), gradients[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["entries", thorough("blocks")])
@pytest.mark.parametrize("dtype", [dtype if dtype == "float32" else thorough(dtype) for dtype in FLOATS])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_the_dense_layer(cell: str, dtype: str, form: str) -> None:
    seed = next(numbers)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2):
        gradients_agree(rng, cell, dtype, form)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_on_the_gpu(cell: str, dtype: str) -> None:
    seed = next(numbers)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for form in ("entries", "blocks"):
        gradients_agree(rng, cell, dtype, form, "cuda")
    gradients_agree(rng, cell, dtype, "entries", "cuda", hidden=rng.randint(100, 400), batch=rng.randint(1, 16))


def module_of(cell: str, *sizes: int, **options: Any) -> Any:
    """A module of PyTorch's with pruned recurrent weights."""
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(cell, torch.nn.RNN)
    made = kind(*sizes, **({"nonlinearity": cell} if GATES[cell] == 1 else {}), **options)
    for name, parameter in made.named_parameters():
        if name.startswith("weight_hh"):
            parameter.detach().copy_(tvm_sparse.prune(parameter, 0.3))
    return made


def assert_stack_learns_as(made: Any, stack: Any, x: Any, tolerance: float) -> None:
    """Gradients of the input and of every parameter are those of the module."""
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = stack(mine)[0], made(theirs)[0]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    weighed = torch.randn_like(found)
    (found * weighed).sum().backward()
    (wanted * weighed).sum().backward()

    def agree(one: Any, other: Any) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * (1 + other.abs().max().item()))

    agree(mine.grad, theirs.grad)
    suffixes = ("", "_reverse")[: 1 + made.bidirectional]
    for place, (number, suffix) in enumerate(itertools.product(range(made.num_layers), suffixes)):
        of_module = {n: getattr(made, f"{n}_l{number}{suffix}").grad for n in ("weight_ih", "weight_hh", "bias_ih")}
        rows, columns, _ = stack.layers[place].weights.coordinates()
        agree(getattr(stack, f"weight_{place}").grad, of_module["weight_ih"])
        agree(getattr(stack, f"bias_{place}").grad, of_module["bias_ih"])
        agree(getattr(stack, f"values_{place}").grad, of_module["weight_hh"][rows, columns])
        if stack.cell == "gru":
            whole = getattr(made, f"bias_hh_l{number}{suffix}").grad
            agree(getattr(stack, f"hidden_bias_{place}").grad, whole[2 * made.hidden_size :])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("cell", OF_TORCH)
def test_a_stack_learns_as_its_module(cell: str, dense: bool) -> None:
    torch.manual_seed(next(numbers))
    made = module_of(cell, 5, 24, num_layers=2, bidirectional=cell in ("lstm", "relu"))
    stack = tvm_sparse.from_torch(made, form="entries", dense=dense).trainable()
    assert stack.training and stack.trainable() is stack
    assert_stack_learns_as(made, stack, torch.randn(7, 18, 5), 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("cell", OF_TORCH)
def test_a_stack_learns_as_its_module_on_the_gpu(cell: str, dense: bool) -> None:
    torch.manual_seed(next(numbers))
    torch.backends.cudnn.allow_tf32 = False
    made = module_of(cell, 40, 200, num_layers=2, bidirectional=cell == "gru").cuda()
    stack = tvm_sparse.from_torch(made, form="entries", dense=dense).trainable()
    assert_stack_learns_as(made, stack, torch.randn(20, 19, 40, device="cuda"), 2e-4)


@pytest.mark.parametrize("cell", ["tanh", thorough("gru"), "lstm"])
def test_many_steps_are_cut(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(next(numbers))
    made = module_of(cell, 4, 10)
    stack = tvm_sparse.from_torch(made).trainable()
    whole, x = copy.deepcopy(stack), torch.randn(9, 18, 4)
    lengths = torch.randint(0, 10, (18,))
    wanted, states = whole(x, lengths=lengths)
    monkeypatch.setattr(recurrent, "EXCHANGED", 1)
    monkeypatch.setattr(recurrent, "LEAST_STEPS", 4)
    found, ends = stack(x, lengths=lengths)
    assert torch.equal(found, wanted)
    pairs = zip(ends, states, strict=True) if cell == "lstm" else [(ends, states)]
    total, other = found.square().sum(), wanted.square().sum()
    for one, end in pairs:
        total, other = total + one.square().sum(), other + end.square().sum()
    total.backward()
    other.backward()
    for one, another in zip(stack.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["entries", "blocks"])
def test_a_trained_stack_is_kept(form: str, tmp_path: Any) -> None:
    torch.manual_seed(next(numbers))
    stack = tvm_sparse.from_torch(module_of("gru", 4, 17), form=form).trainable()
    x, optimizer = torch.randn(5, 2, 4), torch.optim.SGD(stack.parameters(), 0.005)
    before = stack(x)[0].detach()
    for _ in range(3):
        optimizer.zero_grad()
        stack(x)[0].square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        after = stack(x)[0]
    assert not torch.equal(before, after) and after.square().sum() < before.square().sum()
    loaded = tvm_sparse.RecurrentStack.load(stack.save(tmp_path / "stack.npz"))
    again = tvm_sparse.from_torch(module_of("gru", 4, 17), form=form).trainable()
    for other in (loaded, stack.frozen(), copy.deepcopy(stack)):
        torch.testing.assert_close(other(x)[0], after, rtol=1e-6, atol=1e-6)
        assert other.layers[0].weights.coordinates()[0].tolist() == stack.layers[0].weights.coordinates()[0].tolist()
    assert not list(loaded.parameters()) and not loaded(x)[0].requires_grad
    if len(again.values_0) == len(stack.values_0):
        again.load_state_dict(stack.state_dict())
        torch.testing.assert_close(again(x)[0], after, rtol=1e-6, atol=1e-6)


def test_training_in_other_dtypes() -> None:
    torch.manual_seed(next(numbers))
    made = module_of("lstm", 6, 20)
    stack, x = tvm_sparse.from_torch(made, form="entries").trainable(), torch.randn(5, 3, 6)
    rows, columns, _ = stack.layers[0].weights.coordinates()
    made(x)[0].square().sum().backward()
    wanted = made.weight_hh_l0.grad[rows, columns]
    with torch.autocast("cpu", torch.bfloat16):
        output = stack(x)[0]
    assert output.dtype is torch.bfloat16
    output.float().square().sum().backward()
    assert stack.values_0.grad.dtype is torch.float32
    torch.testing.assert_close(stack.values_0.grad, wanted, rtol=0, atol=0.1 * wanted.abs().max().item())
    stack.zero_grad()
    half = stack.half()
    half(x.half())[0].float().square().sum().backward()
    assert half.values_0.grad.dtype is torch.float16
    torch.testing.assert_close(half.values_0.grad.float(), wanted, rtol=0, atol=0.02 * wanted.abs().max().item())


def test_nothing_to_compute_has_gradients() -> None:
    weights = tvm_sparse.recurrent_weights(torch.eye(4), 1)
    for steps, batch in ((0, 2), (3, 0)):
        x, h0 = torch.randn(steps, batch, 4, requires_grad=True), torch.randn(batch, 4, requires_grad=True)
        output, h_n = tvm_sparse.sparse_recurrent(weights, x, h0, cell="tanh")
        (output.sum() + h_n.sum()).backward()
        assert x.grad.shape == x.shape and torch.equal(h0.grad, torch.ones_like(h0) if not steps else h0.grad)


def test_no_gradient_through_out() -> None:
    layer = tvm_sparse.SparseRNN(torch.eye(4))
    x = torch.randn(3, 2, 4, requires_grad=True)
    out = (torch.empty(3, 2, 4), torch.empty(2, 4))
    with pytest.raises(RuntimeError, match="out: a gradient is wanted"):
        layer(x, out=out)
    with torch.no_grad():
        assert layer(x, out=out)[0] is out[0]
    with pytest.raises(RuntimeError, match="requires a gradient"):
        tvm_sparse.sparse_recurrent(layer.weights, x, np.zeros((2, 4), np.float32), cell="tanh")
