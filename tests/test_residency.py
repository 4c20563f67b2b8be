"""What a kernel needs of a machine: where it is not there, or the GPU refuses the launch, another kernel runs."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from cases import AWKWARD, REALISTIC, SM80, SM90

from tvm_sparse.artifacts import manifest
from tvm_sparse.artifacts.compile import CompileError, compile_candidate
from tvm_sparse.artifacts.cuda import limits
from tvm_sparse.artifacts.manifest import Entry
from tvm_sparse.artifacts.residency import unfit
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.machine import AVX512_BF16, Machine, cpu, resolve
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Template
from tvm_sparse.records import Best, Log
from tvm_sparse.runtime import loading
from tvm_sparse.runtime.dispatch import Dispatcher, Kernel
from tvm_sparse.runtime.loading import Miss
from tvm_sparse.runtime.lookup import Choice

KEY = "sparse_recurrent/steps=4,batch=2,hidden=300,nonzeros=10"
SLICE = dataclasses.replace(SM90, cores=16)
ROOM = "its 75 thread blocks wait for each other, and 16 multiprocessors run 16 of them at the same time"


@pytest.mark.parametrize(
    ("where", "threads", "registers", "shared_bytes", "each"),
    [
        (SM90, 1024, 32, 0, 2),  # 2048 threads
        (SM90, 1024, 33, 0, 1),  # registers are allocated by eight
        (SM90, 256, 255, 0, 1),
        (SM90, 32, 16, 0, 32),  # thread blocks
        (SM90, 128, 32, 227 * 1024, 1),
        (SM90, 128, 32, 228 * 1024, 0),  # 1 KB is the system's
        (SM90, 128, 32, 113 * 1024, 2),
        (SM80, 128, 32, 163 * 1024, 1),
        (Machine("cuda", "sm_86", "sm_86", cores=84), 1024, 32, 0, 1),
    ],
)
def test_blocks_at_once(where: Machine, threads: int, registers: int, shared_bytes: int, each: int) -> None:
    assert where.blocks_at_once(threads, registers, shared_bytes) == each * where.cores


def test_clusters_at_once() -> None:
    """More of smaller ones; a part of them where kernels are to use a part of the multiprocessors."""
    found = [SM90.clusters_at_once(blocks) for blocks in range(1, 17)]
    assert found == sorted(found, reverse=True) and found[0] == SM90.cores
    assert all(blocks * clusters <= SM90.cores for blocks, clusters in enumerate(found, 1))
    # By which 32 rows have three blocks each, and 16 rows six.
    assert found[3] < 32 <= found[2] and found[6] < 16 <= found[5]
    half = dataclasses.replace(SM90, cores=SM90.cores // 2)
    assert [half.clusters_at_once(blocks) for blocks in range(1, 17)] == [clusters // 2 for clusters in found]


def resident(blocks: int, threads: int = 128, shared_bytes: int = 0) -> dict[str, int]:
    return {"blocks": blocks, "threads": threads, "shared_bytes": shared_bytes}


def test_what_is_too_large() -> None:
    assert unfit(None, None, SLICE) is None
    assert unfit(resident(16, 1024), {"registers": 64, "shared_bytes": 0}, SLICE) is None
    assert unfit(resident(32, 512), {"registers": 64, "shared_bytes": 0}, SLICE) is None
    assert unfit(resident(75, 1024), {"registers": 64, "shared_bytes": 0}, SLICE) == ROOM
    static = {"registers": 64, "shared_bytes": 4096}
    assert unfit(resident(16, 128, 224 * 1024), static, SLICE) is not None
    assert unfit(resident(16, 128, 223 * 1024), static, SLICE) is None


def test_instructions_that_not_every_cpu_has(tmp_path: Path) -> None:
    """A library that uses them is neither run nor chosen on a CPU without; one for an architecture has none of them."""
    plain = Machine("llvm", "x86-64-v4", "CPU", cores=2)
    able = dataclasses.replace(plain, instructions=AVX512_BF16)
    assert unfit(None, {AVX512_BF16: 1}, plain) == "it uses avx512_bf16, which this CPU does not have"
    assert unfit(None, {AVX512_BF16: 1}, able) is None and unfit(None, None, plain) is None
    assert not resolve("x86-64-v4").instructions and not resolve(cpu().arch).instructions

    problem = parse("head_topk/batch=2,vocab=40,hidden=70,k=3,dtype=bfloat16")
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    found = {one: own.kernel(problem, one).entry for one in (able, plain, able)}
    assert [entry.candidate.values["dots"] for entry in found.values()] == [1, 0]
    assert found[able].resources == {AVX512_BF16: 1} and found[plain].resources is None
    assert len(list((tmp_path / plain.arch).glob("*.so"))) == 2
    fewer = Dispatcher(logs=(), shipped=tmp_path / plain.arch, cache=tmp_path / "other")
    assert fewer.explain(problem, plain).library == str(tmp_path / plain.arch / found[plain].library)


def test_the_environment_limits_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.LIMIT, raising=False)
    assert machine.limit() >= 1 << 20
    monkeypatch.setenv(machine.LIMIT, "16")
    assert machine.limit() == 16
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv(machine.LIMIT, wrong)
        with pytest.raises(ValueError, match=f"{machine.LIMIT}: expected a number of multiprocessors"):
            machine.limit()


@pytest.mark.parametrize("where", [SM90, SM80, SLICE, dataclasses.replace(SM90, cores=1)], ids=lambda m: str(m.cores))
def test_defaults_fit_the_machine(where: Machine) -> None:
    problem = parse(KEY)
    found = spaces.fallback(problem, where)
    assert found.values["cluster" if found.template == "cluster_rows" else "blocks"] <= where.cores
    # A cluster runs as a whole or is refused, too, without being cooperative.
    others = "cluster_rows" if where in (SM90, SLICE) else "step_kernels"
    assert spaces.fallback(problem, where, cooperative=False).template == others


# As TVM words them: refused before any thread block ran, and what leaves the process unusable.
LAUNCH = "CUDALaunch Error: {}\n grid=(132,1,1), block=(512,1,1)\n// func_name=main_kernel"
REFUSALS = [
    LAUNCH.format("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"),
    LAUNCH.format("CUDA_ERROR_INVALID_VALUE"),
    LAUNCH.format("CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    LAUNCH.format("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    "Check failed: (r == 0): Failed to set the allowed dynamic shared memory size to 232448",
    "Failed to allow non-portable CUDA cluster size (16, 1, 1)",
    "CUDAError: cuModuleLoadData(&(module_[device_id]), data_.c_str()) failed with error: CUDA_ERROR_NO_BINARY_FOR_GPU",
]
BROKEN = [
    LAUNCH.format("CUDA_ERROR_ILLEGAL_ADDRESS"),
    LAUNCH.format("CUDA_ERROR_LAUNCH_FAILED"),
    LAUNCH.format("CUDA_ERROR_INVALID_VALUES_OF_ANOTHER_KIND"),
    "CUDAError: cuMemcpyAsync failed with error: CUDA_ERROR_INVALID_VALUE",
    "Mismatched type on argument #5",
]


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("text", REFUSALS)
def test_a_refused_launch_is_replaced_once_and_for_all(text: str, always: bool) -> None:
    calls: list[str] = []

    def refused(*arguments: Any) -> None:
        calls.append("refused")
        raise RuntimeError(text)

    def other(reason: str) -> Any:
        calls.append("loaded")
        assert reason in text
        return lambda *arguments: calls.append(f"steps of {arguments}")

    function = loading.Retreating(refused, other, always=always)
    function(1, 2)
    function(3)
    assert calls == ["refused", "loaded", "steps of (1, 2)", "steps of (3,)"]
    loading.settled(function)(4)
    assert calls[4:] == ["steps of (4,)"]


@pytest.mark.parametrize("text", BROKEN)
def test_other_errors_are_the_callers(text: str) -> None:
    def broken() -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text.partition("\n")[0].partition("(")[0]):
        loading.Retreating(broken, pytest.fail)()


def test_a_launch_that_ran_is_not_looked_at_again() -> None:
    """But for a cooperative one, for which a busy GPU may have no room later."""

    def runs(*arguments: Any) -> None: ...

    once, always = (loading.Retreating(runs, pytest.fail, always=always) for always in (False, True))
    assert loading.settled(once) is once and loading.settled(runs) is runs
    once(1)
    always(1)
    assert loading.settled(once) is runs and loading.settled(always) is always


class Refusing:
    """Kernels in the place of libraries: those of some templates are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *templates: str, text: str = REFUSALS[2]) -> None:
        self.tried: list[str] = []

        def loaded(own: Dispatcher, problem: Any, where: Machine, choice: Choice, located: Any) -> Kernel:
            def function(*arguments: Any) -> None:
                self.tried.append(choice.candidate.template)
                if choice.candidate.template in templates:
                    raise RuntimeError(text)

            entry = Entry(problem.key, where.arch, "cuda", choice.candidate, choice.how, "a.so", "", (), {}, None)
            return Kernel(function, entry, own.explain(problem, where))

        monkeypatch.setattr(Dispatcher, "_loaded", loaded)


TOPK = "softmax_topk/batch=4,vocab=128256,k=5"


def test_a_refused_kernel_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For no batch, whatever look-up would say; and `explain` says what runs."""
    problem, where = parse(TOPK), SM90
    chosen = spaces.fallback(problem, where)
    kernels = Refusing(monkeypatch, chosen.template)
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    with caplog.at_level(logging.WARNING, "tvm_sparse"):
        for _ in range(3):
            own.kernel(problem, where).function()
    instead = kernels.tried[1]
    assert kernels.tried == [chosen.template, *[instead] * 3] and instead != chosen.template
    said = [record.getMessage() for record in caplog.records if "cannot be launched" in record.getMessage()]
    assert len(said) == 1 and "CUDA_ERROR_INVALID_CLUSTER_SIZE" in said[0] and instead in said[0]
    found = own.explain(problem, where)
    assert (found.how, found.candidate.partition("@")[0].partition(" ")[0].startswith(instead)) == ("fallback", True)
    assert "this GPU does not launch" in found.why and chosen.template in found.why
    own.configure("exact", None)
    with pytest.raises(Miss, match="this GPU does not launch"):
        own.kernel(problem, where)


def test_where_every_kernel_is_refused_the_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Refusing(monkeypatch, *(template.name for template in spaces.templates("softmax_topk")))
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    with pytest.raises(loading.LoadError, match="the GPU launches none of .*CUDA_ERROR_INVALID_CLUSTER_SIZE"):
        own.kernel(parse(TOPK), SM90).function()
    assert len(kernels.tried) == len(set(kernels.tried)) >= 2


def test_a_policy_that_forbids_the_fallback_holds_at_a_refused_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse(TOPK)
    best = spaces.fallback(problem, SM90)
    Log(tmp_path / "logs", SM90.arch, problem.operator).append_best(
        Best(problem.key, SM90.arch, best, 1e-6, best, 2e-6, 3, "s")
    )
    Refusing(monkeypatch, best.template)
    own = Dispatcher(logs=(tmp_path / "logs",), shipped=tmp_path / "none", cache=tmp_path)
    own.configure("exact", None)
    with pytest.raises(Miss, match="The policy is 'exact'"):
        own.kernel(problem, SM90).function()


def test_what_a_kernel_needs_is_compared_with_the_machine() -> None:
    """Clusters and dynamic shared memory, as templates declare them and manifests hold them."""
    blackwell = resolve("rtx5090")
    assert unfit(None, {"cluster": 16}, SM90) is None and unfit(None, {"cluster": 8}, blackwell) is None
    assert "clusters of 16 thread blocks are larger than 8" in (unfit(None, {"cluster": 16}, blackwell) or "")
    assert "larger than 1" in (unfit(None, {"cluster": 2}, SM80) or "")
    fits = {"shared_bytes": 4096, "dynamic_shared_bytes": 226 * 1024}
    assert unfit(None, fits, SM90) is None and "of shared memory, more than 166912" in (unfit(None, fits, SM80) or "")
    template, problem = spaces.find("held_rows"), parse(TOPK)
    decisions = template.default(problem, SM90)
    assert template.needs(problem, decisions)["cluster"] == decisions["cluster"] > 8
    assert "dynamic_shared_bytes" in template.needs(problem, decisions)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(t.name for t in spaces.templates() if t.kind == "cuda"))
def test_declared_needs_are_those_of_the_program(name: str) -> None:
    """At the largest cluster of a shape that has one."""
    template = spaces.find(name)
    for problem in (*AWKWARD, *REALISTIC):
        if problem.operator != template.operator or name not in spaces.applicable(problem, SM90)[0]:
            continue
        sizes = template.space(problem, SM90).get("cluster", ())
        points = [dict(template.default(problem, SM90))]
        points = [{**points[0], "cluster": size} for size in sizes] or points
        *_, decisions = (point for point in points if template.allowed(problem, SM90, point) is None)
        if sizes and decisions["cluster"] == 1:
            continue
        text = template.build(problem, decisions).module["main"].script()
        clusters = {int(size) for size in re.findall(r"cta_id_in_cluster\(\[(\d+)\]", text)}
        assert max(clusters, default=1) == template.needs(problem, decisions).get("cluster", 1)
        return


@pytest.mark.gpu
def test_the_driver_tells_the_limits() -> None:
    where = machine.gpu()
    assert where is not None
    found = limits.limits(where)
    assert (found.multiprocessors, found.l2_bytes, found.max_threads) == (
        where.cores,
        where.l2_bytes,
        where.max_threads,
    )
    assert found.block_shared_bytes == where.block_shared_bytes and found.threads == where.threads_at_once
    assert found.cooperative_blocks == where.blocks_at_once(1024, 16, 0)
    assert found.largest_cluster == where.most_cluster
    if "H200" in where.name:
        assert found.clusters_at_once == machine.CLUSTERS_AT_ONCE
    assert limits.clusters_at_once(0, 2 * where.most_cluster, 128, 0) in (0, None)


@pytest.mark.gpu
def test_a_manifest_that_asks_for_too_large_a_cluster_is_passed_over(tmp_path: Path) -> None:
    """As on a GPU of the same architecture with smaller parts; what runs is right."""
    torch = pytest.importorskip("torch")
    where = machine.gpu()
    problem = parse(TOPK)
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    chosen = own.kernel(problem, where).entry
    folder = tmp_path / where.arch
    doctored = dataclasses.replace(chosen, resources={**(chosen.resources or {}), "cluster": 64}, chosen="exact")
    manifest.write(folder, [doctored])
    other = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path / "other")
    other.add(folder)
    kernel = other.kernel(problem, where)
    assert kernel.explanation.library != str(folder / chosen.library)
    logits = torch.randn(4, 128256, device="cuda")
    values, indices = torch.empty(4, 5, device="cuda"), torch.empty(4, 5, dtype=torch.int64, device="cuda")
    with tvm_ffi.use_torch_stream():
        kernel.function(logits, 1.0, 0, values, indices)
    assert torch.equal(logits.gather(1, indices), logits.topk(5).values)


@pytest.mark.gpu
def test_a_launch_that_this_gpu_refuses_retreats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cluster that no GPU launches, compiled for this one; the driver refuses it, and the process goes on."""
    torch = pytest.importorskip("torch")
    where, problem = machine.gpu(), parse(TOPK)
    if not where.has_clusters:
        pytest.skip("this GPU has no clusters")
    refused = clusters_of(32, where, tmp_path / "refused.so")
    with pytest.raises(Exception) as raised:
        refused(torch.zeros(32, device="cuda"))
    assert loading.refusal(raised.value), str(raised.value)
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path)
    kernel = own.kernel(problem, where)
    first = kernel.entry.candidate
    object.__setattr__(kernel.function, "_function", lambda *arguments: refused(torch.zeros(32, device="cuda")))
    logits = torch.randn(4, 128256, device="cuda")
    values, indices = torch.empty(4, 5, device="cuda"), torch.empty(4, 5, dtype=torch.int64, device="cuda")
    with tvm_ffi.use_torch_stream(), caplog.at_level(logging.WARNING, "tvm_sparse"):
        for _ in range(2):
            kernel.function(logits, 1.0, 0, values, indices)
    assert torch.equal(logits.gather(1, indices), logits.topk(5).values)
    assert caplog.text.count("cannot be launched") == 1
    assert own.kernel(problem, where).entry.candidate != first
    torch.cuda.synchronize()


def clusters_of(blocks: int, where: Machine, path: Path) -> Any:
    """A kernel of one cluster of so many thread blocks, each of which writes its number."""
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.artifacts import cuda
    from tvm_sparse.artifacts.compile import target_of

    cuda.activate()

    @T.prim_func
    def main(out: T.Buffer((blocks,), "float32")):
        T.device_entry()
        T.cluster_id([1])
        part = T.cta_id_in_cluster([blocks])
        thread = T.thread_id([32])
        if thread == 0:
            out[part] = T.Cast("float32", part)

    with target_of(where):
        module = tvm.compile(tvm.IRModule({"main": main}), target=target_of(where), tir_pipeline="tirx")
    module.mod.export_library(str(path))
    return loading.load_function(path, "cuda", None)


def exported(folder: Path, blocks: int) -> None:
    """A manifest of a cooperative library and of the one that takes its place; neither is there."""
    problem, template = parse(KEY), spaces.find("persistent_rows")
    candidate = template.candidate({**template.default(problem, SM90), "blocks": blocks})
    steps = spaces.fallback(problem, SM90, cooperative=False)
    figures = {"seconds": 1e-6, "fallback_seconds": 2e-6, "session": "s1", "machine": "a machine", "date": ""}
    taken = {"registers": 64, "shared_bytes": 0, "local_bytes": 0, "spill_instructions": 0}
    of = resident(blocks, 1024)
    manifest.write(
        folder,
        [
            Entry(problem.key, "sm_90a", "cuda", candidate, "exact", "a.so", "0" * 64, (), figures, taken, of),
            Entry(problem.key, "sm_90a", "cuda", steps, "fallback", "b.so", "0" * 64, (), {}, taken),
        ],
    )


def test_an_exported_kernel_is_passed_over_where_it_has_no_room(tmp_path: Path) -> None:
    exported(tmp_path / "folder", 75)
    own = Dispatcher(logs=(), shipped=tmp_path / "shipped", cache=tmp_path / "cache")
    own.add(tmp_path / "folder")
    said = own.explain(parse(KEY), SM90)
    assert (said.how, said.library) == ("exact", str(tmp_path / "folder" / "a.so"))
    said = own.explain(parse(KEY), SLICE)
    assert said.how == "fallback" and said.why.endswith(f"passed over: {ROOM}")


def test_what_does_not_agree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda")
    problem, template = parse(KEY), spaces.find("persistent_rows")

    def changed(**fields: Any) -> Template:
        return dataclasses.replace(template, **fields)

    def without_declaration(problem: Any, decisions: Any) -> Any:
        return dataclasses.replace(template.program(problem, decisions), resident=None)

    def larger(problem: Any, decisions: Any) -> Any:
        program = template.program(problem, decisions)
        return dataclasses.replace(program, resident=dataclasses.replace(program.resident, blocks=9999))

    candidate = template.candidate(template.default(problem, SM90))
    for wrong, message in (
        (changed(cooperative=False), "do not agree on whether it is cooperative"),
        (changed(program=without_declaration), "do not agree on whether it is cooperative"),
        (changed(program=larger), "its 9999 thread blocks wait for each other, and 132 multiprocessors run"),
    ):
        monkeypatch.setattr(spaces, "find", lambda name, operator, wrong=wrong: wrong)
        with pytest.raises(CompileError, match=message):
            compile_candidate(problem, candidate, SM90, tmp_path / "a.so")
    monkeypatch.setattr(spaces, "find", lambda name, operator: template)
    compiled = compile_candidate(problem, candidate, SM90, tmp_path / "a.so")
    assert compiled.resident is not None and compiled.resident["blocks"] == candidate.values["blocks"]
