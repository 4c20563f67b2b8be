"""The time of reading: kernels that only read rows of a matrix, sum and store, in CUDA graphs like ours.

A roofline of memory bandwidth ignores the start of a kernel, the latency of its first bytes, and multiprocessors that
end before others. These kernels include all of that, and nothing else: each warp loads all vectors of its rows before
it adds the first. They are started by programmatic dependent launch, like ours. The fastest of several such kernels is
the floor.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from heads import Call, behind

from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.bench.timing import time_cuda
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import ceildiv
from tvm_sparse.runtime.loading import load_function

WARP, VECTOR = 32, 16
# Most vectors that a thread has in flight: more take registers, and so reduce the number of warps.
MOST_VECTORS = 16


class Reader(NamedTuple):
    threads: int  # of a thread block
    each: int  # rows per warp


READERS = tuple(Reader(threads, each) for threads in (128, 256, 512) for each in (1, 2, 4))
ROUNDS = 5  # for finding the fastest
LARGEST = 1e37  # bound for sums that are checked


def module_of(reader: Reader, rows: int, row_bytes: int, named: int | None) -> Any:
    """A function of a matrix of 32-bit words, the indices of `named` rows, and their sums. `named=None`: all rows in
    order, without reading indices.
    """
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.overlap import overlapping
    from tvm_sparse.schedules.device.words import load_words

    threads, each = reader
    count = rows if named is None else named
    warps, in_row, words = threads // WARP, row_bytes // VECTOR, row_bytes // 4
    vectors = ceildiv(in_row, WARP)

    # fmt: off
    @T.prim_func
    def main(matrix_h: T.handle, ids_h: T.handle, sums_h: T.handle):
        matrix = T.match_buffer(matrix_h, (rows, words), "float32")
        ids = T.match_buffer(ids_h, (named or 1,), "int32")
        sums = T.match_buffer(sums_h, (count,), "float32")
        T.device_entry()
        T.ptx.griddepcontrol.launch_dependents()
        b = T.cta_id([ceildiv(count, warps * each)])
        t = T.thread_id([threads])
        held = T.alloc_local([each * vectors * 4], "uint32")
        row = T.alloc_local([each], "int32")
        total = T.alloc_local([1], "float32")
        T.ptx.griddepcontrol.wait()
        for e in T.unroll(each):
            row[e] = T.min((b * warps + t // WARP) * each + e, count - 1)
            if named is not None:
                T.ptx.ld.global_.s32(row[e], ids.ptr_to([row[e]]))
        for i in T.unroll(each * vectors * 4):
            held[i] = T.uint32(0)
        for e in T.unroll(each):
            for v in T.unroll(vectors):
                if in_row % WARP == 0 or v * WARP + t % WARP < in_row:
                    load_words(
                        16, held, (e * vectors + v) * 4, None, matrix.ptr_to([row[e], (v * WARP + t % WARP) * 4]))
        for e in T.unroll(each):
            total[0] = T.float32(0)
            for i in T.unroll(vectors * 4):
                total[0] = total[0] + T.reinterpret("float32", held[e * vectors * 4 + i])
            for i in T.unroll(5):
                total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), total[0], 1 << i, 32, 32)
            if t % WARP == 0 and (b * warps + t // WARP) * each + e < count:
                sums[(b * warps + t // WARP) * each + e] = total[0]
    # fmt: on
    return tvm.IRModule({"main": overlapping(main.with_attr("global_symbol", "main"))})


def build(module: Any, machine: Machine, path: Path) -> Any:
    """The function of a module, from a library that is written there."""
    import tvm

    from tvm_sparse.artifacts import cuda

    cuda.activate()
    target = target_of(machine)
    with target:
        tvm.compile(module, target=target, tir_pipeline="tirx").export_library(str(path))
    return load_function(path, "cuda", None)


@contextmanager
def fastest(machine: Machine) -> Iterator[Callable[..., Call | None]]:
    """Finds the fastest reader of rows; the libraries live as long as the context.

    The yielded function takes (matrix, ids=None, before=None): a contiguous matrix; the int32 indices of the rows to
    read, or None for all; and a call that runs before each read. It returns a checked call, which does not run
    `before`; or None if launches do not overlap, or rows are not whole 16-byte vectors.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = (Path(folder) / f"{number}.so" for number in itertools.count())

        def find(matrix: torch.Tensor, ids: torch.Tensor | None = None, before: Call | None = None) -> Call | None:
            if not machine.has_clusters or matrix.shape[1] * matrix.element_size() % VECTOR:
                return None
            words = matrix.view(torch.float32)
            named = None if ids is None else ids.reshape(-1)
            row_bytes = words.shape[1] * 4
            numbers = torch.zeros(1, dtype=torch.int32, device=matrix.device) if named is None else named
            read = (words if named is None else words[named.long()]).double()
            wanted, scale, sums = read.sum(1), read.abs().sum(1), torch.empty(len(read), device=matrix.device)
            calls: dict[Reader, Call] = {}
            for reader in READERS:
                if reader.each > 1 and reader.each * ceildiv(row_bytes, VECTOR * WARP) > MOST_VECTORS:
                    continue
                module = module_of(reader, len(words), row_bytes, None if named is None else len(named))
                call = functools.partial(build(module, machine, next(paths)), words, numbers, sums)
                sums.fill_(torch.nan)
                call()
                # Two 16-bit numbers are read as one 32-bit word, whose sums may have no meaning.
                held = scale < LARGEST
                if not bool((abs(sums.double() - wanted)[held] <= 1e-5 * scale[held]).all()):
                    raise AssertionError(f"{reader}: sums differ")
                calls[reader] = call
            some = {reader: behind(before, call) for reader, call in calls.items()} if before else calls
            timed = time_cuda(some, ROUNDS)
            return calls[min(timed, key=lambda reader: sorted(timed[reader][1])[ROUNDS // 2])]

        yield find
