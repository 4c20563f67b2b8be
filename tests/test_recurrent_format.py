"""Sparse recurrent weights on the host: every kind of matrix, the orders of units and entries, what is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from cases import thorough
from foreign import Foreign
from hypothesis import given
from hypothesis import strategies as st

import tvm_sparse
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.formats.recurrent import (
    ORDERS,
    UNITS,
    RecurrentWeights,
    balanced_units,
    bank_order,
    banks_for,
    conflicts,
    entry_words,
    greedy_order,
    pack_entries,
    recurrent_weights,
    unpack_entries,
)


def pruned(hidden: int, gates: int, density: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = gates * hidden, hidden
    return (rng.standard_normal(shape) * (rng.random(shape) < density)).astype(np.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("hidden", "gates", "density"), [(1, 1, 1.0), (37, 3, 0.2), (64, 4, 0.05), (50, 1, 1.0)])
def test_a_layout_holds_the_matrix(dtype: str, order: str, units: str, hidden: int, gates: int, density: float) -> None:
    matrix = pruned(hidden, gates, density)
    weights = recurrent_weights(matrix, gates, dtype=dtype, order=order, units=units)
    assert (weights.hidden, weights.gates, weights.dtype) == (hidden, gates, dtype)
    assert weights.dense().dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(weights.dense(), matrix.astype(numpy_dtype(dtype)))
    assert sorted(weights.units) == list(range(hidden))
    assert weights.row_start[0] == 0 and weights.row_start[-1] == weights.nonzeros == np.count_nonzero(matrix)
    assert {a.dtype.name for a in (weights.units, weights.row_start, weights.entries)} == {"int32"}
    assert weights.entries.shape == (weights.nonzeros, entry_words(hidden, dtype))
    assert all(a.flags.c_contiguous for a in (weights.units, weights.row_start, weights.entries))
    assert str(weights.nonzeros) in repr(weights)
    if units == "plain":
        assert (weights.units == np.arange(hidden)).all()
    if order == "columns":
        for start, stop in zip(weights.row_start, weights.row_start[1:], strict=False):
            assert (np.diff(weights.columns[start:stop]) > 0).all()


def test_every_kind_of_matrix_is_taken() -> None:
    torch = pytest.importorskip("torch")
    matrix = pruned(24, 3, 0.3)
    sparse, tensor = scipy.sparse.csr_array(matrix), torch.from_numpy(matrix)
    kinds: list[Any] = [matrix, matrix.astype(np.float64), sparse, sparse.tocoo(), scipy.sparse.csc_matrix(matrix)]
    kinds += [tensor, tensor.requires_grad_(), tensor.detach().to_sparse_csr(), tensor.detach().to_sparse()]
    kinds += [scipy.sparse.bsr_array(matrix, blocksize=(3, 2))]  # stores zeros
    for kind in kinds:
        weights = recurrent_weights(kind, 3)
        assert weights.dtype == "float32"
        np.testing.assert_array_equal(weights.dense(), matrix)
    half = recurrent_weights(tensor.detach().bfloat16(), 3)
    assert half.dtype == "bfloat16" and half.entries.shape[1] == 1
    same = recurrent_weights(matrix.astype(numpy_dtype("bfloat16")), 3)
    assert same.dtype == "bfloat16" and np.array_equal(same.entries, half.entries)
    blocks = tensor.detach().bfloat16().to_sparse_bsr((3, 2))
    np.testing.assert_array_equal(recurrent_weights(blocks, 3).dense(), half.dense())
    assert recurrent_weights(tensor.detach().half().to_sparse(), 3).dtype == "float16"
    assert recurrent_weights(torch.zeros(6, 6)).nonzeros == 0


def test_entries_that_stand_twice_are_added_and_stored_zeros_are_kept() -> None:
    twice = scipy.sparse.coo_array(([1.0, 2.0, 4.0, 0.0], ([0, 0, 1, 2], [1, 1, 0, 2])), shape=(3, 3))
    weights = recurrent_weights(twice, order="columns", units="plain")
    assert weights.nonzeros == 3 and weights.values.tolist() == [3.0, 4.0, 0.0]
    torch = pytest.importorskip("torch")
    again = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], [1.0, 2.0, 4.0], (3, 3))
    np.testing.assert_array_equal(recurrent_weights(again).dense(), weights.dense())
    assert np.isnan(recurrent_weights(np.array([[np.nan]])).values).all()


@given(st.sampled_from(FLOATS), st.sampled_from([1, 1000, 65536, 65537]), st.integers(0, 50))
def test_entries_unpack_to_what_was_packed(dtype: str, hidden: int, count: int) -> None:
    rng = np.random.default_rng(count)
    columns = rng.integers(0, hidden, count)
    columns[-1:] = hidden - 1
    values = rng.standard_normal(count)
    values[:3] = [np.nan, -np.inf, -0.0][:count]
    entries = pack_entries(columns, values, hidden, dtype)
    assert entries.shape == (count, 1 if dtype != "float32" and hidden <= 65536 else 2)
    found, bits = unpack_entries(entries, dtype)
    np.testing.assert_array_equal(found, columns)
    np.testing.assert_array_equal(bits, values.astype(numpy_dtype(dtype)).astype(np.float32))
    assert (np.signbit(bits) == np.signbit(values))[1:].all()


# ---- orders --------------------------------------------------------------------------------------


def structure(seed: int, rows: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of very different lengths, some empty and some full, with columns in ascending order."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, hidden, rows, endpoint=True)
    counts[rng.random(rows) < 0.2] = 0
    counts[rng.integers(rows)] = hidden
    columns = [np.sort(rng.choice(hidden, count, replace=False)) for count in counts]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), np.concatenate(columns)


@given(
    st.integers(0, 1000),
    st.integers(1, 12),
    st.integers(1, 90),
    st.sampled_from([1, 8, 16, 32]),
    st.sampled_from([1, 3, 4]),
)
def test_orders_permute_within_rows(seed: int, slots: int, hidden: int, banks: int, gates: int) -> None:
    row_start, columns = structure(seed, slots * gates, hidden)
    row = np.repeat(np.arange(slots * gates), np.diff(row_start))
    for chosen in (bank_order(row_start, columns, banks, gates), greedy_order(row_start, columns, banks)):
        assert sorted(chosen) == list(range(len(columns)))
        np.testing.assert_array_equal(row[chosen], row)


def by_algorithm_1(x: int, row: list[int], banks: int) -> list[int]:
    """Appendix A of Zhu, Pool et al. 2018, as it stands there, for row x."""
    color = [(x + bank) % banks for bank in range(banks)]
    found = [-1] * len(row)
    for index in row:
        index_t = index
        bank = index_t % banks
        while color[bank] >= len(row):
            index_t += 1
            bank = index_t % banks
        found[color[bank]] = index
        color[bank] += banks
    return found


@pytest.mark.parametrize(("banks", "gates"), [(8, 1), (32, 1), (8, 4)])
def test_the_greedy_order_is_algorithm_1(banks: int, gates: int) -> None:
    row_start, columns = structure(3, 20, 77)
    ours = columns[greedy_order(row_start, columns, banks, gates)]
    for row, (start, stop) in enumerate(zip(row_start, row_start[1:], strict=False)):
        assert ours[start:stop].tolist() == by_algorithm_1(row // gates, columns[start:stop].tolist(), banks)


def test_the_greedy_order_spreads_the_rows_of_a_warp() -> None:
    """A lane a row, as in the paper's kernel: rows whose columns have the same residues are read from other banks."""
    matrix = scipy.sparse.random_array((256, 256), density=0.2, rng=np.random.default_rng(1))
    found = {order: recurrent_weights(matrix, order=order) for order in ("columns", "greedy")}
    penalty = {order: weights.conflicts(1, 8).penalty for order, weights in found.items()}
    assert penalty["greedy"] < 0.6 * penalty["columns"]


def cycles_of(columns: list[int], banks: int) -> int:
    """Of one row that has all lanes."""
    windows = [columns[i : i + banks] for i in range(0, len(columns), banks)]
    return sum(max(np.bincount(np.array(window) % banks)) for window in windows)


@pytest.mark.parametrize("banks", [8, 16, 32])
def test_conflicts_are_counted(banks: int) -> None:
    row_start, columns = structure(5, 9, 70)
    chosen = columns[bank_order(row_start, columns, banks)]
    rows = [chosen[a:b].tolist() for a, b in zip(row_start, row_start[1:], strict=False)]
    found = conflicts(row_start, chosen, 1, 32, banks)
    assert found.cycles == sum(cycles_of(row, banks) for row in rows)
    assert found.gathers == sum(-(-len(row) // banks) for row in rows)
    assert found.gathers <= found.least <= found.cycles
    assert found.penalty == pytest.approx(found.cycles / found.gathers - 1)


def test_rows_of_one_warp_share_its_cycles() -> None:
    """Two slots of 16 lanes: columns of the same bank cost a cycle each, the same column costs nothing."""
    row_start = np.array([0, 1, 2], np.int32)
    for columns, cycles in (([3, 35], 2), ([3, 3], 1), ([3, 4], 1)):
        assert conflicts(row_start, np.array(columns), 1, 16, 32)[:2] == (1, cycles)
        assert conflicts(row_start, np.array(columns), 1, 16, 8)[:2] == (2, 2)  # 8 lanes at a time: others' cycles
        assert conflicts(row_start, np.array(columns), 2, 16, 32)[:2] == (2, 2)  # two gates of one slot
    assert conflicts(np.zeros(5, np.int32), np.zeros(0, np.int64), 1, 8, 32) == (0, 0, 0)


@pytest.mark.parametrize(("hidden", "density"), [(576, 0.1), (896, 0.02), (896, 0.3), (300, 1.0)])
@pytest.mark.parametrize("banks", [8, thorough(16), 32])
def test_the_order_by_banks_is_near_the_best(hidden: int, density: float, banks: int) -> None:
    matrix = scipy.sparse.random_array((hidden, hidden), density=density, rng=np.random.default_rng(1))
    found = {order: recurrent_weights(matrix, order=order, banks=banks).conflicts(32, banks) for order in ORDERS}
    assert found["banks"].cycles <= 1.06 * found["banks"].least
    assert found["banks"].cycles <= found["greedy"].cycles <= 1.001 * found["columns"].cycles
    if density == 0.1:
        assert found["banks"].penalty < 0.75 * found["greedy"].penalty < 0.75 * found["columns"].penalty


@pytest.mark.parametrize(
    ("gates", "lanes", "banks"), [thorough(1, 8, 32), thorough(1, 4, 8), (4, 16, 32), thorough(4, 8, 16)]
)
def test_rows_of_a_warp_are_ordered_with_regard_to_each_other(gates: int, lanes: int, banks: int) -> None:
    matrix = scipy.sparse.random_array((gates * 1000, 1000), density=0.2, rng=np.random.default_rng(1))
    weights = {order: recurrent_weights(matrix, gates, order=order, banks=banks) for order in ORDERS}
    penalty = {order: laid_out.conflicts(lanes, banks).penalty for order, laid_out in weights.items()}
    assert penalty["banks"] < 0.7 * penalty["columns"] and penalty["banks"] < 0.7 * penalty["greedy"]
    # With full rows there is no conflict at all, whatever the number of lanes.
    full = recurrent_weights(np.ones((gates * 64, 64)), gates, banks=banks)
    for some in (1, 2, 4, 8, 16, 32):
        assert full.conflicts(some, banks).penalty == 0


def test_weights_for_other_banks_are_the_same_weights() -> None:
    matrix = pruned(70, 3, 0.3)
    weights = recurrent_weights(matrix, 3, dtype="float16")
    for banks in (8, 16, 32):
        other = weights.for_banks(banks)
        np.testing.assert_array_equal(other.dense(), weights.dense())
        again = recurrent_weights(matrix, 3, dtype="float16", banks=banks)
        np.testing.assert_array_equal(other.entries, again.entries)
        assert weights.for_banks(banks) is other and other.for_banks(banks) is other
    assert weights.for_banks(8) is weights and weights.for_banks(32).banks == 32
    for order in ("greedy", "columns"):
        kept = recurrent_weights(matrix, 3, order=order)
        assert kept.for_banks(32) is kept


def test_banks_are_those_of_the_widest_gather() -> None:
    found = {(batch, dtype): banks_for(batch, dtype) for batch in (1, 2, 3, 4, 16) for dtype in ("float32", "float16")}
    assert [found[batch, "float32"] for batch in (1, 2, 3, 4, 16)] == [32, 16, 8, 8, 8]
    assert [found[batch, "float16"] for batch in (1, 2, 3, 4, 16)] == [32, 32, 16, 16, 8]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(1, 9))
def test_balanced_units_are_a_permutation_with_like_neighbours(work: list[int], neighbours: int) -> None:
    dealt = balanced_units(np.array(work), neighbours)
    assert sorted(dealt) == list(range(len(work)))
    ranked = sorted(work, reverse=True)
    runs = len(work) // neighbours
    expected = {tuple(ranked[i * neighbours : (i + 1) * neighbours]) for i in range(runs)}
    taken = [tuple(np.array(work)[dealt[i * neighbours : (i + 1) * neighbours]]) for i in range(runs)]
    assert set(taken) == expected


@pytest.mark.parametrize("blocks", [2, 7, 13, 66])
def test_blocks_of_balanced_units_have_equal_work(blocks: int) -> None:
    work = np.maximum(np.random.default_rng(0).normal(200, 80, 1056), 0)

    def spread(order: np.ndarray) -> float:
        shares = [part.sum() for part in np.array_split(work[order], blocks)]
        return float(max(shares) / np.mean(shares))

    dealt = balanced_units(work)
    assert spread(dealt) < 1.08
    # A warp takes as long as its longest unit: as units come, much longer than the mean.
    longest = [work[order].reshape(-1, 4).max(axis=1).sum() for order in (dealt, np.arange(len(work)))]
    assert longest[0] < 1.02 * work.sum() / 4 < 0.85 * longest[1]


def test_large_weights_take_seconds() -> None:
    rng = np.random.default_rng(0)
    hidden, count = 11520, 11520 * 115
    matrix = scipy.sparse.coo_array((np.ones(count), rng.integers(0, hidden, (2, count))), shape=(hidden, hidden))
    started = time.process_time()
    weights = recurrent_weights(matrix)
    assert time.process_time() - started < 10
    assert weights.conflicts().penalty < 0.5


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (np.zeros((3, 4)), {}, ValueError, r"matrix: expected shape \(hidden, hidden\), .* got \(3, 4\)"),
        (
            np.zeros((8, 4)),
            {"gates": 4},
            ValueError,
            r"expected shape \(4 \* hidden, hidden\), gates=4 rows .*\(8, 4\)",
        ),
        (np.zeros(4), {}, ValueError, r"matrix: expected shape .* got \(4,\)"),
        (np.zeros((0, 0)), {}, ValueError, "at least one unit"),
        (np.zeros((2, 2), np.int64), {}, ValueError, "matrix: expected a matrix of float32, .*float64, got int64"),
        (np.zeros((2, 2)), {"dtype": "int8"}, ValueError, "dtype: expected one of .* got 'int8'"),
        (
            np.zeros((2, 2)),
            {"order": "random"},
            ValueError,
            "order: expected one of banks, greedy, columns, got 'random'",
        ),
        (np.zeros((2, 2)), {"units": "sorted"}, ValueError, "units: expected one of balanced, plain, got 'sorted'"),
        (np.zeros((2, 2)), {"banks": 0}, ValueError, "banks: expected one of 1, 2, 4, 8, 16, 32, got 0"),
        (np.zeros((2, 2)), {"gates": True}, ValueError, "gates: expected an integer of at least 1, got True"),
        (Foreign(np.eye(3, dtype=">f4")), {}, TypeError, "matrix: its library does not hand it over by DLPack"),
        ([[1.0]], {}, TypeError, "matrix: expected a SciPy sparse matrix, .* got list"),
    ],
)
def test_bad_weights_are_named(matrix: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recurrent_weights(matrix, **options)


def test_indices_outside_of_the_matrix_are_named() -> None:
    broken = scipy.sparse.coo_array(np.eye(3))
    broken.col[1] = 7
    with pytest.raises(ValueError, match=r"matrix: column 7 of entry 1 is outside \[0, 3\)"):
        recurrent_weights(broken)


def test_the_public_names_are_these() -> None:
    assert tvm_sparse.recurrent_weights is recurrent_weights and tvm_sparse.RecurrentWeights is RecurrentWeights
