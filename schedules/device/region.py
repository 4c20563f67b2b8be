"""Where a kernel stands in a function of several: they run one after the other, on one stream."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


def device_region() -> Any:
    """What a kernel of such a function stands in: `with device_region():` in the place of `T.device_entry()`."""
    return T.attr({"tirx.device_entry": True})
