"""The output layer on a CPU: a vectorised product into a workspace, then a scan of each row for its best.

A thread multiplies a tile at a time, `tile_n` tokens by `tile_m` rows of hidden states, with a SIMD vector of partial
sums for each product. Rows of tokens are read once if all hidden states of a list stay in the L2 cache; those of a
later tile are prefetched meanwhile. In bfloat16 a CPU with AVX512_BF16 multiplies and adds pairs of columns (`dots`).
The scan is that of softmax + top-k (`softmax_topk.row_scan`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm_sparse.core.machine import AVX512_BF16, Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template

from ..words import stored_of

# Rows of hidden states and words whose products are made together. AVX-512 has 32 vector registers for their sums.
TILE_M, TILE_N = (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8)
MAX_SUMS = 32
# Elements of a SIMD vector, and of a vector register of AVX-512.
SIMD = (8, 16, 32)
REGISTER = 16
# How many tiles ahead of the one that is multiplied words are prefetched; 0: no prefetch instructions.
PREFETCH = (0, 1, 2, 4)


def space(problem: Any, machine: Machine) -> Table:
    whole = problem.dtype == "bfloat16" and not stored_of(problem)
    dots = (0, 1) if whole and AVX512_BF16 in machine.instructions.split() else (0,)
    return {"tile_m": TILE_M, "tile_n": TILE_N, "simd": SIMD, "prefetch": PREFETCH, "dots": dots}


def allowed(problem: Any, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["dots"] and decisions["simd"] != REGISTER:
        return f"dots are of vectors of {REGISTER} sums"
    sums = decisions["tile_m"] * decisions["tile_n"] * max(1, decisions["simd"] // REGISTER)
    return f"{sums} vectors of sums exceed {MAX_SUMS}" if sums > MAX_SUMS else None


def default(problem: Any, machine: Machine) -> Decisions:
    return {"tile_m": 4, "tile_n": 4, "simd": 16, "prefetch": 2, "dots": max(space(problem, machine)["dots"])}


def build(problem: Any, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, decisions)


rows = partial(
    Template,
    kind="llvm",
    summary="a vectorised product of tiles of words, then a scan of each row",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
)
