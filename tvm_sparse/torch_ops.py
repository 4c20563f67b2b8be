"""Importing this defines all custom operators of PyTorch, `torch.ops.tvm_sparse.*`.

A call defines its own operator by itself. Import this before `torch.export.load`, which needs the operators of the
saved program.
"""

from __future__ import annotations

from .operators.bsr_matmul import torch_op as bsr_matmul
from .operators.candidate_logits import torch_op as candidate_logits
from .operators.candidate_topk import torch_op as candidate_topk
from .operators.csr_linear import torch_op as csr_linear
from .operators.edit_logits import torch_op as edit_logits
from .operators.head_topk import torch_op as head_topk
from .operators.logsumexp import torch_op as logsumexp
from .operators.nhot_lookup import torch_op as nhot_lookup
from .operators.softmax import torch_op as softmax
from .operators.softmax_sample import torch_op as softmax_sample
from .operators.softmax_topk import torch_op as softmax_topk

__all__ = [
    "bsr_matmul",
    "candidate_logits",
    "candidate_topk",
    "edit_logits",
    "head_topk",
    "logsumexp",
    "csr_linear",
    "nhot_lookup",
    "softmax",
    "softmax_sample",
    "softmax_topk",
]
