"""`tiles` of the output layer with rings of bulk copies, tiles brought ahead and short lists searched in one go: points
that no default of a small problem is."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cases import SM90, check_emulated, own_on_host, run_emulated, settings_of, thorough, trapping
from tvm.sym import Analyzer

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.problem import Mismatch
from tvm_sparse.core.registry import parse
from tvm_sparse.emulation import EmulationError
from tvm_sparse.schedules.output_layer.tiles import best
from tvm_sparse.schedules.output_layer.tiles.product import stays_cached
from tvm_sparse.schedules.output_layer.tiles.space import Extents
from tvm_sparse.schedules.vocabulary import ADDED, renamed

HALVES = "head_topk/batch=5,vocab=301,hidden=136,k=7,dtype=bfloat16,bias=1,ids=2"
WIDER = "head_topk/batch=13,vocab=301,hidden=392,k=7,dtype=float16"
ROWS = "head_topk/batch=19,vocab=173,hidden=136,k=5,dtype=bfloat16,bias=1"
FLOATS = "head_topk/batch=3,vocab=97,hidden=136,k=7,dtype=float32"
LISTS = "candidate_topk/lists=4,beam=1,vocab=97,hidden=200,m=70,k=5,dtype=float16,bias=1"
BLOCKS = "candidate_topk/lists=2,beam=3,vocab=240,hidden=64,m=9,k=12,dtype=bfloat16,block=8"
PRODUCT = "candidate_logits/lists=2,beam=9,vocab=301,hidden=136,m=70,dtype=float16,bias=1"
ALONE = {"reduce_warps": 1, "staged": 1}
SHARED = {"tiles": 1, "staged": 0}
WHOLE = {**SHARED, "depth": 0}
BOTH = {"tiles": 1, "staged": 2, "dynamic": 0}
STAYS = {"evict_first": 1, "cached": 16}
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    (
        HALVES,
        {**ALONE, "tiles": 6, "tile_n": 32, "depth": 2, "stages": 2, "blocks": 3, "prefetch": 1, "evict_first": 1},
    ),
    (HALVES, {**SHARED, "reduce_warps": 1, "depth": 1, "stages": 0, "blocks": 5, "prefetch": 1}),
    # The last of four warps has one vector of a row, so that its second stage is empty.
    (WIDER, {**SHARED, "tile_m": 16, "reduce_warps": 4, "staged": 1, "depth": 1, "stages": 3, "blocks": 3}),
    (FLOATS, {**WHOLE, "reduce_warps": 2, "staged": 1, "stages": 3, "blocks": 2}),
    # Tiles that are taken as thread blocks come to them; of one strip of rows, and of two, with thread blocks that get
    # none.
    (HALVES, {**WHOLE, "reduce_warps": 2, "stages": 3, "blocks": 5, "dynamic": 50, "evict_first": 1}),
    (WIDER, {**WHOLE, "tile_m": 8, "reduce_warps": 4, "tile_n": 32, "stages": 2, "blocks": 12, "dynamic": 25}),
    # Words of a ring are the other operand of 16 rows and more; warps of rows beyond the last one finish no scores.
    (WIDER, {**WHOLE, "tile_m": 16, "tile_n": 16, "reduce_warps": 4, "stages": 2, "blocks": 7, "dynamic": 25}),
    # Tiles of eight words, and words that do not fill the last tile.
    (WIDER, {**WHOLE, "tile_m": 16, "tile_n": 8, "reduce_warps": 4, "staged": 1, "stages": 2, "blocks": 7}),
    # Hidden states in registers and in shared memory; the last warp has a part of a row that ends in the former.
    (WIDER, {**BOTH, "tile_m": 16, "tile_n": 8, "reduce_warps": 4, "depth": 1, "stages": 3, "blocks": 5}),
    # For no more than eight rows: those of a fragment of words, and in registers and in shared memory.
    (HALVES, {**WHOLE, "tile_m": 16, "tile_n": 8, "reduce_warps": 2, "stages": 3, "blocks": 5, "dynamic": 25}),
    (HALVES, {**BOTH, "tile_m": 8, "tile_n": 16, "reduce_warps": 2, "depth": 2, "stages": 2, "blocks": 4}),
    # A part of the words stays in the L2 cache.
    (HALVES, {**WHOLE, **STAYS, "reduce_warps": 2, "stages": 3, "blocks": 5, "dynamic": 50, "prefetch": 1}),
    (FLOATS, {**SHARED, "reduce_warps": 2, "staged": 1, "depth": 4, "stages": 2, "blocks": 3, "direct": 1}),
    (LISTS, {**ALONE, "tiles": 4, "depth": 2, "stages": 3, "direct": 1}),
    (BLOCKS, {"direct": 1, "threads": 256}),
    (PRODUCT, {**ALONE, "tiles": 1, "tile_m": 16, "tile_n": 32, "depth": 4, "stages": 2}),
)
# Other ways through the same phases.
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    (HALVES, {**SHARED, "reduce_warps": 2, "depth": 1, "stages": 3, "blocks": 5, "prefetch": 1}),
    (WIDER, {**SHARED, "tile_m": 16, "reduce_warps": 4, "tile_n": 32, "depth": 2, "stages": 2, "blocks": 3}),
    # Whole rows, of which the last of four warps has one vector.
    (WIDER, {**WHOLE, "tile_m": 16, "reduce_warps": 4, "tile_n": 32, "stages": 2, "blocks": 3}),
    (HALVES, {**WHOLE, "reduce_warps": 2, "stages": 6, "blocks": 5, "prefetch": 1, "evict_first": 1}),
    (HALVES, {**WHOLE, "reduce_warps": 2, "stages": 2, "blocks": 5, "threads": 1024, "dynamic": 12}),
    (WIDER, {**WHOLE, "tile_m": 16, "tile_n": 8, "reduce_warps": 4, "stages": 4, "blocks": 5, "dynamic": 25}),
    (ROWS, {**WHOLE, "tile_m": 32, "tile_n": 16, "reduce_warps": 2, "stages": 3, "blocks": 3, "dynamic": 25}),
    (ROWS, {**WHOLE, "tile_m": 32, "tile_n": 8, "reduce_warps": 2, "stages": 3, "blocks": 4, "dynamic": 12}),
    # The last warp's part of a row ends in shared memory; more than one fragment of hidden states.
    (WIDER, {**BOTH, "tile_m": 16, "tile_n": 16, "reduce_warps": 2, "depth": 2, "stages": 2, "blocks": 4}),
    (ROWS, {**BOTH, "tile_m": 32, "tile_n": 8, "reduce_warps": 2, "depth": 1, "stages": 2, "blocks": 3}),
    (HALVES, {**ALONE, **STAYS, "tiles": 6, "tile_n": 32, "depth": 2, "stages": 2, "blocks": 3}),
    (HALVES, {**WHOLE, **STAYS, "reduce_warps": 2, "stages": 2, "blocks": 5, "prefetch": 1}),
    (FLOATS, {**SHARED, "reduce_warps": 2, "staged": 1, "stages": 2, "depth": 1, "blocks": 3, "threads": 512}),
    (LISTS, {**ALONE, "tiles": 12, "depth": 4, "stages": 2}),
)


@pytest.mark.parametrize(
    ("key", "decisions", "first"),
    [
        *((*point, number % 2) for number, point in enumerate(POINTS)),
        *(thorough(*point, 1 - number % 2) for number, point in enumerate(POINTS)),
        *(thorough(*other, first) for other in OTHERS for first in (0, 1)),
    ],
)
def test_points_equal_the_reference(key: str, decisions: dict[str, int], first: int) -> None:
    """On every second structure, from the `first` on, the others in a thorough run only. Whatever is read before the
    producer kernel is done is garbage."""
    problem = parse(key)
    template = next(t for t in spaces.templates() if t.operator == problem.operator and "tiles" in t.name)
    point = template.default(problem, SM90) | decisions
    assert template.allowed(problem, SM90, point) is None
    check_emulated(problem, template, point, first=first, step=2)


SEARCHED = {**SHARED, "reduce_warps": 2, "tile_n": 16, "depth": 1, "stages": 0, "blocks": 5, "threads": 256}


@pytest.mark.parametrize(
    ("k", "kind", "dynamic", "phase", "reached"),
    [
        # Few words reach the tiles' bound: they are ranked in one step, and of k beyond 24 in several.
        (12, "random", 25, "rank", False),
        thorough(5, "ascending", 0, "rank", False),
        thorough(25, "random", 25, "select", False),
        (70, "random", 0, "select", False),
        # More than 64 do, but no more than 256; or more than these; or words of more tiles than are looked through.
        (5, 10, 0, "select", False),
        thorough(5, 10, 25, "rank", True),
        thorough(5, 20, 0, "choose_tiles", False),
        (5, 20, 25, "select", True),
        (24, "equal", 25, "choose_tiles", True),
        thorough(25, "equal", 0, "choose_tiles", True),
    ],
)
def test_how_many_words_reach_the_bound(
    k: int, kind: str | int, dynamic: int, phase: str, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, template = parse(f"head_topk/batch=3,vocab=2405,hidden=136,k={k},dtype=float16"), spaces.find("head_tiles")
    decisions = {**SEARCHED, **({"dynamic": 25, "depth": 0, "stages": 2} if dynamic else {})}
    point = template.default(problem, SM90) | decisions
    assert template.allowed(problem, SM90, point) is None and Extents.of(problem, point).by_bits
    hidden, words, *others = problem.generate(k)
    # A row's scores are a column of the embedding.
    hidden[:] = np.eye(len(hidden), hidden.shape[1])
    scores = np.random.default_rng(k).standard_normal((len(hidden), len(words)))
    if kind == "ascending":
        scores.sort()
    elif isinstance(kind, int):  # the best words, all equal, fill so many tiles
        scores[:, 16 * 7 : 16 * (7 + kind)] = 6
    elif kind == "equal":
        scores[:] = -2
    words[:, : len(hidden)] = scores.T

    def run() -> None:
        program = template.build(problem, point)
        run_emulated(program, problem, [hidden, words, *others], own_on_host(program, problem), k)

    if reached:
        run()
    monkeypatch.setattr(best, phase, trapping)
    with pytest.raises(EmulationError, match="trap") if reached else contextlib.nullcontext():
        run()


@pytest.mark.parametrize("dynamic", [0, 25])
def test_as_much_stays_cached_as_was_asked_for(dynamic: int) -> None:
    problem = parse("head_topk/batch=12,vocab=40000,hidden=1000,k=12,dtype=float16")
    template, known = spaces.find("head_tiles"), Analyzer()
    for cached in (16, 24, 32):
        e = Extents.of(problem, {**template.default(problem, SM90), "cached": cached, "dynamic": dynamic})
        tiles = [tile for tile in range(e.list_tiles) if known.can_prove(stays_cached(e, tile))]
        assert abs(len(tiles) * e.tile_bytes - cached * 2**20) <= e.stride * e.tile_bytes / 2
        # None of the first round, which memory brings ahead, and none that may be another block's in the next call.
        assert min(tiles) >= e.stride
        assert max(tiles) < e.list_tiles * (100 - dynamic) // 100


@pytest.mark.parametrize("spread", [0, 1, 1000, 1e36])
def test_who_takes_which_tile_changes_no_bit(spread: float) -> None:
    """Nor do scores that lie so far apart that a sum of exponentials changes its unit; 0: those of random states."""
    problem = parse("head_topk/batch=3,vocab=301,hidden=136,k=7,dtype=bfloat16,ids=2")
    template = spaces.find("head_tiles")
    decisions = {**WHOLE, "reduce_warps": 2, "stages": 2, "blocks": 4, "dynamic": 50}
    program = template.build(problem, template.default(problem, SM90) | decisions)
    own = own_on_host(program, problem)
    (hidden, words, *others), found = problem.generate(0, "random", settings_of(problem, 0)), set()
    if spread:
        # A row's scores are a column of the embedding: rising, falling and in no order.
        hidden[:] = np.eye(*hidden.shape)
        rising = np.linspace(-spread, spread, len(words))
        words[:, :3] = np.stack([rising, rising[::-1], np.random.default_rng(0).permutation(rising)], 1)
    for seed in range(3):
        outputs = run_emulated(program, problem, [hidden, words, *others], own, seed)
        found.add(b"".join(output.tobytes() for output in outputs))
    assert len(found) == 1


@pytest.mark.parametrize(
    "decisions", [{**SHARED, "reduce_warps": 2, "depth": 1}, thorough({**ALONE, "tiles": 4, "depth": 3})]
)
def test_words_are_loaded_ahead_only_if_they_are_constant(decisions: dict[str, int]) -> None:
    """Where they go to registers. Of a vocabulary that is said to be constant, and is not, what was there before is
    multiplied."""
    problem, template = parse(HALVES), spaces.find("head_tiles")
    point = template.default(problem, SM90) | decisions | {"stages": 0, "overlap": 1, "blocks": 5}
    assert template.allowed(problem, SM90, point) is None
    check_emulated(problem, template, point, constant=("embedding",))
    with pytest.raises(Mismatch):
        check_emulated(problem, template, point, constant=("hidden",))


REFUSED = {
    "a stage of 16 cache lines is twice": {"depth": 16, "stages": 2, **ALONE, "tiles": 4},
    "warps that share a tile meet": {"reduce_warps": 2, "tiles": 4, "stages": 2, "depth": 1},
    "exceed a multiprocessor's shared memory": {**ALONE, "tiles": 16, "stages": 3, "depth": 4},
    "6 tiles are no power of two": {**ALONE, "tiles": 6, "depth": 1},
    "5 steps in hand exceed 4": {**ALONE, "tiles": 4, "depth": 5},
    "4 stages of parts of rows exceed 3": {**SHARED, "reduce_warps": 2, "depth": 1, "stages": 4},
    "whole rows are read by warps that share": {**WHOLE, "reduce_warps": 2, "stages": 0},
    "words are brought into the L2 cache ahead": {"prefetch": 1, "overlap": 0},
    "tiles that are taken as thread blocks come": {**ALONE, "tiles": 4, "depth": 1, "dynamic": 25},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    problem = parse(HALVES)
    template = spaces.find("head_tiles")
    assert reason in (template.allowed(problem, SM90, template.default(problem, SM90) | REFUSED[reason]) or "")


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        # Two tiles of whole rows: of 16 words, or of eight. Parts of rows, and hidden states in two places.
        (3456, {"tile_m": 8, "tile_n": 16, "depth": 0, "stages": 2, "staged": 0}),
        (3584, {"tile_m": 16, "tile_n": 8, "depth": 0, "stages": 2, "staged": 0}),
        (5632, {"tile_m": 16, "tile_n": 8, "depth": 0, "stages": 2, "staged": 0}),
        (6144, {"tile_m": 8, "tile_n": 16, "depth": 4, "stages": 3, "staged": 0}),
        (7168, {"tile_m": 8, "tile_n": 16, "depth": 3, "stages": 3, "staged": 0}),
        (6656, {"tile_m": 8, "tile_n": 32, "depth": 1, "stages": 0, "staged": 0}),  # no part divides 13 cache lines
        (16384, {"tile_m": 8, "tile_n": 16, "depth": 2, "stages": 2, "staged": 2}),
    ],
)
def test_few_wide_rows_take_rings(hidden: int, expected: dict[str, int]) -> None:
    template = spaces.find("head_tiles")
    for batch in (1, 8):
        problem = parse(f"head_topk/batch={batch},vocab=128256,hidden={hidden},k=20,dtype=bfloat16")
        point = template.default(problem, SM90)
        assert expected == {name: point[name] for name in expected}
    if hidden < 8192:  # nothing wider fits without rings
        assert template.default(problem, machine.resolve("sm_80"))["stages"] == 0


def test_rings_are_for_machines_with_room() -> None:
    """The default of a machine with less shared memory has room, too; before Hopper there are no bulk copies."""
    template, problem = spaces.find("candidate_tiles"), parse(LISTS)
    assert template.space(problem, machine.resolve("sm_80"))["stages"] == (0,)
    small = machine.resolve("sm_120")
    point = template.default(problem, SM90) | {**ALONE, "tiles": 8, "stages": 3, "depth": 2}
    assert template.allowed(problem, SM90, point) is None
    assert "shared memory" in (template.allowed(problem, small, point) or "")


def test_records_of_before_mean_the_same_programs() -> None:
    """They lack what came later, which is behind what there was."""
    problem, template = parse(HALVES), spaces.find("head_tiles")
    now = tuple(template.default(problem, SM90).items())
    before = tuple((name, value) for name, value in now if name not in ADDED["head_tiles"])
    assert renamed("head_tiles", before) == now == renamed("head_tiles", now)
    assert "tvm-sparse db migrate" in (template.point(problem, SM90, dict(before)) or "")
    assert renamed("candidate_dots", (("threads", 256),)) == (("threads", 256),)
