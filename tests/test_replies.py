"""Replies of processes and machines that are not believed: wrong types, other requests, impossible times."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import random
import re
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tvm_sparse.core.machine import cpu
from tvm_sparse.tuning import cluster, replies
from tvm_sparse.tuning.measuring import PrepareError
from tvm_sparse.tuning.replies import NotBelieved, packed, unpacked
from tvm_sparse.workers.processes import Reply, StartError

LIBRARY = b"\x7fELF\n and so on"
SHA256 = hashlib.sha256(LIBRARY).hexdigest()
ASKED = {"problem": "softmax_topk/batch=2", "candidate": "row_scan@5(chunk=64)"}
BUILT = {
    "path": "/there/library.so", "seconds": 1.5, "symbol": "main", "resident": None, "resources": {"registers": 40},
    "workspaces": [{"name": "partial", "shape": ["batch", 4], "dtype": "float32", "fill": 255}],
}  # fmt: skip
BUILD = {**ASKED, "sha256": SHA256, "reply": asdict(Reply("ok", value=BUILT))}
MEASURED = {
    "problem": ASKED["problem"],
    "sha256": SHA256,
    "reply": asdict(Reply("ok", value={"seconds": [2e-6, 3e-6]})),
}
DESCRIBED = {
    "host": "a", "node": "b", "machine": asdict(cpu()), "state": {"clocks.sm": "1980 MHz"}, "versions": {"ray": "2"},
}  # fmt: skip
ODD = (None, True, 0, -1, 1.5, "", "other", [], ["x"], {}, {"a": 1}, [[[]]], 2**70, "x" * 2_000_000)


def mutated(value: Any, rng: random.Random) -> Any:
    """With one of its parts, or itself, another one."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        number = rng.randrange(len(value))
        return [*value[:number], mutated(value[number], rng), *value[number + 1 :]]
    return rng.choice([one for one in ODD if one != value])


def test_plain_data_goes_there_and_back() -> None:
    assert unpacked(packed(BUILD, LIBRARY)) == (json.loads(json.dumps(BUILD)), LIBRARY)
    assert unpacked(packed({})) == ({}, b"")
    reply = replies.of_request(unpacked(packed(BUILD, LIBRARY))[0], **ASKED)
    assert reply == Reply("ok", value=BUILT)
    replies.check_built(reply, LIBRARY, SHA256)
    replies.check_described(unpacked(packed(DESCRIBED))[0])
    failed = Reply("crash", message="why", environment=True, changed=("its alarms",))
    assert replies.of_request({**ASKED, "reply": json.loads(json.dumps(asdict(failed)))}, **ASKED) == failed


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"seconds": [1e-9]}), pickle.dumps(print) + b"\n", b"", b"{}", b"[]\n", b"7\n", b"null\n",
        b'{"a": NaN}\n', b'{"a": -Infinity}\n', b"\xff\n", b"[" * 100_000 + b"\n", b'{"a": ' * 100_000 + b"\n",
        {"reply": 1}, Reply("ok"), bytearray(b"{}\n"), None, (b"{}", b""),
    ],
    ids=lambda data: repr(data)[:20],
)  # fmt: skip
def test_what_is_no_plain_data_is_refused(data: Any) -> None:
    with pytest.raises(NotBelieved):
        unpacked(data)


def test_drawn_changes_of_a_reply_are_refused_or_change_nothing_that_is_used() -> None:
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    refused = 0
    for _ in range(3000):
        if not isinstance(value := mutated(json.loads(json.dumps(BUILD)), rng), dict):
            continue  # `unpacked` gives objects alone
        try:
            reply = replies.of_request(value, **ASKED)
            replies.check_built(reply, LIBRARY, value.get("sha256"))
        except NotBelieved as error:
            refused += 1
            assert len(str(error)) < 1000
            continue
        if reply.ok:
            assert all(type(reply.value[name]) is type(BUILT[name]) for name in ("path", "symbol", "workspaces")), seed
            assert type(reply.value["seconds"]) in (int, float) and reply.value["seconds"] < 1e300, seed
    assert refused > 1500
    for _ in range(1000):
        if isinstance(value := mutated(json.loads(json.dumps(DESCRIBED)), rng), dict):
            try:
                replies.check_described(value)
            except NotBelieved:
                continue
            where = value["machine"]
            assert where is None or all(
                type(where[field.name]) is type(getattr(cpu(), field.name)) for field in dataclasses.fields(cpu())
            ), seed


@pytest.mark.parametrize(
    "seconds",
    [
        [0], [0.0], [-1e-6], [1e-12], [31.0], [float("inf")], [float("nan")], [True], ["1e-6"], [None], [[1e-6]],
        [], "1e-6", None, {}, 1e-6, [2e-6, -1.0], [1e-6] * 200_000, [10**400],
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_times_that_no_clock_shows_are_refused(seconds: Any) -> None:
    with pytest.raises(NotBelieved):
        replies.check_measured(Reply("ok", value={"seconds": seconds}), ("time",), 30.0)


def test_times_are_expected_where_they_were_asked() -> None:
    for value in ({"seconds": [1e-6, 29]}, {"seconds": (1e-6,)}):
        replies.check_measured(Reply("ok", value=value), ("check", "time"), 30.0)
    replies.check_measured(Reply("ok", value={"seconds": []}), ("check",), 30.0)
    replies.check_measured(Reply("crash", message="x"), ("time",), 30.0)
    for value in ({"seconds": [1e-6]}, {}, None, [], 7):
        with pytest.raises(NotBelieved):
            replies.check_measured(Reply("ok", value=value), ("check",), 30.0)


# ---- with the driver -----------------------------------------------------------------------------


class Remote:
    """An actor all of whose methods answer alike."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_: Any) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (packed(MEASURED), ""),
        (packed({**MEASURED, "problem": "softmax/batch=1"}), "problem is 'softmax/batch=1', expected"),
        (packed({**MEASURED, "sha256": "0" * 64}), "sha256 is '000"),
        (packed({**MEASURED, "reply": asdict(Reply("ok", value={"seconds": [1e-30]}))}), "a time is 1e-30 s"),
        (pickle.dumps(MEASURED), "not JSON|expected a line"),
        (MEASURED, "expected bytes, got dict"),
        (packed({"raised": "SystemExit", "message": "x"}), "raised is 'SystemExit'"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_driver_believes_only_what_was_measured_for_it(
    answer: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_result", lambda ref, abandoned: ref)
    (tmp_path / "library.so").write_bytes(LIBRARY)
    measurer = cluster.RemoteMeasurer(Remote(answer), 0, DESCRIBED)
    library = {"library": str(tmp_path / "library.so"), "steps": ("time",)}
    reply = measurer.measure({"problem": ASKED["problem"], "seed": 0}, library, 30.0, lambda: False)
    if not said:
        assert reply == Reply("ok", value={"seconds": [2e-6, 3e-6]})
    else:
        assert (reply.kind, reply.environment) == ("crash", True)
        assert _matches(said, reply.message)


def _matches(pattern: str, text: str) -> bool:
    return re.search(f"is not believed: .*({pattern})", text) is not None


def test_errors_of_a_place_are_raised_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_result", lambda ref, abandoned: ref)
    problem = {"problem": ASKED["problem"], "seed": 0}
    for cls in (PrepareError, StartError):
        answer = cluster._answer(lambda cls=cls: (_ for _ in ()).throw(cls("why")))
        with pytest.raises(cls, match="why"):
            cluster.RemoteMeasurer(Remote(answer), 0, DESCRIBED).prepare(problem, lambda: False)
    with pytest.raises(StartError, match="a device is not believed"):
        cluster.RemoteMeasurer(Remote(b"x"), 0, DESCRIBED).prepare(problem, lambda: False)
    for answer, same in ((packed(DESCRIBED), True), (packed({**DESCRIBED, "machine": None}), False), (b"x", False)):
        assert cluster.RemoteMeasurer(Remote(answer), 0, DESCRIBED).recover(lambda: False) == same


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (packed(BUILD, LIBRARY), ""),
        (packed(BUILD, LIBRARY + b"more"), "its sha256 differs"),
        (packed(BUILD), "its sha256 differs"),
        (packed({**BUILD, "candidate": "row_scan@5(chunk=32)"}, LIBRARY), "candidate is 'row_scan@5.chunk=32.'"),
        (pickle.dumps((BUILD, LIBRARY)), "not JSON|expected a line"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_driver_writes_only_the_library_that_was_built(
    data: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ref:
        def future(self) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(data)
            return done

    builders = object.__new__(cluster.RemoteBuilders)
    builders._build, builders._refs = Remote(Ref()), set()
    path = tmp_path / "library.so"
    reply = builders.submit({**ASKED, "path": str(path)}, timeout=1.0).result(10)
    if not said:
        assert reply == Reply("ok", value={**BUILT, "path": str(path)}) and path.read_bytes() == LIBRARY
    else:
        assert (reply.kind, reply.environment, path.exists()) == ("crash", True, False)
        assert _matches(said, reply.message)
