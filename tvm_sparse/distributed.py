"""Layers divided over the processes of `torch.distributed`: `tvm_sparse.distributed.TopkHead`."""

from __future__ import annotations

from .layers.distributed import TopkHead

__all__ = ["TopkHead"]
