"""One engine for rows: what GPU kernels that read rows of logits are made of.

cut    how rows lie over thread blocks, threads and vectors of 16 bytes; plain numbers, no compiler
hold   which elements a thread has, and where they stay: in registers, in shared memory, or nowhere (read again)
sum    the pair (m, d) of a thread's elements: maximum, and sum of exponentials relative to it, online
join   pairs of a warp, a thread block and a cluster
best   a bound that at least k elements of a row reach: the k-th best of the largest elements of groups

A phase takes a kernel's `Extents`, then a thread's `RowState` (`state`) and what else it reads or writes. Its docstring
says what it reads, what it writes, which barriers it holds, and what is true afterwards. Users: `softmax`, `logsumexp`
and `softmax_sample`. The phases of `best` take buffers instead of a state; its users are the kernels of softmax_topk,
of the output layer and of the LSH step that look for a bound.
"""
