"""Host time of a call in microseconds, compared with its unavoidable parts and with PyTorch's own operators.

    python scripts/host_time.py                      # on the GPU if there is one; half a minute
    python scripts/host_time.py --csv scripts/results/host-time-h200.csv
    python scripts/host_time.py --target cpu --no-compiled

`raw` calls the kernel's function with existing outputs; `allocations` is `torch.empty` for the outputs. `custom` is the
operator of torch.ops in eager mode, `idle` an operator with the same arguments that does nothing, `compiled` a function
of torch.compile that consists of the call, `graph` the same under CUDA graphs (mode="reduce-overhead", including its
copies and checks). The clock never waits for the GPU. All take turns, and the figure is the minimum over the rounds,
since other work of the host can only add time. The shapes are small enough for the GPU to keep up. On a CPU the kernel
runs within the call, so every figure except the allocations includes its time.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from reproduction import provenance, write_csv

from tvm_sparse.cli.common import Target, console, errors, machine_here, table
from tvm_sparse.core import registry
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.runtime.dispatch import dispatcher

_libraries: list[Any] = []  # an operator exists as long as the library object that defined it
CALLS = 50  # less than the launch queue's capacity


@dataclass(frozen=True)
class Case:
    """One operator: its problem, the call, and its comparisons."""

    problem: Problem
    call: Callable[..., Any]
    given: tuple[Any, ...]  # of the call
    arguments: tuple[Any, ...]  # of the kernel, before the outputs
    outputs: tuple[Any, ...]
    operator: tuple[Any, tuple[Any, ...]] | None  # of torch.ops, and its arguments
    torch: Callable[[], Any]
    form: str = ""  # of the call, if there are several


def cases(where: Machine) -> list[Case]:
    import torch

    import tvm_sparse
    import tvm_sparse.torch_ops

    device = where.device

    def tensors(problem: Problem) -> list[Any]:
        return [torch.from_numpy(a).to(device) if hasattr(a, "dtype") else a for a in problem.generate(0)]

    def parse(key: str) -> Problem:
        """The problem, with its kernel loaded: otherwise a call may use a kernel with larger extents."""
        problem = registry.parse(key).as_called()
        dispatcher.warmup([problem], where, 1)
        return problem

    found = []
    problem = parse("softmax_topk/batch=8,vocab=1024,k=5")
    logits = tensors(problem)[0]
    outputs = tvm_sparse.softmax_topk(logits, 5)
    ops = torch.ops.tvm_sparse
    found.append(
        Case(problem, tvm_sparse.softmax_topk, (logits, 5), (logits, 1.0, 0), outputs,
             (ops.softmax_topk.default, (logits, 5)),
             lambda: torch.topk(torch.softmax(logits, -1), 5))
    )  # fmt: skip
    problem = parse("softmax/batch=8,vocab=1024")
    result = tvm_sparse.softmax(logits)
    found.append(
        Case(problem, tvm_sparse.softmax, (logits,), (logits, 0), (result,), (ops.softmax.default, (logits,)),
             lambda: torch.softmax(logits, -1))
    )  # fmt: skip
    problem = parse("bsr_matmul/m=8,k=256,n=256,block=16,sparsity=0.9")
    x, data, indices, indptr = tensors(problem)[:4]
    weight = tvm_sparse.BsrWeight((data, indices, indptr), columns=256)
    y = tvm_sparse.bsr_matmul(x, weight)
    known, dense = (weight.data, weight.indices, weight.indptr, weight.order, weight.structure), weight.to_dense()
    found.append(
        Case(weight.problem(8, 0, ""), tvm_sparse.bsr_matmul, (x, weight), (x, *weight.arguments), (y,),
             (ops.bsr_matmul.default, (x, *known)), lambda: torch.nn.functional.linear(x, dense))
    )  # fmt: skip
    problem = parse("nhot_lookup/rows=64,vocab=1000,width=128,nonzeros=5,weighted=1")
    indptr, indices, values, embedding = tensors(problem)
    rows = tvm_sparse.CsrRows((indptr, indices, values), columns=1000)
    summed = tvm_sparse.nhot_lookup(rows, embedding)
    bag = torch.nn.functional.embedding_bag
    found.append(
        Case(rows.problem(128, "float32"), tvm_sparse.nhot_lookup, (rows, embedding), (*rows.arguments, embedding),
             (summed,), (ops.nhot_lookup_rows.default, (indptr, indices, values, embedding)),
             lambda: bag(indices, embedding, indptr, mode="sum", per_sample_weights=values, include_last_offset=True))
    )  # fmt: skip
    problem = parse("head_topk/batch=4,vocab=8000,hidden=256,k=5,dtype=bfloat16")
    hidden, words = (torch.randn(n, 256, device=device).bfloat16() for n in (4, 8000))
    for constant in (False, True):
        best = tvm_sparse.head_topk(hidden, words, 5, normaliser=True, constant=constant)
        found.append(
            Case(problem, lambda h, w, c=constant: tvm_sparse.head_topk(h, w, 5, constant=c), (hidden, words),
                 (hidden, words, 1.0, 0, int(constant)), best,
                 None if constant else (ops.head_topk.default, (hidden, words, 5)),
                 lambda: torch.topk(torch.softmax(torch.nn.functional.linear(hidden, words), -1), 5),
                 "constant" if constant else "")
        )  # fmt: skip
    return [*found, *samples(logits, parse)]


def samples(logits: Any, parse: Callable[[str], Problem]) -> list[Case]:
    """The sampler, with and without a top_k, in each form of its random numbers."""
    import torch

    import tvm_sparse

    rows, device = logits.shape[0], logits.device
    seeds = torch.randint(2**40, (rows, 2), device=device)
    offsets, uniforms = torch.arange(rows, device=device), torch.rand(rows, device=device)
    forms: dict[str, tuple[int, dict[str, Any], tuple[Any, ...]]] = {
        "no seed": (2, {}, (3, 0)),
        "integer seed": (2, {"seed": 3, "offset": 7}, (3, 7)),
        "offset array": (3, {"seed": 3, "offset": offsets}, (3, offsets)),
        "seed array": (1, {"seed": seeds}, (seeds,)),
        "uniforms": (0, {"uniforms": uniforms}, (uniforms,)),
    }
    found = []
    for top_k in (50, None):
        for form, (seeded, options, numbers) in forms.items():
            what = "k=64" if top_k else "k=128,whole=1"
            problem = parse(f"softmax_sample/batch=8,vocab=1024,{what},seeded={seeded}")
            kept = problem.axes["k"]
            outputs = (
                torch.empty(rows, dtype=torch.int32, device=device), torch.empty(rows, device=device),
                torch.empty(rows, kept, device=device), torch.empty(rows, kept, dtype=torch.int64, device=device),
            )  # fmt: skip

            def call(x: Any, top_k: Any = top_k, options: dict[str, Any] = options) -> Any:
                return tvm_sparse.softmax_sample(x, top_k=top_k, top_p=0.9, **options)

            call(logits)
            arguments = (logits, 1.0, top_k or 0, 0.9, 0.0, *numbers)
            found.append(
                Case(problem, call, (logits,), arguments, outputs, None,
                     lambda: torch.multinomial(torch.softmax(logits, -1), 1), form)
            )  # fmt: skip
    return found


def idle(overload: Any, outputs: Sequence[Any]) -> Any:
    """An operator with the schema of this one that does nothing and returns these outputs."""
    import torch

    name = overload._schema.name.split("::")[1]
    library = torch.library.Library("host_time", "FRAGMENT")
    _libraries.append(library)
    library.define(name + str(overload._schema).partition(name)[2].replace(".default", "", 1))
    several = list(outputs) if "Tensor[]" in str(overload._schema) else tuple(outputs)
    results = outputs[0] if len(outputs) == 1 else several
    library.impl(name, lambda keyset, *args: results, "Autograd", with_keyset=True)
    return getattr(torch.ops.host_time, name).default


def contenders(case: Case, where: Machine, compiled: bool) -> dict[str, Callable[[], Any]]:
    import torch

    function = dispatcher.kernel(case.problem, where).function
    arguments, outputs, given, call = case.arguments, case.outputs, case.given, case.call
    shapes = [(tuple(one.shape), one.dtype, one.device) for one in outputs]
    found: dict[str, Callable[[], Any]] = {
        "ours": lambda: call(*given),
        "raw": lambda: function(*arguments, *outputs),
        "allocations": lambda: [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes],
        "torch": case.torch,
    }
    if case.operator is not None:
        custom, operands = case.operator
        nothing = idle(custom, outputs)
        found |= {"custom": lambda: custom(*operands), "idle": lambda: nothing(*operands)}
    if compiled and case.operator is not None:
        found["compiled"] = lambda: traced(*given)
        traced = torch.compile(lambda *a: call(*a), fullgraph=True)
        if where.kind == "cuda":
            captured = torch.compile(lambda *a: call(*a), fullgraph=True, mode="reduce-overhead")
            found["graph"] = lambda: captured(*given)
    return found


def host_times(found: dict[str, Callable[[], Any]], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Seconds per call, the minimum over the rounds."""
    best = dict.fromkeys(found, float("inf"))
    for number in range(rounds + 1):  # the first round is a warm-up, which includes compilation
        for name, call in found.items():
            if number == 0:
                for _ in range(5):
                    call()
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
    wait()
    return best


def main(
    target: Target = "auto",
    compiled: Annotated[bool, typer.Option(help="Also inside of torch.compile, which compiles for seconds.")] = True,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    csv: Annotated[Path | None, typer.Option(help="Where the figures go, too.")] = None,
) -> None:
    with errors():
        where = machine_here(target, "timing calls")
        if where.kind == "llvm":
            os.environ.setdefault("TVM_NUM_THREADS", "1")  # the host's time is that of one thread
        import torch

        logging.getLogger("tvm_sparse").setLevel(logging.ERROR)
        wait = torch.cuda.synchronize if where.kind == "cuda" else lambda: None
        names = ["raw", "allocations", "ours", "torch", "custom", "idle", *(["compiled", "graph"] if compiled else [])]
        ratios = ["ours / (raw + allocations)", "ours / torch", "custom / ours"]
        shown, rows = table("problem", *names, *ratios, right=(*names, *ratios)), []
        for case in cases(where):
            times = host_times(contenders(case, where, compiled), rounds, wait)
            ours = times["ours"]
            shares = (ours / (times["raw"] + times["allocations"]), ours / times["torch"])
            shares += (times["custom"] / ours,) if "custom" in times else ()
            cells = [f"{times[name] * 1e6:.2f}" if name in times else "-" for name in names]
            ratios_shown = [f"{share:.2f}" for share in shares] + ["-"] * (len(ratios) - len(shares))
            name = f"{case.problem.typed} ({case.form})" if case.form else case.problem.typed
            rows.append([name, *cells, *ratios_shown])
            shown.add_row(*rows[-1])
        console().print(f"Host time on {where.name} ({where.arch}), PyTorch {torch.__version__}; microseconds a call")
        console().print(shown)
        if csv:
            timing = f"calls from Python in microseconds, least of {rounds} rounds of {CALLS}; nothing waits"
            write_csv(csv, provenance(where) | {"timing": timing}, ("problem", *names, *ratios), rows)


if __name__ == "__main__":
    sys.exit(typer.run(main))
