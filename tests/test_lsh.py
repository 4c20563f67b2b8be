"""Locality sensitive hashing: tables on the host, the public calls, and kernels on extents other than their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from cases import SM90, calls_run, own_on_host, run_emulated, settings_of, thorough
from hypothesis import given, settings
from hypothesis import strategies as st

import tvm_sparse
from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.emulation import run_on_cpu
from tvm_sparse.formats import bitmap, wta
from tvm_sparse.runtime import loading
from tvm_sparse.runtime.dispatch import Dispatcher

pytestmark = pytest.mark.drawn

# What the calls below ask for.
KEYS = (
    "wta_hash/batch=6,hidden=40,k=8,units=2,bands=60",
    "wta_hash/batch=6,hidden=40,k=8,units=2,bands=60,dtype=bfloat16",
    "lsh_lookup/lists=2,beam=3,vocab=700,bands=60,bits=6",
    "lsh_lookup/lists=2,beam=3,vocab=700,bands=60,table=cuckoo,bits=30",
    "lsh_lookup/lists=1,beam=1,vocab=40,bands=300,bits=6",
    "compaction/lists=2,vocab=700,capacity=50",
    "lsh_candidates/lists=2,beam=3,hidden=40,vocab=700,k=8,units=2,bands=60,capacity=50",
    "lsh_candidates/lists=2,beam=3,hidden=40,vocab=700,k=8,units=2,bands=60,table=cuckoo,capacity=50",
)


@pytest.fixture(scope="module", autouse=True)
def dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dispatcher]:
    """The kernels: fallbacks of `KEYS`, compiled together, in a cache of the module's own."""
    with calls_run(KEYS, tmp_path_factory.mktemp("kernels")) as own:
        yield own


@pytest.fixture(scope="module")
def embedding() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((700, 40), dtype=np.float32)


@pytest.fixture(scope="module")
def permutations() -> np.ndarray:
    return wta.permutations(40, 8, 2, 60, seed=3)


# ---- permutations and codes ----------------------------------------------------------------------


def test_permutations_are_columns_without_repetition() -> None:
    drawn = wta.permutations(20, 7, 3, 50, seed=1)
    assert drawn.shape == (50, 3, 7) and drawn.dtype == np.int16
    assert ((drawn >= 0) & (drawn < 20)).all()
    assert all(len(set(unit)) == 7 for unit in drawn.reshape(-1, 7))
    assert np.array_equal(drawn[:9], wta.permutations(20, 7, 3, 9, seed=1))
    assert not np.array_equal(drawn, wta.permutations(20, 7, 3, 50, seed=2))
    assert np.array_equal(np.sort(wta.permutations(5, 5, 1, 4), axis=2), np.tile(np.arange(5), (4, 1, 1)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((0, 2, 1, 1), "hidden: expected an integer of at least 1, got 0"),
        ((10, 1, 1, 1), "k: expected an integer of at least 2, got 1"),
        ((10, 2, 0, 1), "units: expected an integer of at least 1, got 0"),
        ((10, 2, 1, 2.0), "bands: expected an integer of at least 1, got 2.0"),
        ((40000, 2, 1, 1), "columns are int16, so at most 32767 of them, got 40000"),
        ((1000, 300, 1, 1), "k: expected at most 256, got 300"),
        ((10, 16, 1, 1), "k=16 different columns needs hidden >= k, got hidden=10"),
        ((100, 16, 8, 1), "units=8 places among k=16 has 8 * 4 = 32 bits; at most 30 fit"),
    ],
)
def test_impossible_hashes_are_refused_with_the_numbers(parameters: tuple, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        wta.permutations(*parameters)
    assert message in str(caught.value)
    if all(isinstance(value, int) and value > 0 for value in parameters):
        hidden, k, units, bands = parameters
        with pytest.raises(ProblemError):
            registry.make("wta_hash", {"batch": 1, "hidden": hidden, "k": k, "units": units, "bands": bands})


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 40), st.sampled_from(["random", "ties", "special"]))
def test_codes_are_those_of_the_equations(k: int, units: int, rows: int, structure: str) -> None:
    problem = registry.make("wta_hash", {"batch": max(rows, 1), "hidden": 11, "k": k, "units": units, "bands": 6})
    x, drawn = problem.generate(rows, structure)
    bits = (k - 1).bit_length()
    for row, codes in zip(x[:rows], wta.hash_rows(x[:rows], drawn), strict=True):
        for band, code in zip(drawn, codes, strict=True):
            expected = 0
            for unit in band:
                values = [-np.inf if np.isnan(row[column]) else float(row[column]) for column in unit]
                expected = expected << bits | values.index(max(values))
            assert code == expected


def test_codes_of_a_row_by_hand() -> None:
    """The row and the permutations of Table 5, whose columns count from 1, with K = 2 and u = 2."""
    row = np.array([[0.32, 0.48, -0.57, 0.63]], np.float32)
    drawn = np.array([[[0, 1], [0, 2]], [[2, 1], [3, 0]]], np.int16)
    assert wta.hash_rows(row, drawn).tolist() == [[0b10, 0b10]]


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", wta.KINDS)
@pytest.mark.parametrize("spread", ["even", "one bucket", "few codes"])
def test_tables_find_the_words_of_a_code(kind: str, spread: str) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers({"even": 64, "one bucket": 1, "few codes": 5}[spread], size=(301, 17), dtype=np.int32)
    built = wta.tables(codes, 301, kind, bits=6)
    wta.check_tables(built.words, built.table)
    asked = rng.integers(64, size=(2, 3, 17), dtype=np.int32)
    start, length = wta.find_buckets(asked, built.table, built.multipliers)
    for place in np.ndindex(asked.shape):
        found = built.words[place[2], start[place] : start[place] + length[place]]
        assert found.tolist() == np.flatnonzero(codes[:, place[2]] == asked[place]).tolist()


def test_long_codes_in_a_cuckoo_table() -> None:
    codes = np.random.default_rng(1).integers(1 << 30, size=(5000, 9), dtype=np.int32)
    built = wta.tables(codes, 5000, "cuckoo")
    start, length = wta.find_buckets(codes, built.table, built.multipliers)
    assert (length >= 1).all() and (built.multipliers & 1).all()
    band = np.broadcast_to(np.arange(9), codes.shape)
    inside = (built.words[band, start] <= np.arange(5000)[:, None]) & (length <= 5000)
    assert inside.all()


def test_a_cuckoo_build_that_fails_is_repeated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(2).integers(1 << 30, size=(300, 4), dtype=np.int32)
    monkeypatch.setattr(wta, "MOST_ROUNDS", 6)
    built = wta.tables(codes, 300, "cuckoo")
    assert built.rehashes > 0
    assert (wta.find_buckets(codes, built.table, built.multipliers)[1] >= 1).all()
    monkeypatch.setattr(wta, "MOST_ROUNDS", 1)
    monkeypatch.setattr(wta, "MOST_REHASHES", 2)
    with pytest.raises(ValueError, match="no hash functions found for 4 of 4 bands"):
        wta.tables(codes, 300, "cuckoo")


@pytest.mark.parametrize(
    ("codes", "vocab", "options", "message"),
    [
        (np.zeros((3, 2), np.int64), 3, {"bits": 4}, "codes: expected shape (3, bands) and dtype int32"),
        (np.zeros((3, 2), np.int32), 4, {"bits": 4}, "codes: expected shape (4, bands)"),
        (np.zeros((3, 2), np.int32), 3, {}, "bits: a direct table needs the bits of a code, from 1 to 16, got None"),
        (np.zeros((3, 2), np.int32), 3, {"bits": 17}, "from 1 to 16, got 17; longer codes need a cuckoo table"),
        (np.full((3, 2), 16, np.int32), 3, {"bits": 4}, "codes: expected codes in [0, 16), got 16"),
        (np.full((3, 2), -1, np.int32), 3, {"kind": "cuckoo"}, "codes: expected codes in [0, 1073741824), got -1"),
        (np.zeros((3, 2), np.int32), 3, {"kind": "tree"}, "kind: expected one of direct, cuckoo, got 'tree'"),
    ],
)
def test_bad_codes_are_named(codes: np.ndarray, vocab: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        wta.tables(codes, vocab, **options)
    assert message in str(caught.value)


def test_bad_tables_are_found() -> None:
    codes = np.random.default_rng(0).integers(8, size=(20, 3), dtype=np.int32)
    direct, cuckoo = (wta.tables(codes, 20, kind, bits=3) for kind in wta.KINDS)
    words = direct.words.copy()
    words[1, 4] = 20
    with pytest.raises(ValueError, match=r"words: expected ids in \[0, 20\), got 0 to 20"):
        wta.check_tables(words, direct.table)
    starts = direct.table.copy()
    starts[2, 3] = 21
    with pytest.raises(ValueError, match="table: bucket starts must begin at 0, never fall, and end at vocab=20"):
        wta.check_tables(direct.words, starts)
    entries = cuckoo.table.copy()
    entries[entries[..., 0] >= 0, 2] = 21
    with pytest.raises(ValueError, match="must lie within the vocab=20 words of a band"):
        wta.check_tables(cuckoo.words, entries)


@given(st.integers(1, 100), st.integers(0, 3), st.integers(0, 2**32))
def test_bitmaps_round_trip(size: int, rows: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((rows, size)) < 0.5
    packed = bitmap.pack_bits(mask)
    assert packed.dtype == np.int32 and packed.shape == (rows, bitmap.bitmap_words(size))
    assert np.array_equal(bitmap.unpack_bits(packed, size), mask)
    assert all(bool(packed[r, j // 32] >> j % 32 & 1) == mask[r, j] for r in range(rows) for j in range(size))


# ---- calls ---------------------------------------------------------------------------------------


def as_torch(array: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


@pytest.mark.parametrize("kind", wta.KINDS)
@pytest.mark.parametrize("convert", [lambda array: array, as_torch], ids=["numpy", "torch"])
def test_candidates_are_those_of_the_three_steps(
    kind: str, convert: Any, embedding: np.ndarray, permutations: np.ndarray
) -> None:
    built = wta.tables(wta.hash_rows(embedding, permutations), 700, kind, bits=6)
    rng = np.random.default_rng(9)
    hidden = embedding[rng.integers(700, size=6)] + 0.3 * rng.standard_normal((6, 40), dtype=np.float32)
    always = bitmap.pack_bits(np.arange(700) < 7)
    tables = [convert(array) for array in (built.words, built.table, always)]
    options = {"multipliers": convert(built.multipliers)}
    for threshold in (1, 12, 61):
        for _ in range(2):  # the second call goes another way
            codes = tvm_sparse.wta_hash(convert(hidden), convert(permutations))
            rows = codes.reshape(2, 3, -1)
            chosen = tvm_sparse.lsh_lookup(rows, *tables, threshold, **options)
            steps = tvm_sparse.compaction(chosen, 700, np.int64(50))
            rows = convert(hidden.reshape(2, 3, -1))
            found = tvm_sparse.lsh_candidates(rows, convert(permutations), *tables, threshold, 50, **options)
            assert type(found[0]) is type(convert(hidden))
        expected = np.asarray(codes)[:, None] == wta.hash_rows(embedding, permutations)[None]
        mask = (expected.sum(axis=2) >= threshold).reshape(2, 3, -1).any(axis=1) | (np.arange(700) < 7)
        assert np.array_equal(bitmap.unpack_bits(np.asarray(chosen), 700), mask)
        for candidates, counts in (steps, found):
            assert np.asarray(counts).tolist() == mask.sum(axis=1).tolist()
            for row, words in zip(np.asarray(candidates), mask, strict=True):
                listed = np.flatnonzero(words)[:50]
                assert row.tolist() == [*listed, *[-1] * (50 - len(listed))]
    assert mask.sum() == 14  # nothing is hit more often than there are bands


def test_more_hits_than_a_byte_counts() -> None:
    codes = np.full((40, 300), 5, np.int32)
    codes[20:, :44] = 6
    built = wta.tables(codes, 40, "direct", bits=6)
    none = np.zeros(2, np.int32)
    for threshold, count in ((1, 40), (256, 40), (257, 20), (300, 20), (301, 0)):
        chosen = tvm_sparse.lsh_lookup(codes[:1, None], built.words, built.table, none, threshold)
        assert bitmap.unpack_bits(chosen, 40).sum() == count, threshold


def test_outputs_may_be_given_and_dtypes_differ(embedding: np.ndarray, permutations: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.from_numpy(embedding[:6]).to(torch.bfloat16)
    out = torch.empty((6, 60), dtype=torch.int32)
    assert tvm_sparse.wta_hash(rows, torch.from_numpy(permutations), out=out) is out
    rounded = embedding[:6].astype(ml_dtypes.bfloat16)
    assert np.array_equal(out.numpy(), wta.hash_rows(rounded, permutations))
    empty = tvm_sparse.wta_hash(np.empty((0, 40), np.float32), permutations)
    assert empty.shape == (0, 60) and empty.dtype == np.int32
    given = np.empty((2, 50), np.int32), np.empty(2, np.int32)
    found = tvm_sparse.compaction(np.zeros((2, 22), np.int32), 700, 50, out=given)
    assert found[0] is given[0] and (given[0] == -1).all() and (given[1] == 0).all()
    candidates, counts = tvm_sparse.compaction(np.empty((0, 22), np.int32), 700, 50)
    assert candidates.shape == (0, 50) and counts.shape == (0,)


def test_bad_arguments_are_named(embedding: np.ndarray, permutations: np.ndarray) -> None:
    built = wta.tables(wta.hash_rows(embedding, permutations), 700, "direct", bits=6)
    hashed = wta.tables(wta.hash_rows(embedding, permutations), 700, "cuckoo")
    always, rows = np.zeros(22, np.int32), embedding[:6].reshape(2, 3, 40)
    codes = np.zeros((2, 3, 60), np.int32)

    def refused(message: str, function: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            function(*arguments, **options)
        assert message in str(caught.value)

    outside = permutations.copy()
    outside[4, 1, 2] = 40
    hash_, look_up, compact = tvm_sparse.wta_hash, tvm_sparse.lsh_lookup, tvm_sparse.compaction
    refused("hidden: expected 2 dimensions", hash_, rows, permutations)
    refused("permutations: expected shape (n, n, n) and dtype int16", hash_, embedding, permutations.astype(np.int32))
    refused("permutations[4, 1, 2]=40 is outside [0, 40)", hash_, embedding, outside)
    refused("out: expected shape (6, 60)", hash_, embedding[:6], permutations, out=np.empty((6, 61), np.int32))
    tables = built.words, built.table, always
    refused("codes: expected shape (lists, beam, bands)", look_up, codes[0], *tables, 3)
    refused("threshold: expected an integer of at least 1 and below 2^31, got 0", look_up, codes, *tables, 0)
    refused("threshold: expected an integer of at least 1 and below 2^31, got 2.5", look_up, codes, *tables, 2.5)
    refused("words: expected shape (60, n)", look_up, codes, built.words[:5], built.table, always, 3)
    refused("table: expected 2^bits + 1 bucket starts", look_up, codes, built.words, built.table[:, :-1], always, 3)
    refused("table: expected 2 dimensions", look_up, codes, built.words, built.table[0], always, 3)
    refused("always: expected shape (22,)", look_up, codes, built.words, built.table, always[:5], 3)
    refused("multipliers: expected those of the cuckoo table", look_up, codes, hashed.words, hashed.table, always, 3)
    refused("multipliers: expected none", look_up, codes, *tables, 3, multipliers=hashed.multipliers)
    bad = built.words + 700
    refused("words: expected ids in [0, 700)", look_up, codes, bad, built.table, always, 3, validate=True)
    for code in (-1, built.table.shape[1] - 1, 2**31 - 1):
        outside = codes.copy()
        outside[0, 0, 1] = code
        message = f"codes: codes[0, 0, 1]={code} is outside [0, {built.table.shape[1] - 1})"
        refused(message, look_up, outside, built.words, built.table, always, 3, validate=True)
    refused("chosen: expected shape (lists, 22) and dtype int32 for vocab=700", compact, codes[0], 700, 50)
    for capacity in (0, 2**31):
        message = f"capacity: expected an integer of at least 1 and below 2^31, got {capacity}"
        refused(message, compact, np.zeros((1, 22), np.int32), 700, capacity)
    refused("out: expected 2 arrays", compact, np.zeros((1, 22), np.int32), 700, 50, out=always)
    candidates = tvm_sparse.lsh_candidates
    refused("hidden: expected shape (lists, beam, hidden)", candidates, embedding, permutations, *tables, 3, 50)
    refused("capacity: expected an integer", candidates, rows, permutations, *tables, 3, -1)
    step, ids = tvm_sparse.lsh_topk, np.arange(9, dtype=np.int32)
    given = (embedding, permutations, *tables[:2], bitmap.pack_bits(np.arange(700) < 9))
    refused("hidden: expected shape (lists, beam, hidden)", step, rows[0], *given, ids, 3, 5)
    refused("ids: expected at least one word, got none", step, rows, *given, ids[:0], 3, 5)
    refused("ids: ids[0]=-1 is outside [0, 700)", step, rows, *given, ids - 1, 3, 5)
    refused("ids: expected each word of `always` once and no other", step, rows, *given, ids[1:], 3, 5)
    refused("n: expected 1 <= n <= vocab (700), got 701", step, rows, *given, ids, 3, 701)
    fewer = embedding[1:], *given[1:]
    refused("words: expected those of the embedding's 699 words, got 700", step, rows, *fewer, ids, 3, 5)
    coarse = wta.tables(codes[0] % 2, 3, "direct", bits=1)
    refused(
        "table: expected 2^6 + 1 bucket starts a band, for codes of units=2 places among k=8, got 2^1 + 1",
        candidates, rows, permutations, coarse.words, coarse.table, always[:1], 3, 50,
    )  # fmt: skip


# ---- kernels at other extents --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "decisions"),
    [
        mark(
            "row_clusters",
            "lsh_candidates/lists=1,beam=2,hidden=48,vocab=700,k=8,units=2,bands=12,capacity=90",
            {"threads": 128, "cluster": cluster, "exchange": exchange, "finishers": finishers, "loads": 4},
        )
        for mark, cluster, exchange, finishers in (
            (pytest.param, 1, 0, 1),
            (pytest.param, 4, 0, 4),
            (thorough, 4, 1, 4),
            (pytest.param, 4, 1, 1),
            (thorough, 2, 0, 1),
        )
    ]
    + [
        (
            "row_clusters",
            "lsh_candidates/lists=1,beam=2,hidden=50,vocab=52000,k=7,units=3,bands=12,capacity=90,dtype=float16",
            {"threads": 512, "cluster": 1, "exchange": 0, "finishers": 1, "slices": 2, "bucket_lanes": 4, "loads": 1},
        ),
        thorough(
            "shared_counts",
            "lsh_lookup/lists=1,beam=2,vocab=104000,bands=10,bits=10",
            {"cluster": 2, "finishers": 2, "slices": 2},
        ),
        (
            "shared_counts",
            "lsh_lookup/lists=1,beam=2,vocab=900,bands=10,table=cuckoo,bits=30",
            {"threads": 128, "cluster": 2, "finishers": 2, "exchange": 1, "bucket_lanes": 32},
        ),
        ("staged_hash", "wta_hash/batch=2,hidden=48,k=6,units=3,bands=5", {"threads": 64}),
        ("bitmap_scan", "compaction/lists=1,vocab=4000,capacity=7", {"threads": 128, "slices": 2}),
        ("plain_steps", "lsh_candidates/lists=1,beam=2,hidden=48,vocab=700,k=8,units=2,bands=12,capacity=90", {}),
        thorough(
            "fused_step",
            "lsh_topk/lists=1,beam=9,hidden=264,vocab=700,frequent=40,n=5,k=8,units=2,bands=12,dtype=float16",
            {"threads": 128, "hash_threads": 256, "cluster": 1, "loads": 2, "depth": 8, "staged": 0},
        ),
        (
            "fused_step",
            "lsh_topk/lists=1,beam=9,hidden=264,vocab=700,frequent=40,n=5,k=8,units=2,bands=12,dtype=float16",
            {"threads": 128, "hash_threads": 256, "cluster": 4, "slices": 2, "loads": 2, "words": 16, "staged": 1},
        ),
        thorough(
            "fused_step",
            "lsh_topk/lists=1,beam=35,hidden=72,vocab=700,frequent=300,n=5,k=8,units=2,bands=12,dtype=bfloat16",
            {"row_groups": 2, "threads": 128, "hash_threads": 256, "cluster": 3, "loads": 2, "words": 16},
        ),
        thorough(
            "fused_step",
            "lsh_topk/lists=1,beam=35,hidden=72,vocab=700,frequent=300,n=5,k=8,units=2,bands=12,dtype=bfloat16",
            {"row_groups": 2, "threads": 128, "hash_threads": 256, "cluster": 1, "late_words": 4},
        ),
        thorough(
            "fused_step",
            "lsh_topk/lists=1,beam=4,hidden=36,vocab=900,frequent=1,n=40,k=16,units=5,bands=12,table=cuckoo",
            {"threads": 512, "hash_threads": 256, "cluster": 1, "slices": 1, "overlap": 0, "beside": 0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else None,
)
def test_one_kernel_serves_every_beam_number_of_bands_and_capacity(
    name: str, key: str, decisions: dict[str, int]
) -> None:
    """Also more bands than it has room for at a time, and fewer than there are thread blocks; workspaces stay clean."""
    problem, template = parse(key), spaces.find(name)
    # Kernels that do not overlap are those of GPUs before Hopper.
    where = SM90 if decisions.get("overlap", 1) else machine.resolve("sm_80")
    point = {**template.default(problem, where), **decisions}
    assert template.point(problem, where, point) is None
    program = template.build(problem, point)
    others = {"beam": (1, 3), "bands": (40, 3), "capacity": (700, 1), "frequent": (700, 1)}
    for seed in range(2):
        axes = {axis: others[axis][seed] for axis in problem.data_axes}
        here = dataclasses.replace(problem, **axes).with_batch(2 + seed)
        held = loading.allocated(map(dataclasses.asdict, program.workspaces), here, loading.on_host)
        for again, structure in enumerate(here.structures[: 2 - seed]):
            inputs, outputs = here.generate(seed, structure, settings_of(here, again)), here.empty_outputs()
            arguments = [*inputs, *outputs, *held]
            run_on_cpu(program.module, target_of(where), arguments, pipeline=program.pipeline, seed=seed)
            here.check(inputs, here.reference(inputs), outputs)


@pytest.mark.parametrize(
    ("bands", "more"),
    [
        pytest.param(2, {"cluster": 1, "slices": 1}, id="blocks"),
        thorough(2, {"cluster": 2, "slices": 4}, id="clusters"),
        pytest.param(60, {"cluster": 5, "slices": 1}, id="more hits than there is room for"),
    ],
)
def test_a_step_of_a_head_leaves_no_word_out(bands: int, more: dict[str, int]) -> None:
    """More words with hits enough than a thread block multiplies at a time; whoever finds them first, results are the
    same to the last bit."""
    problem = parse(f"lsh_topk/lists=1,beam=2,hidden=8,vocab=1600,frequent=3,n=2,k=2,units=1,bands={bands}")
    template = spaces.find("fused_step")
    point = {**template.default(problem, SM90), "threads": 128, "hash_threads": 256, **more}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    held = loading.allocated(map(dataclasses.asdict, program.workspaces), problem, loading.on_host)
    for structure, threshold, count in (("every", bands, 1600), ("random", bands + 1, 3)):
        inputs = problem.generate(0, structure, {"threshold": threshold, "scale": 1.0, "log": 0})
        found = []
        for seed in range(2):
            outputs = problem.empty_outputs()
            arguments = [*inputs, *outputs, *held]
            run_on_cpu(program.module, target_of(SM90), arguments, pipeline=program.pipeline, seed=seed)
            problem.check(inputs, problem.reference(inputs), outputs)
            assert outputs[3] == [count]
            found.append([output.tobytes() for output in outputs])
        assert found[0] == found[1]


def test_a_step_of_a_head_adds_infinities_of_float32_column_by_column() -> None:
    """Words are split as if they were finite: the lower part of an infinity is NaN."""
    problem = parse("lsh_topk/lists=1,beam=3,hidden=8,vocab=80,frequent=30,n=3,k=4,units=2,bands=6")
    template = spaces.find("fused_step")
    point = {**template.default(problem, SM90), "threads": 128, "hash_threads": 256, "cluster": 1}
    program = template.build(problem, point)
    held = loading.allocated(map(dataclasses.asdict, program.workspaces), problem, loading.on_host)
    inputs, outputs = problem.generate(0, "random", {"threshold": 7, "scale": 1.0, "log": 0}), problem.empty_outputs()
    hidden, embedding, ids = inputs[0], inputs[1], inputs[7]
    hidden[0, :, 0], embedding[ids[5], 0] = 1.0, -np.inf  # a word that is masked by its embedding
    run_on_cpu(program.module, target_of(SM90), [*inputs, *outputs, *held], pipeline=program.pipeline)
    assert np.isfinite(outputs[0]).all() and ids[5] not in outputs[1]
    problem.check(inputs, problem.reference(inputs), outputs)


def test_a_step_of_a_head_in_one_program_is_taken_where_it_fits() -> None:
    fits = parse("lsh_topk/lists=1,beam=12,hidden=1000,vocab=40000,frequent=5500,n=12,dtype=float16")
    for more, template in (
        ({}, "fused_step"), ({"hidden": 1001}, "listed_dots"), ({"n": 133}, "listed_dots"),
        ({"beam": 300}, "listed_dots"),
    ):  # fmt: skip
        assert spaces.fallback(dataclasses.replace(fits, **more), SM90).template == template
    refused = spaces.applicable(dataclasses.replace(fits, hidden=1001), SM90)[1]["fused_step"]
    assert "rows of 2002 bytes are no whole vectors of 16" in refused


def test_clusters_of_a_list_meet_whatever_the_beam() -> None:
    """Of other batches and beams; all words in each bucket, and a threshold that none reaches."""
    problem = parse("lsh_candidates/lists=1,beam=33,hidden=24,vocab=331,k=4,units=2,bands=21,capacity=200")
    template = spaces.find("row_clusters")
    point = {**template.default(problem, SM90), "threads": 128, "cluster": 2, "finishers": 2}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    for beam, structure, threshold in (
        (1, "random", 3), (12, "special", 2), (5, "every", 22), (16, "every", 21), (17, "skewed", 4),
        (3, "nothing", 1), (3, "skewed", 70_000),
    ):  # fmt: skip
        here = dataclasses.replace(problem, beam=beam)
        inputs, outputs = here.generate(beam, structure, {"threshold": threshold}), here.empty_outputs()
        own = loading.allocated(map(dataclasses.asdict, program.workspaces), here, loading.on_host)
        arguments = [*inputs, *outputs, *own]
        run_on_cpu(program.module, target_of(SM90), arguments, pipeline=program.pipeline, seed=beam)
        here.check(inputs, here.reference(inputs), outputs)


def test_thread_blocks_are_kept_apart_where_there_is_shared_memory_for_it() -> None:
    """A machine with less has the same kernels without."""
    wide = parse("lsh_topk/lists=1,beam=24,hidden=1000,vocab=40000,frequent=5500,n=12,dtype=float16")
    template = spaces.find("fused_step")
    assert template.default(wide, SM90)["apart"] == 1 and template.space(wide, SM90)["apart"] == (0, 1)
    assert template.default(parse(wide.key.replace("beam=24", "beam=12")), SM90)["apart"] == 0
    small = machine.Machine("cuda", "sm_120", "sm_120", cores=170)
    point = template.default(wide, small)
    assert point["apart"] == 0 and template.space(wide, small)["apart"] == (0,)
    assert "of the last kernel exceed shared memory" in (template.allowed(wide, small, {**point, "apart": 1}) or "")


def test_a_vocabulary_beyond_shared_memory_is_sliced_or_goes_another_way() -> None:
    small = machine.Machine("cuda", "sm_86", "sm_86", cores=84)
    large = parse("lsh_lookup/lists=1,beam=1,vocab=1000000,bands=10")
    point = spaces.find("shared_counts").default(large, small)
    assert point["cluster"] == 1 and point["slices"] * small.block_shared_bytes >= 2 * large.vocab
    deep = parse("lsh_candidates/lists=1,beam=1,hidden=32000,vocab=1000,bands=10")
    assert "exceed shared memory" in spaces.applicable(deep, small)[1]["row_clusters"]
    assert spaces.fallback(deep, small).template == "plain_steps"
    old = machine.Machine("cuda", "sm_75", "sm_75", cores=40)
    for key, template in (
        ("lsh_candidates/lists=1,beam=1,hidden=64,vocab=1000,bands=10", "plain_steps"),
        ("compaction/lists=1,vocab=100,capacity=10", "copy_if"),
    ):
        assert spaces.fallback(parse(key), old).template == template
    wide = parse("compaction/lists=1,vocab=4000000,capacity=10")
    assert spaces.fallback(wide, SM90).template == "copy_if"


def test_definitions_compile_for_the_longest_codes() -> None:
    problem = parse("lsh_candidates/lists=1,beam=1,hidden=9,vocab=33,k=9,units=7,bands=2,table=cuckoo,capacity=3")
    assert problem.bits == 28
    tvm.compile(tvm.IRModule({"main": problem.definition()}), target="llvm")
    with pytest.raises(ProblemError, match="codes for a direct table must have 1 to 16 bits, got 28"):
        dataclasses.replace(problem, table="direct")


@pytest.mark.parametrize(("structure", "better"), [("constant", False), ("ties", False), ("constant", True)])
def test_more_words_survive_than_there_is_room_for(structure: str, better: bool) -> None:
    """Equals of the bound are all of 2,500 frequent words: more than the list of survivors holds.

    `better`: the few other words that reach the threshold have larger scores, so that all of them are results.
    """
    axes = "lists=1,beam=2,hidden=16,vocab=3000,frequent=2500,n=20,k=8,units=2,bands=10,table=direct,dtype=float16"
    problem, template = parse(f"lsh_topk/{axes}"), spaces.find("fused_step")
    program = template.build(problem, template.default(problem, SM90))
    seed = int.from_bytes(os.urandom(4), "little")
    inputs = problem.generate(seed, structure)
    if better:
        named = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
        others = np.setdiff1d(np.arange(problem.vocab), named["ids"])
        state = named["hidden"][0, 0].astype(np.float32)
        named["embedding"][others] += (state / np.square(state).sum()).astype(np.float16)
    run_emulated(program, problem, inputs, own_on_host(program, problem), seed % 1000)
