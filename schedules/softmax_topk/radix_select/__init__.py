"""Softmax + top-k on a GPU for every k: one thread block per row, the k-th key found by radix passes over the row
itself.

The fallback. It keeps nothing but a histogram, so neither vocab nor k is bounded by shared memory. The row is read once
for the maximum and the sum, once for each digit of the key (from the L2 cache; rarely more than five times, because the
search ends when all elements of a digit's bin are taken), and once to collect the k keys from the k-th on. These are
collected in the output for the indices, and sorted there by Batcher's merge exchange (Knuth, The Art of Computer
Programming 3, 5.2.2, Algorithm M). Its comparators all point one way, so that k need not be a power of two.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

radix_select = in_phases(
    space,
    name="radix_select",
    version=2,
    operator="softmax_topk",
    summary="a block a row, radix passes over the row, any k",
)
