"""What all tests share: Ctrl-C works, and GPU tests are skipped, with the reason, on a machine without one."""

from __future__ import annotations

import signal

import pytest

from tvm_sparse.core import machine

# A shell starts what it puts into the background with SIGINT ignored, and every child inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and machine.gpu() is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and the driver finds none"))
