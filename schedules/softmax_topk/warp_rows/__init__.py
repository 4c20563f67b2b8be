"""Softmax + top-k on a GPU for short rows: a warp has a row, its registers hold it, and no warp waits for another.

A warp loads its row at once, 16 bytes a lane and load; all that follows is between its own lanes. The maximum is known
before the first exponential, so nothing is rescaled and no logit is streamed twice. Then the k largest are found in two
steps: a few elements, at least k, are copied to shared memory as keys (value and index in 64 bits), and each of these
is given its rank, by counting how many keys are larger, and written.

**Small k** (up to `COUNTED`). Every lane knows its largest element. The k-th largest of these 32 maxima is a threshold
that at least k elements reach, and in most rows few others do. The elements that reach it become keys, and every key is
compared with every other one.

**Larger k.** All elements are counted in bins of equal width, between the row's maximum and a bound which at least k
elements reach. A scan over the counts tells where each bin's elements begin in the order, and which bin has the k-th
largest (the cut). Elements up to the cut become keys, each in its bin's range of shared memory, and are compared only
with the keys of their own bin.

With `lanes` = 16 a warp has two rows at the same time (`pairs`), for the smallest k: what lanes do together then serves
both.

**When that fails.** Equal values, outliers and infinities can leave too many keys: too many elements at the threshold,
or a crowded bin. For larger k a row's values are then gone through one after another, the largest first, as long as
they are few, and votes of the lanes tell the place of every element that has one. Else the k-th largest is found by
bisection. Values are compared as integers that order alike, and an interval that encloses the k-th largest is halved
until no more elements lie above its lower end than there is room for. If it shrinks to one value, that is the k-th
largest, and of the elements equal to it the first columns are taken. For larger k the keys are then put in order by a
bitonic sort.

The files: `space` has the decisions and the extents that follow from them; `kernel` the kernel as a sequence of phases;
`row`, `counting`, `pairs`, `bins`, `levels`, `bisection` and `results` these phases; `state` what they share.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

warp_rows = in_phases(
    space,
    name="warp_rows",
    version=3,
    operator="softmax_topk",
    summary="a warp a row, which its registers hold; survivors are ranked by counting or in bins",
)
