"""The region of one kernel in a function that has several: they run one after the other, on one stream."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


def device_region() -> Any:
    """The region of a kernel in such a function: `with device_region():` instead of `T.device_entry()`."""
    return T.attr({"tirx.device_entry": True})
