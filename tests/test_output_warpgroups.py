"""`warpgroups` of the output layer: words streamed through products of warpgroups, beside tens of rows."""

from __future__ import annotations

import pytest
from cases import SM90, check_emulated, thorough

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.schedules.output_layer.warpgroups.space import TILE_M

BIASED = "head_topk/batch=19,vocab=173,hidden=136,k=5,dtype=bfloat16,bias=1"
ASKED = "head_topk/batch=37,vocab=301,hidden=256,k=7,dtype=float16,ids=2"
MANY = "head_topk/batch=18,vocab=1301,hidden=328,k=30,dtype=float16"
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    # Rounds of tiles in which warps have none, and a last part of one vector.
    (BIASED, {"tile_m": 32, "tile_n": 16, "tiles": 4, "depth": 1, "stages": 2, "blocks": 2}),
    # Two strips of rows, the second one of five; columns that end with a part; words of two fragments.
    (ASKED, {"tile_m": 32, "tile_n": 32, "tiles": 8, "depth": 1, "stages": 3, "blocks": 1}),
    # Four steps a part, of which two are in hand.
    (MANY, {"tile_m": 32, "tile_n": 16, "tiles": 8, "depth": 4, "stages": 2, "blocks": 4, "evict_first": 1}),
)
# Other ways through the same phases.
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    (ASKED, {"tile_m": 64, "tile_n": 16, "tiles": 4, "depth": 4, "stages": 2, "blocks": 3, "overlap": 0}),
    (MANY, {"tile_m": 32, "tile_n": 16, "tiles": 12, "depth": 2, "stages": 2, "blocks": 3}),
)


@pytest.mark.parametrize(("key", "decisions"), [*POINTS, *(thorough(*other) for other in OTHERS)])
def test_points_equal_the_reference(key: str, decisions: dict[str, int]) -> None:
    """Whatever is read before the producer kernel is done is garbage."""
    problem, template = parse(key), spaces.find("head_warpgroups")
    point = template.default(problem, SM90) | {"threads": 256} | decisions
    assert template.allowed(problem, SM90, point) is None
    check_emulated(problem, template, point, first=key == MANY, step=2)


NOT_FIT = {
    "has all 16 rows": "head_topk/batch=16,vocab=301,hidden=136,k=5,dtype=bfloat16",
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
    "exceed the registers": {"tile_m": 128, "tile_n": 32},
    "exceed a multiprocessor's shared memory": {"tile_m": 64, "stages": 6},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    problem = parse(f"head_topk/batch=100,vocab=301,hidden={64 if 'row' in reason else 1024},k=5,dtype=float16")
    template = spaces.find("head_warpgroups")
    assert reason in (template.allowed(problem, SM90, template.default(problem, SM90) | REFUSED[reason]) or "")


@pytest.mark.parametrize("batch", [17, 32, 48, 64, 100, 300])
def test_a_tile_has_all_rows_if_it_can(batch: int) -> None:
    """So words are read once."""
    for hidden in (64, 1024, 8192):
        problem = parse(f"head_topk/batch={batch},vocab=128256,hidden={hidden},k=20,dtype=bfloat16")
        chosen = spaces.fallback(problem, SM90)
        assert chosen.template == "head_warpgroups"
        enough = [tile for tile in TILE_M if tile >= batch]
        assert chosen.values["tile_m"] == (min(enough) if enough else max(TILE_M))
