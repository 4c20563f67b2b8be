"""Which array library a tensor or an array belongs to, for code that serves PyTorch and NumPy alike."""

from __future__ import annotations

import sys
from typing import Any


def library(array: Any) -> Any:
    """PyTorch for a tensor, else NumPy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    import numpy as np

    return np
