"""Cooperative kernels: all their thread blocks run at the same time, or another kernel runs."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from cases import SM80, SM90

from tvm_sparse.artifacts import manifest
from tvm_sparse.artifacts.compile import CompileError, compile_candidate
from tvm_sparse.artifacts.manifest import Entry
from tvm_sparse.artifacts.residency import unfit
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.machine import AVX512_BF16, Machine, cpu, resolve
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Template
from tvm_sparse.runtime import loading
from tvm_sparse.runtime.dispatch import Dispatcher

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
    assert spaces.fallback(problem, where).values["blocks"] <= where.cores
    assert spaces.fallback(problem, where, cooperative=False).template == "step_kernels"


def test_what_a_launch_without_room_is_replaced_by(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def refused(*arguments: Any) -> None:
        calls.append("refused")
        raise RuntimeError("CUDALaunch Error: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE\n grid=(132,1,1)")

    def other() -> Any:
        calls.append("loaded")
        return lambda *arguments: calls.append(f"steps of {arguments}")

    function = loading.or_else(refused, parse(KEY), other)
    with caplog.at_level(logging.WARNING, "tvm_sparse"):
        function(1, 2)
        function(3)
    assert calls == ["refused", "loaded", "steps of (1, 2)", "steps of (3,)"]
    assert len(caplog.records) == 1 and "no room for all thread blocks" in caplog.text


def test_other_errors_are_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="ILLEGAL"):
        loading.or_else(broken, parse(KEY), pytest.fail)()


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
