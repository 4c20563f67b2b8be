"""Least time of a launch on this GPU, by the bytes it reads: the limit for products with small weights.

    python scripts/launch_floor.py          # about half a minute

The kernels only read, sum and store: one vector of x per thread and, with a weight, its vectors too, once and in order,
without indices, with rows of equal length. The last ones instead gather x like a product of 8 rows of x with blocks of
16 x 16: two halves of a row for each block, from given random columns; with and without reading the blocks, before the
producer kernel is done (`BsrWeight(constant=True)`). They are started by programmatic dependent launch, like ours. Each
is timed with hot inputs and with rotated inputs that exceed the L2 cache, in CUDA graphs, and compared with the time of
reading its bytes from memory. Writes a CSV with GPU, versions and date into scripts/results/.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import typer
from floors import build
from reproduction import provenance, result_path, write_csv

from tvm_sparse.bench.compare import in_turn
from tvm_sparse.bench.timing import time_cuda
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us

# x of the gathering kernels: 8 rows of 4,096 elements of 16 bits, here as 32-bit words.
X_ROWS, X_WORDS = 8, 2048


class Kernel(NamedTuple):
    blocks: int
    threads: int
    vectors: int  # 16-byte vectors of the weight per thread
    gathers: int = 0  # vectors of x per thread from given columns; 0: one in order
    ahead: bool = False  # reads the weight before the producer kernel is done


# Five vectors of 256 x 256 threads are 5.2 MB: the stored blocks of a half-precision weight of 4096 x 4096 of which 85
# % are zero. Four vectors of 256 x 320 threads are the same size, with two gathers per thread for the octets of 40
# blocks per row.
KERNELS = (
    Kernel(128, 128, 0),
    Kernel(256, 256, 0),
    Kernel(64, 256, 2),
    Kernel(256, 256, 1),
    Kernel(256, 256, 5),
    Kernel(128, 512, 5),
    Kernel(1056, 256, 8),
    Kernel(256, 256, 5, ahead=True),
    Kernel(256, 320, 0, gathers=2),
    Kernel(256, 320, 4, gathers=2, ahead=True),
)
MOST_COPIES = 50


def module_of(kernel: Kernel) -> Any:
    """The kernel, as a function of x, the weight, the columns and y."""
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.overlap import overlapping
    from tvm_sparse.schedules.device.words import load_words

    blocks, threads, vectors, gathers, ahead = kernel
    reads = max(gathers, 1)

    # fmt: off
    @T.inline
    def read_weight(W, b, t, words):
        for v in T.unroll(vectors):
            load_words(16, words, (reads + v) * 4, None, W.ptr_to([((b * vectors + v) * threads + t) * 4]))

    @T.prim_func
    def main(x_h: T.handle, weight_h: T.handle, columns_h: T.handle, y_h: T.handle):
        X = T.match_buffer(x_h, (X_ROWS, X_WORDS), "float32")
        W = T.match_buffer(weight_h, (blocks * threads * max(vectors, 1) * 4,), "float32")
        C = T.match_buffer(columns_h, (blocks * reads * (threads // 8),), "int32")
        Y = T.match_buffer(y_h, (blocks * threads,), "float32")
        T.device_entry()
        T.ptx.griddepcontrol.launch_dependents()
        b = T.cta_id([blocks])
        t = T.thread_id([threads])
        words = T.alloc_local([(vectors + reads) * 4], "uint32")
        column = T.alloc_local([reads], "int32")
        total = T.alloc_local([1], "float32")
        for g in T.unroll(gathers):
            # Four lanes of a warp share a row of x, and eight a column.
            T.ptx.ld.global_.s32(column[g], C.ptr_to([(b * reads + g) * (threads // 8) + t // 32 * 4 + t % 4]))
        if ahead:
            read_weight(W, b, t, words)
        T.ptx.griddepcontrol.wait()
        if gathers == 0:
            load_words(16, words, 0, None, X.ptr_to([0, t * 4]))
        for g in T.unroll(gathers):
            load_words(16, words, g * 4, None, X.ptr_to([t % 32 // 4, column[g]]))
        if not ahead:
            read_weight(W, b, t, words)
        total[0] = T.float32(0)
        for e in T.unroll((vectors + reads) * 4):
            total[0] = total[0] + T.reinterpret("float32", words[e])
        Y[b * threads + t] = total[0]
    # fmt: on
    return tvm.IRModule({"main": overlapping(main.with_attr("global_symbol", "main"))})


def expected(kernel: Kernel, x: Any, weight: Any, columns: Any) -> Any:
    """The kernel's result, by PyTorch."""
    import torch

    blocks, threads, vectors, gathers, _ = kernel
    t = torch.arange(threads, device=x.device)
    if gathers:
        starts = columns.view(blocks, gathers, threads // 8)[:, :, t // 32 * 4 + t % 4].long()
        places = (t % 32 // 4)[:, None] * X_WORDS + starts[..., None] + torch.arange(4, device=x.device)
        wanted = x.view(-1)[places].sum((1, 3))
    else:
        wanted = x.view(-1)[: 4 * threads].view(threads, 4).sum(1).expand(blocks, threads)
    return wanted + weight.view(blocks, vectors, threads, 4).sum((1, 3)) if vectors else wanted


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
            for kernel in KERNELS:
                function = build(module_of(kernel), where, Path(folder) / f"{'_'.join(map(str, kernel))}.so")
                size = kernel.blocks * kernel.threads * max(kernel.vectors, 1) * 4
                copies = min(math.ceil(2 * cache / (4 * size)), MOST_COPIES) if kernel.vectors else 1
                outputs, columns = torch.empty(kernel.blocks * kernel.threads, device="cuda"), []
                for _ in range(copies):
                    # A block's second octet is directly after its first.
                    pairs = torch.randint(X_WORDS // 8, (len(outputs) // 16 * max(kernel.gathers, 1), 1), device="cuda")
                    columns.append((pairs * 8 + torch.tensor([0, 4], device="cuda")).view(-1).int())
                weights = [torch.randn(size, device="cuda") for _ in range(copies)]
                xs = [torch.randn(X_ROWS, X_WORDS, device="cuda") for _ in range(copies)]
                each = [
                    functools.partial(function, x, weight, places, outputs)
                    for x, weight, places in zip(xs, weights, columns, strict=True)
                ]
                for call, *inputs in zip(each, xs, weights, columns, strict=True):
                    call()
                    wanted = expected(kernel, *inputs).reshape(-1)
                    torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-3)
                calls[kernel, "hot"] = each[0]
                if kernel.vectors:
                    calls[kernel, "rotated"] = in_turn(each)
            heads = ("blocks", "threads", "weight MB", "weight", "x", "inputs", "us", "of limit")
            printed = table(*heads, right=("weight MB", "us"))
            for (kernel, inputs), (_, seconds) in time_cuda(calls).items():
                median = sorted(seconds)[len(seconds) // 2]
                threads = kernel.blocks * kernel.threads
                size = 16 * threads * kernel.vectors
                share = (size + 4 * threads) / (where.bandwidth or math.nan) / median
                read = ("ahead" if kernel.ahead else "after the wait") if kernel.vectors else "none"
                line = [kernel.blocks, kernel.threads, size, read, "gathered" if kernel.gathers else "in order", inputs]
                lines.append([*line, f"{median * 1e6:.3f}", f"{share:.3f}"])
                printed.add_row(*map(str, line[:2]), f"{size / 1e6:.1f}", *line[3:], us(median), f"{share:.0%}")
        console().print(printed)
        path = result_path("launch-floor", where).with_suffix(".csv")
        columns_of = ("blocks", "threads", "weight_bytes", "weight", "x", "inputs", "microseconds", "of_limit")
        write_csv(path, facts, columns_of, lines)
        typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
