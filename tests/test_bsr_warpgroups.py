"""`block_warpgroups`: panels of x that block rows share, and products of warpgroups."""

from __future__ import annotations

import random

import pytest
from cases import RUN_SEED, SM90, check_emulated, drawn, thorough

from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.operators.bsr_matmul.dense import reads_turned
from tvm_sparse.operators.bsr_matmul.problem import ACTIVATIONS, BsrMatmul

pytestmark = pytest.mark.drawn

# Problems, and points of their spaces. The emulator is exact about shared memory, so a wrong place is a wrong number.
ALONE = {"producers": 1}
POINTS: tuple[tuple[str, dict[str, int]], ...] = (
    # Two block columns a panel, three block rows a thread block, a second strip of six rows.
    (
        "m=70,k=256,n=192,block=32,sparsity=0.6,dtype=bfloat16,bias=1,activation=relu",
        {"tile_m": 64, "tile_n": 96, "panel": 64, "stages": 3, "overlap": 1},
    ),
    # Two producer warps, an odd number of stages.
    (
        "m=150,k=256,n=192,block=32,sparsity=0.6,dtype=bfloat16,bias=1",
        {"tile_m": 64, "tile_n": 96, "panel": 32, "stages": 3, "producers": 2, "overlap": 1},
    ),
    # Transposed blocks, two of a block row in a panel.
    (
        "m=70,k=256,n=192,block=32,sparsity=0.6,dtype=bfloat16,turned=1",
        {"tile_m": 64, "tile_n": 96, "panel": 64, "stages": 3, "overlap": 1},
    ),
    # Such a block in two boxes, and two panels a block column.
    (
        "m=40,k=256,n=256,block=128,sparsity=0.5,dtype=bfloat16,turned=1",
        {"tile_m": 64, "tile_n": 128, "panel": 64, "stages": 4, "producers": 2, "overlap": 1},
    ),
    # float32, of which tensor cores take the upper bits.
    (
        "m=70,k=256,n=192,block=32,sparsity=0.6,precision=tf32,bias=1,activation=relu",
        {"tile_m": 64, "tile_n": 96, "panel": 32, "stages": 3, "overlap": 1},
    ),
    # Four of them; a last thread block of one block row, and rows of blocks that end early.
    (
        "m=40,k=128,n=144,block=16,sparsity=0.6,dtype=float16,activation=silu",
        {"tile_m": 64, "tile_n": 64, "panel": 64, "stages": 4, "overlap": 0},
    ),
    # Two panels a block column.
    (
        "m=40,k=256,n=256,block=128,sparsity=0.5,dtype=bfloat16",
        {"tile_m": 64, "tile_n": 128, "panel": 64, "stages": 4, "producers": 2, "overlap": 1},
    ),
)
OTHERS: tuple[tuple[str, dict[str, int]], ...] = (
    (
        "m=40,k=256,n=256,block=64,sparsity=0.5,precision=tf32",
        {"tile_m": 64, "tile_n": 128, "panel": 16, "stages": 6, "producers": 2, "overlap": 1},
    ),
    (
        "m=100,k=144,n=72,block=24x8,sparsity=0.5,precision=tf32",
        {"tile_m": 128, "tile_n": 48, "panel": 16, "stages": 6, "overlap": 1},
    ),
    (
        "m=100,k=144,n=96,block=48x16,sparsity=0.5,dtype=float16,bias=1,turned=1",
        {"tile_m": 128, "tile_n": 48, "panel": 16, "stages": 4, "overlap": 1},
    ),
    # Sides that are no powers of two, three panels a block column.
    (
        "m=100,k=144,n=72,block=24x48,sparsity=0.5,dtype=float16,bias=1",
        {"tile_m": 128, "tile_n": 48, "panel": 16, "stages": 4, "overlap": 1},
    ),
    (
        "m=70,k=256,n=256,block=64,sparsity=0.7,dtype=bfloat16",
        {"tile_m": 64, "tile_n": 64, "panel": 64, "stages": 4, "overlap": 1},
    ),
    (
        "m=70,k=128,n=80,block=8x32,sparsity=0.7,dtype=bfloat16,pattern=skewed",
        {"tile_m": 64, "tile_n": 64, "panel": 64, "stages": 4, "overlap": 0},
    ),
    (
        "m=260,k=64,n=64,block=32,sparsity=0.5,dtype=bfloat16",
        {"tile_m": 256, "tile_n": 64, "panel": 32, "stages": 3, "overlap": 1},
    ),
)


@pytest.mark.parametrize(("axes", "point"), [*POINTS, *(thorough(*other) for other in OTHERS)])
def test_points_equal_the_reference(axes: str, point: dict[str, int]) -> None:
    """Also with columns in any order, repeated blocks, empty block rows, NaN and infinities."""
    problem, template = parse(f"bsr_matmul/{axes}"), spaces.find("block_warpgroups")
    point = {name: (ALONE | point)[name] for name in template.space(problem, SM90)}
    assert template.point(problem, SM90, point) is None
    check_emulated(problem, template, point)


def drawn_problem(rng: random.Random) -> BsrMatmul:
    """Any block whose sides are multiples of 8, any number of rows of x, and every option."""
    rows, cols = rng.choice((8, 16, 24, 32, 48, 64)), rng.choice((8, 16, 32, 48, 64))
    return BsrMatmul(
        rng.choice((rng.randint(1, 32), rng.randint(33, 140))), cols * rng.randint(1, 6), rows * rng.randint(1, 5),
        f"{rows}x{cols}", round(rng.uniform(0, 0.95), 2), rng.choice(("uniform", "skewed")),
        rng.choice(("float16", "bfloat16", "float32")), rng.randint(0, 1), rng.choice(ACTIVATIONS),
        turned=int(rng.random() < 0.2), precision=rng.choice(("", "tf32")),
    )  # fmt: skip


@pytest.mark.parametrize("number", [0, 1, *(thorough(number) for number in range(2, 100))])
def test_drawn_problems_and_points(number: int) -> None:
    """Any template that serves the problem, and any structure of inputs."""
    rng = random.Random(f"{RUN_SEED}/{number}")
    problem = drawn_problem(rng)
    template = spaces.find(rng.choice(list(spaces.applicable(problem, SM90)[0])))
    default = template.candidate(template.default(problem, SM90))
    [candidate] = drawn(template, problem, SM90, 1, f"{RUN_SEED}/{number}") or [default]
    print(problem.key, candidate)
    structure = rng.randrange(len(problem.structures))
    # With every second structure the weight is a constant one, which kernels may read before their producer is done.
    constant = ("data", "indices", "indptr", "order") if structure % 2 == 0 else ()
    check_emulated(problem, template, candidate.values, constant, structure, len(problem.structures))


def test_the_default_is_where_it_is_the_faster_template() -> None:
    """With wide blocks, enough rows of x and enough work; `tensor_core` elsewhere."""

    def first(axes: str) -> str:
        problem = parse(f"bsr_matmul/{axes},dtype=bfloat16")
        return spaces.fallback(problem, SM90).template

    assert first("m=512,k=4096,n=4096,block=64,sparsity=0.8") == "block_warpgroups"
    assert first("m=512,k=4096,n=4096,block=128,sparsity=0.8") == "block_warpgroups"
    assert first("m=512,k=4096,n=4096,block=32,sparsity=0.8") == "tensor_core"
    assert first("m=4096,k=4096,n=4096,block=32,sparsity=0.8") == "block_warpgroups"
    assert first("m=1024,k=4096,n=4096,block=32,sparsity=0.8") == "tensor_core"
    assert first("m=64,k=4096,n=4096,block=64,sparsity=0.8") == "tensor_core"
    assert first("m=512,k=1024,n=1024,block=64,sparsity=0.95") == "tensor_core"


@pytest.mark.parametrize("turned", [0, 1])
def test_no_block_at_all(turned: int) -> None:
    axes, template = f"m=40,k=64,n=64,block=16,sparsity=1,dtype=float16,turned={turned}", "block_warpgroups"
    problem = parse(f"bsr_matmul/{axes}")
    check_emulated(problem, spaces.find(template), spaces.find(template).default(problem, SM90), step=4)


def test_transposed_blocks_are_read_as_they_are_where_that_is_the_faster_way() -> None:
    def reads(m: int, block: tuple[int, int], dtype: str = "bfloat16", arch: str = "sm_90a") -> bool:
        blocks = round(0.2 * 4096**2 / (block[0] * block[1]))
        return reads_turned(m, 4096, 4096, block, blocks, dtype, machine.resolve(arch))

    assert reads(8192, (32, 32)) and reads(512, (64, 64)) and reads(8192, (64, 128))
    assert not reads(8192, (16, 16)) and not reads(64, (64, 64)) and not reads(8192, (24, 64))
    assert not reads(8192, (64, 64), "float32") and not reads(8192, (64, 64), arch="sm_80")


NOT_FIT = {
    "tf32 is not asked for": "m=128,k=256,n=256,block=32,sparsity=0.5",
    "multiples of 8 rows": "m=128,k=256,n=256,block=32x8,sparsity=0.5,dtype=float16",
    "transposed blocks of 24 columns": "m=128,k=256,n=240,block=24x32,sparsity=0.5,dtype=float16,turned=1",
    "32 columns in float32": "m=128,k=256,n=256,block=32,sparsity=0.5,precision=tf32,turned=1",
    "fills too little": "m=32,k=256,n=256,block=32,sparsity=0.5,dtype=float16",
}


@pytest.mark.parametrize("reason", NOT_FIT)
def test_what_does_not_fit_says_why(reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        spaces.find("block_warpgroups").space(parse(f"bsr_matmul/{NOT_FIT[reason]}"), SM90)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120", "compute_90"])
def test_other_architectures_have_no_such_products(arch: str) -> None:
    with pytest.raises(NotApplicable, match="wgmma"):
        problem = parse("bsr_matmul/m=128,k=256,n=256,block=32,sparsity=0.5,dtype=float16")
        spaces.find("block_warpgroups").space(problem, machine.resolve(arch))


REFUSED = {
    "block rows in a thread block": ("k=1024,n=1024,block=8x16", {"tile_n": 256}),
    "exceed the registers": ("k=1024,n=1024,block=64", {"tile_m": 256, "tile_n": 256}),
    "shared memory": ("k=1024,n=1024,block=64", {"tile_n": 256, "stages": 8}),
    "no room for a tile of y": ("k=1024,n=1024,block=16", {"tile_n": 256, "panel": 16, "stages": 2}),
    "twice a row": ("k=64,n=1024,block=64", {"stages": 3}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_point_says_why(reason: str) -> None:
    axes, decisions = REFUSED[reason]
    problem = parse(f"bsr_matmul/m=512,{axes},sparsity=0.5,dtype=bfloat16")
    template = spaces.find("block_warpgroups")
    base = {"tile_m": 128, "tile_n": 128, "panel": 64, "stages": 2, **ALONE, "overlap": 1}
    assert reason in (template.point(problem, SM90, base | decisions) or "")
