"""`candidate_topk` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import custom

from . import call

__all__ = ["candidate_topk", "one_list"]

_NAMES = ("embedding", "candidates", "counts", "bias")


def _call(
    hidden: Any,
    embedding: Any,
    candidates: Any,
    n: int,
    counts: Any,
    block: int,
    log: bool,
    temperature: float,
    bias: Any,
    normaliser: bool,
    validate: bool,
    heat: Any,
) -> list[Any]:
    temperature = custom.value_of(temperature, heat)
    options = {"counts": counts, "block": block, "log": log, "temperature": temperature, "bias": bias}
    return list(
        call.candidate_topk(hidden, embedding, candidates, n, normaliser=normaliser, validate=validate, **options)
    )


def one_list(name: str, candidates: Any, dims: Any) -> None:
    """Raise if vmap maps over more than the hidden states, or if these have separate lists.

    Raises
    ------
    ValueError
        Naming the argument.
    """
    custom.unbatched(name, dims, _NAMES)
    if candidates.dim() != 1:
        raise ValueError(f"candidates: vmap of {name} is offered with one list for all rows; call it in a loop")


def _batched(info: Any, in_dims: Any, hidden: Any, embedding: Any, candidates: Any, *args: Any) -> Any:
    """Rows of all examples together, with the one list that they share."""
    one_list("candidate_topk", candidates, (*in_dims[1:3], in_dims[4], in_dims[8]))
    custom.unbatched("candidate_topk", in_dims[11:], ("temperature",))
    hidden = hidden.movedim(in_dims[0], 0)
    results = _OPERATOR(hidden.flatten(0, 1), embedding, candidates, *args)
    return [result.unflatten(0, hidden.shape[:2]) for result in results], [0] * len(results)


_OPERATOR = custom.define(
    "candidate_topk(Tensor hidden, Tensor embedding, Tensor candidates, SymInt n, Tensor? counts=None, int block=1,"
    " bool log=False, float temperature=1.0, Tensor? bias=None, bool normaliser=False, bool validate=False,"
    " Tensor? heat=None) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("hidden, embedding or bias"),
)


def candidate_topk(
    hidden: Any,
    embedding: Any,
    candidates: Any,
    n: int,
    *,
    counts: Any = None,
    block: int = 1,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    normaliser: bool = False,
    validate: bool = False,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function as torch.compile traces it."""
    temperature, heat = custom.number(temperature)
    args = (hidden, embedding, candidates, n, counts, block, log, temperature, bias, normaliser, validate, heat)
    return custom.written(tuple(_OPERATOR(*args)), out)
