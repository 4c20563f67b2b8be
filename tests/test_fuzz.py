"""A short run of `scripts/fuzz.py`, and what its long ones found."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from cases import use_dispatcher

import tvm_sparse
from tvm_sparse.layers import storage
from tvm_sparse.records import exchange
from tvm_sparse.runtime.dispatch import Dispatcher

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The script, with a process's kernels of its own: none, so that calls end where they would need one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "fuzz", raising=False)
    import fuzz

    use_dispatcher(monkeypatch, Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path / "none"))
    yield fuzz


def test_readers_and_functions_raise_what_they_document(fuzz: ModuleType, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    pytest.importorskip("torch")
    reports = [fuzz.guided(name, 40, seed, tmp_path / "last") for name in fuzz.READERS]
    reports += fuzz.functions(list(fuzz.CALLS), 4, seed, tmp_path / "last", kernels=False)
    found = [finding for report in reports for finding in report.findings]
    assert not found, f"seed {seed}: " + "\n".join(found)
    # It looks for something: nearly every reader is led to inputs that show more than the valid ones did.
    assert sum(report.kept > 1 for report in reports if report.target in fuzz.READERS) > len(fuzz.READERS) // 2


def test_a_finding_is_told_with_its_place(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader raises beyond its documentation, and a process would not survive, is not lost."""
    reader = dataclasses.replace(fuzz.READERS["candidate"], errors=(), structured=False)
    monkeypatch.setitem(fuzz.READERS, "candidate", reader)
    report = fuzz.guided("candidate", 60, 1, tmp_path / "last")
    assert report.findings and report.findings[0].startswith("candidate: ValueError at core/candidate.py:")


def test_a_head_without_its_library_is_no_head(tmp_path: Path) -> None:
    embedding = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    path = tvm_sparse.LshHead(embedding, k=2, units=2, bands=3, threshold=1).save(tmp_path / "head.npz")
    held, meta = storage.read(path)
    del meta["library"]
    storage.write(path, held, meta)
    with pytest.raises(ValueError, match="not a head: 'library'"):
        tvm_sparse.LshHead.load(path)


@pytest.mark.parametrize(
    "text", ["'a' * 999999999 == ''", "(1,) * 999999999 == 1", "name * 99 == name", "size.real", 7]
)
def test_a_condition_of_a_file_is_arithmetic_of_numbers(text: object, tmp_path: Path) -> None:
    parameters = [{"Name": "size", "Values": "[1, 2]"}, {"Name": "name", "Values": "['a', 'b']"}]
    space = {"TuningParameters": parameters, "Conditions": [{"Expression": text}]}
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"ConfigurationSpace": space}))
    with pytest.raises(exchange.ExchangeError, match="is not understood|expected a text"):
        exchange.read_inputs(path)
    space["Conditions"] = [{"Expression": "name == 'a' and size * 2 < 4"}]
    path.write_text(json.dumps({"ConfigurationSpace": space}))
    assert sum(exchange.read_inputs(path).refused().values()) == 3
