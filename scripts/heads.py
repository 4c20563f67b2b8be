"""Code shared by scripts about output layers: similar states like those of a beam, lists of a given length, contenders
that are checked before they are timed, and their lines in a table and a CSV.

All data are torch tensors on the device. Times are those of `tvm_sparse.bench`: CUDA graphs, in turn.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from contenders import built
from reproduction import write_csv

import tvm_sparse
from tvm_sparse.bench.timing import ROUNDS, Times, time_cpu, time_cuda
from tvm_sparse.cli.common import console, fail, machine_here, table, us
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.registry import make
from tvm_sparse.formats import wta
from tvm_sparse.formats.bitmap import pack_bits
from tvm_sparse.operators.head_topk.call import KERNEL, way
from tvm_sparse.runtime import arrays

# Options of commands that compare heads on a GPU.
CsvFile = Annotated[Path | None, typer.Option("--csv", help="File to write.")]
Rounds = Annotated[int, typer.Option(min=1, help="In which calls take turns.")]
Seed = Annotated[int, typer.Option(help="Of states and embeddings.")]

Call = Callable[[], Any]
Check = Callable[[Any], None]
# Allowed error of probabilities, relative to the largest one: for float32 sums in another order; and for logits rounded
# to the states' dtype, which depends on their magnitude (see `top_check`).
OURS, ROUNDED = 2e-3, None
CPU_ROUNDS = 3
LSH, LISTS, EXACT, CHAIN, TORCH, TORCH_GATHERED = (
    "LSH head", "LSH by lists", "exact head", "product + softmax_topk", "torch product + softmax + topk",
    "torch gather + product + softmax + topk",
)  # fmt: skip
# Words whose embeddings are averaged for a state: it is as near to each as a model's states are to likely words.
NEAREST = 12


@dataclass(frozen=True)
class Timed:
    """One contender."""

    seconds: float | None
    how: str = ""
    note: str = ""


def gpu_here(target: str) -> Machine:
    """The GPU that `--target` names, of this machine."""
    where = machine_here(target, "comparing")
    if where.kind != "cuda":
        fail("target: needs a GPU")
    return where


def draw(
    vocab: int, hidden: int, rows: int, dtype: str, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal embedding `(vocab, hidden)`, and states `(rows, hidden)`, each the sum of a common and a separate half,
    which are means of some words. Scores have a standard deviation of about 2.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    embedding = torch.empty((vocab, hidden), dtype=kind, device=device).normal_(0, hidden**-0.5, generator=generator)
    drawn = torch.randint(vocab, (rows + 1, NEAREST), generator=generator, device=device)
    means = torch.nn.functional.normalize(embedding[drawn].float().sum(1))
    states = torch.nn.functional.normalize(means[1:] + means[:1]) * 2 * hidden**0.5
    return embedding, states.to(kind).contiguous()


# ---- lists ---------------------------------------------------------------------------------------


def hits(head: Any, hidden: torch.Tensor) -> np.ndarray:
    """Equation 9 for some states: hits `(rows, vocab)`, counted on the host from the head's own tables."""
    parts = (head.hashing.permutations, head.hashing.words, head.hashing.table, head.hashing.multipliers)
    permutations, words, starts, multipliers = (None if a is None else a.cpu().numpy() for a in parts)
    first, length = wta.find_buckets(wta.hash_rows(hidden.float().cpu().numpy(), permutations), starts, multipliers)
    found = np.empty((len(hidden), head.vocab), np.int64)
    for row in range(len(hidden)):
        buckets = [words[band, at : at + n] for band, (at, n) in enumerate(zip(first[row], length[row], strict=True))]
        found[row] = np.bincount(np.concatenate(buckets), minlength=head.vocab)
    return found


def candidates_of(head: Any, hidden: torch.Tensor) -> np.ndarray:
    """The list of some states that share it, by definition (equations 3 and 10)."""
    chosen = (hits(head, hidden) >= head.settings.threshold).any(axis=0)
    chosen[head.frequent] = True
    return np.flatnonzero(chosen)


def changed(head: Any, frequent: np.ndarray | None = None, **numbers: int) -> Any:
    """The head with the same tables, but another threshold or capacity, or other words that are always candidates."""
    ids = head.frequent if frequent is None else frequent
    settings = dataclasses.replace(head.settings, frequent=len(ids), **numbers)
    return type(head).assembled(head.embedding, head.bias, settings, head.hashing, ids, path="lsh")


def lsh_head(
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    candidates: int,
    *,
    k: int = 16,
    units: int = 3,
    bands: int = 500,
    table: str | None = None,
) -> Any:
    """An LSH head whose list for these states has about `candidates` words: half by hits, the others frequent words."""
    head = tvm_sparse.LshHead(embedding, k=k, units=units, bands=bands, threshold=1, frequent=0, table=table)
    most = hits(head, hidden).max(axis=0)
    threshold = next(t for t in range(1, bands + 2) if (most >= t).sum() <= candidates // 2)
    chosen = most >= threshold
    # Some of the first T words are candidates already.
    total = chosen.sum() + np.cumsum(~chosen)
    frequent = min(int(np.searchsorted(total, candidates)) + 1, head.vocab)
    capacity = min(head.vocab, -(-max(candidates * 5 // 4, frequent) // 256) * 256)
    return changed(head, np.arange(frequent), threshold=min(threshold, bands), capacity=capacity)


def problems_of(head: Any, rows: int, n: int) -> list[Problem]:
    """The problems of a step of the head, and that of the exact head."""
    own, dtype = head.settings, str(head.embedding.dtype).removeprefix("torch.")
    lists = {"lists": 1, "beam": rows, "vocab": own.vocab, "hidden": own.hidden, "dtype": dtype}
    hashed = {"k": own.k, "units": own.units, "bands": own.bands, "table": own.table}
    fused = [make("lsh_topk", {**lists, **hashed, "frequent": own.frequent, "n": n})] if own.frequent else []
    return [
        *fused,
        make("lsh_candidates", {**lists, **hashed, "capacity": own.capacity}),
        make("candidate_topk", {**lists, "m": own.capacity, "k": n}),
        make("head_topk", {"batch": rows, "vocab": own.vocab, "hidden": own.hidden, "k": n, "dtype": dtype}),
    ]


def ready(problems: Iterable[Problem], where: Machine) -> Any:
    """A context in which the kernels of these problems are available to public functions, built in parallel."""
    return built([(problem, (), ()) for problem in dict.fromkeys(problems)], where)


# ---- contenders ----------------------------------------------------------------------------------


def torch_full(hidden: torch.Tensor, embedding: torch.Tensor, n: int) -> Call:
    """Product, softmax and top-n of all words, by torch."""

    def call() -> Any:
        logits = torch.nn.functional.linear(hidden, embedding)
        return torch.topk(torch.softmax(logits, -1, dtype=torch.float32), n)

    return call


def product_topk(hidden: torch.Tensor, embedding: torch.Tensor, n: int) -> Call:
    """Product by torch, followed by our softmax and top-n."""
    return lambda: tvm_sparse.softmax_topk(torch.nn.functional.linear(hidden, embedding), n)


def torch_gathered(hidden: torch.Tensor, embedding: torch.Tensor, candidates: torch.Tensor, n: int) -> Call:
    """A copy of the candidates' embeddings, followed by product, softmax and top-n, by torch; `candidates` are `(m,)`
    or one list per row.
    """
    words = candidates.long()

    def call() -> Any:
        if words.dim() == 1:
            logits = torch.nn.functional.linear(hidden, embedding[words])
        else:
            logits = torch.bmm(embedding[words], hidden[:, :, None])[:, :, 0]
        values, at = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), n)
        return values, words[at] if words.dim() == 1 else words.gather(1, at)

    return call


def top_check(
    hidden: torch.Tensor, embedding: torch.Tensor, n: int, candidates: torch.Tensor | None = None
) -> Callable[[float | None], Check]:
    """Makes checks by tolerance: a check raises `Mismatch` unless values and words are the n best of the softmax, in
    float64, over all words or over candidates `(m,)` or `(rows, m)`. Words of nearly equal probability may be swapped.
    `ROUNDED`: a logit and the normaliser may be off by half a unit in the last place of the largest logit.
    """
    if candidates is None:
        scores = hidden.double() @ embedding.double().T
    else:
        words = candidates.long().expand(len(hidden), -1)
        # Row by row, since all copies together may be larger than the embedding.
        found = [embedding[some].double() @ row.double() for some, row in zip(words, hidden, strict=True)]
        scores = torch.full((len(hidden), len(embedding)), -torch.inf, dtype=torch.float64, device=hidden.device)
        scores.scatter_(1, words, torch.stack(found))
    probabilities = torch.softmax(scores, -1)
    best = torch.topk(probabilities, n).values

    largest = float(abs(scores[scores.isfinite()]).max())
    rounding = OURS + math.expm1(largest * torch.finfo(hidden.dtype).eps)

    def within(tolerance: float | None) -> Check:
        bound = (rounding if tolerance is ROUNDED else tolerance) * best[:, :1]

        def check(outputs: Any) -> None:
            values, indices = outputs[:2]
            if values.shape != best.shape or not bool((abs(values.double() - best) <= bound).all()):
                raise Mismatch("probabilities are not those of the reference")
            if not bool((abs(probabilities.gather(1, indices.long()) - best) <= bound).all()):
                raise Mismatch("words are not the best ones")

        return check

    return within


def bounds(states: torch.Tensor, embedding: torch.Tensor, n: int) -> tuple[float | None, float | None]:
    """Allowed errors of probabilities, for the exact head and for peers. With many rows, and if a record says that it
    is faster, the head uses torch's product as well.
    """
    peers = OURS if states.dtype == torch.float32 else ROUNDED
    known = arrays.facts("hidden", states)
    taken = way((len(states), len(embedding), states.shape[1], n, known.dtype), known)
    return (OURS if taken == KERNEL else peers), peers


def by_lists(head: Any, hidden: torch.Tensor, n: int) -> Call:
    """A step in two programs, as in a head for which `lsh_topk` does not fit."""
    hashing, own = head.hashing, head.settings
    frequent = pack_bits(np.isin(np.arange(own.vocab), head.frequent))
    always = torch.from_numpy(frequent).to(hidden.device)

    def call() -> Any:
        candidates, counts = tvm_sparse.lsh_candidates(
            hidden[None], hashing.permutations, hashing.words, hashing.table, always, own.threshold, own.capacity,
            multipliers=hashing.multipliers,
        )  # fmt: skip
        return tvm_sparse.candidate_topk(hidden, head.embedding, candidates, n, counts=counts)

    return call


def step_contenders(
    head: Any, states: torch.Tensor, n: int, words: torch.Tensor
) -> tuple[dict[str, Call], dict[str, Check]]:
    """An LSH step and its peers, by name, and checks of their results. The states share the candidates `words`, which
    are the head's.
    """
    embedding = head.embedding
    calls: dict[str, Call] = {
        LSH: lambda: head.topk(states, n, path="lsh"),
        LISTS: by_lists(head, states, n),
        EXACT: lambda: tvm_sparse.head_topk(states, embedding, n, constant=True),
        CHAIN: product_topk(states, embedding, n),
        TORCH: torch_full(states, embedding, n),
        # With given candidates: neither hash nor look-up.
        TORCH_GATHERED: torch_gathered(states, embedding, words, n),
    }
    of_all, of_list = (top_check(states, embedding, n, some) for some in (None, words))
    exact, rounded = bounds(states, embedding, n)
    return calls, {
        LSH: of_list(OURS), LISTS: of_list(OURS), EXACT: of_all(exact), CHAIN: of_all(rounded), TORCH: of_all(rounded),
        TORCH_GATHERED: of_list(rounded),
    }  # fmt: skip


def timed(
    calls: Mapping[str, Call],
    checks: Mapping[str, Check],
    device: str,
    rounds: int = ROUNDS["cuda"],
    *,
    cold: bool = False,
) -> dict[str, Timed]:
    """Check contenders and time them in turn, on a GPU in `rounds` rounds. A contender that fails or is wrong has a
    note instead of a time. `cold`: timed by `time_cold`, on a GPU.
    """
    results: dict[str, Timed] = {}
    able: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            outputs = call()
            if name in checks:
                checks[name](outputs)
        except Exception as error:  # anything that a library does not support becomes its note
            reason = str(error).strip().partition("\n")[0] or repr(error)
            results[name] = Timed(None, note=reason[:160])
            typer.echo(f"{name} has no time: {reason[:300]}", err=True)
            continue
        able[name] = call
        results[name] = Timed(None)  # keeps the order
    if device == "cuda":
        times = (time_cold if cold else time_cuda)(able, rounds)
    else:
        times = time_cpu(able, CPU_ROUNDS)
    for name, (how, seconds) in times.items():
        if isinstance(seconds, str):
            results[name] = Timed(None, note=seconds)
        else:
            results[name] = Timed(statistics.median(seconds), how)
    return results


def behind(first: Call, second: Call) -> Call:
    """Both calls, one after the other, with the result of the second."""

    def both() -> Any:
        first()
        return second()

    return both


def cache_reader() -> Call:
    """A call that reads twice the L2 cache's size, like the layers of a model between two steps of its head."""
    held = torch.zeros(2 * torch.cuda.get_device_properties(0).L2_cache_size // 4, device="cuda")
    total = torch.empty((), device="cuda")

    def read() -> None:
        torch.sum(held, dim=0, out=total)

    return read


def time_cold(calls: Mapping[str, Call], rounds: int) -> Times:
    """`time_cuda` of calls separated by a `cache_reader`, whose time in the same round is subtracted."""
    read, alone = cache_reader(), "a read of the L2 cache"
    found = time_cuda({alone: read, **{name: behind(read, call) for name, call in calls.items()}}, rounds)
    _, reads = found.pop(alone)
    return {
        name: (how, [second - first for first, second in zip(reads, seconds, strict=True)])
        for name, (how, seconds) in found.items()
    }


class Report:
    """Lines of a script, written to a CSV, if there is one, as they are added. The facts are printed unless `quiet`."""

    def __init__(
        self, path: Path | None, facts: Mapping[str, str], columns: Sequence[str], *, quiet: bool = False
    ) -> None:
        self._path, self._facts, self._columns = path, facts, columns
        self._lines: list[list[Any]] = []
        for name, value in () if quiet else facts.items():
            typer.echo(f"{name}: {value}")
        self._write()  # a CSV that cannot be written fails before anything is measured

    def add(self, **cells: Any) -> None:
        unknown = cells.keys() - set(self._columns)
        assert not unknown, unknown
        self._lines.append([_cell(cells.get(column)) for column in self._columns])
        self._write()

    def _write(self) -> None:
        if self._path:
            write_csv(self._path, self._facts, self._columns, self._lines)

    def close(self) -> None:
        if self._path:
            typer.echo(f"written: {self._path}")


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else value


def micro(result: Timed) -> str:
    """Microseconds for a CSV."""
    return "" if result.seconds is None else f"{result.seconds * 1e6:.3f}"


def over(one: Timed | None, other: Timed | None) -> str:
    """Time of `one` over that of `other`."""
    if one is None or other is None or not one.seconds or not other.seconds:
        return ""
    return f"{one.seconds / other.seconds:.3f}"


def show(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table whose first column is text; results are in microseconds."""
    printed = table(*heads, right=heads[1:])
    for row in rows:
        printed.add_row(*(us(cell.seconds) if isinstance(cell, Timed) else str(cell) for cell in row))
    typer.echo(f"\n{title}")
    console().print(printed)
