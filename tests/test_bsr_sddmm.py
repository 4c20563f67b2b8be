"""`sampled_warpgroups`: the blocks of a product of two dense matrices, by products of warpgroups."""

from __future__ import annotations

import numpy as np
import pytest
from cases import SM80, SM90, check_emulated, own_on_host, run_emulated, thorough

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.operators.bsr_sddmm.call import bsr_sddmm, likely_faster

# Problems, and points of their spaces. The emulator is exact about shared memory, so a wrong place is a wrong number.
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    # Two thread blocks add up their sums; rows with more blocks than a thread block has, a last step of six rows.
    ("m=70,k=192,n=128,block=64,sparsity=0.4,dtype=bfloat16", {"tile_m": 16, "tile_k": 128, "stages": 8, "cluster": 2}),
    # Two parts of a block's rows, and boxes of 32 bytes.
    (
        "m=40,k=96,n=256,block=128x16,sparsity=0.5,dtype=bfloat16,pattern=skewed",
        {"tile_m": 16, "tile_k": 32, "stages": 2, "cluster": 1},
    ),
    # Blocks of fewer rows than a warpgroup multiplies, some of which lie beyond the last block row.
    (
        "m=40,k=192,n=168,block=24x32,sparsity=0.3,dtype=bfloat16",
        {"tile_m": 16, "tile_k": 64, "stages": 2, "cluster": 1},
    ),
    # Two warpgroups beside each other, and boxes of 64 bytes.
    (
        "m=40,k=672,n=128,block=64x32,sparsity=0.1,dtype=float16",
        {"tile_m": 16, "tile_k": 384, "stages": 2, "cluster": 1},
    ),
)
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    # Blocks of three boxes.
    (
        "m=70,k=384,n=128,block=64x96,sparsity=0.1,dtype=float16",
        {"tile_m": 64, "tile_k": 192, "stages": 2, "cluster": 1},
    ),
    # A second part of a block's rows that is shorter; sums of a cluster.
    ("m=70,k=64,n=192,block=96x32,sparsity=0.3,dtype=float16", {"tile_m": 16, "tile_k": 64, "stages": 8, "cluster": 2}),
    # More block rows than a warp has lanes.
    ("m=20,k=64,n=2560,block=64,sparsity=0.5,dtype=bfloat16", {"tile_m": 32, "tile_k": 64, "stages": 3, "cluster": 1}),
    ("m=70,k=256,n=128,block=64,sparsity=0.3,dtype=float16", {"tile_m": 16, "tile_k": 128, "stages": 8, "cluster": 4}),
)


@pytest.mark.parametrize(("axes", "point"), [*POINTS, *(thorough(*other) for other in OTHERS)])
def test_points_equal_the_reference(axes: str, point: dict[str, int]) -> None:
    """Also with columns in any order, repeated blocks, empty block rows, NaN and infinities."""
    problem, template = parse(f"bsr_sddmm/{axes}"), spaces.find("sampled_warpgroups")
    assert template.point(problem, SM90, point) is None
    check_emulated(problem, template, point, step=2 if point["cluster"] > 1 else 1)


@pytest.mark.parametrize("name", ["sampled_elements", "sampled_warpgroups"])
def test_no_block_at_all(name: str) -> None:
    problem, template = parse("bsr_sddmm/m=3,k=64,n=64,block=64,sparsity=1,dtype=bfloat16"), spaces.find(name)
    check_emulated(problem, template, template.default(problem, SM90), step=4)


def test_sums_of_a_cluster_are_added_up_in_one_order() -> None:
    problem = parse("bsr_sddmm/m=70,k=64,n=64,block=64,sparsity=0,dtype=bfloat16")
    template, inputs = spaces.find("sampled_warpgroups"), problem.generate(0)
    program = template.build(problem, {"tile_m": 16, "tile_k": 64, "stages": 8, "cluster": 2})
    first, second = (run_emulated(program, problem, inputs, own_on_host(program, problem), seed)[0] for seed in (1, 2))
    assert first.tobytes() == second.tobytes()


NOT_FIT = {
    "is not of 16 bits": "m=128,k=256,n=256,block=64,sparsity=0.5",
    "are not of multiples of 8 rows": "m=128,k=256,n=256,block=4x32,sparsity=0.5,dtype=float16",
}


@pytest.mark.parametrize("reason", NOT_FIT)
def test_what_does_not_fit_says_why(reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        spaces.find("sampled_warpgroups").space(parse(f"bsr_sddmm/{NOT_FIT[reason]}"), SM90)


REFUSED = {
    "in whole blocks": ("k=1152,n=64,block=64x96", {"tile_k": 480}),
    "lanes of a warp": ("k=1024,n=64,block=64x16", {"tile_k": 512}),
    "exceed the registers": ("k=1024,n=256,block=256x64", {"tile_k": 256}),
    "shared memory": ("k=1024,n=64,block=64", {"tile_m": 128, "tile_k": 256, "stages": 4}),
    "no room for sums": ("k=1024,n=64,block=64", {"tile_k": 256, "cluster": 2}),
    "in pairs": ("k=64,n=64,block=64x16", {"tile_k": 16, "cluster": 8}),
    "rows exceed m": ("k=64,n=64,block=64", {"tile_m": 128, "cluster": 8}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    axes, decisions = REFUSED[reason]
    problem = parse(f"bsr_sddmm/m=512,{axes},sparsity=0.5,dtype=bfloat16")
    template = spaces.find("sampled_warpgroups")
    base = {"tile_m": 16, "tile_k": 64, "stages": 2, "cluster": 1}
    assert reason in (template.point(problem, SM90, base | decisions) or "")


def test_defaults_fill_a_multiprocessor_s_shared_memory() -> None:
    """And few units are shared by clusters; many are not."""
    template = spaces.find("sampled_warpgroups")
    large = template.default(parse("bsr_sddmm/m=8192,k=4096,n=4096,block=64,sparsity=0.8,dtype=bfloat16"), SM90)
    stage = large["tile_m"] * (64 + 256) * 2
    assert large["tile_k"] == 256 and large["stages"] == min(227 * 1024 // stage, 8)
    clusters = [
        template.default(parse(f"bsr_sddmm/m=8192,k=4096,n={n},block=64,sparsity=0.8,dtype=bfloat16"), SM90)["cluster"]
        for n in (512, 4096, 16384)
    ]
    assert clusters == sorted(clusters, reverse=True) and clusters[0] > clusters[-1] == 1


def test_which_way_is_likely() -> None:
    """The kernel for few and wide blocks of 16 bits on a GPU that has such products."""
    assert likely_faster(0.2, (64, 64), "bfloat16", SM90) and likely_faster(0.5, (128, 128), "float16", SM90)
    assert not likely_faster(0.9, (64, 64), "bfloat16", SM90)
    assert likely_faster(0.2, (32, 32), "bfloat16", SM90) and not likely_faster(0.3, (32, 32), "bfloat16", SM90)
    assert not likely_faster(0.2, (16, 16), "bfloat16", SM90) and not likely_faster(0.2, (64, 64), "float32", SM90)
    assert not likely_faster(0.2, (64, 64), "bfloat16", SM80)


def test_a_call_takes_arrays_that_lie_in_any_way() -> None:
    problem = parse("bsr_sddmm/m=5,k=66,n=35,block=5x3,sparsity=0.5")
    left, right, indices, indptr = problem.generate(3)
    apart = np.ascontiguousarray(left.T).T
    found = bsr_sddmm(apart, np.repeat(right, 2, 1)[:, ::2], indices, indptr, (5, 3))
    problem.check([left, right, indices, indptr], problem.reference([left, right, indices, indptr]), [found])
