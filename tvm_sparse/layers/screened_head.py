"""The exact output layer for few rows, which reads most of the embedding in eight bits.

A copy in int8 gives an approximate score t of each word, and norms that were computed with the copy bound its error:

    |t[w] - s[w]| <= sum_g |hidden_g| * bounds[g, w]

where g are groups of neighbouring columns. `bounds[g, w]` is the norm of what rounding to int8 removed from the
word's columns of the group, plus what sums in float32 may be off by, per length of the hidden state's columns. The
smallest t - bound among the k words that are best by t is a score which k words reach. Words whose t + bound is below
it are not among the k best. All others are multiplied with the embedding itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.given import integer
from ..formats.quantized import QuantizedEmbedding, check_dense, quantize_embedding
from ..operators.candidate_logits.call import candidate_logits
from ..operators.candidate_topk.call import candidate_topk
from ..operators.compaction.call import compaction
from ..operators.edit_logits.call import soft_cap_of
from ..operators.head_topk.call import FUSED_K, FUSED_ROWS, best_and_scores, head_topk
from ..operators.head_topk.problem import WHOLE_WORDS
from ..operators.logsumexp.call import logsumexp
from ..operators.screen.call import screen
from ..operators.screen.problem import MOST_GROUPS
from ..operators.softmax_topk.call import softmax_topk
from ..operators.softmax_topk.problem import ABSOLUTE_LOG, CAPPED
from ..operators.softmax_topk.shards import capped
from ..runtime.calls import inverse_temperature, whole_number

# Words that a row's list of survivors has room for, where the host asks how many there are.
CAPACITY = 4096
# Error of a float32 sum of n products, relative to the sum of their magnitudes, on tensor cores, which truncate: of
# each addition a unit in the last place, and one more in sixteen. Beside these the warps' sums are joined, and a score
# is multiplied by its scale and compared with others.
UNIT, MORE, BESIDE = 2.0**-23, 17 / 16, 64
# By how much bounds are enlarged: their own products may be of TF32, if `torch.set_float32_matmul_precision` says so.
ENLARGED = 1 + 2.0**-9


class Screened(NamedTuple):
    """Results of `ScreenedHead.topk`.

    Attributes
    ----------
    values
        `(rows, k)` float32 scores of the k best words, descending.
    indices
        `(rows, k)` int64 words.
    normaliser, error
        If requested, `(rows,)` float32: logarithm of the sum of all exponentials of scores over the temperature, and a
        bound of its error, 0 where the exact head has run.
    """

    values: torch.Tensor
    indices: torch.Tensor
    normaliser: torch.Tensor | None = None
    error: torch.Tensor | None = None


class ScreenedHead:
    """An exact output layer that reads an int8 copy of its embedding, and of the embedding itself only what it must.

    `topk` returns the k best words of softmax(hidden @ embedding.T + bias) with their scores, as `head_topk` with
    `shard=(0, vocab)` does: always, not with a high probability. Half as many bytes are read for up to 16 rows. The
    copy takes memory beside the embedding: half of one in 16 bits, and 4 bytes a word for each group of columns.

    Parameters
    ----------
    embedding
        `(vocab, hidden)` torch tensor on CPU or CUDA; float32, float16 or bfloat16, finite. It is kept, not copied:
        after a change of its numbers a new head is needed.
    bias
        `(vocab,)` float32 added to every row of the scores; -inf masks a word.
    groups
        Groups of columns with norms of their own, a divisor of `hidden` up to 32. More groups make tighter bounds where
        hidden states are large in few columns, and take more memory. Default: the largest divisor up to 8.

    Attributes
    ----------
    calls, exact_calls
        Calls of `topk`, and those of them that took the exact head.
    survivors
        `(rows,)` int32, of the last screened call: words that were multiplied with the embedding itself. None before.

    Raises
    ------
    TypeError
        If the embedding is no torch tensor.
    ValueError
        For another rank or dtype, a row that is not finite, a bias that does not fit, or groups that do not divide the
        columns.

    Notes
    -----
    `topk` takes the exact head for more than 16 rows, k above 256, and on a GPU where no kernel reads eight bits: below
    compute capability 9.0, in float32, or for more columns than `head_topk` reads in eight bits.

    When not to use it: if all probabilities are needed to float32's accuracy; if the results of `head_topk` with a
    quantised embedding are good enough (`quantize_embedding`), which needs no embedding in 16 bits.
    """

    def __init__(self, embedding: torch.Tensor, bias: torch.Tensor | None = None, *, groups: int | None = None) -> None:
        if not isinstance(embedding, torch.Tensor):
            raise TypeError(f"embedding: expected a torch tensor, got {type(embedding).__name__}")
        check_dense("embedding", embedding)
        self.embedding = embedding.detach().contiguous()
        self.quantized = quantize_embedding(self.embedding, "int8")
        vocab, hidden = self.embedding.shape
        if groups is None:
            groups = max(n for n in range(1, 9) if hidden % n == 0)
        self.groups = integer("groups", groups)
        if not 1 <= self.groups <= MOST_GROUPS or hidden % self.groups:
            raise ValueError(f"groups: expected a divisor of the {hidden} columns up to {MOST_GROUPS}, got {groups}")
        self.bias = None if bias is None else bias.detach()
        if bias is not None and (bias.shape != (vocab,) or bias.dtype != torch.float32):
            raise ValueError(
                f"bias: expected shape ({vocab},) and dtype float32, got {tuple(bias.shape)}, {bias.dtype}"
            )
        self.bounds = self._bounds()
        self._whole, self._row = self.quantized, self.bias
        if vocab % WHOLE_WORDS and self.embedding.is_cuda:
            self._pad(-vocab % WHOLE_WORDS)
        # What adding a bias to a score may be off by, beyond what a score may be.
        self._added = 0.0 if bias is None else 8 * UNIT * float(bias.abs().nan_to_num(posinf=0.0).max())
        self.calls = self.exact_calls = 0
        self.survivors: torch.Tensor | None = None

    def topk(
        self,
        hidden: torch.Tensor,
        k: int,
        *,
        temperature: float = 1.0,
        normaliser: bool = False,
        soft_cap: float | None = None,
        synchronise: bool | None = None,
    ) -> Screened:
        """The k best words of each row, exactly, and the normaliser with a bound of its error.

        Parameters
        ----------
        hidden
            `(rows, hidden)`, of the embedding's dtype and on its device.
        k
            1 <= k <= vocab.
        temperature
            Scores are divided by it before the normaliser is computed; the order of words does not depend on it.
        normaliser
            Also return the normaliser and the bound of its error. log-probabilities are `values / temperature` less
            the normaliser.
        soft_cap
            The soft cap c of the model's final logits, as for `head_topk`: scores s of the product become
            c * tanh(s / c), to which the bias is added. Bounds of errors of s hold for capped scores as well. Where
            scores are close to the cap more words survive; scores that differ by less than 2^-20 of the cap may be in
            either order, as in `head_topk`.
        synchronise
            Whether the host waits for the numbers of survivors. If one exceeds 4,096, the exact head then runs, which
            `exact_calls` counts. Without it, as a CUDA graph needs, lists have room for all words: results are the
            same, but a row with many survivors takes longer than the exact head. Default: unless a CUDA graph is being
            captured. One call with False comes before the capture, and loads the kernels.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As in `head_topk`.
        """
        k, scale = whole_number("k", k), inverse_temperature(temperature)
        cap = None if soft_cap is None else soft_cap_of(soft_cap)
        vocab = len(self.embedding)
        self.calls += 1
        if not 0 < len(hidden) <= FUSED_ROWS or not 1 <= k <= min(FUSED_K, vocab):
            return self._exact(hidden, k, temperature, normaliser, cap)
        if synchronise is None:
            synchronise = not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        if (found := best_and_scores(hidden, self._whole, k, self._row, cap)) is None:
            return self._exact(hidden, k, temperature, normaliser, cap)
        best, scores = found
        norms = torch.linalg.vector_norm(hidden.detach().view(len(hidden), self.groups, -1), dim=2, dtype=torch.float32)
        capacity = min(CAPACITY, vocab) if synchronise else vocab
        # Both scores that are compared are capped, each with an error of its own.
        added = self._added if cap is None else self._added + 4 * CAPPED * cap
        words, counts = compaction(screen(scores, best, norms, self.bounds, added), vocab, capacity)
        self.survivors = counts
        if synchronise and int(counts.max()) > capacity:
            return self._exact(hidden, k, temperature, normaliser, cap)
        if cap is None:
            _, ranked = candidate_topk(hidden, self.embedding, words, k, counts=counts, bias=self.bias)
        else:
            ranked = words.gather(1, softmax_topk(self._summed(hidden, words, cap, counts), k)[1])
        # The best words' scores, as `head_topk` sums and ranks them: equal ones in the order of the words.
        if k == 1:
            values, indices = self._summed(hidden, ranked.int(), cap), ranked.long()
        else:
            words = ranked.int().sort(1).values
            summed = self._summed(hidden, words, cap)
            places = softmax_topk(summed, k)[1]
            values, indices = summed.gather(1, places), words.gather(1, places).long()
        if not normaliser:
            return Screened(values, indices)
        highest = torch.addmm(scores, norms, self.bounds)
        summed, error = self._normaliser(scores, highest, indices, values, scale)
        return Screened(values, indices, summed, error if cap is None else error + 2 * CAPPED * cap * scale)

    def _pad(self, count: int) -> None:
        """Let kernels see whole tiles: with words whose scores are -inf, and which bitmaps do not count."""
        vocab, hidden = self.embedding.shape
        octets, scales = self.quantized.octets, self.quantized.scales
        values = torch.cat([octets, octets.new_zeros((count, hidden))])
        scales = torch.cat([scales, scales.new_ones((count, 1))])
        self._whole = QuantizedEmbedding.of_octets(values, scales, "int8")
        self.quantized = self._whole[:vocab]
        row = scales.new_zeros(vocab) if self.bias is None else self.bias
        self._row = torch.nn.functional.pad(row, (0, count), value=-torch.inf)
        self.bounds = torch.nn.functional.pad(self.bounds, (0, count))

    def _summed(
        self, hidden: torch.Tensor, words: torch.Tensor, cap: float | None, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Float32 scores `(rows, n)` of words of each row, by the embedding itself; -inf beyond a row's count."""
        if cap is None:
            return candidate_logits(hidden, self.embedding, words, counts=counts, bias=self.bias)
        found = capped(candidate_logits(hidden, self.embedding, words, counts=counts), cap)
        return found if self.bias is None else found + self.bias[words.clamp(min=0)]

    def _exact(self, hidden: torch.Tensor, k: int, temperature: float, normaliser: bool, cap: float | None) -> Screened:
        self.exact_calls += 1
        shard = (0, len(self.embedding))
        options: dict[str, Any] = {"temperature": temperature, "bias": self.bias, "shard": shard, "soft_cap": cap}
        values, indices, sums = head_topk(hidden, self.embedding, k, **options)
        return Screened(values, indices, *((sums, torch.zeros_like(sums)) if normaliser else ()))

    def _bounds(self) -> torch.Tensor:
        """`(groups, vocab)` float32, of the module's docstring."""
        vocab, hidden = self.embedding.shape
        off = UNIT * (MORE * hidden + BESIDE)
        found = torch.empty((self.groups, vocab), dtype=torch.float32, device=self.embedding.device)
        for rows, part in self.quantized.parts():
            exact = self.embedding[rows].double()
            stored = part.values.double() * part.scales.double()

            def norms(numbers: torch.Tensor) -> torch.Tensor:
                return numbers.reshape(len(numbers), self.groups, -1).square().sum(2).sqrt()

            found[:, rows] = (ENLARGED * (norms(exact - stored) + off * (norms(exact) + norms(stored)))).t().float()
        return found

    def _normaliser(
        self,
        scores: torch.Tensor,
        highest: torch.Tensor,
        indices: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normaliser, with the k best words' own scores instead of those by int8, and the bound of its error. The
        arrays of scores and `highest` are overwritten.

        With S the sum of exponentials and U the sum of those of scores plus their bounds (`highest`), the true sum is
        at most U, and at least that of scores less their bounds, which is at least S^2 / U (Cauchy-Schwarz).
        """
        for each in (scores, highest):
            each.scatter_(1, indices, values)
            if scale != 1:
                each.mul_(scale)
        found, most = logsumexp(scores), logsumexp(highest)
        rounded = 2 * ABSOLUTE_LOG + UNIT * BESIDE * (1 + found.abs() + scale * values[:, 0].abs())
        return found, most - found + rounded
