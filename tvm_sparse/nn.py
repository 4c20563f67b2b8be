"""Modules of PyTorch: `tvm_sparse.nn.BsrLinear`, `NHotEmbeddingBag`, `NHotEmbeddingBags`, `LmHead`, `RecurrentStack`,
and `sparsify`.
"""

from __future__ import annotations

from .layers.bsr_linear import BsrLinear, sparsify
from .layers.embedding_bag import NHotEmbeddingBag, NHotEmbeddingBags
from .layers.lm_head import LmHead
from .layers.recurrent_stack import RecurrentStack

__all__ = ["BsrLinear", "LmHead", "NHotEmbeddingBag", "NHotEmbeddingBags", "RecurrentStack", "sparsify"]
