"""Sampling from an output layer: hidden states to tokens, without the logits of all rows in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.libraries import library
from ..core.problem import width as rounded_up
from ..formats.quantized import QuantizedEmbedding
from ..operators.edit_logits.call import edit_logits
from ..operators.head_draw.call import if_faster
from ..operators.head_topk.call import FUSED_K, head_topk, pair_facts, scores_of
from ..operators.head_topk.product import rows_at_once
from ..operators.softmax_sample import seeds
from ..operators.softmax_sample.call import softmax_sample
from ..operators.softmax_sample.problem import width_of_call
from ..operators.softmax_topk.reference import GREEDY
from ..operators.softmax_topk.shards import on_host, taken
from ..runtime import arrays, custom
from ..runtime.calls import outputs_for, whole_number, without_gradient

# Temperatures from here on make words equally likely, masked ones apart, which `softmax_sample` knows.
EVEN = 1e6
# Arguments that may have something for each row.
OF_ROWS = ("temperature", "top_k", "top_p", "min_p", "allowed", "uniforms", "seed", "offset")
# Arguments of a draw from all words.
OF_DRAW = ("temperature", "bias", "uniforms", "seed", "offset", "soft_cap")


class Parts(NamedTuple):
    """The functions of which a draw is made: public ones, or those of a graph, which has no `head_draw`."""

    head_topk: Callable[..., Any]
    softmax_sample: Callable[..., Any]
    scores: Callable[[Any, Any], Any]
    edit_logits: Callable[..., Any]
    head_draw: Callable[..., Any] | None = None


def head_sample(
    hidden: Any,
    embedding: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    bias: Any = None,
    allowed: Any = None,
    uniforms: Any = None,
    seed: Any = None,
    offset: Any = 0,
    max_top_k: int | None = None,
    best: int = 0,
    soft_cap: float | None = None,
    constant: bool = False,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """A token of each row of hidden states, drawn from what the filters leave of softmax(hidden @ embedding.T).

    With s = hidden @ embedding.T the result is `softmax_sample(s, ...)` of float32 scores s, for the same uniform
    numbers the same tokens up to the rounding of sums.

    Parameters
    ----------
    hidden
        Shape `(batch, hidden)`; float32, float16 or bfloat16.
    embedding
        Shape `(vocab, hidden)`, one row for each word, of the dtype and on the device of `hidden`; `vocab` below 2^31.
        Or a `QuantizedEmbedding`, as for `head_topk`.
    temperature, top_k, top_p, min_p, bias, allowed, uniforms, seed, offset, max_top_k, best, soft_cap
        As for `softmax_sample`: numbers, or arrays with one for each row; a bias and a bitmap of words; where random
        numbers come from; how many of the best words to return as well; the soft cap of the model, of float32 scores.
    constant
        As for `head_topk`.
    out
        `(tokens, logprobs)` to write into: contiguous, on the device of `hidden`.

    Returns
    -------
    tokens
        `(batch,)` int32 words.
    logprobs
        `(batch,)` float32: ln p(token), of the distribution after the temperature and before all filters.
    values, indices
        With `best` only: `(batch, best)` float32 log-probabilities, and `(batch, best)` int64 words.

    Raises
    ------
    TypeError
        If an argument has another type, is on an unsupported device, or is an array on a GPU that is no torch tensor.
    ValueError
        As in `head_topk` and `softmax_sample`.
    RuntimeError
        If an argument requires a gradient.

    Notes
    -----
    If top_k is one number for all rows, of at most 256, `head_topk` finds the top_k best words with their
    log-probabilities, whatever the temperatures, and the draw reads these alone: on a GPU no other scores reach memory
    with up to 64 or 128 rows. The same holds for a greedy draw. Without filters, on a GPU and with as many rows, one
    pass over the embedding writes sums of slices of 8 to 32 words, and the slice that has the token is multiplied
    again; temperatures may be those of rows. `explain("head_draw", ...)` says whether a call is drawn so. It is not in
    graphs of PyTorch, with `configure(batch_invariant=True)` and with a `QuantizedEmbedding`. In these and all other
    cases float32 scores of a chunk of rows are written, up to 240 MB on a GPU and 120 MB on a CPU, from which
    `softmax_sample` draws.

    When not to use it: if the scores of a row are changed one by one before the draw.

    Sources: those of `head_topk` and `softmax_sample`.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"bias": bias, "allowed": allowed, "uniforms": uniforms, "seed": seed, "offset": offset}
    options |= {"max_top_k": max_top_k, "best": best, "soft_cap": soft_cap}
    whole = not isinstance(embedding, QuantizedEmbedding)
    if whole and type(embedding) is not type(hidden):
        embedding = without_gradient(embedding)
    if custom.transformed(hidden, embedding if whole else embedding.octets, *filter(arrays.is_torch, options.values())):
        return traced(hidden, embedding, constant=constant, out=out, **options)
    known, theirs = pair_facts(hidden, embedding)
    if known.shape[0] and not known.shape[1]:
        raise ValueError(f"hidden: expected at least one column, got shape {known.shape}")
    wanted = tuple((name, known.shape[:1], dtype) for name, dtype in (("tokens", "int32"), ("logprobs", "float32")))
    given = None if out is None else outputs_for(out, wanted, hidden, known)
    states, words = on_host("hidden", hidden), on_host("embedding", embedding) if whole else embedding
    held = [
        name for name in ("bias", *OF_ROWS) if hasattr(options[name], "__dlpack__") and not _is_scalar(options[name])
    ]
    options |= {name: on_host(name, options[name]) for name in held}
    batch, most = known.shape[0], rows_at_once(theirs.shape[0], known.shape[1], known.device)
    parts = Parts(head_topk, softmax_sample, scores_of, edit_logits, if_faster)
    if batch <= most or _bound(options, theirs.shape[0]) is not None:
        results = _drawn(parts, states, words, constant, options)
    else:
        said = seeds.told(*(options[name] for name in ("uniforms", "seed", "offset")))
        kind, numbers = said or seeds.fresh(states)
        if kind in (seeds.OF_CALL, seeds.OFFSETS):  # the numbers of rows count
            kind, numbers = seeds.GIVEN, (seeds.uniforms(kind, numbers, (batch,), states, known),)
        options |= {"uniforms": None, "seed": None, "offset": 0}
        options["uniforms" if kind == seeds.GIVEN else "seed"] = numbers[0]
        results = _in_chunks(parts, states, words, constant, options, most)
    if given is None:
        return tuple(arrays.returned(one, hidden) for one in results)
    for into, one in zip(given, results, strict=False):
        on_host("out", into)[...] = one
    return (*(out or ()), *(arrays.returned(one, hidden) for one in results[2:]))


def traced(hidden: Any, embedding: Any, *, constant: bool = False, out: Any = None, **options: Any) -> tuple[Any, ...]:
    """`head_sample` as torch.compile traces it: custom operators, without chunks."""
    from ..operators.edit_logits.torch_op import edit_logits
    from ..operators.head_topk.torch_op import head_scores, head_topk
    from ..operators.softmax_sample.torch_op import softmax_sample

    defaults = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "bias": None, "allowed": None}
    defaults |= {"uniforms": None, "seed": None, "offset": 0, "max_top_k": None, "best": 0, "soft_cap": None}
    parts = Parts(head_topk, softmax_sample, head_scores, edit_logits)
    results = _drawn(parts, hidden, embedding, constant, {**defaults, **options})
    if out is None:
        return results
    return (*custom.written(results[:2], out), *results[2:])


def _is_array(value: Any) -> bool:
    # A symbolic number of torch.compile has no attributes.
    return not isinstance(value, int | float) and len(getattr(value, "shape", ())) > 0


def _is_scalar(value: Any) -> bool:
    """Whether it is an array of no dimension."""
    return getattr(value, "shape", None) == ()


def _number(value: Any) -> float | None:
    """A number, or None for an array, for a tensor, whose value a graph does not know, and for what `softmax_sample`
    refuses.
    """
    if isinstance(value, bool) or _is_array(value) or arrays.is_torch(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _bound(options: dict[str, Any], vocab: int) -> tuple[int, Any] | None:
    """How many best words decide a draw, and at which temperature, 0 if it is greedy, or those of rows; None if others
    may decide it.
    """
    heat, top_k = options["temperature"], options["top_k"]
    own = _is_array(heat)
    heat = heat if own else _number(heat)
    if heat is None or options["allowed"] is not None or _is_array(top_k):
        return None
    if not own and 0 <= heat < GREEDY:
        if any(_is_array(options[name]) for name in ("top_p", "min_p")):
            return None
        return max(1, min(options["best"], vocab)), 0.0
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not (own or GREEDY <= heat < EVEN):
        return None
    return (top_k, heat) if 0 < top_k <= min(FUSED_K, vocab) else None


def _has_no_filter(hidden: Any, embedding: Any, options: dict[str, Any]) -> bool:
    """Whether the arrays are torch tensors with rows, no filter is on, and no best words are wanted."""
    if not (arrays.is_torch(hidden) and arrays.is_torch(embedding) and len(hidden)):
        return False
    top_k, (top_p, min_p) = options["top_k"], (_number(options[name]) for name in ("top_p", "min_p"))
    if options["allowed"] is not None or options["max_top_k"] is not None or type(options["best"]) is not int:
        return False
    every = top_k is None or (type(top_k) is int and not 0 < top_k < embedding.shape[0])
    heat = _number(options["temperature"])
    suits = _is_array(options["temperature"]) or (heat is not None and GREEDY <= heat < EVEN)
    return every and suits and top_p == 1 and min_p == 0 and options["best"] == 0


def _drawn(parts: Parts, hidden: Any, embedding: Any, constant: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    """The draw for rows whose scores are written at once, if they are written."""
    vocab = embedding.shape[0]
    bound = _bound(options, vocab)
    if bound is None and parts.head_draw is not None and _has_no_filter(hidden, embedding, options):
        found = parts.head_draw(hidden, embedding, constant=constant, **{name: options[name] for name in OF_DRAW})
        if found is not None:
            return tuple(found)
    if bound is None:
        scores = parts.scores(hidden, embedding)
        if options["soft_cap"] is not None:
            scores = parts.edit_logits(scores, soft_cap=options["soft_cap"], out=scores)
        return tuple(parts.softmax_sample(scores, **{**options, "soft_cap": None}))
    most, heat = bound
    best = whole_number("best", options["best"])
    _, left, _ = width_of_call(options["top_k"] or 0, options["max_top_k"], vocab, best == 0)
    if not 0 <= best <= left:
        raise ValueError(f"best: expected at most the {left} words that top_k leaves, got {best}")
    own = _is_array(heat)
    greedy = not own and not heat
    named = {"log": True, "temperature": 1.0 if greedy else heat, "bias": options["bias"], "constant": constant}
    named["soft_cap"] = options["soft_cap"]
    # Few numbers of words, so that few kernels serve all top_k.
    values, words = parts.head_topk(hidden, embedding, rounded_up(most, vocab), **named)[:2]
    # The columns are in the order of the words: a draw in the order of columns is one in theirs.
    among = {name: options[name] for name in ("top_p", "min_p", "uniforms", "seed", "offset")}
    among |= {"temperature": 0.0} if greedy else {"top_k": most}
    place = arrays.converted("tokens", parts.softmax_sample(values, **among)[0], "int64")
    place = (place * (heat >= GREEDY) if own else place)[:, None]
    tokens, logprobs = arrays.converted("tokens", taken(words, place)[:, 0], "int32"), taken(values, place)[:, 0]
    return (tokens, logprobs, values[:, :best], words[:, :best]) if best else (tokens, logprobs)


def _in_chunks(
    parts: Parts, hidden: Any, embedding: Any, constant: bool, options: dict[str, Any], most: int
) -> tuple[Any, ...]:
    """`_drawn` for `most` rows at a time."""
    found = []
    for first in range(0, hidden.shape[0], most):
        rows = slice(first, first + most)
        own = {name: options[name][rows] for name in OF_ROWS if _is_array(options[name])}
        found.append(_drawn(parts, hidden[rows], embedding, constant, {**options, **own}))
    space = library(hidden)
    join = space.cat if arrays.is_torch(hidden) else space.concatenate
    return tuple(join(results) for results in zip(*found, strict=True))
