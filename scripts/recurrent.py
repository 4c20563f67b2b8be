"""Code shared by scripts about recurrent layers: cases, weights with random patterns, and checked contenders.

A case is a layer and a call of it: hidden units, batch, steps, density and cell. Contenders are ours with and without
the input product, ours with the weight in blocks (with a random pattern: a dense persistent layer), torch's module
(cuDNN on a GPU, whose input product is part of it), and two loops over steps as users write them, captured as one CUDA
graph on a GPU: with the dense product (cuBLAS) and with the sparse one (cuSPARSE).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
import typer
from heads import Call, Check, Timed, ready, timed

import tvm_sparse
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem, numpy_dtype
from tvm_sparse.core.registry import make
from tvm_sparse.formats.block_recurrent import COLUMNS as COLUMNS_OF_GROUP
from tvm_sparse.formats.block_recurrent import ROWS as ROWS_OF_TILE
from tvm_sparse.formats.block_recurrent import tiles_of
from tvm_sparse.formats.recurrent import RecurrentWeights
from tvm_sparse.layers.libraries import to_host
from tvm_sparse.layers.recurrent import BATCH, TILES_BATCH, launches
from tvm_sparse.operators.sparse_recurrent.problem import GATES, preferred

OURS, PRODUCT, BLOCKS, MODULE, DENSE, SPARSE, FLASH = (
    "sparse layer", "sparse layer + input product", "layer of blocks", "torch module", "dense step loop",
    "sparse step loop", "FlashRNN",
)  # fmt: skip
DTYPES = ("float32", "float16")
# Allowed differences from the float64 reference; states are at most about 1, and rounded at each step.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 2e-1}
# The 2-norm of a row of recurrent weights: the layer contracts, so that rounding errors decay from step to step.
NORM = 0.45
# Boost clocks, for the time of gathers from shared memory at 128 bytes per clock and multiprocessor.
CLOCKS = (("H200", 1.98e9), ("H100", 1.98e9))
SHARED_BYTES = 128
ROUNDS = 10  # few, since a round of a loop over steps takes long
COLUMNS = ("cell", "hidden", "batch", "steps", "density", "nonzeros", "dtype", "implementation", "microseconds",
           "microseconds_a_step", "over_ours", "share_of_limit", "timed", "kernel", "note")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layer, and the shape of a call."""

    hidden: int
    batch: int = 4
    steps: int = 256
    density: float = 0.1
    cell: str = "tanh"

    @classmethod
    def parsed(cls, text: str) -> Case:
        """Parse `hidden,batch,steps,density[,cell]`. Raises `typer.BadParameter`."""
        parts = text.split(",")
        try:
            if len(parts) not in (4, 5):
                raise ValueError
            case = cls(int(parts[0]), int(parts[1]), int(parts[2]), float(parts[3]), *parts[4:])
            if min(case.hidden, case.batch, case.steps) < 1 or not 0 < case.density <= 1 or case.cell not in GATES:
                raise ValueError
        except ValueError:
            raise typer.BadParameter(
                f"expected hidden,batch,steps,density[,{'|'.join(GATES)}], got {text}", param_hint="--case"
            ) from None
        return case

    def __str__(self) -> str:
        return f"{self.cell}, {self.hidden} x {self.batch} x {self.steps} x {self.density:g}"

    @property
    def rows(self) -> int:
        return GATES[self.cell] * self.hidden


@dataclass(frozen=True)
class Drawn:
    """Weights and inputs of a case, dense and in float32 on the device; `layers` with entries by dtype, and with
    `blocks` for values of 16 bits.
    """

    case: Case
    weight_hh: torch.Tensor
    weight_ih: torch.Tensor
    bias_ih: torch.Tensor
    bias_hh: torch.Tensor
    x: torch.Tensor
    layers: Mapping[str, Any]
    blocks: Mapping[str, Any]
    device: str

    @property
    def nonzeros(self) -> int:
        return next(iter(self.layers.values())).weights.nonzeros

    def of(self, name: str, dtype: str) -> torch.Tensor:
        return getattr(self, name).to(getattr(torch, dtype))

    def projected(self, dtype: str) -> torch.Tensor:
        weights = (self.of(name, dtype) for name in ("weight_ih", "bias_ih", "bias_hh"))
        return self.layers[dtype].project_inputs(self.of("x", dtype), *weights)


def draw(
    case: Case, device: str, dtypes: Iterable[str] = DTYPES, seed: int = 0, order: str = "banks", spread: float = 0
) -> Drawn:
    """A layer with a random pattern, whose input has as many features as it has units.

    `spread`: with more than 0 the pattern is that of the largest magnitudes, where the logarithms of rows' scales have
    this standard deviation: so magnitude pruning leaves trained weights.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows, hidden = case.rows, case.hidden
    if spread:
        sizes = normal(rows, hidden).abs() * (spread * normal(rows, 1)).exp()
        kept = sizes >= sizes.flatten().kthvalue(max(1, round((1 - case.density) * sizes.numel()))).values
    else:
        kept = torch.rand((rows, hidden), generator=generator, device=device) < case.density
    weight_hh = normal(rows, hidden) * kept * (NORM / max(1.0, hidden * case.density) ** 0.5)
    bias_hh = 0.1 * normal(rows)
    found = kept.nonzero().cpu().numpy()
    values = weight_hh[kept].cpu().numpy()
    matrix = scipy.sparse.coo_array((values, (found[:, 0], found[:, 1])), shape=(rows, hidden))
    layers = {dtype: layer(case, matrix, bias_hh, dtype=dtype, form="entries", order=order) for dtype in dtypes}
    blocks = {dtype: layer(case, matrix, bias_hh, dtype=dtype, form="blocks") for dtype in dtypes if dtype != "float32"}
    x = normal(case.steps, case.batch, hidden)
    weight_ih, bias_ih = normal(rows, hidden) * (0.7 / hidden**0.5), 0.1 * normal(rows)
    return Drawn(case, weight_hh, weight_ih, bias_ih, bias_hh, x, layers, blocks, device)


def layer(case: Case, matrix: Any, bias_hh: torch.Tensor, **options: Any) -> Any:
    """Our layer of a case."""
    if case.cell == "lstm":
        return tvm_sparse.SparseLSTM(matrix, **options)
    if case.cell == "gru":
        return tvm_sparse.SparseGRU(matrix, bias_hh, **options)
    return tvm_sparse.SparseRNN(matrix, nonlinearity=case.cell, **options)


def problems_of(case: Case, dtypes: Iterable[str]) -> list[Problem]:
    """The problems of our layers' calls, at the expected numbers of nonzeros and of groups of blocks."""
    found, gates = [], GATES[case.cell]
    nonzeros = min(case.hidden, preferred(round(case.rows * case.hidden * case.density), case.rows))
    tiles, across = tiles_of(case.hidden, gates), -(-case.hidden // COLUMNS_OF_GROUP)
    absent = tiles * across * (1 - case.density) ** (ROWS_OF_TILE * COLUMNS_OF_GROUP)
    groups = across if absent < 0.5 else min(across, preferred(round(tiles * across - absent), tiles))
    parts = (launches(case.steps, case.batch, case.hidden, most) for most in (BATCH, TILES_BATCH))
    for steps, batch in dict.fromkeys(itertools.chain(*parts)):
        axes = {"steps": steps, "batch": batch, "hidden": case.hidden, "cell": case.cell}
        for dtype in dtypes:
            if batch <= BATCH:
                found.append(make("sparse_recurrent", {**axes, "nonzeros": nonzeros, "dtype": dtype}))
            if dtype != "float32":
                found.append(make("block_recurrent", {**axes, "nonzeros": groups, "dtype": dtype}))
    return found


# ---- contenders ----------------------------------------------------------------------------------


def cell_of(kind: str, hidden_bias: torch.Tensor | None, on_gpu: bool) -> Callable[..., tuple[Any, ...]]:
    """`step(x, product, states) -> states` of a cell, where `product` is h W^T; on a GPU by torch's fused kernels."""
    if kind in ("tanh", "relu"):
        act = torch.tanh if kind == "tanh" else torch.relu
        return lambda x, product, states: (act(x + product),)
    if kind == "lstm":
        if on_gpu:
            return lambda x, product, states: torch.ops.aten._thnn_fused_lstm_cell(x, product, states[1])[:2]

        def lstm(x: Any, product: Any, states: Any) -> tuple[Any, ...]:
            i, f, g, o = (x + product).chunk(4, 1)
            c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
            return o.sigmoid() * c.tanh(), c

        return lstm
    assert hidden_bias is not None
    zeros = torch.zeros_like(hidden_bias)
    inside, outside = torch.cat([zeros, zeros, hidden_bias]), torch.cat([zeros, zeros, zeros])
    if on_gpu:
        cell = torch.ops.aten._thnn_fused_gru_cell
        return lambda x, product, states: cell(x, product, states[0], outside, inside)[:1]

    def gru(x: Any, product: Any, states: Any) -> tuple[Any, ...]:
        (xr, xz, xn), (ur, uz, un) = x.chunk(3, 1), (product + inside).chunk(3, 1)
        z = (xz + uz).sigmoid()
        n = torch.tanh(xn + (xr + ur).sigmoid() * un)
        return (n + z * (states[0] - n),)

    return gru


def step_loop(
    drawn: Drawn, dtype: str, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, on_gpu: bool
) -> Call:
    """A loop over steps: a product `(batch, rows)` with the state, and the cell."""
    case = drawn.case
    bias = drawn.of("bias_hh", dtype)[-case.hidden :] if case.cell == "gru" else None
    step = cell_of(case.cell, bias, on_gpu)
    zeros = torch.zeros((case.batch, case.hidden), dtype=x.dtype, device=x.device)

    def call() -> torch.Tensor:
        states: tuple[Any, ...] = (zeros, zeros) if case.cell == "lstm" else (zeros,)
        found = []
        for t in range(case.steps):
            states = step(x[t], product(states[0]), states)
            found.append(states[0])
        return torch.stack(found)

    return call


def dense_loop(drawn: Drawn, dtype: str) -> Call:
    """A loop with the dense product; for an Elman layer the sum is part of the product."""
    x, weight, case = drawn.projected(dtype), drawn.of("weight_hh", dtype).T.contiguous(), drawn.case
    if case.cell not in ("tanh", "relu"):
        return step_loop(drawn, dtype, lambda h: h @ weight, x, drawn.device == "cuda")
    act = torch.tanh_ if case.cell == "tanh" else torch.relu_
    zeros = torch.zeros((case.batch, case.hidden), dtype=x.dtype, device=x.device)

    def call() -> torch.Tensor:
        found, h = x.clone(), zeros
        for t in range(case.steps):
            h = act(torch.addmm(found[t], h, weight, out=found[t]))
        return found

    return call


def sparse_loop(drawn: Drawn) -> Call:
    """A loop with the sparse product of a CSR tensor and the transposed state, in float32."""
    x, case = drawn.projected("float32"), drawn.case
    weight = drawn.weight_hh.to_sparse_csr()
    if case.cell not in ("tanh", "relu"):
        return step_loop(drawn, "float32", lambda h: (weight @ h.T).T.contiguous(), x, drawn.device == "cuda")
    act = torch.tanh_ if case.cell == "tanh" else torch.relu_
    zeros = torch.zeros((case.hidden, case.batch), device=x.device)
    turned = x.transpose(1, 2).contiguous()

    def call() -> torch.Tensor:
        found, h = turned.clone(), zeros
        for t in range(case.steps):
            h = act(torch.addmm(found[t], weight, h, out=found[t]))
        return found.transpose(1, 2)

    return call


def module(drawn: Drawn, dtype: str) -> Call:
    """torch's module with the masked weight, including its input product."""
    case, kind = drawn.case, {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    given = {"device": drawn.device, "dtype": getattr(torch, dtype)}
    if case.cell in kind:
        made = kind[case.cell](case.hidden, case.hidden, **given)
    else:
        made = torch.nn.RNN(case.hidden, case.hidden, nonlinearity=case.cell, **given)
    for name in ("weight_hh", "weight_ih", "bias_ih", "bias_hh"):
        getattr(made, f"{name}_l0").detach().copy_(getattr(drawn, name))
    made.flatten_parameters()
    x = drawn.of("x", dtype)
    return lambda: made(x)[0]


def flash(drawn: Drawn) -> Call:
    """FlashRNN's fused kernel in bfloat16, without the input product: one head, a dense weight."""
    from flashrnn import flashrnn  # an optional peer, which compiles when it is called

    case, dtype = drawn.case, torch.bfloat16
    gates = GATES[case.cell]
    name = {"tanh": "elman", "lstm": "lstm", "gru": "gru"}.get(case.cell)
    if name is None:
        raise RuntimeError(f"no {case.cell} cell")
    shape = (case.steps, case.batch, gates, 1, case.hidden)
    x = drawn.layers["float32"].project_inputs(drawn.x, drawn.weight_ih, drawn.bias_ih, drawn.bias_hh)
    wx = x.to(dtype).reshape(shape).transpose(0, 1).contiguous()
    r = drawn.weight_hh.to(dtype).reshape(gates, 1, case.hidden, case.hidden).contiguous()
    b = torch.zeros((gates, 1, case.hidden), dtype=dtype, device=drawn.device)
    return lambda: flashrnn(wx, r, b, function=name, backend="cuda_fused")[0][0][:, :, 0].transpose(0, 1)


def reference(drawn: Drawn) -> torch.Tensor:
    """All outputs in float64."""
    weights = (getattr(drawn, name).double() for name in ("weight_ih", "bias_ih", "bias_hh"))
    x = tvm_sparse.project_inputs(drawn.x.double(), *weights, cell=drawn.case.cell)
    weight = drawn.weight_hh.double()
    return step_loop(drawn, "float64", lambda h: h @ weight.T, x, False)()


def contenders(
    drawn: Drawn, *, peers: bool = True, loops: bool = True
) -> tuple[dict[tuple[str, str], Call], dict[tuple[str, str], Check]]:
    """Calls by implementation and dtype, and checks of their outputs.

    `peers`: whether to include other libraries; `loops`: whether to include the loops over steps.
    """
    case, dtypes = drawn.case, tuple(drawn.layers)
    makers: dict[tuple[str, str], Callable[[], Call]] = {}
    for dtype in dtypes:
        makers[OURS, dtype] = functools.partial(ours, drawn, dtype)
        makers[PRODUCT, dtype] = functools.partial(ours_with_product, drawn, dtype)
        if dtype in drawn.blocks:
            makers[BLOCKS, dtype] = functools.partial(of_blocks, drawn, dtype)
    if peers:
        makers |= {(MODULE, dtype): functools.partial(module, drawn, dtype) for dtype in dtypes}
        if loops:
            makers |= {(DENSE, dtype): functools.partial(dense_loop, drawn, dtype) for dtype in dtypes}
            if case.density < 1:
                makers[SPARSE, "float32"] = functools.partial(sparse_loop, drawn)
        if drawn.device == "cuda" and importlib.util.find_spec("flashrnn"):
            makers[FLASH, "bfloat16"] = functools.partial(flash, drawn)
    wanted = reference(drawn)
    checks = {key: functools.partial(check, wanted, key[1], str(case)) for key in makers}
    return {key: prepared(maker) for key, maker in makers.items()}, checks


def ours(drawn: Drawn, dtype: str) -> Call:
    x, one = drawn.projected(dtype), drawn.layers[dtype]
    return lambda: one(x)[0]


def of_blocks(drawn: Drawn, dtype: str) -> Call:
    x, one = drawn.projected(dtype), drawn.blocks[dtype]
    return lambda: one(x)[0]


def ours_with_product(drawn: Drawn, dtype: str) -> Call:
    one, x = drawn.layers[dtype], drawn.of("x", dtype)
    weight, bias_ih, bias_hh = (drawn.of(name, dtype) for name in ("weight_ih", "bias_ih", "bias_hh"))

    def call() -> torch.Tensor:
        with as_cudnn():
            projected = one.project_inputs(x, weight, bias_ih, bias_hh)
        return one(projected)[0]

    return call


@contextlib.contextmanager
def as_cudnn() -> Iterator[None]:
    """Compute float32 products in TF32 if cuDNN's layers may use it, as they do by default."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def prepared(make_call: Callable[[], Call]) -> Call:
    """A call that is prepared when it is first called, so that a failure becomes its note."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make_call())
        return made[0]()

    return call


def check(wanted: torch.Tensor, dtype: str, what: str, found: Any) -> None:
    if found.shape != wanted.shape:
        raise Mismatch(f"{what}: outputs have shape {tuple(found.shape)}")
    worst = float((found.double() - wanted).abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise Mismatch(f"{what}: outputs differ by {worst:.3g} from the float64 reference")


# ---- a run ---------------------------------------------------------------------------------------

Results = dict[tuple[str, str], Timed]


@torch.no_grad()
def measured(
    cases: Mapping[Case, Mapping[str, Any]],
    where: Machine,
    report: Any,
    *,
    dtypes: Sequence[str] = DTYPES,
    peers: bool = True,
    loops: bool = True,
    rounds: int = ROUNDS,
    seed: int = 0,
    spread: float = 0,
) -> dict[Case, Results]:
    """Results of cases, by implementation and dtype; each case comes with additional cells for the report's lines.
    `spread` is as in `draw`.

    Our kernels are built in parallel before anything is timed.
    """
    results = {}
    with ready([problem for case in cases for problem in problems_of(case, dtypes)], where):
        for case, cells in cases.items():
            typer.echo(f"measuring {case}", err=True)
            drawn = draw(case, where.device, dtypes, seed, spread=spread)
            calls, checks = contenders(drawn, peers=peers, loops=loops)
            names = {key: ", ".join(key) for key in calls}
            found = timed(
                {names[key]: call for key, call in calls.items()},
                {names[key]: one for key, one in checks.items()},
                where.device,
                rounds,
            )
            results[case] = {key: found[name] for key, name in names.items()}
            add_lines(report, drawn, results[case], where, cells)
            del drawn, calls, checks
    return results


def add_lines(report: Any, drawn: Drawn, results: Results, where: Machine, cells: Mapping[str, Any]) -> None:
    """Add a CSV line for each contender, with the additional `cells`."""
    case = drawn.case
    for (name, dtype), result in results.items():
        mine = results.get((OURS, dtype)) or results.get((OURS, "float32"))
        limit = limit_of(case, drawn.nonzeros, dtype, where)
        kernel = ""
        if name in (OURS, BLOCKS):
            one = (drawn.layers if name == OURS else drawn.blocks)[dtype]
            [chosen, *_] = one.explain(case.steps, case.batch, target=where.arch).kernels
            kernel = f"{chosen.candidate} ({chosen.how})"
        seconds = result.seconds
        report.add(
            **cells,
            **timing_cells(drawn, dtype, name, result),
            over_ours=f"{seconds / mine.seconds:.3f}" if seconds and mine and mine.seconds else "",
            share_of_limit=f"{limit / seconds:.3f}" if seconds and limit and name == OURS else "",
            kernel=kernel,
        )


def timing_cells(drawn: Drawn, dtype: str, name: str, result: Timed) -> dict[str, Any]:
    """The cells of a CSV line that tell what was timed, and how long it took."""
    case, seconds = drawn.case, result.seconds
    return {
        "cell": case.cell,
        "hidden": case.hidden,
        "batch": case.batch,
        "steps": case.steps,
        "density": case.density,
        "nonzeros": drawn.nonzeros,
        "dtype": dtype,
        "implementation": name,
        "microseconds": f"{seconds * 1e6:.3f}" if seconds else "",
        "microseconds_a_step": f"{seconds * 1e6 / case.steps:.3f}" if seconds else "",
        "timed": result.how,
        "note": result.note,
    }


def limit_of(case: Case, nonzeros: int, dtype: str, where: Machine) -> float | None:
    """Lower bound in seconds for a persistent kernel: the gathers from shared memory, or reading all data from memory
    once.

    Every nonzero gathers the states of all sequences at every step. None if the clock is not known.
    """
    clock = next((rate for chip, rate in CLOCKS if chip in where.name), None)
    if clock is None or where.bandwidth is None:
        return None
    size = numpy_dtype(dtype).itemsize
    gathers = case.steps * nonzeros * case.batch * size / (where.cores * SHARED_BYTES * clock)
    moved = case.steps * case.batch * (case.rows + case.hidden) * size + nonzeros * (4 if size == 2 else 8)
    return max(gathers, moved / where.bandwidth)


def shrunk(case: Case, shrink: int) -> Case:
    """The case with a `shrink`-th of units and steps, to test whether everything runs."""
    if shrink == 1:
        return case
    return dataclasses.replace(case, hidden=max(8, case.hidden // shrink), steps=max(2, case.steps // shrink))


def inputs_of(drawn: Drawn, dtype: str, weights: RecurrentWeights) -> list[np.ndarray]:
    """Inputs of the operator for one launch of a case, with weights in a layout, on the host."""
    case = drawn.case
    zeros = np.zeros((case.batch, case.hidden), numpy_dtype(dtype))
    found = [weights.units, weights.row_start, weights.entries, to_host(drawn.projected(dtype)), zeros]
    if case.cell == "lstm":
        found.append(zeros)
    if case.cell == "gru":
        found.append(to_host(drawn.of("bias_hh", dtype)[-case.hidden :]))
    return found
