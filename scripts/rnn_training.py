"""Forward and backward pass of sparse recurrent layers, beside torch's modules (cuDNN on a GPU).

    python scripts/rnn_training.py --csv scripts/results/rnn-training-h200.csv      # a minute or two

A case is hidden units, batch, steps, density and cell ("tanh" if none is named); patterns are random. "sparse layer" is
ours with a projected input: the gradients of that input and of the stored weights. "+ input product" is a trained
`RecurrentStack` with the gradients of its input and of all its parameters, like "torch module", whose recurrent weight
has its dense gradient; "dense way" is that stack with `dense=True`. "forward" is the forward pass alone, with what the
backward pass needs. The gradient of the input is compared with that of the dense layer in float64. On a GPU, CUDA
graphs are timed; in float32 input products use TF32, as cuDNN does by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from heads import Call, Report, Timed, over, ready, show, timed
from recurrent import (
    DTYPES,
    MODULE,
    OURS,
    PRODUCT,
    ROUNDS,
    Case,
    Drawn,
    as_cudnn,
    cell_of,
    draw,
    prepared,
    timing_cells,
)
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.layers.recurrent import launches, projected_bias
from tvm_sparse.operators.recurrent_backward.autograd import pattern_of
from tvm_sparse.operators.recurrent_backward.call import problem_of as problem_back
from tvm_sparse.operators.sparse_recurrent.call import problem_of
from tvm_sparse.operators.sparse_recurrent.problem import GATES
from tvm_sparse.runtime.dispatch import dispatcher

CASES = (
    "1792,4,256,0.1", "1792,1,256,0.1", "1792,16,256,0.1", "1152,4,256,0.1", "1024,4,256,0.125,lstm",
    "1024,16,256,0.125,lstm", "1024,32,256,0.125,lstm", "1024,4,256,0.125,gru", "512,4,256,0.1,lstm",
)  # fmt: skip
FORWARD, BOTH, WAY = "forward", "both", "dense way"
# Largest error of the input's gradient, as a share of its largest element.
TOLERANCE = {"float32": 5e-3, "float16": 3e-2, "bfloat16": 2e-1}
COLUMNS = ("cell", "hidden", "batch", "steps", "density", "nonzeros", "dtype", "implementation", "passes",
           "microseconds", "microseconds_a_step", "over_ours", "error", "timed", "kernel", "note")  # fmt: skip


def problems_of(case: Case, layer: Any) -> dict[str, Problem]:
    """The problems of every launch of both passes, by pass; the first of each pass is that of the first launch."""
    found = {}
    shapes = launches(case.steps, case.batch, case.hidden * GATES[case.cell])
    for number, (steps, batch) in enumerate(dict.fromkeys(shapes)):
        back = pattern_of(layer.weights, "cpu").transposed(None, batch)
        found[f"{FORWARD}{number or ''}"] = problem_of(layer.weights, steps, batch, case.cell)
        found[f"{BOTH}{number or ''}"] = problem_back(back, steps, batch, case.cell)
    return found


def passes(call: Callable[[], torch.Tensor], leaves: list[Any], weighed: torch.Tensor) -> tuple[Call, Call]:
    """The forward pass, and both; a call of both returns the gradient of the first leaf, which is the input."""

    def both() -> Any:
        return torch.autograd.grad(call(), leaves, weighed)[0]

    return lambda: call().detach(), both


def ours(drawn: Drawn, dtype: str, weighed: torch.Tensor) -> tuple[Call, Call]:
    layer, x = drawn.layers[dtype], drawn.projected(dtype).requires_grad_()
    values = pattern_of(layer.weights, x.device).own.clone().requires_grad_()
    zeros = x.new_zeros(drawn.case.batch, drawn.case.hidden)
    states = (zeros,) * (1 + (drawn.case.cell == "lstm"))
    return passes(lambda: layer._call(x, states, None, None, None, values=values)[0], [x, values], weighed)


def ours_with_product(drawn: Drawn, dtype: str, weighed: torch.Tensor, dense: bool = False) -> tuple[Call, Call]:
    bias = projected_bias(drawn.of("bias_ih", dtype), drawn.of("bias_hh", dtype), drawn.case.cell)
    inputs = [(drawn.of("weight_ih", dtype), bias)]
    stack = tvm_sparse.RecurrentStack([drawn.layers[dtype]], inputs, dense=dense).trainable()
    x = drawn.of("x", dtype).clone().requires_grad_()
    leaves = [x, *stack.parameters()]

    def call() -> torch.Tensor:
        return stack(x)[0]

    forward, both = passes(call, leaves, weighed)
    return within(forward), within(both)


def module(drawn: Drawn, dtype: str, weighed: torch.Tensor) -> tuple[Call, Call]:
    case, kind = drawn.case, {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    given: dict[str, Any] = {"device": drawn.device, "dtype": getattr(torch, dtype)}
    if case.cell in kind:
        made = kind[case.cell](case.hidden, case.hidden, **given)
    else:
        made = torch.nn.RNN(case.hidden, case.hidden, nonlinearity=case.cell, **given)
    for name in ("weight_hh", "weight_ih", "bias_ih", "bias_hh"):
        getattr(made, f"{name}_l0").detach().copy_(getattr(drawn, name))
    made.flatten_parameters()
    x = drawn.of("x", dtype).clone().requires_grad_()
    return passes(lambda: made(x)[0], [x, *made.parameters()], weighed)


def within(call: Call) -> Call:
    def found() -> Any:
        with as_cudnn():
            return call()

    return found


def reference(drawn: Drawn, projected: bool, weighed: torch.Tensor) -> torch.Tensor:
    """The gradient of the input, or of the projected input, in float64."""
    case = drawn.case
    x = drawn.x.double().requires_grad_()
    weights = (getattr(drawn, name).double() for name in ("weight_ih", "bias_ih", "bias_hh"))
    inputs = tvm_sparse.project_inputs(x, *weights, cell=case.cell)
    bias = drawn.bias_hh.double()[-case.hidden :] if case.cell == "gru" else None
    step, weight = cell_of(case.cell, bias, False), drawn.weight_hh.double()
    zeros = torch.zeros((case.batch, case.hidden), dtype=x.dtype, device=x.device)
    states: tuple[Any, ...] = (zeros, zeros) if case.cell == "lstm" else (zeros,)
    found = []
    for t in range(case.steps):
        states = step(inputs[t], states[0] @ weight.T, states)
        found.append(states[0])
    return torch.autograd.grad(torch.stack(found), inputs if projected else x, weighed.double())[0]


def error_of(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def show_kernels(title: str, call: Call) -> None:
    """Print the time of each kernel of a call, as PyTorch's profiler has it."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    typer.echo(f"\nkernels of {title}")
    typer.echo(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=60))


def measured(
    case: Case, where: Machine, report: Report, dtypes: tuple[str, ...], rounds: int, seed: int, profile: bool = False
) -> Any:
    """Results by implementation, passes and dtype."""
    typer.echo(f"measuring {case}", err=True)
    drawn = draw(case, where.device, dtypes, seed)
    generator = torch.Generator(where.device).manual_seed(seed + 1)
    shape = (case.steps, case.batch, case.hidden)
    weighed = torch.randn(shape, generator=generator, device=where.device)
    wanted = {projected: reference(drawn, projected, weighed) for projected in (True, False)}
    dense = functools.partial(ours_with_product, dense=True)
    makers: dict[str, Any] = {OURS: ours, PRODUCT: ours_with_product, WAY: dense, MODULE: module}
    calls, checks, errors_found = {}, {}, {}
    for dtype in dtypes:
        given = weighed.to(getattr(torch, dtype))
        for name, make_passes in makers.items():
            made = functools.cache(functools.partial(make_passes, drawn, dtype, given))
            calls[name, FORWARD, dtype] = prepared(lambda made=made: made()[0])
            calls[name, BOTH, dtype] = prepared(lambda made=made: made()[1])

            def check(found: Any, key: Any = (name, BOTH, dtype), projected: bool = name == OURS) -> None:
                errors_found[key] = error_of(wanted[projected], found)
                if not errors_found[key] <= TOLERANCE[key[2]]:
                    raise Mismatch(
                        f"{case}: the gradient of the input is off by {errors_found[key]:.3g} of its largest"
                    )

            checks[name, BOTH, dtype] = check
    names = {key: ", ".join(key) for key in calls}
    problems = {dtype: problems_of(case, layer) for dtype, layer in drawn.layers.items()}
    with ready([one for found in problems.values() for one in found.values()], where):
        found = timed(
            {names[key]: call for key, call in calls.items()},
            {names[key]: one for key, one in checks.items()},
            where.device,
            rounds,
        )
        if profile and where.device == "cuda":
            for (name, _, dtype), call in calls.items():
                if (name, dtype) == (OURS, dtypes[-1]):
                    show_kernels(f"{case}, {dtype}", call)
    results = {key: found[name] for key, name in names.items()}
    for (name, which, dtype), result in results.items():
        kernel = ""
        if name == OURS:
            kernel = str(dispatcher.explain(problems[dtype][which], where).candidate)
        report.add(
            **timing_cells(drawn, dtype, name, result),
            passes=which,
            over_ours=over(result, results[OURS, which, dtype]),
            error=f"{errors_found[name, which, dtype]:.2g}" if (name, which, dtype) in errors_found else "",
            kernel=kernel,
        )
    return results


def main(
    target: Target = "auto",
    case: Annotated[list[str] | None, typer.Option(help="Only these hidden,batch,steps,density[,cell].")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of weights and states; default: float32, float16.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing on a GPU.")] = ROUNDS,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
    profile: Annotated[bool, typer.Option(help="Print the kernels of our layer's passes.")] = False,
) -> None:
    """Time the training of sparse recurrent layers and of torch's modules."""
    with errors():
        where = machine_here(target, "comparing")
        report, dtypes = Report(csv_path, provenance(where), COLUMNS), tuple(dtype or DTYPES)
        results: dict[Case, dict[tuple[str, str, str], Timed]] = {}
        for text in case or CASES:
            one = Case.parsed(text)
            results[one] = measured(one, where, report, dtypes, rounds, seed, profile)
        columns = [(name, which) for which in (FORWARD, BOTH) for name in (OURS, PRODUCT, WAY, MODULE)]
        for kind in dtypes:
            rows = []
            for one, found in results.items():
                gain = over(found[MODULE, BOTH, kind], found[PRODUCT, BOTH, kind])
                rows.append([str(one), *(found[name, which, kind] for name, which in columns), gain])
            heads = ("cell, hidden x batch x steps x density", *(f"{a}, {b}" for a, b in columns), "torch / ours, both")
            show(f"microseconds a call, {kind}", heads, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
