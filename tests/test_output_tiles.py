"""The output layer's templates on tensor cores: points that no default of a small problem is."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from cases import SM90, check_emulated, own_on_host, reached, run_emulated, settings_of, thorough, watch_phases
from tvm.sym import Analyzer

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import Mismatch
from tvm_sparse.core.registry import parse
from tvm_sparse.schedules.output_layer import registers, rings
from tvm_sparse.schedules.output_layer.best import search
from tvm_sparse.schedules.output_layer.tiles.product import stays_cached
from tvm_sparse.schedules.vocabulary import present

pytestmark = pytest.mark.drawn

HALVES = "head_topk/batch=5,vocab=301,hidden=136,k=7,dtype=bfloat16,bias=1,ids=2,per_row=1"
WIDER = "head_topk/batch=13,vocab=301,hidden=392,k=7,dtype=float16"
FLOATS = "head_topk/batch=3,vocab=97,hidden=136,k=7,dtype=float32"
# Eight warps share a row: of 57 vectors, so that the last has one, and of 114, so that it has two of 16.
EIGHT = "head_topk/batch=5,vocab=301,hidden=456,k=7,dtype=bfloat16,bias=1,ids=2,per_row=1"
WIDE_EIGHT = "head_topk/batch=13,vocab=301,hidden=912,k=7,dtype=float16"
ROWS = "head_topk/batch=19,vocab=173,hidden=456,k=5,dtype=bfloat16,bias=1"
FLOATS_EIGHT = "head_topk/batch=3,vocab=97,hidden=236,k=7,dtype=float32"
OCTETS = "head_topk/batch=13,vocab=301,hidden=912,k=7,dtype=bfloat16,stored=float8_e4m3fn"
# Scales for groups of one step, of which the last warp has three of four; and for groups of two steps.
GROUPS = "head_topk/batch=13,vocab=147,hidden=1984,k=7,dtype=bfloat16,stored=int8,groups=31"
WIDE_GROUPS = "head_topk/batch=5,vocab=147,hidden=2048,k=7,dtype=float16,bias=1,ids=2,stored=float8_e4m3fn,groups=16"
LISTS = "candidate_topk/lists=4,beam=1,vocab=97,hidden=200,m=70,k=5,dtype=float16,bias=1"
LONG = "candidate_topk/lists=1,beam=1,vocab=9000,hidden=64,m=8200,k=5,dtype=bfloat16"
BLOCKS = "candidate_topk/lists=2,beam=3,vocab=240,hidden=64,m=9,k=12,dtype=bfloat16,block=8"
PRODUCT = "candidate_logits/lists=2,beam=9,vocab=301,hidden=136,m=70,dtype=float16,bias=1"
LIST_PRODUCT = "candidate_logits/lists=3,beam=1,vocab=97,hidden=136,m=70,dtype=float16,bias=1"
# Of 337 vectors eight warps have six steps each, the last one vector.
PARTS = "head_topk/batch=13,vocab=131,hidden=2696,k=7,dtype=bfloat16,ids=2,per_row=1"
# The same in eight bits: of 337 vectors eight warps have 48 each, the last one vector. Groups of 128 columns.
WIDE_OCTETS = "head_topk/batch=13,vocab=67,hidden=5392,k=7,dtype=bfloat16,stored=int8"
WIDER_GROUPS = "head_topk/batch=5,vocab=67,hidden=6144,k=7,dtype=float16,bias=1,stored=float8_e4m3fn,groups=48"
# Seven warps have all columns, in stages of 512.
IDLE = "head_topk/batch=3,vocab=35,hidden=7168,k=7,dtype=bfloat16,stored=int8"
STAYS = {"evict_first": 1, "cached": 16}
TAKEN = {"staged": 0, "dynamic": 25, "prefetch": 0}
DEALT = {"staged": 1, "dynamic": 0, "prefetch": 0}
POINTS: tuple[tuple[str, str, dict[str, int]], ...] = (
    # Words come to registers, ahead of the producer kernel too; warps that have tiles of their own.
    ("head_registers", HALVES, {"reduce_warps": 1, "staged": 0, "depth": 1, "blocks": 5, "prefetch": 1}),
    (
        "head_registers",
        WIDER,
        {"tile_m": 16, "reduce_warps": 4, "staged": 1, "depth": 2, "blocks": 3, "evict_first": 1},
    ),
    ("candidate_registers", BLOCKS, {"threads": 256}),
    ("candidate_registers_product", PRODUCT, {"reduce_warps": 1, "staged": 1, "tile_m": 16, "tile_n": 32, "depth": 1}),
    # Tiles that are taken as thread blocks come to them; of one strip of rows, and of two, with thread blocks that get
    # none.
    ("head_rings", EIGHT, {**TAKEN, "blocks": 5, "prefetch": 1}),
    ("head_rings", WIDE_EIGHT, {**TAKEN, "tile_m": 8, "blocks": 12}),
    # Words are the other operand of 16 rows and more; warps of rows beyond the last one finish no scores.
    ("head_rings", WIDE_EIGHT, {**TAKEN, "tile_m": 16, "blocks": 7}),
    # Tiles of eight words, and words that do not fill the last tile. For no more than eight rows: those of a fragment.
    ("head_rings", WIDE_EIGHT, {**DEALT, "tile_m": 16, "tile_n": 8, "blocks": 7}),
    ("head_rings", EIGHT, {**TAKEN, "tile_m": 16, "tile_n": 8, "blocks": 5}),
    # A part of the words stays in the L2 cache.
    ("head_rings", EIGHT, {**TAKEN, **STAYS, "blocks": 5, "dynamic": 12, "prefetch": 1}),
    ("head_rings", FLOATS_EIGHT, {**DEALT, "blocks": 2}),
    # Words in eight bits, beside hidden states in registers and in shared memory.
    ("head_rings", OCTETS, {**TAKEN, "tile_m": 16, "tile_n": 8, "blocks": 7, "stages": 3}),
    ("head_rings", OCTETS, {**DEALT, "tile_m": 8, "blocks": 5}),
    ("head_rings", GROUPS, {**TAKEN, "tile_m": 16, "blocks": 4, "stages": 3}),
    ("head_rings", GROUPS, {**DEALT, "tile_m": 16, "tile_n": 8, "blocks": 3, "stages": 2}),
    ("head_rings", WIDE_GROUPS, {**DEALT, "tile_m": 8, "staged": 0, "blocks": 3}),
    # Parts of rows; hidden states in registers and in shared memory, where the last warp has a part of a row that ends
    # in the former.
    ("head_warp_rings", PARTS, {"tile_m": 8, "depth": 2, "staged": 0, "stages": 3, "blocks": 3, **STAYS}),
    ("head_warp_rings", PARTS, {"tile_m": 16, "tile_n": 8, "depth": 3, "staged": 2, "stages": 2, "blocks": 5}),
    ("head_warp_rings", WIDE_OCTETS, {"tile_m": 16, "tile_n": 8, "depth": 3, "staged": 2, "stages": 2, "blocks": 3}),
    ("head_warp_rings", IDLE, {"tile_m": 8, "tile_n": 16, "depth": 4, "staged": 0, "stages": 2, "blocks": 2}),
    ("head_warp_rings", WIDER_GROUPS, {"tile_m": 8, "depth": 2, "staged": 0, "stages": 3, "blocks": 2}),
    ("candidate_warp_rings", LISTS, {"tiles": 4, "depth": 2, "stages": 3}),
    ("candidate_warp_rings_product", LIST_PRODUCT, {"tiles": 4, "depth": 1, "stages": 2}),
)
# Other ways through the same phases.
OTHERS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("head_registers", FLOATS, {"reduce_warps": 2, "staged": 1, "depth": 1, "blocks": 3, "threads": 512}),
    ("candidate_registers", LISTS, {"reduce_warps": 1, "staged": 1, "depth": 2}),
    ("head_rings", EIGHT, {**DEALT, "blocks": 5, "prefetch": 1}),
    ("head_rings", EIGHT, {**DEALT, **STAYS, "blocks": 5, "prefetch": 1}),
    ("head_rings", EIGHT, {**TAKEN, "staged": 1, "blocks": 5}),
    ("head_rings", EIGHT, {**TAKEN, "blocks": 5, "threads": 1024, "dynamic": 6}),
    ("head_rings", ROWS, {**TAKEN, "tile_m": 32, "blocks": 3}),
    ("head_rings", ROWS, {**TAKEN, "tile_m": 32, "tile_n": 8, "blocks": 4, "dynamic": 12}),
    ("head_warp_rings", PARTS, {"tile_m": 16, "tile_n": 16, "depth": 2, "staged": 2, "stages": 2, "blocks": 4}),
    ("head_warp_rings", PARTS, {"tile_m": 16, "depth": 3, "staged": 0, "stages": 2, "blocks": 3, "prefetch": 1}),
    ("candidate_warp_rings", LISTS, {"tiles": 12, "depth": 4, "stages": 2}),
    # A list that is too long to be searched at once.
    ("candidate_warp_rings", LONG, {"tiles": 8, "depth": 1, "stages": 2}),
)


@pytest.mark.parametrize(
    ("name", "key", "decisions", "first"),
    [
        *((*point, number % 2) for number, point in enumerate(POINTS)),
        *(thorough(*point, 1 - number % 2) for number, point in enumerate(POINTS)),
        *(thorough(*other, first) for other in OTHERS for first in (0, 1)),
    ],
)
def test_points_equal_the_reference(name: str, key: str, decisions: dict[str, int], first: int) -> None:
    """On every second structure, from the `first` on, the others in a thorough run only. Whatever is read before the
    producer kernel is done is garbage."""
    problem, template = parse(key), spaces.find(name)
    point = template.default(problem, SM90) | decisions
    assert template.allowed(problem, SM90, point) is None and set(point) == set(template.space(problem, SM90))
    check_emulated(problem, template, point, first=first, step=2)


# Of up to 16 rows: tiles dealt out, and taken as thread blocks come to them.
SEARCHED: dict[int, tuple[str, dict[str, int]]] = {
    0: (
        "head_registers",
        {"reduce_warps": 2, "staged": 0, "tile_n": 16, "depth": 1, "blocks": 5, "threads": 256, "prefetch": 0},
    ),
    25: ("head_rings", {**TAKEN, "blocks": 5, "threads": 512}),
}


@pytest.mark.parametrize(
    ("k", "kind", "dynamic", "phase", "needed"),
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
        (24, "NaN", 0, "choose_tiles", True),
        thorough(25, "equal", 0, "choose_tiles", True),
    ],
)
def test_how_many_words_reach_the_bound(
    k: int,
    kind: str | int,
    dynamic: int,
    phase: str,
    needed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name, decisions = SEARCHED[dynamic]
    columns, template = 456 if dynamic else 136, spaces.find(name)
    problem = parse(f"head_topk/batch=3,vocab=2405,hidden={columns},k={k},dtype=float16")
    point = template.default(problem, SM90) | decisions
    assert template.allowed(problem, SM90, point) is None
    assert (rings if dynamic else registers).space.extents(problem, point).by_bits
    hidden, words, *others = problem.generate(k)
    # A row's scores are a column of the embedding.
    hidden[:] = np.eye(len(hidden), hidden.shape[1])
    scores = np.random.default_rng(k).standard_normal((len(hidden), len(words)))
    if kind == "ascending":
        scores.sort()
    elif isinstance(kind, int):  # the best words, all equal, fill so many tiles
        scores[:, 16 * 7 : 16 * (7 + kind)] = 6
    elif kind in ("equal", "NaN"):
        scores[:] = -2 if kind == "equal" else np.nan
    words[:, : len(hidden)] = scores.T

    watch_phases(monkeypatch, search, "rank", "select", "choose_tiles")
    program = template.build(problem, point)
    outputs = run_emulated(program, problem, [hidden, words, *others], own_on_host(program, problem), k)
    assert (phase in reached(capfd)) == needed
    if kind in ("equal", "NaN"):
        assert (outputs[1] == np.arange(k)).all()


@pytest.mark.parametrize("dynamic", [0, 25])
def test_as_much_stays_cached_as_was_asked_for(dynamic: int) -> None:
    problem = parse("head_topk/batch=12,vocab=40000,hidden=1000,k=12,dtype=float16")
    template, known = spaces.find("head_rings"), Analyzer()
    for cached in (16, 24, 32):
        e = rings.space.extents(problem, {**template.default(problem, SM90), "cached": cached, "dynamic": dynamic})
        tiles = [tile for tile in range(e.list_tiles) if known.can_prove(stays_cached(e, tile))]
        assert abs(len(tiles) * e.tile_bytes - cached * 2**20) <= e.stride * e.tile_bytes / 2
        # None of the first round, which memory brings ahead, and none that may be another block's in the next call.
        assert min(tiles) >= e.stride
        assert max(tiles) < e.list_tiles * (100 - dynamic) // 100


@pytest.mark.parametrize("spread", [0, 1, 1000, 1e36])
def test_who_takes_which_tile_changes_no_bit(spread: float) -> None:
    """Nor do scores that lie so far apart that a sum of exponentials changes its unit; 0: those of random states."""
    problem = parse("head_topk/batch=3,vocab=301,hidden=456,k=7,dtype=bfloat16,ids=2")
    template = spaces.find("head_rings")
    program = template.build(problem, template.default(problem, SM90) | {**TAKEN, "blocks": 4})
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
    "decisions", [{"reduce_warps": 2, "staged": 0, "depth": 1}, thorough({"reduce_warps": 1, "staged": 1, "depth": 3})]
)
def test_words_are_loaded_ahead_only_if_they_are_constant(decisions: dict[str, int]) -> None:
    """Where they go to registers. Of a vocabulary that is said to be constant, and is not, what was there before is
    multiplied."""
    problem, template = parse(HALVES), spaces.find("head_registers")
    point = template.default(problem, SM90) | decisions | {"overlap": 1, "blocks": 5}
    assert template.allowed(problem, SM90, point) is None
    check_emulated(problem, template, point, constant=("embedding",))
    with pytest.raises(Mismatch):
        check_emulated(problem, template, point, constant=("hidden",))


REFUSED: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("candidate_warp_rings", LISTS, {"depth": 8}, "a stage of 8 cache lines is twice"),
    (
        "head_warp_rings",
        PARTS,
        {"tile_m": 16, "depth": 3, "staged": 2, "stages": 3},
        "exceed a multiprocessor's shared memory",
    ),
    ("head_warp_rings", PARTS, {"tile_m": 16, "tile_n": 8, "staged": 0}, "eight tokens are an operand"),
    ("head_rings", EIGHT, {"tile_m": 8, "tile_n": 8}, "eight tokens are an operand"),
    ("head_rings", EIGHT, {"cached": 8, "evict_first": 0}, "all others leave it first"),
    ("head_registers", HALVES, {"reduce_warps": 1, "depth": 2}, "2 steps in hand do not divide"),
    ("head_registers", HALVES, {"reduce_warps": 8, "depth": 1}, "the last of 8 warps has no part of a row"),
    ("head_registers", HALVES, {"prefetch": 1, "overlap": 0}, "brought into the L2 cache ahead"),
)


@pytest.mark.parametrize(("name", "key", "decisions", "reason"), REFUSED)
def test_what_is_no_point_says_why(name: str, key: str, decisions: dict[str, int], reason: str) -> None:
    problem, template = parse(key), spaces.find(name)
    assert reason in (template.allowed(problem, SM90, template.default(problem, SM90) | decisions) or "")


@pytest.mark.parametrize(
    ("hidden", "name", "expected"),
    [
        # Two tiles of whole rows: of 16 words, or of eight. Parts of rows, and hidden states in two places.
        (3456, "head_rings", {"tile_m": 8, "tile_n": 16, "staged": 0}),
        (3584, "head_rings", {"tile_m": 16, "tile_n": 8, "staged": 0}),
        (5632, "head_rings", {"tile_m": 16, "tile_n": 8, "staged": 0}),
        (6144, "head_warp_rings", {"tile_m": 8, "tile_n": 16, "depth": 4, "stages": 3, "staged": 0}),
        (7168, "head_warp_rings", {"tile_m": 8, "tile_n": 16, "depth": 3, "stages": 3, "staged": 0}),
        (6656, "head_registers", {"tile_m": 8, "tile_n": 32, "depth": 1, "staged": 0}),  # no part divides 13 lines
        (16384, "head_warp_rings", {"tile_m": 8, "tile_n": 16, "depth": 2, "stages": 2, "staged": 2}),
    ],
)
def test_few_wide_rows_take_rings(hidden: int, name: str, expected: dict[str, int]) -> None:
    """Where there are no products of warpgroups, which otherwise take rows of more than 5632 columns."""
    likely = ("head_rings", "head_warp_rings", "head_registers")
    for batch in (1, 8):
        problem = parse(f"head_topk/batch={batch},vocab=128256,hidden={hidden},k=20,dtype=bfloat16")
        tables = spaces.applicable(problem, SM90)[0]
        taking = [t for t in map(spaces.find, likely) if t.name in tables and not t.declines(problem, SM90)]
        point = taking[0].default(problem, SM90)
        assert (taking[0].name, expected) == (name, {name: point[name] for name in expected})
    if hidden < 8192:  # nothing wider fits without rings
        assert spaces.fallback(problem, machine.resolve("sm_80")).template == "head_registers"


def test_rings_are_for_machines_with_room() -> None:
    """The default of a machine with less shared memory has room, too; before Hopper there are no bulk copies."""
    template, problem = spaces.find("candidate_warp_rings"), parse(LISTS.replace("hidden=200", "hidden=2000"))
    assert "has no bulk copies" in spaces.applicable(problem, machine.resolve("sm_80"))[1]["candidate_warp_rings"]
    small = machine.resolve("sm_120")
    point = template.default(problem, SM90) | {"tiles": 8, "stages": 3, "depth": 2}
    assert template.allowed(problem, SM90, point) is None
    assert "shared memory" in (template.allowed(problem, small, point) or "")
    assert template.allowed(problem, small, template.default(problem, small)) is None


BEFORE = {
    "tile_m": 8, "tile_n": 16, "reduce_warps": 8, "tiles": 1, "depth": 2, "staged": 0, "blocks": 132, "threads": 1024,
    "overlap": 1, "evict_first": 1, "prefetch": 1, "stages": 3, "direct": 0, "dynamic": 0, "cached": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "heir"),
    [
        ({"stages": 0, "cached": 0}, "head_registers"),
        ({"stages": 0, "cached": 0, "reduce_warps": 1, "tiles": 16, "staged": 1}, "head_registers"),
        ({"depth": 0, "stages": 2, "dynamic": 12}, "head_rings"),
        ({}, "head_warp_rings"),
        # No point that a template has now: another number of tiles, of stages, or of warps, or another search.
        ({"stages": 0, "cached": 0, "reduce_warps": 1, "tiles": 8}, None),
        ({"depth": 0, "stages": 3}, None),
        ({"reduce_warps": 4}, None),
        ({"direct": 1}, None),
    ],
)
def test_records_of_a_divided_template_mean_the_same_points(changes: dict[str, int], heir: str | None) -> None:
    problem = parse("head_topk/batch=8,vocab=128256,hidden=4096,k=20,dtype=bfloat16")
    before = Candidate("head_tiles", 9, tuple((BEFORE | changes).items()))
    now = present(before)
    assert present(now) == now
    if heir is None:
        assert now == before
        return
    template = spaces.find(heir)
    assert (now.template, now.version) == (heir, 1) and list(now.values) == list(template.space(problem, SM90))
    room = importlib.import_module(f"tvm_sparse.schedules.output_layer.{heir.removeprefix('head_')}.space")
    e = room.extents(problem, now.values)
    assert {name: getattr(e, name) for name in BEFORE} == BEFORE | changes


def test_records_of_another_version_or_template_stay() -> None:
    for name, version in (("head_tiles", 8), ("head_dots", 2)):
        candidate = Candidate(name, version, (("threads", 256),))
        assert present(candidate) == candidate
