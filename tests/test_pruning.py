"""Pruning: the masks keep what they say, in both libraries, and training with them ends at the density."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest

from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.layers.pruning import (
    METHODS,
    GradualPruning,
    constant_schedule,
    cubic_schedule,
    prune,
    pruning_mask,
)

numbers = itertools.count(int.from_bytes(os.urandom(4), "little"))
SHAPES = ((1, 1), (5, 7), (48, 16), (33, 97))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(next(numbers)).standard_normal(shape, dtype=np.float32)


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0, 0.01, 0.1, 0.5, 0.999, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_magnitude_keeps_the_largest(shape: tuple[int, int], density: float) -> None:
    weight = drawn(*shape)
    mask = pruning_mask(weight, density)
    assert mask.dtype == bool and mask.sum() == round(density * weight.size)
    if mask.any() and not mask.all():
        assert abs(weight[mask]).min() >= abs(weight[~mask]).max()


@pytest.mark.parametrize("density", [0, 0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_balanced_rows_are_equal(shape: tuple[int, int], density: float) -> None:
    weight = drawn(*shape)
    mask = pruning_mask(weight, density, method="row_balanced")
    assert (mask.sum(1) == round(density * shape[1])).all()
    for row, kept in zip(abs(weight), mask, strict=True):
        assert not kept.any() or kept.all() or row[kept].min() >= row[~kept].max()


@pytest.mark.parametrize("block", [1, 8, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_kept_whole(shape: tuple[int, int], block: int) -> None:
    weight = drawn(*shape)
    mask = pruning_mask(weight, 0.3, method="block", block=block)
    kept, left = [], []
    for row in range(0, shape[0], block):
        for column in range(0, shape[1], block):
            part = np.s_[row : row + block, column : column + block]
            assert mask[part].all() or not mask[part].any()
            (kept if mask[part].all() else left).append(np.mean(weight[part].astype(np.float64) ** 2))
    assert len(kept) == round(0.3 * (len(kept) + len(left)))
    assert not kept or not left or min(kept) >= max(left) * (1 - 1e-5)


@pytest.mark.parametrize(("gates", "block"), [(1, 8), (3, 8), (4, 5), (4, 16)])
def test_blocks_have_the_same_units_of_all_gates(gates: int, block: int) -> None:
    weight = drawn(gates * 21, 21)
    mask = pruning_mask(weight, 0.4, method="block", block=block, gates=gates).reshape(gates, 21, 21)
    assert (mask == mask[0]).all()
    alone = pruning_mask((weight.reshape(gates, 21, 21) ** 2).mean(0) ** 0.5, 0.4, method="block", block=block)
    assert np.array_equal(mask[0], alone)
    # Other methods do not ask for them.
    assert np.array_equal(pruning_mask(weight, 0.4, gates=gates), pruning_mask(weight, 0.4))


def test_blocks_of_a_module_are_of_all_gates() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.GRU(5, 32)
    pruning = GradualPruning(module, lambda step: 0.25, method="block", block=8)
    pruning.after_step()
    kept = (module.weight_hh_l0.detach() != 0).reshape(3, 32, 32)
    assert (kept == kept[0]).all() and int(kept[0].sum()) == 256


@pytest.mark.parametrize("method", METHODS)
def test_of_equal_entries_the_first_stay(method: str) -> None:
    mask = pruning_mask(np.ones((16, 20), np.float32), 0.5, method=method, block=4)
    assert mask.sum() == 160
    first = {"magnitude": mask[:8], "row_balanced": mask[:, :10], "block": mask[:8]}[method]
    assert first.all()


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_torch_and_numpy_agree(method: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(drawn(24, 40)).to(getattr(torch, dtype))
    array = tensor.double().numpy().astype(np.float64 if dtype == "float64" else numpy_dtype(dtype))
    mask = pruning_mask(tensor.requires_grad_(), 0.2, method=method, block=8)
    assert isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
    assert np.array_equal(mask.numpy(), pruning_mask(array, 0.2, method=method, block=8))
    pruned = prune(tensor, 0.2, method=method, block=8)
    assert pruned.dtype is tensor.dtype and not pruned.requires_grad
    assert torch.equal(pruned, torch.where(mask, tensor.detach(), 0))
    ours = prune(array, 0.2, method=method, block=8)
    assert ours.dtype == array.dtype and np.array_equal(ours.astype(np.float64), pruned.double().numpy())


def test_extremes_are_compared() -> None:
    weight = np.asarray([[np.inf, 1, -np.inf, 0], [65504, -2, 0, 0]], np.float32)
    assert pruning_mask(weight, 0.25).tolist() == [[True, False, True, False], [False] * 4]
    assert pruning_mask(np.full((4, 4), 60000, np.float16), 0.5, method="block", block=2).sum() == 8
    assert pruning_mask(np.full((4, 4), 1e-30, np.float32) * np.eye(4, dtype=np.float32), 0.25, method="block",
                        block=1).sum() == 4  # fmt: skip
    assert pruning_mask(np.zeros((0, 5), np.float32), 0.5).shape == (0, 5)
    pruned = prune(np.asarray([[np.inf, 1.0]], np.float32), 0.5)
    assert pruned.tolist() == [[np.inf, 0]]
    assert prune(np.asarray([[np.inf, 1.0]], np.float32), 0).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        (np.ones(3, np.float32), {}, ValueError, "weight: expected two dimensions"),
        (np.ones((3, 3), np.int32), {}, ValueError, "weight: expected two dimensions of floats"),
        (np.full((3, 3), np.nan, np.float32), {}, ValueError, "weight: expected no NaN"),
        ([[1.0]], {}, TypeError, "weight: expected a torch tensor or a NumPy array"),
        (np.ones((3, 3), np.float32), {"density": 1.5}, ValueError, "density: expected 0 <= density <= 1"),
        (np.ones((3, 3), np.float32), {"density": float("nan")}, ValueError, "density: expected"),
        (np.ones((3, 3), np.float32), {"density": "much"}, TypeError, "density: expected a number"),
        (np.ones((3, 3), np.float32), {"method": "random"}, ValueError, "method: expected one of"),
        (np.ones((3, 3), np.float32), {"block": 0}, ValueError, "block: expected at least 1"),
        (np.ones((3, 3), np.float32), {"gates": 2}, ValueError, "gates: expected a divisor of the 3 rows"),
    ],
)
def test_what_does_not_fit_is_named(weight: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        pruning_mask(weight, **{"density": 0.5, **options})


# ---- schedules -----------------------------------------------------------------------------------


def test_the_cubic_schedule_is_that_of_zhu_and_gupta() -> None:
    density = cubic_schedule(0.1, begin=10, end=110, every=20)
    found = {step: density(step) for step in range(1, 130)}
    wanted = {t: 1 - (0.9 + (0 - 0.9) * (1 - (t - 10) / 100) ** 3) for t in range(10, 111, 20)}
    assert {step for step, value in found.items() if value is not None} == set(wanted)
    assert all(found[step] == pytest.approx(value) for step, value in wanted.items())
    assert found[10] == 1 and found[110] == pytest.approx(0.1)
    # The last step counts also where the interval does not meet it.
    assert cubic_schedule(0.2, begin=1, end=6, every=4)(6) == pytest.approx(0.2)
    assert cubic_schedule(0.2, begin=3, end=3)(3) == pytest.approx(0.2)


def test_the_constant_schedule_is_that_of_the_paper() -> None:
    """First half epoch dense, a new pattern every half epoch to the end of epoch 11, then fine-tuning."""
    half = 50
    density = constant_schedule(0.125, begin=half, end=22 * half, every=half)
    steps = [step for step in range(1, 26 * half + 1) if density(step) is not None]
    assert steps == list(range(half, 22 * half + 1, half)) and density(half) == 0.125


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cubic_schedule(0.5, begin=0, end=10), "begin, end, every: expected 1 <= begin"),
        (lambda: cubic_schedule(0.5, begin=10, end=9), "begin, end, every"),
        (lambda: cubic_schedule(0.5, begin=1, end=9, initial=0.4), "final: expected at most the initial"),
        (lambda: cubic_schedule(-1, begin=1, end=9), "final: expected 0 <= final <= 1"),
        (lambda: constant_schedule(0.5, begin=1, end=9, every=0), "begin, end, every"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- training ------------------------------------------------------------------------------------


def train(master: bool, schedule: Any, method: str = "magnitude", steps: int = 40) -> tuple[Any, Any, list[Any]]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(next(numbers))
    module = torch.nn.LSTM(6, 16, num_layers=2)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    pruning = GradualPruning(module, schedule, method=method, master=master).attach(optimizer)
    patterns = []
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 3, 6))[0].square().mean().backward()
        optimizer.step()
        patterns.append(module.weight_hh_l0.detach() != 0)
    return module, pruning, patterns


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("method", ["magnitude", "row_balanced"])
def test_a_module_ends_at_the_density(method: str, master: bool) -> None:
    module, pruning, patterns = train(master, cubic_schedule(0.125, begin=5, end=25, every=5), method)
    assert pruning.step == 40 and pruning.density == pytest.approx(0.125)
    for name, parameter in module.named_parameters():
        share = float((parameter != 0).float().mean())
        assert share == pytest.approx(0.125) if name.startswith("weight_hh") else share > 0.9, name
    assert patterns[3].all() and all(patterns[i].sum() >= patterns[i + 1].sum() for i in range(39))
    assert all((patterns[i] == patterns[24]).all() for i in range(25, 40))
    pruning.detach()


def test_pruned_weights_return_with_a_master_copy_only() -> None:
    schedule = constant_schedule(0.25, begin=2, end=38, every=2)
    for master in (False, True):
        _, _, patterns = train(master, schedule)
        returned = any((patterns[i + 1] & ~patterns[i]).any() for i in range(2, 38))
        assert returned == master


def test_the_master_copy_is_what_the_optimiser_steps() -> None:
    """Plain gradient descent by hand, with gradients at the pruned weights."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.tensor([[4.0, 3.0], [2.0, 1.0]]))
    pruning = GradualPruning([weight], lambda step: 0.5 if step in (1, 3) else None, master=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    pruning.attach(optimizer)
    unpruned, pattern = weight.detach().clone(), torch.ones(2, 2)
    for step in (1, 2, 3):
        pushed = torch.tensor([[1.0, 0.0], [-1.5, 0.0]])
        optimizer.zero_grad()
        (weight * pushed + weight**2 / 20).sum().backward()
        assert torch.allclose(weight.grad, pushed + weight.detach() / 10)
        unpruned = unpruned - (pushed + unpruned * pattern / 10)
        optimizer.step()
        if step in (1, 3):
            pattern = pruning_mask(unpruned, 0.5).float()
        assert torch.allclose(weight.detach(), unpruned * pattern)
    assert pattern.tolist() == [[0, 1], [1, 0]]  # the third weight was pruned at first, and is back


def test_training_resumes() -> None:
    torch = pytest.importorskip("torch")
    first, pruning, _ = train(True, cubic_schedule(0.25, begin=5, end=25, every=5), steps=20)
    again = torch.nn.LSTM(6, 16, num_layers=2)
    again.load_state_dict(first.state_dict())
    other = GradualPruning(again, pruning.schedule, master=True)
    other.load_state_dict(pruning.state_dict())
    for one in (pruning, other):
        one.before_step()
        one.after_step()
    assert other.step == 21 and all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    small = GradualPruning(torch.nn.GRU(6, 8), pruning.schedule)
    with pytest.raises(ValueError, match="state: masks"):
        small.load_state_dict(pruning.state_dict())


def test_what_cannot_be_pruned_is_refused() -> None:
    torch = pytest.importorskip("torch")
    schedule = cubic_schedule(0.5, begin=1, end=2)
    assert len(GradualPruning(torch.nn.Sequential(torch.nn.GRU(3, 4, bidirectional=True)), schedule).parameters) == 2
    with pytest.raises(TypeError, match="target: expected a module with recurrent weights"):
        GradualPruning(torch.nn.Linear(3, 4), schedule)
    with pytest.raises(TypeError, match="target: expected two-dimensional"):
        GradualPruning([torch.nn.Parameter(torch.ones(3))], schedule)
    with pytest.raises(TypeError, match="target: expected a module or a list of parameters"):
        GradualPruning(3, schedule)
    with pytest.raises(TypeError, match="schedule"):
        GradualPruning(torch.nn.GRU(3, 4), 0.5)
    with pytest.raises(ValueError, match="method"):
        GradualPruning(torch.nn.GRU(3, 4), schedule, method="random")
