"""`streams` of the output layer: lists of one row each, whose words are streamed through registers."""

from __future__ import annotations

import pytest
from cases import SM90, check_emulated

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable

pytestmark = pytest.mark.drawn

LISTS = "candidate_topk/lists=4,beam=1,vocab=97,hidden=200,m=70,k=5,dtype=float16,bias=1"
BLOCKS = "candidate_topk/lists=3,beam=1,vocab=240,hidden=64,m=9,k=12,dtype=bfloat16,block=8"
FLOATS = "candidate_topk/lists=2,beam=1,vocab=97,hidden=136,m=50,k=40,dtype=float32"
PRODUCT = "candidate_logits/lists=3,beam=1,vocab=301,hidden=136,m=71,dtype=bfloat16,bias=1"
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    (LISTS, {}),
    # Rows of 25 vectors: steps of 8 lanes end behind them, and the last step has one vector.
    (LISTS, {"reduce_threads": 8, "vectors": 2, "tile_n": 4, "tiles": 2, "threads": 256}),
    (LISTS, {"reduce_threads": 8, "vectors": 1, "tile_n": 2, "tiles": 4, "overlap": 0}),
    (BLOCKS, {"reduce_threads": 8, "vectors": 1, "tile_n": 8, "tiles": 2}),
    (FLOATS, {"reduce_threads": 16, "vectors": 2, "tile_n": 2, "tiles": 2, "threads": 256}),
    (PRODUCT, {"reduce_threads": 32, "vectors": 1, "tile_n": 2, "tiles": 4}),
    (PRODUCT, {"reduce_threads": 16, "vectors": 2, "tile_n": 1, "tiles": 2}),
)


@pytest.mark.parametrize(("key", "decisions"), POINTS)
def test_points_equal_the_reference(key: str, decisions: dict[str, int]) -> None:
    """Whatever is read before the producer kernel is done is garbage."""
    problem = parse(key)
    template = next(t for t in spaces.templates() if t.operator == problem.operator and "stream" in t.name)
    point = template.default(problem, SM90) | decisions
    assert template.point(problem, SM90, point) is None
    check_emulated(problem, template, point)


NOT_FIT = {
    "lists of one row each": "candidate_topk/lists=1,beam=2,vocab=97,hidden=64,m=70,k=5",
    "do not start on 16 bytes": "candidate_topk/lists=2,beam=1,vocab=97,hidden=33,m=70,k=5",
    "exceeds 256": "candidate_topk/lists=2,beam=1,vocab=997,hidden=64,m=700,k=300",
    "exceed 4096": "candidate_topk/lists=2,beam=1,vocab=9970,hidden=64,m=4100,k=3",
    "exceeds shared memory": "candidate_topk/lists=2,beam=1,vocab=97,hidden=8192,m=70,k=3",
}


@pytest.mark.parametrize("reason", NOT_FIT)
def test_what_does_not_fit_says_why(reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        spaces.find("candidate_streams").space(parse(NOT_FIT[reason]), SM90)


def test_what_is_no_point_says_why() -> None:
    template, problem = spaces.find("candidate_streams"), parse(LISTS)
    point = template.default(problem, SM90)
    assert "vectors in hand" in (template.point(problem, SM90, point | {"vectors": 4, "tile_n": 8}) or "")
    assert "twice" in (template.point(problem, SM90, point | {"reduce_threads": 32, "vectors": 2, "tile_n": 1}) or "")
