"""Every GPU template's kernels on a real GPU: what the tuner demands of a candidate before it is timed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import AWKWARD, built, case_id, sampled

from tvm_sparse.bench import measure
from tvm_sparse.bench.buffers import Guarded, device_of
from tvm_sparse.bench.producer import Producer
from tvm_sparse.bench.timing import ALONE_ROUNDS, BEHIND_ROUNDS
from tvm_sparse.bench.verification import make_case, verify
from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Template
from tvm_sparse.records import Log
from tvm_sparse.tuning import fleet
from tvm_sparse.tuning.measuring import Measurer
from tvm_sparse.tuning.plans import make_plan
from tvm_sparse.tuning.session import tune_all

pytestmark = pytest.mark.gpu

LARGE = tuple(
    parse(key)
    for key in (
        "softmax_topk/batch=4000,vocab=25000,k=5",
        "softmax_topk/batch=10,vocab=25000,k=5",
        "softmax_topk/batch=1,vocab=128256,k=50,dtype=bfloat16",
        "softmax_topk/batch=7,vocab=50257,k=2048,dtype=float16",
        "softmax_topk/batch=3,vocab=50021,k=5000",
        "softmax_sample/batch=64,vocab=128256,k=64,dtype=bfloat16,per_row=1",
        "softmax_sample/batch=5,vocab=50257,k=128,seeded=1,whole=1",
        "softmax/batch=4000,vocab=25000",
        "softmax/batch=9,vocab=128256,dtype=bfloat16",
        "softmax/batch=5,vocab=50257,dtype=float16",
        "softmax/batch=5,vocab=50257,algorithm=safe",
        "logsumexp/batch=9,vocab=128255",
        "bsr_matmul/m=64,k=4096,n=4096,block=16,sparsity=0.9",
        "bsr_matmul/m=1,k=1024,n=4096,block=32,sparsity=0.95,dtype=float16",
        "bsr_matmul/m=33,k=768,n=768,block=64x8,sparsity=0.5,pattern=skewed,dtype=bfloat16",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=1",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=100,weighted=1",
        "nhot_lookup/rows=1000,vocab=131072,width=2048,nonzeros=64,weighted=1,dtype=bfloat16,index=int64",
    )
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        pytest.param(template, problem, marks=pytest.mark.large if problem in LARGE else ())
        for template in spaces.templates()
        for problem in AWKWARD + LARGE
        if template.kind == "cuda" and template.operator == problem.operator
    ],
    ids=case_id,
)
def test_candidates_agree_with_the_reference(template: Template, problem: Problem, tmp_path: Path) -> None:
    gpu = machine.gpu()
    assert gpu is not None
    if reason := spaces.applicable(problem, gpu)[1].get(template.name):
        assert registry.find(problem.operator).fallbacks["cuda"][-1] is not template
        pytest.skip(reason)
    for number, candidate in enumerate(sampled(template, problem, gpu, 2)):
        compiled = built(problem, candidate, gpu, tmp_path / f"{number}.so")
        message = {
            "problem": problem.key,
            "kind": "cuda",
            "library": compiled.path,
            "workspaces": list(compiled.workspaces),
            "seed": number,
            "steps": ("verify", "check", "recheck"),
        }
        assert measure.handle(message) == {"seconds": []}


def test_every_row_of_a_large_batch(tmp_path: Path) -> None:
    """4000 x 25000 through each template's default and all ways in which its launches overlap."""
    gpu, problem = machine.gpu(), LARGE[0]
    assert gpu is not None
    large = make_case(problem, 0)
    for name in spaces.applicable(problem, gpu)[0]:
        template = spaces.find(name)
        table, default = template.space(problem, gpu), template.default(problem, gpu)
        ahead = [name for name in ("overlap", "prefetch") if name in table]
        for values in itertools.product(*(table[name] for name in ahead)):
            point = {**default, **dict(zip(ahead, values, strict=True))}
            if template.point(problem, gpu, point) is not None:
                continue
            library = tmp_path / f"{name}_{'_'.join(map(str, values))}.so"
            compiled = built(problem, template.candidate(point), gpu, library)
            function = measure.load(compiled.path, "cuda")
            verify(function, "cuda", [large], compiled.workspaces)


def test_a_candidate_is_timed(tmp_path: Path) -> None:
    gpu, problem = machine.gpu(), LARGE[1]
    assert gpu is not None
    candidate = spaces.fallback(problem, gpu)
    compiled = built(problem, candidate, gpu, tmp_path / "kernel.so")
    message = {"problem": problem.key, "kind": "cuda", "library": compiled.path, "workspaces": [], "seed": 0}
    seconds = measure.handle(message)["seconds"]
    assert len(seconds) == ALONE_ROUNDS["cuda"]
    # Not faster than the memory, not slower than a launch and a hundred times the memory.
    fastest = problem.cost().bytes / 20e12
    assert all(fastest < s < 1e-3 for s in seconds)
    # A sound trial changes nothing for which its process would be renewed: a new context takes seconds.
    asked = {name: message.pop(name) for name in ("problem", "kind", "seed")}
    measurer = Measurer()
    try:
        replies = [measurer.measure(asked, message, 60) for _ in range(3)]
        assert [(reply.message, reply.changed) for reply in replies] == [("", ())] * 3
        assert measurer.processes == 1
    finally:
        measurer.close()


def test_a_candidate_is_timed_behind_a_producer(tmp_path: Path) -> None:
    """Its inputs are intact, and it is right afterwards; arrays end within a word."""
    gpu = machine.gpu()
    assert gpu is not None
    for key in ("softmax_topk/batch=10,vocab=25000,k=5", "softmax_topk/batch=3,vocab=1001,k=5,dtype=float16"):
        problem = parse(key)
        compiled = built(problem, spaces.fallback(problem, gpu), gpu, tmp_path / f"{problem.batch_extent}.so")
        message: dict[str, Any] = {
            "problem": key,
            "kind": "cuda",
            "library": compiled.path,
            "workspaces": list(compiled.workspaces),
            "seed": 0,
        }
        for fresh in (False, True, True):
            seconds = measure.handle({**message, "fresh": fresh})["seconds"]
            assert len(seconds) >= (BEHIND_ROUNDS // 3 if fresh else ALONE_ROUNDS["cuda"]) and min(seconds) > 0
        assert len(measure._producers) == 1


def test_a_producer_writes_what_an_array_has_lost() -> None:
    """All of it, to the last byte, and nothing beside it."""
    import numpy as np

    sizes, draw = (1, 3, 16, 17, 4099, 1 << 20), np.random.default_rng(0)
    rooms = [Guarded("cuda", size, offset) for size in sizes for offset in (0, 4)]
    contents = [draw.integers(0, 256, size, np.uint8) for size in sizes for _ in range(2)]
    arrays = [(room.place(content.shape, "uint8"), content) for room, content in zip(rooms, contents, strict=True)]
    for room in rooms:
        room.write(0)
    producer = Producer(arrays)
    device_of("cuda").sync()
    for room in rooms:
        room.write(1)
    producer.launch(0)
    device_of("cuda").sync()
    for room, content in zip(rooms, contents, strict=True):
        np.testing.assert_array_equal(room.read(), content)


def test_tuning_with_fresh_inputs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tvm_sparse", "tune", "softmax_topk", "batch=4", "vocab=3000", "k=5"]
    command += ["--trials", "4", "--logs", str(tmp_path)]
    gpu = machine.gpu()
    assert gpu is not None
    log = Log(tmp_path, gpu.arch, "softmax_topk")
    for inputs in ("hot", "fresh"):
        done = subprocess.run([*command, "--inputs", inputs], capture_output=True, text=True, check=True)
        assert ("Inputs: fresh" in done.stdout) == (inputs == "fresh")
    contents = log.read()
    assert [session.state for session in contents.sessions] == ["hot", "fresh"]
    assert [trial.outcome for trial in contents.timed(fresh=True)] == ["ok"] * 4
    (best,) = log.best().values()
    assert log.sessions()[best.session].fresh


@pytest.mark.skipif(len(machine.gpus()) < 2, reason="needs two GPUs")
def test_two_gpus_tune_at_the_same_time(tmp_path: Path) -> None:
    gpus = machine.gpus()[:2]
    problems = [parse(f"softmax_topk/batch={batch},vocab=3000,k=5") for batch in (3, 4)]
    plans = [make_plan(p, gpus[0], 4, Log(tmp_path, gpus[0].arch, p.operator), 4) for p in problems]
    ends: dict[Any, Any] = {}
    with fleet.local(gpus[0], 4, gpus=(0, 1)) as devices:
        assert len({device.state.get("driver_version") for device in devices.devices}) == 1
        tune_all(plans, tmp_path, devices, end=ends.__setitem__)
        assert all(device.turn.busy for device in devices.devices)
    assert {best.problem for best in ends.values()} == {p.key for p in problems}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("gate", ["threshold_gate", "cluster_gate"])
def test_overlapped_launches_read_what_the_kernel_before_wrote(gate: str, dtype: str, tmp_path: Path) -> None:
    """A loop of three kernels, each of which reads what the one before has just written, and nothing in between.

    The best five columns of y choose the rows of the table that are added up to x, and y is x times a sparse weight. A
    bias that changes with the step keeps the loop moving. After every number of steps the same bits have to be there as
    if each kernel had been waited for.
    """
    torch = pytest.importorskip("torch")
    from tvm_sparse.runtime.loading import load_function

    gpu = machine.gpu()
    assert gpu is not None
    kind, weighted = getattr(torch, dtype), int(dtype == "float32")
    rows, columns, k, steps = 48, 4096, 5, 24
    product = f"bsr_matmul/m={rows},k={columns},n={columns},block=16,sparsity=0.9,dtype={dtype}"
    kernels = []
    for name, key in (
        (gate, f"softmax_topk/batch={rows},vocab={columns},k={k},dtype={dtype},bias=1"),
        (
            "warp_gather",
            f"nhot_lookup/rows={rows},vocab={columns},width={columns},nonzeros={k},dtype={dtype},weighted={weighted},"
            "index=int64",
        ),
        ("staged_x" if dtype == "float32" else "tensor_core", product),
    ):
        template, problem = spaces.find(name), parse(key)
        way = {"tile_m": 8, "tile_n": 16, "overlap": 2} if name == "tensor_core" else {"overlap": 1}
        if name == "cluster_gate":  # which always overlaps
            way = {}
        if name == "warp_gather":  # only ids that are read ahead say what to prefetch
            way["prefetch"] = 0
        point = {**template.default(problem, gpu), **way}
        assert template.point(problem, gpu, point) is None
        compiled = built(problem, template.candidate(point), gpu, tmp_path / f"{name}.so")
        assert not compiled.workspaces
        kernels.append(load_function(Path(compiled.path), "cuda", None))
    topk, lookup, multiply = kernels

    torch.manual_seed(0)
    table = torch.randn(columns, columns, device="cuda").to(kind)
    noise = 3 * torch.randn(steps, columns, device="cuda")
    _, data, blocks, ends, order, long, _ = parse(product).generate(0)
    # A weight that is known and constant, and one of which the kernel has to guess the pattern while the one before
    # still runs.
    known = gate == "threshold_gate"
    tensors = (torch.from_numpy(array).cuda() for array in (data, blocks, ends, order))
    sparse = (*tensors, long if known else -1, int(known))
    indptr = torch.arange(0, rows * k + 1, k, device="cuda")
    first = torch.randn(rows, columns, device="cuda").to(kind)

    def buffers() -> dict[str, Any]:
        return {
            "x": torch.full((rows, columns), float("nan"), dtype=kind, device="cuda"),
            "y": first.clone(),
            "values": torch.full((rows, k), float("nan"), device="cuda"),
            "indices": torch.full((rows, k), -1, device="cuda"),
        }

    def step(number: int, x: Any, y: Any, values: Any, indices: Any, settle: Callable[[], None]) -> None:
        topk(y, 1.0, 0, noise[number], values, indices)
        settle()
        lookup(indptr, indices.view(-1), *([values.view(-1)] if weighted else []), table, x)
        settle()
        multiply(x, *sparse, y)
        settle()

    expected, waited = [], buffers()
    for number in range(steps):
        step(number, **waited, settle=torch.cuda.synchronize)
        expected.append({name: array.clone() for name, array in waited.items()})
    assert all(not torch.equal(a["indices"], b["indices"]) for a, b in itertools.pairwise(expected))
    for many in range(1, steps + 1):
        overlapped = buffers()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(many):
                step(number, **overlapped, settle=lambda: None)
        for how in ("replayed", "launched"):
            overlapped["y"].copy_(first)
            torch.cuda.synchronize()
            if how == "replayed":
                graph.replay()
            else:
                for number in range(many):
                    step(number, **overlapped, settle=lambda: None)
            torch.cuda.synchronize()
            for name, array in overlapped.items():
                assert torch.equal(array, expected[many - 1][name]), f"{name} after {many} steps, {how}"
