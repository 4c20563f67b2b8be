"""Tuning on a Ray cluster: three nodes on this machine, a driver that is killed, and a node that is lost in a trial."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tuning_child

from tvm_sparse.core.machine import cpu
from tvm_sparse.records import Log
from tvm_sparse.tuning import cluster, plans
from tvm_sparse.tuning.cluster import ClusterError
from tvm_sparse.tuning.measuring import Lost
from tvm_sparse.tuning.plans import make_plan
from tvm_sparse.tuning.session import tune
from tvm_sparse.workers.processes import Reply

pytest.importorskip("ray", reason='needs Ray: pip install "tvm_sparse[ray]"')

PROBLEM = tuning_child.PROBLEM
FIXED = {"simd": (8, 16)}
TRIALS = 10  # all points: no search is asked


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, children_without_torch: None) -> Iterator[Any]:
    # Ray's processes give way to all others, and this machine may have others that take all of it.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            found.add_node(num_cpus=1, wait=False)
        found.wait_for_nodes()
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def test_a_killed_driver_is_resumed_and_a_lost_node_costs_nothing_but_time(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(tmp_path, cpu().arch, PROBLEM.operator)
    words = [PROBLEM.key, "--target", "cpu", "--trials", str(TRIALS), "--logs", str(tmp_path), "--fix", "simd=8,16"]
    argv = [sys.executable, "-m", "tvm_sparse", "tune", *words, "--ray", nodes.address, "--workers", "2"]
    driver = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not log.read().trials and driver.poll() is None:
            time.sleep(0.05)
    finally:
        driver.kill()
        said, _ = driver.communicate()
    paid = len(log.read().trials)
    assert 0 < paid < TRIALS, said

    real = cluster.RemoteMeasurer.measure
    victims: list[Any] = []
    outcomes: list[str] = []
    head = nodes.head_node.node_id

    def lose(node: Any, stopped: list[psutil.Process]) -> None:
        nodes.remove_node(node, allow_graceful=False)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def measure(self: Any, *arguments: Any) -> Reply:
        if self.node != head and not victims:  # one of two devices at least is beside the head
            victims.extend(node for node in nodes.list_all_nodes() if node.node_id == self.node)
            # Its processes stand still from now on: the node is lost before the trial ends, however fast it is.
            [raylet] = victims[0].all_processes["raylet"]
            stopped = psutil.Process(raylet.process.pid).children(recursive=True)
            for process in stopped:
                process.suspend()
            threading.Timer(0.4, lose, (victims[0], stopped)).start()
        try:
            reply = real(self, *arguments)
        except Lost:
            outcomes.append("lost")
            raise
        outcomes.append(reply.kind)
        return reply

    monkeypatch.setattr(cluster.RemoteMeasurer, "measure", measure)
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 2)
    with cluster.connected(nodes.address, "cpu", workers=2) as devices:
        plan = make_plan(PROBLEM, cpu(), TRIALS, log, 1, fixed=FIXED)
        assert (plan.paid, plan.trials) == (paid, TRIALS - paid)
        best = tune(plan, log, using=devices)
    trials = log.read().trials
    assert outcomes.count("lost") == 1 and set(outcomes) == {"ok", "lost"}
    assert sum(" is lost: " in message for message in caplog.messages) == 1
    # What the node was measuring has been measured elsewhere.
    assert len(trials) == len({trial.candidate for trial in trials}) == TRIALS
    assert {trial.outcome for trial in trials} == {"ok"} and not log.read().skipped
    assert log.best() == {PROBLEM.key: best} and len({trial.session for trial in trials}) == 2

    with pytest.raises(ClusterError, match=r"of its \d cores 9 are to measure, and none is left to build"):
        with cluster.connected(nodes.address, "cpu", workers=9):
            pass
    with pytest.raises(ClusterError, match="it has no GPU"):
        with cluster.connected(nodes.address, "cuda"):
            pass


def test_the_command_tunes_on_a_cluster_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children_without_torch: None
) -> None:
    """The whole way, with the variable that Ray sets for its workers and torchrun for its processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    problem = tuning_child.THREADED
    words = [problem.key, "--target", "cpu", "--trials", "2", "--logs", str(tmp_path), "--ray", "local"]
    argv = [sys.executable, "-m", "tvm_sparse", "tune", *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = Log(tmp_path, cpu().arch, problem.operator)
    assert done.returncode == 0, done.stdout
    assert [trial.outcome for trial in log.read().trials] == ["ok"] * 2 and problem.key in log.best()


def test_builds_of_a_lost_task_are_nobodys_fault() -> None:
    found = cluster.lost_build(RuntimeError("the node died"))
    assert found.kind == "crash" and found.environment and "the node died" in found.message


def test_there_is_no_cluster() -> None:
    with pytest.raises(ClusterError, match=r"no connection to 127\.0\.0\.1:1"):
        with cluster.connected("127.0.0.1:1"):
            pass
