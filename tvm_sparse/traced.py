"""The functions that torch.compile traces instead of the public ones: custom operators, imported when they are traced.

`tvm_sparse.__getattr__` registers them without importing PyTorch, which may be imported after the function.
"""

from __future__ import annotations

from typing import Any


def softmax(*args: Any, **options: Any) -> Any:
    from .operators.softmax.torch_op import softmax

    return softmax(*args, **options)


def log_softmax(*args: Any, **options: Any) -> Any:
    from .operators.softmax.torch_op import log_softmax

    return log_softmax(*args, **options)


def logsumexp(*args: Any, **options: Any) -> Any:
    from .operators.logsumexp.torch_op import logsumexp

    return logsumexp(*args, **options)


def softmax_topk(*args: Any, **options: Any) -> Any:
    from .operators.softmax_topk.torch_op import softmax_topk

    return softmax_topk(*args, **options)


def softmax_sample(*args: Any, **options: Any) -> Any:
    from .operators.softmax_sample.torch_op import softmax_sample

    return softmax_sample(*args, **options)


def edit_logits(*args: Any, **options: Any) -> Any:
    from .operators.edit_logits.torch_op import edit_logits

    return edit_logits(*args, **options)


def head_topk(*args: Any, **options: Any) -> Any:
    from .operators.head_topk.torch_op import head_topk

    return head_topk(*args, **options)


def candidate_topk(*args: Any, **options: Any) -> Any:
    from .operators.candidate_topk.torch_op import candidate_topk

    return candidate_topk(*args, **options)


def candidate_logits(*args: Any, **options: Any) -> Any:
    from .operators.candidate_logits.torch_op import candidate_logits

    return candidate_logits(*args, **options)


def bsr_matmul(*args: Any, **options: Any) -> Any:
    from .operators.bsr_matmul.torch_op import bsr_matmul

    return bsr_matmul(*args, **options)


def csr_linear(*args: Any, **options: Any) -> Any:
    from .operators.csr_linear.torch_op import csr_linear

    return csr_linear(*args, **options)


def nhot_lookup(*args: Any, **options: Any) -> Any:
    from .operators.nhot_lookup.torch_op import nhot_lookup

    return nhot_lookup(*args, **options)


def merge_topk(parts: Any, k: int) -> Any:
    from .layers.shards import merged

    return merged(parts, k)


def head_sample(*args: Any, **options: Any) -> Any:
    from .layers.head_sample import traced

    return traced(*args, **options)


def sample_details(*args: Any, **options: Any) -> Any:
    from .layers.sampling import details_by
    from .operators.softmax_sample.torch_op import softmax_sample

    return details_by(softmax_sample, *args, **options)


def merge_sample(*args: Any, **options: Any) -> Any:
    from .layers.sampling import drawn_by
    from .layers.shards import merged

    return drawn_by(merged, *args, **options)
