"""What a launch takes at least on this GPU, by what it reads: the limit of products with small weights.

    python scripts/launch_floor.py          # about half a minute

The kernels do nothing but read, add up and store: a vector of x a thread and, with a weight, that too, once and in
order, without indices, with rows of equal length. They overlap the launch before as ours do. Each is timed hot and with
weights in turn that exceed the L2 cache, in CUDA graphs, and compared with the time in which memory brings its bytes.
Writes a CSV with GPU, versions and date into scripts/results/.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import typer
from reproduction import provenance, result_path, write_csv

from tvm_sparse import peers
from tvm_sparse.artifacts.compile import target_of
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.machine import Machine
from tvm_sparse.runtime.loading import load_function

# Blocks, threads a block, and vectors of 16 bytes of the weight a thread. Five of 256 x 256 threads are 5.2 MB: the
# stored blocks of a half-precision weight of 4096 x 4096 of which 85 % are zero.
KERNELS = ((128, 128, 0), (256, 256, 0), (64, 256, 2), (256, 256, 1), (256, 256, 5), (128, 512, 5), (1056, 256, 8))
MOST_COPIES = 50


def build(blocks: int, threads: int, vectors: int, machine: Machine, folder: Path) -> Any:
    """The kernel, as a function of x, the weight and y."""
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.artifacts import cuda_toolchain
    from tvm_sparse.schedules.overlap import await_previous, overlapping
    from tvm_sparse.schedules.words import load_words

    # fmt: off
    @T.prim_func
    def main(x_h: T.handle, weight_h: T.handle, y_h: T.handle):
        X = T.match_buffer(x_h, (threads * 4,), "float32")
        W = T.match_buffer(weight_h, (blocks * threads * max(vectors, 1) * 4,), "float32")
        Y = T.match_buffer(y_h, (blocks * threads,), "float32")
        T.device_entry()
        b = T.cta_id([blocks])
        t = T.thread_id([threads])
        words = T.alloc_local([(vectors + 1) * 4], "uint32")
        total = T.alloc_local([1], "float32")
        await_previous()
        load_words(16, words, 0, None, X.ptr_to([t * 4]))
        for v in T.unroll(vectors):
            load_words(16, words, v * 4 + 4, None, W.ptr_to([((b * vectors + v) * threads + t) * 4]))
        total[0] = T.float32(0)
        for e in T.unroll((vectors + 1) * 4):
            total[0] = total[0] + T.reinterpret("float32", words[e])
        Y[b * threads + t] = total[0]
    # fmt: on
    cuda_toolchain.activate()
    target, path = target_of(machine), folder / f"{blocks}_{threads}_{vectors}.so"
    with target:
        module = tvm.compile(
            tvm.IRModule({"main": overlapping(main.with_attr("global_symbol", "main"))}),
            target=target, tir_pipeline="tirx",
        )  # fmt: skip
    module.export_library(str(path))
    return load_function(path, "cuda", None)


def main(target: Target = "auto") -> None:
    """Time kernels that only read, add up and store."""
    import torch

    with errors():
        where = machine_here(target, "measuring")
        if not where.has_clusters:
            raise typer.BadParameter("expected a GPU whose launches overlap (compute capability 9.0)")
        facts = provenance(where)
        cache, lines, calls = torch.cuda.get_device_properties().L2_cache_size, [], {}
        with tempfile.TemporaryDirectory() as folder:
            for blocks, threads, vectors in KERNELS:
                function = build(blocks, threads, vectors, where, Path(folder))
                size = blocks * threads * max(vectors, 1) * 4
                copies = min(math.ceil(2 * cache / (4 * size)), MOST_COPIES)
                x, y = torch.randn(threads * 4, device="cuda"), torch.empty(blocks * threads, device="cuda")
                weights = [torch.randn(size, device="cuda") for _ in range(copies if vectors else 1)]
                function(x, weights[0], y)
                wanted = x.view(-1, 4).sum(1) + (
                    weights[0].view(blocks, vectors, threads, 4).sum((1, 3)) if vectors else torch.zeros(1, 1).cuda()
                )
                torch.testing.assert_close(y.view(blocks, threads), wanted.expand(blocks, threads))
                each = [functools.partial(function, x, weight, y) for weight in weights]
                calls[blocks, threads, vectors, "hot"] = each[0]
                if vectors:
                    calls[blocks, threads, vectors, "rotated"] = peers.in_turn(each)
            printed = table("blocks", "threads", "weight MB", "inputs", "us", "of limit", right=("weight MB", "us"))
            for (blocks, threads, vectors, inputs), (_, seconds) in peers.time_cuda(calls).items():
                median = sorted(seconds)[len(seconds) // 2]
                size = 16 * blocks * threads * vectors
                share = (size + 4 * blocks * threads) / (where.bandwidth or math.nan) / median
                lines.append([blocks, threads, size, inputs, f"{median * 1e6:.3f}", f"{share:.3f}"])
                printed.add_row(str(blocks), str(threads), f"{size / 1e6:.1f}", inputs, us(median), f"{share:.0%}")
        console().print(printed)
        path = result_path("launch-floor", where).with_suffix(".csv")
        write_csv(path, facts, ("blocks", "threads", "weight_bytes", "inputs", "microseconds", "of_limit"), lines)
        typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
