"""What a sampler's filters leave of a row, where tokens stand in it, and draws from the parts of a vocabulary.

The functions take torch tensors. They consist of calls of the kernels and of operations of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..formats.bitmap import BITS
from ..operators.softmax_sample.call import FILTERS, softmax_sample
from ..operators.softmax_sample.problem import MAX_K
from ..operators.softmax_sample.reference import BELOW_ONE
from ..operators.softmax_topk.reference import GREEDY, LEAST_SCALE
from ..runtime.calls import facts_beside, logits_facts, whole_number
from .shards import merge_topk

# Elements of the rows that are looked at together: their copies take at most some 1.5 GB.
AT_ONCE = 1 << 25


class SampleDetails(NamedTuple):
    """What `sample_details` returns: tensors of the shape of the tokens."""

    logprobs: torch.Tensor  # float32: ln p(token), before the filters
    left_logprobs: torch.Tensor  # float32: ln of p(token) relative to what is left; -inf for a token that is not left
    mass: torch.Tensor  # float32: the probability of all that is left
    counts: torch.Tensor  # int64: how many words are left
    ranks: torch.Tensor  # int64: 1 for the best word of the row, before the filters


def sample_details(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> SampleDetails:
    """What `softmax_sample` draws from: the words that its filters leave, and where a token stands among them.

    With the words w_1, w_2, ... of a row in order, their probabilities p, and the n words that are left, all as
    `softmax_sample` defines them, and the token w_j,

        logprobs = ln p(w_j),  mass = p(w_1) + ... + p(w_n),  counts = n,  ranks = j,
        left_logprobs = ln(p(w_j) / mass) if j <= n, else -inf.

    Tokens need not have been drawn from these logits: with those of a draft model, left_logprobs is what speculative
    sampling compares (`examples/speculative.py`).

    Parameters
    ----------
    logits
        `(batch, vocab)`, or `(..., vocab)`, a float32, float16 or bfloat16 tensor.
    tokens
        `(batch,)` int32 or int64, in [0, vocab), which is not checked.
    temperature, top_k, top_p, min_p, bias, allowed
        As for `softmax_sample`.

    Returns
    -------
    details
        A named tuple of tensors `(batch,)`: `logprobs`, `left_logprobs`, `mass` in float32, `counts`, `ranks` in int64.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `softmax_sample`, naming the argument; TypeError for arrays that are no torch tensors.

    Notes
    -----
    A row without a distribution has one word that is left, and NaN for the other floats. Sums are those of float32
    probabilities: where top_p ends within 1e-6 of a word, the count may differ by it from that of the draw.

    Ranks cost some passes of PyTorch over the logits. With a number `top_k` of at most 1024 the rest is one call of
    `softmax_sample`; without a top_k and top_p it is two more passes. Otherwise rows are sorted, which takes more than
    ten times as long as the draw.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits: expected a torch tensor, got {type(logits).__name__}")
    known = logits_facts(logits)
    facts_beside("tokens", tokens, known.shape[:-1], ("int32", "int64"), known)
    return details_by(
        softmax_sample, logits, tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, bias=bias,
        allowed=allowed,
    )  # fmt: skip


def details_by(
    call: Callable[..., Any],
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    bias: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> SampleDetails:
    """`sample_details` of checked logits and tokens, by a `call` of `softmax_sample`."""
    *rows, vocab = logits.shape
    several = bool(getattr(top_k, "shape", ()))
    number = 0 if several or top_k is None else whole_number("top_k", top_k)
    bounded = 0 < number <= MAX_K and number < vocab
    best = number if bounded else 1
    zeros = torch.zeros(tuple(rows), device=logits.device)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # The call checks all arguments. Its token does not matter.
    _, _, values, words = call(logits, **filters, bias=bias, allowed=allowed, uniforms=zeros, best=best)
    filters["top_k"] = 0 if top_k is None else top_k
    given = [_by_row(filters[name], dtype, zeros) for name, dtype, *_ in FILTERS]
    flat: list[Any] = [logits.reshape(-1, vocab), tokens.reshape(-1).long()]
    flat += [values.reshape(-1, best), words.reshape(-1, best)]
    flat += [None if allowed is None else allowed.reshape(-1, allowed.shape[-1]), *given]
    plain = not several and not number and not isinstance(top_p, torch.Tensor) and top_p == 1
    step = max(1, AT_ONCE // vocab)
    parts = []
    for first in range(0, max(1, flat[0].shape[0]), step):
        some: list[Any] = [None if one is None else one[first : first + step] for one in flat]
        parts.append(_details(*some, bias=bias, bounded=bounded, plain=plain))
    return SampleDetails(*[torch.cat(found).view(tuple(rows)) for found in zip(*parts, strict=True)])


def _by_row(number: Any, dtype: str, like: torch.Tensor) -> torch.Tensor:
    """A filter of each row, `(rows,)`."""
    kind = getattr(torch, dtype)
    if isinstance(number, torch.Tensor):
        return number.to(kind).expand(like.shape).reshape(-1)
    return torch.full(like.shape, number, dtype=kind, device=like.device).reshape(-1)


def _details(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    allowed: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    bounded: bool,
    plain: bool,
) -> tuple[torch.Tensor, ...]:
    """The fields of `SampleDetails` of some rows.

    `values`, `words`: log-probabilities and columns of the best words. `bounded`: nothing else is left. `plain`: min_p
    is the only filter, but for greedy rows.
    """
    vocab = logits.shape[1]
    columns = torch.arange(vocab, device=logits.device)
    scores = logits.float() if bias is None else logits.float() + bias
    if allowed is not None:
        bits = allowed[:, columns // BITS] >> (columns % BITS).int()
        scores = torch.where((bits & 1) != 0, scores, -torch.inf)
    own, top = scores.gather(1, tokens[:, None]), scores.gather(1, words[:, :1])
    # NaN counts as the largest.
    larger = (scores > own) & ~own.isnan() | scores.isnan() & ~own.isnan()
    equal = (scores == own) | scores.isnan() & own.isnan()
    ranks = (larger | equal & (columns < tokens[:, None])).sum(1) + 1

    greedy = ~(temperature >= GREEDY)
    scale = torch.where(greedy, 1.0, (1 / temperature).clamp_min(LEAST_SCALE))[:, None]
    limits = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k.long())
    limits = torch.where(greedy, 1, limits)
    # Log-probabilities follow from that of the best word.
    logprobs = values[:, 0] + ((own - top) * scale)[:, 0]
    if bounded:
        counts, mass = left(values.exp(), limits, top_p, min_p)
    elif plain:
        chances = ((scores - top) * scale + values[:, :1]).exp()
        stay = (chances > 0) & (chances >= min_p[:, None] * values[:, :1].exp())
        alone = greedy | (stay.sum(1) == 0)
        counts = torch.where(alone, 1, stay.sum(1))
        mass = torch.where(stay, chances, 0).sum(1, dtype=torch.float64)
        mass = torch.where(alone, values[:, 0].exp(), mass.float())
    else:
        ordered = (scores + 0.0).sort(dim=1, descending=True, stable=True).values
        counts, mass = left(((ordered - top) * scale + values[:, :1]).exp(), limits, top_p, min_p)
    undefined = values[:, 0].isnan()
    logprobs = torch.where(undefined, torch.nan, logprobs)
    mass = torch.where(undefined, torch.nan, mass)
    counts = torch.where(undefined, 1, counts)
    shares = torch.where(ranks <= counts, logprobs - mass.log(), -torch.inf)
    return logprobs, torch.where(undefined, torch.nan, shares), mass, counts, ranks


def left(
    chances: torch.Tensor, limits: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the best words of each row filters leave, and their probability, `(rows,)`.

    `chances (rows, n)`: probabilities of the best words, descending; `limits`, `top_p`, `min_p (rows,)`. See
    `softmax_sample`: at least one word is left, and beside the best none of probability 0.
    """
    within = (torch.arange(chances.shape[1], device=chances.device) < limits[:, None]) & (chances > 0)
    total = torch.where(within, chances, 0).cumsum(1, dtype=torch.float64)
    nucleus = (total - chances < top_p[:, None].double() * total[:, -1:]) | (top_p >= 1)[:, None]
    counts = (within & nucleus & (chances >= min_p[:, None] * chances[:, :1])).sum(1).clamp_min(1)
    return counts, total.gather(1, counts[:, None] - 1)[:, 0].float()


def merge_sample(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    uniforms: torch.Tensor,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of the whole vocabulary for each row, drawn exactly from the parts of its shards.

    With a top_k the k best words of all parts are merged (`merge_topk`), and the token is that of `softmax_sample` for
    the whole logits: with w_1 ... w_n the words that are left, it is the first w_j for which
    p(w_1) + ... + p(w_j) > u * (p(w_1) + ... + p(w_n)).

    Without one each part has one word, which its process has drawn from its shard, for example by `softmax_sample` with
    a number of its own. The part is chosen with its share of the probability, in the order of parts: the token then has
    its probability in the whole vocabulary. Nothing beside the temperature may have filtered the draws.

    Parameters
    ----------
    parts
        `(values, indices, normaliser)` of each shard as `merge_topk` takes them, of at least top_k words, or of all
        that the shard has. Without a top_k `(batch, 1)`: score and word of the token that was drawn from the shard,
        with the shard's normaliser. Shards without a word have n = 0. All parts have the `temperature`.
    uniforms
        `(batch,)` float32 numbers in [0, 1), equal in all processes, and independent of those of the shards' draws.
    top_k
        1 <= top_k <= 1024, at most the number of words, or None.
    temperature
        A number above 0, that of the parts' normalisers.
    top_p, min_p
        Numbers, or `(batch,)` float32, as for `softmax_sample`; only with a top_k.

    Returns
    -------
    tokens
        `(batch,)` int64 words of the whole vocabulary.
    logprobs
        `(batch,)` float32: ln p(token) at the temperature, before the filters, as exactly as float32 normalisers tell.

    Raises
    ------
    TypeError, ValueError
        As in `merge_topk`; for top_p or min_p without a top_k, parts of more than one word without a top_k, or a
        `uniforms` that does not fit.

    Notes
    -----
    A row without a distribution gets the first word in order, and NaN.
    """
    options: dict[str, Any] = {"top_k": top_k, "temperature": temperature, "top_p": top_p, "min_p": min_p}
    return drawn_by(merge_topk, parts, uniforms, **options)


def drawn_by(
    merge: Callable[..., Any],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    uniforms: torch.Tensor,
    *,
    top_k: int | None = None,
    temperature: float = 1.0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_sample` by `merge_topk`, or by `shards.merged`, which checks nothing."""
    whole_numbers = top_k is None or 1 <= whole_number("top_k", top_k) <= MAX_K
    if not whole_numbers:
        raise ValueError(f"top_k: expected 1 <= top_k <= {MAX_K}, or None, got {top_k}")
    if not isinstance(uniforms, torch.Tensor):
        raise TypeError(f"uniforms: expected a torch tensor, got {type(uniforms).__name__}")
    if top_k is None:
        for name, given, neutral in (("top_p", top_p, 1), ("min_p", min_p, 0)):
            if isinstance(given, torch.Tensor) or given != neutral:
                raise ValueError(
                    f"{name}: filters of the whole vocabulary need the best words of all parts; pass top_k="
                )
        for i, (values, *_) in enumerate(parts):
            if values.shape[-1] > 1:
                raise ValueError(
                    f"parts[{i}] (values): expected one drawn word, got {values.shape[-1]}; for best words pass top_k="
                )
        return _of_drawn(merge, parts, uniforms, temperature)
    scores, words, normaliser = merge(parts, top_k)
    rows = scores.shape[:-1]
    if uniforms.shape != rows:
        raise ValueError(f"uniforms: expected shape {tuple(rows)}, got {tuple(uniforms.shape)}")
    flat, numbers = scores.reshape(-1, top_k), uniforms.reshape(-1)
    limits = torch.full_like(numbers, top_k, dtype=torch.int64)
    # Relative to the best word's: filters and the draw ask for ratios, and a large normaliser has few bits for them.
    chances = ((flat - flat[:, :1]) / temperature).exp()
    counts, _ = left(chances, limits, *[_by_row(one, "float32", uniforms) for one in (top_p, min_p)])
    stay = torch.arange(top_k, device=flat.device) < counts[:, None]
    place = _first_above(torch.where(stay, chances, 0), numbers, counts)
    logprobs = flat.gather(1, place) / temperature - normaliser.reshape(-1, 1)
    return words.reshape(-1, top_k).gather(1, place).view(rows), logprobs.view(rows)


def _of_drawn(
    merge: Callable[..., Any],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    uniforms: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_sample` without a top_k."""
    _, _, normaliser = merge(parts, 1)
    parts = [part for part in parts if part[0].shape[-1]]
    rows = normaliser.shape
    if uniforms.shape != rows:
        raise ValueError(f"uniforms: expected shape {tuple(rows)}, got {tuple(uniforms.shape)}")
    scores, words = (torch.cat([part[i] for part in parts], -1).view(-1, len(parts)) for i in (0, 1))
    shares = torch.stack([part[2].reshape(-1) for part in parts], 1) - normaliser.reshape(-1, 1)
    place = _first_above(shares.exp(), uniforms.reshape(-1), torch.full_like(words[:, 0], len(parts)))
    logprobs = scores.gather(1, place) / temperature - normaliser.reshape(-1, 1)
    return words.gather(1, place).view(rows), logprobs.view(rows)


def _first_above(chances: torch.Tensor, uniforms: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The first place up to which chances sum to more than a share of all, `(rows, 1)`: one of the first `counts`, with
    a chance above 0 if any has one.
    """
    total = chances.cumsum(1, dtype=torch.float64)
    aim = uniforms.clamp(0, BELOW_ONE).double()[:, None] * total[:, -1:]
    place = (total <= aim).sum(1)
    # By rounding the last sum may be no more than the share of it.
    positions = torch.arange(chances.shape[1], device=chances.device)
    last = torch.where(chances > 0, positions, 0).amax(1)
    return torch.minimum(torch.minimum(place, last), counts - 1).clamp_min(0)[:, None]
