"""The output layer on a GPU for lists of one row each: tokens streamed through registers, without tensor cores.

A list's tokens serve a single row, so that each token is read for one product: two operations per number, which the
GPU's cores do while memory delivers the next tokens. Tensor cores would gain nothing: one hidden state fills an eighth
of an operand of eight columns.

**First kernel: the scores.** `reduce_threads` lanes of a warp share a token. They have `tile_n` tokens in hand, and
`vectors` 16-byte vectors of each. As soon as a vector has been multiplied, the one `vectors` later is loaded in its
place. The hidden state is in shared memory, and each vector of it is read once for all tokens in hand. Thread blocks
are many and small: while one waits for memory, others compute.

**Second kernel: the best**, of all scores of a list (`best`, with `direct`).

All numbers are multiplied and added in float32.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import in_phases

from . import space

streams = partial(
    in_phases,
    space,
    summary="lists of one row each: words streamed through registers; the best words of all",
)
