"""`warpgroups` of the output layer: words streamed through products of warpgroups, beside tens of rows."""

from __future__ import annotations

import pytest
from cases import SM90, check_emulated, own_on_host, run_emulated, thorough

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.schedules.output_layer.warpgroups.space import TILE_M

pytestmark = pytest.mark.drawn

BIASED = "head_topk/batch=19,vocab=173,hidden=136,k=5,dtype=bfloat16,bias=1"
ASKED = "head_topk/batch=37,vocab=301,hidden=256,k=7,dtype=float16,ids=2"
MANY = "head_topk/batch=18,vocab=1301,hidden=328,k=30,dtype=float16"
WIDE = "head_topk/batch=3,vocab=61,hidden=5640,k=5,dtype=bfloat16"
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    # Rounds of tiles in which warps have none, and a last part of one vector.
    (BIASED, {"tile_m": 32, "tile_n": 16, "tiles": 4, "depth": 1, "stages": 2, "blocks": 2, "gated": 1}),
    # Two strips of rows, the second one of five; columns that end with a part; words of two fragments.
    (ASKED, {"tile_m": 32, "tile_n": 32, "tiles": 8, "depth": 1, "stages": 3, "blocks": 1}),
    # Four steps a part, of which two are in hand.
    (MANY, {"tile_m": 32, "tile_n": 16, "tiles": 8, "depth": 4, "stages": 2, "blocks": 4, "gated": 1}),
)
# Other ways through the same phases.
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    (ASKED, {"tile_m": 64, "tile_n": 16, "tiles": 4, "depth": 4, "stages": 2, "blocks": 3}),
    (WIDE, {"tile_m": 8, "tile_n": 32, "tiles": 4, "depth": 2, "stages": 2, "blocks": 1, "gated": 0}),
    (WIDE.replace("batch=3", "batch=11"), {"tile_m": 16, "tile_n": 16, "tiles": 4, "depth": 4, "blocks": 1}),
    (MANY, {"tile_m": 32, "tile_n": 16, "tiles": 12, "depth": 2, "stages": 2, "blocks": 3}),
)


@pytest.mark.parametrize(("key", "decisions"), [*POINTS, *(thorough(*other) for other in OTHERS)])
def test_points_equal_the_reference(key: str, decisions: dict[str, int]) -> None:
    """Whatever is read before the producer kernel is done is garbage."""
    problem, template = parse(key), spaces.find("head_warpgroups")
    point = template.default(problem, SM90) | {"threads": 256} | decisions
    assert template.allowed(problem, SM90, point) is None
    check_emulated(problem, template, point, first=key == MANY, step=2)


def test_words_come_before_the_wait_only_if_they_are_constant() -> None:
    """Of what is said to be constant, and is not, what was there before is multiplied."""
    problem, template = parse(BIASED), spaces.find("head_warpgroups")
    point = template.default(problem, SM90) | {"threads": 256}
    check_emulated(problem, template, point, constant=("embedding",), step=4)
    with pytest.raises(AssertionError):
        check_emulated(problem, template, point, constant=("hidden",), step=4)


@pytest.mark.parametrize("structure", ["random", "special", "ascending"])
def test_scores_that_are_not_among_the_best_are_not_written(structure: str) -> None:
    """Of the first round of tiles all are, and of later ones those that reach a bound; which are ever better ones where
    scores ascend."""
    problem = parse("head_topk/batch=19,vocab=1501,hidden=64,k=3,dtype=bfloat16")
    template = spaces.find("head_warpgroups")
    point = {"tile_m": 32, "tile_n": 16, "tiles": 4, "depth": 1, "stages": 2, "blocks": 1, "threads": 256}
    point = template.default(problem, SM90) | point | {"gated": 1}
    assert template.allowed(problem, SM90, point) is None
    program = template.build(problem, point)
    own = own_on_host(program, problem)
    run_emulated(program, problem, problem.generate(0, structure, dict(problem.settings[0])), own)
    tops = next(own[i] for i, workspace in enumerate(program.workspaces) if workspace.name == "tops")
    tiles = -(-problem.vocab // 16)
    assert (tops[:, :4] != 0).all()
    skipped = (tops[:, 4:tiles] == 0).mean()
    assert skipped == 0 if structure == "ascending" else skipped > 0.1


NOT_FIT = {
    "fragment all 16": "head_topk/batch=16,vocab=301,hidden=136,k=5,dtype=bfloat16",
    "is not of 16 bits": "head_topk/batch=19,vocab=301,hidden=136,k=5",
    "do not start on 16 bytes": "head_topk/batch=19,vocab=301,hidden=35,k=5,dtype=bfloat16",
    "the most that are ranked": "head_topk/batch=19,vocab=301,hidden=136,k=257,dtype=bfloat16",
}


@pytest.mark.parametrize("reason", NOT_FIT)
def test_what_does_not_fit_says_why(reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        spaces.find("head_warpgroups").space(parse(NOT_FIT[reason]), SM90)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120", "compute_90"])
def test_other_architectures_have_no_such_products(arch: str) -> None:
    with pytest.raises(NotApplicable, match="wgmma"):
        spaces.find("head_warpgroups").space(parse(BIASED), machine.resolve(arch))


REFUSED = {
    "is twice a row": {"depth": 4},
    "exceed the registers": {"tile_m": 128, "tile_n": 32, "tiles": 8},
    "exceed a multiprocessor's shared memory": {"tile_m": 64, "tile_n": 32, "stages": 6},
    "no bound would be found in time": {"gated": 1},
    "are no bound for the 5 best": {"gated": 1, "tiles": 4, "blocks": 1},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    problem = parse(f"head_topk/batch=100,vocab=301,hidden={64 if 'row' in reason else 1024},k=5,dtype=float16")
    template = spaces.find("head_warpgroups")
    assert reason in (template.allowed(problem, SM90, template.default(problem, SM90) | REFUSED[reason]) or "")


@pytest.mark.parametrize("batch", [1, 8, 9, 17, 32, 48, 64, 100, 300])
def test_a_tile_has_all_rows_if_it_can(batch: int) -> None:
    """So words are read once."""
    for hidden in (64, 1024, 8192) if batch > 16 else (5640, 8192, 16384):
        problem = parse(f"head_topk/batch={batch},vocab=128256,hidden={hidden},k=20,dtype=bfloat16")
        chosen = spaces.fallback(problem, SM90)
        assert chosen.template == "head_warpgroups"
        enough = [tile for tile in TILE_M if tile >= batch]
        assert chosen.values["tile_m"] == (min(enough) if enough else max(TILE_M))
