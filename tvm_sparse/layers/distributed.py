"""The exact output layer with its embedding divided over the processes of `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..operators.head_topk.call import head_topk
from ..runtime.calls import whole_number
from .sampling import merge_sample
from .shards import merged


class TopkHead:
    """The k best words of a vocabulary whose embedding is divided over the processes of a group.

    Every process holds the rows of neighbouring words, in the order of the ranks. A call finds the k best of each
    shard, gathers them from all processes, and merges them as `merge_topk` does: one collective of
    `batch * (3 * k + 1) * 4` bytes per process.

    All processes of the group construct it and call it together, with the same `hidden`, k and temperature. Then they
    all return the same result.

    Parameters
    ----------
    embedding
        This process's shard `(words, hidden)`, at least one row: float32, float16 or bfloat16, of the same dtype and
        number of columns in all processes, on the CPU (gloo) or a GPU (NCCL). It is not copied; it may be written
        between calls.
    total
        Words of the whole vocabulary. By default the sum of all rows. Fewer: the last rows of all are padding, which is
        never returned and does not count, even where it fills whole shards.
    group
        A process group; by default all processes.

    Attributes
    ----------
    shard
        `(offset, total)` of this process, as `head_topk` takes it.

    Raises
    ------
    TypeError
        If `embedding` is not a torch tensor, or `total` is not an integer.
    ValueError
        In all processes, if an embedding has not two dimensions or no row, if dtypes, columns or totals differ, or
        `total` is not in [1, all rows].
    """

    def __init__(self, embedding: torch.Tensor, *, total: int | None = None, group: Any = None) -> None:
        if not isinstance(embedding, torch.Tensor):
            raise TypeError(f"embedding: expected a torch tensor, got {type(embedding).__name__}")
        wanted = None if total is None else whole_number("total", total)
        ours = (tuple(embedding.shape), str(embedding.dtype), wanted)
        all_of: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_of, ours, group=group)
        for rank, (shape, dtype, words) in enumerate(all_of):
            # Compared with the first, so that all processes raise the same error.
            if len(shape) != 2 or not shape[0]:
                raise ValueError(
                    f"embedding: expected shape (words, hidden) with at least one row, got {shape} in rank {rank}"
                )
            if (shape[1], dtype, words) != (all_of[0][0][1], *all_of[0][1:]):
                raise ValueError(
                    f"embedding: expected {all_of[0][0][1]} columns, {all_of[0][1]} and total {all_of[0][2]} as in rank"
                    f" 0, got {shape[1]}, {dtype} and {words} in rank {rank}"
                )
        rows = [shape[0] for shape, *_ in all_of]
        whole = sum(rows) if wanted is None else wanted
        if not 1 <= whole <= sum(rows):
            raise ValueError(f"total: expected 1 <= total <= the rows of all shards ({sum(rows)}), got {whole}")
        rank = dist.get_rank(group)
        self.embedding = embedding
        self.group = group
        self.shard = (sum(rows[:rank]), whole)
        # Words of each shard, without padding.
        self._words = [max(0, min(rows[i], whole - sum(rows[:i]))) for i in range(len(rows))]

    def topk(
        self,
        hidden: torch.Tensor,
        k: int,
        *,
        log: bool = False,
        temperature: float = 1.0,
        bias: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        soft_cap: float | None = None,
        constant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The k most probable words of softmax((hidden @ embedding.T + bias) / temperature, -1), as `head_topk`.

        Parameters
        ----------
        hidden
            `(batch, hidden)`, the same in all processes.
        k
            1 <= k <= total.
        log, temperature, soft_cap, constant
            As for `head_topk`; the temperature is one number.
        bias
            `(words,)` float32, of this process's shard.
        allowed
            `(batch, ceil(words / 32))` int32, bitmaps of the words of this process's shard, as for `head_topk`.

        Returns
        -------
        values
            `(batch, k)` float32 probabilities, with `log` their logarithms, descending. Their relative error is about
            1e-7 of the best score, since the normaliser is a float32 number of that size.
        indices
            `(batch, k)` int64 words of the whole vocabulary; equal scores in the order of words, NaN first.
        normaliser
            `(batch,)` float32, log(sum_j exp(s[b, j] / temperature)) over the whole vocabulary.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `head_topk`, before anything is sent: an error in some processes alone leaves the others waiting.
        """
        options: dict[str, Any] = {"temperature": temperature, "bias": bias, "allowed": allowed, "soft_cap": soft_cap}
        part = head_topk(hidden, self.embedding, k, shard=self.shard, constant=constant, **options)
        scores, indices, normaliser = merged(self._gathered(part, k), k)
        logs = scores * (1.0 / float(temperature)) - normaliser[:, None]
        return logs if log else logs.exp_(), indices, normaliser

    def sample(
        self,
        hidden: torch.Tensor,
        top_k: int,
        uniforms: torch.Tensor,
        *,
        temperature: float = 1.0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
        bias: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        soft_cap: float | None = None,
        constant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row, drawn from what top-k, top-p and min-p leave, as `softmax_sample` would from all logits.

        One collective, as `topk`; all processes draw the same token.

        Parameters
        ----------
        hidden, bias, allowed, soft_cap, constant
            As in `topk`.
        top_k
            1 <= top_k <= 1024, at most total.
        uniforms
            `(batch,)` float32 numbers in [0, 1), the same in all processes.
        temperature, top_p, min_p
            As for `merge_sample`.

        Returns
        -------
        tokens
            `(batch,)` int64 words of the whole vocabulary.
        logprobs
            `(batch,)` float32: ln p(token) at the temperature, before the filters.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `topk` and `merge_sample`.
        """
        options: dict[str, Any] = {"temperature": temperature, "bias": bias, "allowed": allowed, "soft_cap": soft_cap}
        part = head_topk(hidden, self.embedding, top_k, shard=self.shard, constant=constant, **options)
        parts = self._gathered(part, top_k)
        return merge_sample(parts, uniforms, top_k=top_k, temperature=float(temperature), top_p=top_p, min_p=min_p)

    def _gathered(self, part: tuple[Any, ...], k: int) -> list[tuple[Any, Any, Any]]:
        """The best k words, their columns and the normalisers of every process, each sent as one int32 array that is as
        wide as the largest.
        """
        widths = [min(k, words) for words in self._words]
        most = max(widths)
        values, indices, normaliser = part
        batch = len(values)
        packed = values.new_zeros((batch, 3 * most + 1), dtype=torch.int32)
        packed[:, : values.shape[1]] = values.view(torch.int32)
        packed[:, most : most + 2 * values.shape[1]] = indices.view(torch.int32)
        packed[:, 3 * most] = normaliser.view(torch.int32)
        every = packed.new_empty((len(widths), batch, 3 * most + 1))
        dist.all_gather(list(every.unbind(0)), packed, group=self.group)

        def own(array: torch.Tensor) -> torch.Tensor:
            # In memory of its own, which is aligned for 64 bits.
            return array.clone(memory_format=torch.contiguous_format)

        parts = []
        for one, width in zip(every, widths, strict=True):
            if width:  # a shard of padding adds nothing
                scores = own(one[:, :width]).view(torch.float32)
                words = own(one[:, most : most + 2 * width]).view(torch.int64)
                parts.append((scores, words, own(one[:, 3 * most]).view(torch.float32)))
        return parts
