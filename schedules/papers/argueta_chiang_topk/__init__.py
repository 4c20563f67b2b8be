"""Softmax + top-k on a GPU by Algorithm 4 of Argueta & Chiang, for comparison: every element is sent down the k best.

The k best of a row lie in its thread block's shared memory, value and index packed into a word of 64 bits. A thread
takes an element along all k places: an atomicMax leaves the larger word there and gives the smaller one to take on to
the next. No word is lost and no place's word ever gets smaller, so all threads may do this at once, and in the end
place n has the n-th largest. That is k atomic operations an element, those of a warp all on one address.

As published but for what keys and results ask for:

- A word has the value's bits, made to order as unsigned integers, above the complement of the index. So ties go to the
  lower index and NaN comes first. The paper's packing orders non-negative values only.
- The maximum is an atomicMax of the same bits, as there is none of floats.
- The sum is reduced by shuffles, not by atomics, so that it is the same in every run.
- Exponentials are taken of differences from the maximum, as the paper's line 20 means.

**skip**: an element below the last place is passed over. That place is read without an atomic; as places only grow,
nothing is lost. The paper does not do this.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

packed_insertion = in_phases(
    space,
    name="packed_insertion",
    version=1,
    operator="softmax_topk",
    summary="for comparison: every element down the k best by atomicMax of packed words in shared memory",
    comparison=True,
)
