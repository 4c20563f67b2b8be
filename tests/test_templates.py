"""Every schedule template: its space, and what its sampled candidates compute, with no GPU.

Driven by `spaces.templates()`: a new template is covered by being in it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick_build_worker
import tvm
import tvm_ffi
from cases import (
    AWKWARD,
    MACHINES,
    REALISTIC,
    SM90,
    case_id,
    cases,
    combinations,
    of_each_choice,
    on_cpu,
    sampled,
    settings_of,
    thorough,
)
from tvm import tirx
from tvm.ir import Call

from tvm_sparse.artifacts.compile import CompileError, compile_candidate, target_of
from tvm_sparse.bench import measure
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.arguments import function
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import AVX512_BF16, Machine
from tvm_sparse.core.problem import Mismatch, Problem, Settings
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Program, Template, Workspace
from tvm_sparse.emulation import EmulationError, run_on_cpu, serialise
from tvm_sparse.runtime import loading

ODD = "bsr_matmul/m=3,k=66,n=35,block=5x3,sparsity=0.5"
WITH_EMPTY_ROWS = {
    "bsr_matmul": "bsr_matmul/m=4,k=64,n=64,block=8,sparsity=0.6",
    "nhot_lookup": "nhot_lookup/rows=6,vocab=20,width=40,nonzeros=3",
}
OLD = Machine("cuda", "sm_75", "sm_75", cores=40)  # neither bfloat16, nor asynchronous copies


# ---- spaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "key", "reason"),
    [
        ("threshold_gate", "softmax_topk/batch=1,vocab=2600,k=2100", "k=2100 exceeds 2048"),
        ("sample_warps", "softmax_sample/batch=5,vocab=301,k=7,whole=1", "a warp alone would take long"),
        ("sample_slices", "softmax_sample/batch=5,vocab=301,k=7,whole=1", "sums of slices tell the best word alone"),
        ("softmax_held", "softmax/batch=1,vocab=2000000", "a cluster does not hold a row of vocab=2000000"),
        ("softmax_staged", "softmax/batch=1,vocab=2048,algorithm=naive", "the naive algorithm reads a row more than"),
        ("per_tile", "bsr_matmul/m=3,k=66,n=35,block=5x3,sparsity=0.5", "n=35 does not divide"),
        ("cross_thread", "bsr_matmul/m=3,k=32,n=32,block=4,sparsity=0.5", "k=32 has no work"),
        ("over_blocks", "bsr_matmul/m=3,k=32,n=35,block=5x32,sparsity=0.5", "rows of 1 blocks have no work"),
        ("staged_x", ODD, "blocks of 5x3 do not divide evenly"),
        ("staged_x", "bsr_matmul/m=3,k=32,n=32,block=1,sparsity=0.5,dtype=float16", "no copies of 4 to 16 bytes"),
        ("dealt_gather", "nhot_lookup/rows=1000000,vocab=9,width=64,nonzeros=4", "sectors of output are too many"),
        ("tensor_core", "bsr_matmul/m=9,k=64,n=64,block=16,sparsity=0.5", "round float32 inputs"),
        ("tensor_core", "bsr_matmul/m=9,k=64,n=64,block=4x16,sparsity=0.5,dtype=float16", "no multiples of 8x8"),
    ],
)
def test_template_that_does_not_apply_says_why(template: str, key: str, reason: str) -> None:
    tables, reasons = spaces.applicable(parse(key), SM90)
    assert template not in tables
    assert reason in reasons[template]
    assert reason in (spaces.find(template).point(parse(key), SM90, {}) or "")


@pytest.mark.parametrize(
    ("key", "machine", "expected"),
    [
        ("m=8,k=64,n=64,block=8,sparsity=0.5,dtype=float16", SM90, "tensor_core"),
        ("m=8,k=64,n=2097152,block=16,sparsity=0.5,dtype=float16", SM90, "tensor_core"),  # no axis of a grid is as long
        ("m=8,k=64,n=64,block=8,sparsity=0.5,dtype=float16", OLD, "warp_shuffle"),
        ("m=8,k=64,n=64,block=4,sparsity=0.5,dtype=float16", SM90, "warp_shuffle"),
        ("m=8,k=64,n=64,block=8,sparsity=0.5", SM90, "staged_x"),
        ("m=3,k=66,n=35,block=5x3,sparsity=0.5", SM90, "warp_shuffle"),
        ("m=8,k=64,n=64,block=8,sparsity=0.5", MACHINES["llvm"], "block_rows"),
    ],
)
def test_fallback_is_the_first_that_fits(key: str, machine: Machine, expected: str) -> None:
    assert spaces.fallback(parse(f"bsr_matmul/{key}"), machine).template == expected


@pytest.mark.parametrize("count", [500, thorough(2_000)])
@pytest.mark.parametrize("problem", AWKWARD + REALISTIC, ids=case_id)
@pytest.mark.parametrize("kind", MACHINES)
def test_defaults_are_points_and_restrictions_are_sentences(kind: str, problem: Problem, count: int) -> None:
    machine = MACHINES[kind]
    tables, reasons = spaces.applicable(problem, machine)
    assert registry.find(problem.operator).fallbacks[kind][-1].name in tables
    for name, table in tables.items():
        template = spaces.find(name)
        assert template.point(problem, machine, template.default(problem, machine)) is None
        assert all(values and len(set(values)) == len(values) for values in table.values())
        for decisions in itertools.islice(combinations(table, f"{name} {problem}"), count):
            reason = template.allowed(problem, machine, decisions)
            reasons[f"{name}{decisions}"] = "a point that is allowed" if reason is None else reason
    for where, reason in reasons.items():
        assert len(reason.split()) >= 4 and reason == reason.strip() and "{" not in reason, f"{where}: {reason!r}"


@pytest.mark.parametrize("template", spaces.templates(), ids=case_id)
def test_what_is_no_point_is_not_compiled(template: Template, tmp_path: Path) -> None:
    machine = MACHINES[template.kind]
    _, problem = cases(template.kind, name=template.name)[0]
    good = template.candidate(template.default(problem, machine))
    table = template.space(problem, machine)
    (name, _), *rest = good.decisions
    bad = {
        "version": Candidate(good.template, good.version + 1, good.decisions),
        "among": Candidate(good.template, good.version, ((name, max(table[name]) + 1), *rest)),
        "decisions are": Candidate(good.template, good.version, tuple(rest)),
        "the space has": Candidate(good.template, good.version, (*good.decisions, ("extra", 1))),
    }
    for values in itertools.product(*table.values()):
        if reason := template.allowed(problem, machine, dict(zip(table, values, strict=True))):
            bad[reason] = template.candidate(dict(zip(table, values, strict=True)))
            break
    for message, candidate in bad.items():
        with pytest.raises(CompileError) as caught:
            compile_candidate(problem, candidate, machine, tmp_path / "no.so")
        assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


# ---- running a candidate -------------------------------------------------------------------------


def workspaces(program: Program, problem: Problem) -> list[np.ndarray]:
    return loading.allocated(map(dataclasses.asdict, program.workspaces), problem, loading.on_host)


def verify(
    problem: Problem,
    structure: str,
    seed: int,
    call: Callable[[Sequence[Any]], None],
    extra: Sequence[Any] = (),
    settings: Settings | None = None,
) -> None:
    """Call on fresh inputs and poisoned outputs; the outputs agree with the reference and the inputs are as before.

    Without settings: with those of the problem in turn, by the seed.
    """
    inputs = problem.generate(seed, structure, settings_of(problem, seed) if settings is None else settings)
    kept = [np.copy(a) for a in inputs]
    outputs = problem.empty_outputs()
    call([*inputs, *outputs, *extra])
    try:
        problem.check(inputs, problem.reference(inputs), outputs)
    except Mismatch as error:
        raise Mismatch(f"{problem} {structure} seed {seed}: {error}") from None
    for before, after in zip(kept, inputs, strict=True):
        assert before.tobytes() == np.asarray(after, before.dtype).tobytes(), "an input was changed"


# Of products: a weight that the host has looked at and that is constant; one of these alone.
KNOWN, UNKNOWN, WRITTEN = {"balance": 1, "constant": 1}, {"balance": 0, "constant": 1}, {"balance": 1, "constant": 0}


def shared(call: Callable[[Sequence[Any]], None], rows: int) -> Callable[[Sequence[Any]], None]:
    """A block-sparse product in which thread blocks share so many rows, whether they are long or not."""
    return lambda arguments: call([*arguments[:5], rows, *arguments[6:]])


def misaligned(array: np.ndarray) -> tuple[Any, np.ndarray]:
    """A tensor that starts one element past a 64-byte boundary, and the array that shares its memory."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + array.itemsize
    inside = room[start : start + array.nbytes]
    view = inside.view(array.dtype).reshape(array.shape)
    view[...] = array
    # Through bytes, because DLPack does not know NumPy's bfloat16; an empty tensor has no bytes to point at.
    flat = tvm_ffi.from_dlpack(room[start : start + max(array.nbytes, 1)], require_alignment=1)
    return flat._create_view(array.shape, str(array.dtype)), view


def on_llvm(function: Any) -> Callable[[Sequence[Any]], None]:
    """Calls with tensors that are aligned to their elements and no more, and copies the results back."""

    def call(arguments: Sequence[Any]) -> None:
        placed = [misaligned(a) if isinstance(a, np.ndarray) else (a, None) for a in arguments]
        function(*(tensor for tensor, _ in placed))
        for array, (_, view) in zip(arguments, placed, strict=True):
            if view is not None:
                array[...] = view

    return call


# What no choice brings: whole vectors and tiles, and lengths of rows that do not fill the last pack of a batch.
BESIDES = {
    "softmax_streamed": "softmax/batch=1,vocab=2048,dtype=bfloat16",
    "persistent_tiles": "block_recurrent/steps=2,batch=17,hidden=16,nonzeros=2,dtype=bfloat16",
    "persistent_rows": "sparse_recurrent/steps=2,batch=9,hidden=19,nonzeros=3,cell=gru,dtype=float16,ragged=1",
}


@functools.cache
def own_problems(template: Template) -> list[Problem]:
    """The problems that a template is run on without a GPU: the least, and as few others, two in all at least, as show
    each choice that any has. Sizes at which one branches are for its own tests; on a GPU it runs on all problems."""
    more = [parse(BESIDES[template.name])] if template.name in BESIDES else []
    return of_each_choice((problem for _, problem in cases(template.kind, name=template.name)), more)


# CUDA templates whose points are run thread by thread by tests of their own.
RUN_ELSEWHERE = {
    *("threshold_gate", "cluster_gate", "held_rows", "warp_rows"),
    *("head_rings", "head_warp_rings", "head_registers", "head_warpgroups"),
    *("candidate_warp_rings", "candidate_registers", "candidate_registers_product", "candidate_streams"),
    *("row_clusters", "fused_step", "cluster_rows", "persistent_rows", "persistent_tiles"),
}


def on_own_problems(kind: str, *rest: Any) -> list[Any]:
    """Every template on its own problems, and the `rest`; beyond the least and that of the most choices only in a
    thorough run; so are those of CUDA that are checked as loops as well, which is faster, beyond the latter, and on no
    more than two; and all of those that are run elsewhere."""
    found: list[Any] = []
    for template in (one for one in spaces.templates() if one.kind == kind):
        own = own_problems(template)
        if kind == "cuda" and not template.explicit_threads:
            found += [*(thorough(template, problem, *rest) for problem in own[:2][:-1]), (template, own[:2][-1], *rest)]
        else:
            usual = 0 if template.name in RUN_ELSEWHERE else 2
            found += [(template, problem, *rest) for problem in own[:usual]]
            found += [thorough(template, problem, *rest) for problem in own[usual:]]
    return found


def cpu_points() -> list[Any]:
    """The default of each template on its own problems; at one of them, another point in a thorough run: what differs
    between problems the default shows."""
    others = [thorough(t, own_problems(t)[:2][-1], True) for t in spaces.templates() if t.kind == "llvm"]
    return [*on_own_problems("llvm", False), *others]


@pytest.mark.drawn
@pytest.mark.parametrize(("template", "problem", "others"), cpu_points(), ids=case_id)
def test_cpu_candidates_for_every_structure_batch_and_alignment(
    template: Template, problem: Problem, others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES["llvm"]
    if folder := os.environ.get(quick_build_worker.KEPT):
        monkeypatch.setattr(tvm, "compile", quick_build_worker.compiling_once(Path(folder)))
    chosen = sampled(template, problem, machine, int(others))
    for number, candidate in enumerate(chosen[1:] if others else chosen):
        compiled = compile_candidate(problem, candidate, machine, tmp_path / f"{number}.so")
        assert compiled.resources == ({AVX512_BF16: 1} if candidate.values.get("dots") else None)
        if candidate == spaces.fallback(problem, machine):  # so it is looked at before it is timed, with guards around
            known = {
                "library": compiled.path,
                "workspaces": compiled.workspaces,
                "seed": 0,
                "steps": ("verify", "check"),
            }
            assert measure.handle({"problem": problem.key, "kind": "llvm", **known}) == {"seconds": []}
        call = on_llvm(tvm.runtime.load_module(compiled.path)["main"])
        program = template.build(problem, candidate.values)
        for seed, structure in enumerate(problem.structures):
            verify(problem, structure, seed, call, workspaces(program, problem))
        # One library serves every batch.
        for seed, batch in enumerate((1, 3, problem.batch_extent + 6)):
            here = problem.with_batch(batch)
            verify(here, problem.structures[seed % 2], seed, call, workspaces(program, here))


@pytest.mark.parametrize(
    ("name", "key", "decisions"),
    [
        ("row_scan", "softmax_topk/batch=2,vocab=262144,k=5", {"chunk": 64, "simd": 16}),
        ("row_scan", "softmax_topk/batch=2,vocab=151936,k=5", {"chunk": 64, "simd": 64}),
        ("softmax_rows", "softmax/batch=2,vocab=262144", {"chunk": 64, "simd": 8, "kept": 1}),
        ("logsumexp_rows", "logsumexp/batch=2,vocab=262144", {"chunk": 64, "simd": 64}),
    ],
)
def test_long_rows_are_not_added_up_one_by_one(name: str, key: str, decisions: dict[str, int], tmp_path: Path) -> None:
    """Equal elements, of which each would be rounded the same way: the errors of a lane's 30,000 would add up."""
    problem, machine = parse(key), MACHINES["llvm"]
    compiled = compile_candidate(problem, spaces.find(name).candidate(decisions), machine, tmp_path / "library.so")
    call = on_llvm(tvm.runtime.load_module(compiled.path)["main"])
    for seed, structure in enumerate(problem.structures):
        verify(problem, structure, seed, call)


def on_loops(module: tvm.IRModule) -> Callable[[Sequence[Any]], None]:
    # What a schedule means does not depend on how well it is compiled.
    function = on_cpu(serialise(module))

    def call(arguments: Sequence[Any]) -> None:
        tensors = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
        function(*tensors)
        for array, tensor in zip(arguments, tensors, strict=True):
            if isinstance(array, np.ndarray):
                array[...] = tensor.numpy()

    return call


def as_loops() -> list[Any]:
    """Problems that show no choice of a template's that others do not only in a thorough run."""
    found = cases("cuda", explicit_threads=False)
    return [one if one[1] in own_problems(one[0]) else thorough(*one) for one in found]


@pytest.mark.drawn
@pytest.mark.parametrize("others", [False, thorough(True)], ids=["default", "another"])
@pytest.mark.parametrize(("template", "problem"), as_loops(), ids=case_id)
def test_schedules_with_threads_as_loops(template: Template, problem: Problem, others: bool) -> None:
    chosen = sampled(template, problem, SM90, int(others))
    for candidate in chosen[1:] if others else chosen:
        program = template.build(problem, candidate.values)
        call = on_loops(program.module)
        for seed, structure in enumerate(problem.structures):
            verify(problem, structure, seed, call, workspaces(program, problem))
        larger = problem.with_batch(problem.batch_extent + 3)
        verify(larger, problem.tuned, 9, call, workspaces(program, larger))


def without_initialisation(module: tvm.IRModule) -> tvm.IRModule:
    """The module with every sum begun at whatever was there: what a reduction with no step leaves behind."""

    def store(node: tirx.BufferStore) -> tirx.Stmt:
        value = node.value
        return tirx.Evaluate(0) if isinstance(value, tirx.FloatImm) and value.value == 0 else node

    main = module["main"]
    return tvm.IRModule({"main": main.with_body(tvm_ffi.structural_map(main.body, (tirx.BufferStore, store)))})


@pytest.mark.parametrize(
    "template",
    [t for t in spaces.templates() if t.kind == "cuda" and not t.explicit_threads and t.operator in WITH_EMPTY_ROWS],
    ids=case_id,
)
def test_threads_as_loops_catch_a_schedule_that_forgets_to_initialise(template: Template) -> None:
    problem = parse(WITH_EMPTY_ROWS[template.operator])
    module = template.build(problem, template.default(problem, SM90)).module
    verify(problem, "empty_rows", 0, on_loops(module))
    with pytest.raises(Mismatch):
        verify(problem, "empty_rows", 0, on_loops(without_initialisation(module)))


# ---- thread by thread ----------------------------------------------------------------------------


Stale = Callable[[Sequence[Any]], dict[int, np.ndarray]]


def emulated(program: Program, seed: int, stale: Stale | None = None) -> Callable[[Sequence[Any]], None]:
    def call(arguments: Sequence[Any]) -> None:
        before = stale(arguments) if stale else None
        try:
            run_on_cpu(program.module, target_of(SM90), arguments, pipeline=program.pipeline, seed=seed, stale=before)
        except NotImplementedError as error:
            if "cluster" in str(error):
                pytest.skip(f"{error}: checked on a GPU only (test_gpu.py)")
            raise

    return call


def run_thread_by_thread(template: Template, problem: Problem, candidate: Candidate, first: int) -> None:
    """On every second structure, from the `first` on; on all of them if the template has one problem alone."""
    structures, step = list(enumerate(problem.structures)), min(len(own_problems(template)), 2)
    program = template.build(problem, candidate.values)
    # The seed draws the inputs and the order of the threads.
    for place, (seed, structure) in enumerate(structures[first % step :: step]):
        # One of them at another batch than the one that the kernel was built for.
        case = problem.with_batch(problem.batch_extent + (place == 1))
        verify(case, structure, seed, emulated(program, seed), workspaces(program, case))


@pytest.mark.drawn
@pytest.mark.parametrize(("template", "problem"), on_own_problems("cuda"), ids=case_id)
def test_defaults_thread_by_thread(template: Template, problem: Problem) -> None:
    """The default of one problem takes every second structure, that of the next one the others."""
    default = template.candidate(template.default(problem, SM90))
    run_thread_by_thread(template, problem, default, own_problems(template).index(problem))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "template", [t for t in spaces.templates() if t.kind == "cuda" and t.name not in RUN_ELSEWHERE], ids=case_id
)
def test_other_points_thread_by_thread(template: Template) -> None:
    problem = own_problems(template)[:2][-1]
    for candidate in sampled(template, problem, SM90, 1)[1:]:
        run_thread_by_thread(template, problem, candidate, 0)


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("rows=5,vocab=40,width=48,nonzeros={},weighted=1,padded=1,stored=int8,tables=3", {"loads": 2, "tiles": 2}),
        ("rows=5,vocab=40,width=20,nonzeros={},dtype=float16,index=int64,mode=mean,padded=1,tables=2", {"overlap": 1}),
        ("rows=5,vocab=40,width=32,nonzeros={},dtype=bfloat16,mode=max,padded=1,stored=float8_e4m3fn", {"overlap": 2}),
        ("rows=5,vocab=40,width=33,nonzeros={},mode=mean,stored=int8", {"overlap": 2, "prefetch": 1}),
    ],
    ids=["int8-tables", "means-of-tables", "maxima-float8", "means-int8"],
)
def test_bags_thread_by_thread(key: str, decisions: dict[str, int]) -> None:
    """Rows of fewer entries than a warp has lanes, and of more; the program is built for either."""
    few, many = random.randint(1, 32), random.randint(33, 96)
    problem = parse(f"nhot_lookup/{key}".format(random.choice((few, many))))
    template = spaces.find("warp_gather")
    point = {**template.default(problem, SM90), **decisions}
    assert template.allowed(problem, SM90, point) is None
    program = template.build(problem, point)
    for seed, structure in enumerate(("random", "ragged", "empty_rows", "special")):
        for entries in (few, many):
            case = dataclasses.replace(problem, nonzeros=entries)
            verify(case, structure, seed, emulated(program, seed), workspaces(program, case))


@pytest.mark.parametrize("beyond", [0, 1])
def test_hits_where_a_thread_block_has_no_room_for_all_pieces_of_its_buckets(beyond: int) -> None:
    """All words are in one long bucket of each band, and are found by as many hits as there are bands, but not by one
    more: neither is one lost nor counted twice."""
    problem = parse("lsh_topk/lists=1,beam=1,hidden=4,vocab=520,frequent=1,n=1,k=2,units=1,bands=260")
    template = spaces.find("fused_step")
    program = template.build(problem, template.default(problem, SM90))
    settings = {"threshold": problem.bands + beyond}
    verify(problem, "every", 0, emulated(program, 0), workspaces(program, problem), settings)


@pytest.mark.parametrize(
    ("name", "key", "decisions"),
    [
        (
            "tensor_core",
            "m=3,k=1024,n=48,block=8,dtype=float16,bias=1",
            {"tile_m": 16, "reduce_warps": 2, "cluster": 8},
        ),
        (
            "tensor_core",
            "m=40,k=256,n=32,block=16,dtype=bfloat16",
            {"tile_m": 16, "reduce_warps": 2, "warps_m": 2, "cluster": 2},
        ),
        ("staged_x", "m=9,k=256,n=16,block=8,activation=silu", {"tile_m": 8, "threads": 32, "cluster": 4}),
    ],
    ids=["8-blocks", "2-blocks", "4-blocks-staged"],
)
def test_blocks_of_threads_share_a_long_row(name: str, key: str, decisions: dict[str, int]) -> None:
    """Among rows that are not shared, and to the same bits in whichever order the blocks run.

    The producer kernel may still write x, the weight and the bias, but not the structure.
    """
    problem, template = parse(f"bsr_matmul/{key},sparsity=0.5,pattern=skewed"), spaces.find(name)
    point = {**template.default(problem, SM90), "depth": 1, **decisions, "overlap": 1}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)

    def written(arguments: Sequence[Any]) -> dict[int, np.ndarray]:
        floats = {i: a for i, a in enumerate(arguments) if isinstance(a, np.ndarray) and a.dtype.kind != "i"}
        return {i: garbage(a, 1) for i, a in floats.items()}

    for seed, structure in enumerate(problem.structures):
        for rows in (1, problem.grid[0] // 2, problem.grid[0]):
            verify(problem, structure, seed, shared(emulated(program, seed, written), rows), settings=KNOWN)
        verify(problem, structure, seed, emulated(program, seed), settings=UNKNOWN)
    inputs, results = problem.generate(0, "one_row"), []
    for seed in (1, 2):
        outputs = problem.empty_outputs()
        shared(emulated(program, seed), 1)([*inputs, *outputs])
        results.append(outputs[0].tobytes())
    assert results[0] == results[1]


# Problems for each operator whose templates overlap their producer kernel; the first that fits is taken.
OVERLAPPED = {
    "screen": ("screen/rows=3,vocab=400,k=5,groups=2",),
    "softmax_topk": (
        "softmax_topk/batch=2,vocab=6001,k=20,dtype=float16,bias=1,ids=3",
        "softmax_topk/batch=3,vocab=1001,k=20,dtype=float16,bias=1,ids=3",
        "softmax_topk/batch=2,vocab=6001,k=20,dtype=float16,ids=3",
    ),
    "softmax_sample": (
        "softmax_sample/batch=2,vocab=6001,k=20,dtype=float16,bias=1,per_row=1",
        "softmax_sample/batch=3,vocab=301,k=20,dtype=float16,per_row=1,seeded=1",
        "softmax_sample/batch=2,vocab=6001,k=1,dtype=float16,per_row=1,seeded=1,whole=1,bias=1,allowed=1",
    ),
    "edit_logits": ("edit_logits/batch=3,vocab=301,words=40,dtype=float16,bias=1,per_row=1",),
    "bsr_matmul": (
        "bsr_matmul/m=9,k=576,n=48,block=8,sparsity=0.5,dtype=float16,bias=1,activation=silu",
        "bsr_matmul/m=5,k=528,n=48,block=16,sparsity=0.5,dtype=float16,bias=1,activation=silu",
        "bsr_matmul/m=66,k=96,n=96,block=16,sparsity=0.5,dtype=float16,bias=1,activation=silu",
    ),
    "nhot_lookup": ("nhot_lookup/rows=7,vocab=53,width=33,nonzeros=3,weighted=1,index=int64",),
    "head_topk": (
        "head_topk/batch=3,vocab=301,hidden=40,k=5,dtype=float16,bias=1,ids=2",
        "head_topk/batch=19,vocab=173,hidden=136,k=5,dtype=bfloat16,bias=1",
    ),
    "head_draw": (
        "head_draw/batch=3,vocab=301,hidden=456,dtype=float16,bias=1,per_row=1,seeded=1",
        "head_draw/batch=19,vocab=173,hidden=136,dtype=bfloat16,bias=1,seeded=3",
        "head_draw/batch=2,vocab=37,hidden=2696,dtype=float16,bias=1",
    ),
    "candidate_topk": (
        "candidate_topk/lists=2,beam=3,vocab=301,hidden=40,m=70,k=5,dtype=float16,bias=1",
        "candidate_topk/lists=2,beam=1,vocab=301,hidden=40,m=70,k=5,dtype=float16,bias=1",
    ),
    "candidate_logits": (
        "candidate_logits/lists=2,beam=9,vocab=301,hidden=40,m=70,dtype=float16,bias=1",
        "candidate_logits/lists=2,beam=1,vocab=301,hidden=40,m=70,dtype=float16,bias=1",
    ),
    "wta_hash": ("wta_hash/batch=3,hidden=40,k=16,units=3,bands=50,dtype=float16",),
    "lsh_lookup": ("lsh_lookup/lists=2,beam=2,vocab=700,bands=20,bits=3",),
    "compaction": ("compaction/lists=2,vocab=3000,capacity=700",),
    "lsh_candidates": ("lsh_candidates/lists=2,beam=2,hidden=40,vocab=700,k=8,units=2,bands=20,capacity=90",),
    "lsh_topk": ("lsh_topk/lists=2,beam=3,hidden=40,vocab=517,frequent=13,n=5,k=7,units=2,bands=13,dtype=float16",),
}
# Decisions without which a template's program is one kernel.
SEVERAL = {"sample_slices": {"tickets": 2}}
# Arguments that a head has from the beginning, and that a template reads early by its description.
CONSTANT = {"fused_step": ("permutations",)}


def overlapping() -> list[Any]:
    """Templates, and the ways in which their launches overlap; ways that read less ahead only in a thorough run."""
    found = {}
    for template, problem in cases("cuda"):
        table = template.space(problem, SM90)
        found[template.name] = template, table.get("overlap", ()), table.get("prefetch", (0,))
    return [
        (template, way) if overlap == max(overlaps) else thorough(template, way)
        for template, overlaps, prefetches in found.values()
        for overlap in overlaps
        for prefetch in prefetches
        if overlap and (overlap == max(overlaps) or not prefetch)
        for way in [{"overlap": overlap} | ({"prefetch": prefetch} if prefetch else {})]
    ]


def garbage(array: np.ndarray, seed: int) -> np.ndarray:
    """Numbers that might be right or, by odd seeds, NaN; integers of which half lie around the sizes that occur here
    and half anywhere."""
    rng = np.random.default_rng(seed)
    if array.dtype.kind not in "iu":
        return np.full_like(array, np.nan) if seed % 2 else rng.normal(0, 8, array.shape).astype(array.dtype)
    most = np.iinfo(array.dtype)
    anywhere = rng.integers(most.min, most.max, array.shape, array.dtype, endpoint=True)
    return np.where(
        rng.random(array.shape) < 0.5, anywhere, rng.integers(max(most.min, -100), 1000, array.shape, array.dtype)
    )


def all_garbage(seed: int, first: int | None = None, but: Sequence[int] = ()) -> Stale:
    """All arrays, or those among the first arguments, but for those at some places."""
    return lambda arguments: {
        i: garbage(a, seed) for i, a in enumerate(arguments[:first]) if isinstance(a, np.ndarray) and i not in but
    }


@pytest.mark.drawn
@pytest.mark.parametrize(("template", "way"), overlapping(), ids=case_id)
def test_overlapping_launches_use_nothing_that_the_producer_kernel_still_writes(
    template: Template, way: dict[str, int]
) -> None:
    """All arrays hold garbage for threads that read before they await that kernel, and lose what these write: numbers
    that might be right, then NaN. What is read so early no structure tells."""
    problems = [p for p in map(parse, OVERLAPPED[template.operator]) if template.name in spaces.applicable(p, SM90)[0]]
    for problem in problems:
        point = {**template.default(problem, SM90), **SEVERAL.get(template.name, {}), **way}
        if template.point(problem, SM90, point) is None:
            break
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    names = [one.name for one in problem.kernel_inputs]
    kept = [names.index(name) for name in CONSTANT.get(template.name, ())]
    for seed, structure in enumerate(problem.structures[:2]):
        # They would else be told that nobody writes the structure, or the words.
        heads = dict.fromkeys(("head_topk", "head_draw"), {"constant": 0})
        settings = {"bsr_matmul": UNKNOWN, **heads}.get(problem.operator)
        verify(
            problem,
            structure,
            seed,
            emulated(program, seed, all_garbage(seed, but=kept)),
            workspaces(program, problem),
            settings,
        )


def with_one_other(array: np.ndarray, place: int) -> np.ndarray:
    other = array.copy()
    other[place : place + 1] ^= 1
    return other


# What a row's columns (argument 2) and ends (argument 3) are taken to be, by what is wrong with it.
WRONG: dict[str, Callable[[np.ndarray, np.ndarray], dict[int, np.ndarray]]] = {
    "one column": lambda indices, indptr: {2: with_one_other(indices, indices.size // 3)},
    "one end, and the next row's begin": lambda indices, indptr: {3: with_one_other(indptr, indptr.size // 2)},
    "all columns": lambda indices, indptr: {2: garbage(indices, 0)},
    "all ends": lambda indices, indptr: {3: garbage(indptr, 0)},
    "both": lambda indices, indptr: {2: garbage(indices, 1), 3: garbage(indptr, 1)},
    "no blocks": lambda indices, indptr: {3: np.zeros_like(indptr)},
    "begins, but not how many blocks": lambda indices, indptr: {3: indptr + 1},
}


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("m=3,k=1024,n=48,block=8,dtype=float16,bias=1", {"tile_m": 16, "reduce_warps": 2, "depth": 1}),
        ("m=5,k=512,n=64,block=16,dtype=bfloat16", {"tile_m": 8, "reduce_warps": 4, "depth": 2}),
        ("m=40,k=240,n=48,block=8x24,dtype=float16", {"tile_m": 32, "reduce_warps": 1, "warps_m": 2}),
    ],
    ids=["2-warps", "4-warps", "1-warp"],
)
def test_wrong_guesses_of_a_row_are_found_out(key: str, decisions: dict[str, int]) -> None:
    """Whatever is wrong with them, for all lanes of a warp or for some."""
    problem, template = parse(f"bsr_matmul/{key},sparsity=0.5"), spaces.find("tensor_core")
    point = {**template.default(problem, SM90), **decisions, "overlap": 1}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    for (seed, wrong), structure in itertools.product(enumerate(WRONG.values()), problem.structures):
        call = emulated(program, seed, lambda arguments, wrong=wrong: wrong(*arguments[2:4]))
        verify(problem, structure, seed, call, settings=UNKNOWN)


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("m=5,k=528,n=64,block=16,dtype=float16", {"reduce_warps": 8, "depth": 2}),
        ("m=8,k=1024,n=64,block=32,dtype=bfloat16,bias=1", {"tile_n": 32, "reduce_warps": 2, "depth": 1}),
        ("m=3,k=512,n=48,block=16x8,dtype=float16", {"reduce_warps": 1, "depth": 4}),
    ],
    ids=["8-warps", "2-warps", "1-warp"],
)
def test_blocks_are_loaded_ahead_only_if_they_are_constant(key: str, decisions: dict[str, int]) -> None:
    problem, template = parse(f"bsr_matmul/{key},sparsity=0.5"), spaces.find("tensor_core")
    point = {**template.default(problem, SM90), "tile_m": 8, "tile_n": 16, **decisions, "overlap": 2}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    for seed, structure in enumerate(problem.structures):
        x, x_and_data = (emulated(program, seed, all_garbage(seed, first)) for first in (1, 2))
        verify(problem, structure, seed, x, settings=KNOWN)
        verify(problem, structure, seed, x_and_data, settings=WRITTEN)
        if structure == "random":
            with pytest.raises(Mismatch):
                verify(problem, structure, seed, x_and_data, settings=KNOWN)


# What the ids (argument 1) are taken to be. Row starts are not read ahead: by structure their guess is right or wrong.
WRONG_IDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one": lambda indices: with_one_other(indices, indices.size // 3),
    "the last": lambda indices: with_one_other(indices, max(indices.size - 1, 0)),
    "some": lambda indices: np.where(np.arange(indices.size) % 5 == 2, garbage(indices, 2), indices),
    "all": lambda indices: garbage(indices, 0),
    "the least numbers": lambda indices: np.full_like(indices, np.iinfo(indices.dtype).min),
    "the largest numbers": lambda indices: np.full_like(indices, np.iinfo(indices.dtype).max),
    "other high words": lambda indices: indices + np.array(1 << 31).astype(indices.dtype) * 2,
}


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("rows=5,vocab=24,width=128,nonzeros=1", {"column_lanes": 32, "vec": 4, "tiles": 4}),
        (
            "rows=5,vocab=23,width=70,nonzeros=1,dtype=float16,index=int64",
            {"column_lanes": 16, "vec": 2, "prefetch": 1},
        ),
        (
            "rows=6,vocab=30,width=64,nonzeros=3",
            {"column_lanes": 32, "vec": 2, "loads": 1, "prefetch": 1},
        ),
        ("rows=4,vocab=60,width=33,nonzeros=40,weighted=1,index=int64", {"loads": 2}),
        (
            "rows=3,vocab=97,width=40,nonzeros=90,weighted=1,dtype=float16",
            {"column_lanes": 4, "vec": 8, "loads": 4, "prefetch": 1},
        ),
        ("rows=4,vocab=50,width=256,nonzeros=10,weighted=1,dtype=bfloat16", {"loads": 4}),
    ],
    ids=["one-hot", "one-hot-groups", "few-ids", "int64", "more-than-32", "two-batches"],
)
def test_wrong_guesses_of_ids_are_found_out(key: str, decisions: dict[str, int]) -> None:
    """Whatever is wrong with them, for all lanes of a warp or for some, and none leads out of the table."""
    problem, template = parse(f"nhot_lookup/{key}"), spaces.find("warp_gather")
    point = {**template.default(problem, SM90), "overlap": 2, **decisions}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    even, others = problem.tuned, [structure for structure in problem.structures if structure != problem.tuned]
    for seed, wrong in enumerate(WRONG_IDS.values()):
        for structure in (even, others[seed % len(others)]):
            call = emulated(program, seed, lambda arguments, wrong=wrong: {1: wrong(arguments[1])})
            verify(problem, structure, seed, call)


@pytest.mark.parametrize(
    ("key", "decisions"),
    [
        ("rows=9,vocab=61,width=72,nonzeros=8,dtype=float16,weighted=1", {"reduce_threads": 2, "overlap": 2}),
        ("rows=12,vocab=50,width=33,nonzeros=7,weighted=1,index=int64", {"reduce_threads": 4, "overlap": 1}),
        ("rows=7,vocab=40,width=8,nonzeros=50", {"reduce_threads": 2, "overlap": 0}),
    ],
    ids=["loads-of-ids", "single-ids", "two-batches"],
)
def test_rows_that_are_not_where_they_are_guessed_to_be(key: str, decisions: dict[str, int]) -> None:
    """As many entries as the problem says on average, but not in every row; another number; and other numbers of rows,
    for one library serves them all."""
    problem, template = parse(f"nhot_lookup/{key}"), spaces.find("dealt_gather")
    point = {**template.default(problem, SM90), **decisions}
    assert template.point(problem, SM90, point) is None
    program = template.build(problem, point)
    rng = np.random.default_rng(0)
    for rows, each in itertools.product((1, problem.rows, 2 * problem.rows + 1), (problem.nonzeros, 1, 0)):
        here = problem.with_batch(rows)
        for moved in (0, 1, 3):
            counts = np.full(rows, each)
            counts[: rows // 2] -= min(moved, each)
            counts[rows - rows // 2 :] += min(moved, each)
            indptr, indices, *values, table = here.generate(moved)
            indptr[1:] = np.cumsum(rng.permutation(counts))
            nnz = int(indptr[-1])
            indices = rng.integers(here.vocab, size=nnz).astype(indices.dtype)
            values = [rng.standard_normal(nnz).astype(array.dtype) for array in values]
            inputs, outputs = [indptr, indices, *values, table], here.empty_outputs()
            emulated(program, moved)([*inputs, *outputs])
            here.check(inputs, here.reference(inputs), outputs)


def test_thread_by_thread_catches_a_missing_barrier() -> None:
    """The emulator's own tests show this for small kernels; here it is shown for one of ours."""
    problem = parse("softmax_topk/batch=2,vocab=1500,k=5")
    template = spaces.find("radix_select")
    program = template.build(problem, template.default(problem, SM90))
    barriers = 0

    def drop(call: Call) -> Any:
        nonlocal barriers
        if "cta_sync" in getattr(call.op, "name", ""):
            barriers += 1
            if barriers == 4:
                return tirx.const(0, "int32")
        return call

    main = program.module["main"]
    broken = tvm.IRModule({"main": main.with_body(tvm_ffi.structural_map(main.body, (Call, drop)))})
    with pytest.raises((EmulationError, Mismatch)):
        verify(problem, "random", 0, emulated(Program(broken, pipeline=program.pipeline), 0))
    assert barriers > 4


@pytest.mark.parametrize("name", ["rows", "logits", "values", "batch", "problem", "bias"])
def test_workspace_of_a_taken_name_is_refused(name: str) -> None:
    own = Workspace(name, ("batch", 8), "uint32")
    with pytest.raises(Exception, match=f"workspaces have names that are taken: {name}"):
        function(parse("softmax_topk/batch=4,vocab=100,k=5"), lambda io: None, (own,))
