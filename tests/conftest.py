"""What all tests share: Ctrl-C works; GPU tests run one at a time, and where there is no GPU are skipped.

pyproject.toml runs the tests in two processes. GPU tests form a group (`--dist loadgroup`), which one of the two gets:
two processes on one GPU would disturb each other's timings and share its memory. The other one goes on with the rest.
"""

from __future__ import annotations

import os
import signal

import pytest

from tvm_sparse.core import machine

# Idle threads of the CPU kernels would spin beside the other tests; child processes inherit it.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")
# A shell starts what it puts into the background with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    absent = pytest.mark.skip(reason="needs a CUDA GPU, and the driver finds none")
    mark = pytest.mark.xdist_group("gpu") if machine.gpu() else absent
    for item in marked:
        item.add_marker(mark)
