"""Sampled product on a GPU, a thread an element of a stored block: the fallback that asks nothing of the shape.

Neighbouring threads have neighbouring columns of a block, so that a warp reads whole sectors of `right`, and the same
element of `left`.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm

# Threads of a thread block: whole warps.
THREADS = powers(32, 512)


def space(problem: BsrSddmm, machine: Machine) -> Table:
    return {"threads": THREADS}


def build(problem: BsrSddmm, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.words import load_element
    from ..interface import gpu_program
    from .block_row import find_block_row, load_int

    (rows, cols), (block_rows, _), threads = problem.block_shape, problem.grid, decisions["threads"]
    find = find_block_row(block_rows)

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        many: T.int32 = io.nnzb * (rows * cols)
        group = T.cta_id([T.max((io.nnzb * (rows * cols) + (threads - 1)) // threads, 1)])
        e: T.int32 = group * threads + T.thread_id([threads])
        if e < many:
            block: T.int32 = e // (rows * cols)
            row: T.int32 = 0
            column: T.int32 = 0
            find(io, row, block)
            load_int(column, io.indices.ptr_to([block]))
            j: T.int32 = row * rows + e // cols % rows
            c: T.int32 = column * cols + e % cols
            total: T.float32 = T.float32(0)
            for i in T.serial(io.m):
                total = total + load_element(problem.dtype, io.left.ptr_to([i, j])) * load_element(
                    problem.dtype, io.right.ptr_to([i, c]))
            io.data[block, e // cols % rows, e % cols] = T.Cast(problem.dtype, total)
    # fmt: on
    return gpu_program(problem, body)


sampled_elements = Template(
    name="sampled_elements",
    version=1,
    operator="bsr_sddmm",
    kind="cuda",
    summary="a thread an element of a stored block",
    space=space,
    default=lambda problem, machine: {"threads": 128},
    program=build,
    explicit_threads=True,
)
