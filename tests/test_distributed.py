"""Layers divided over processes, with gloo, compared with one process in float64."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import calls_run, thorough, use_dispatcher

import tvm_sparse
from tvm_sparse.core.registry import parse
from tvm_sparse.formats.bitmap import pack_bits
from tvm_sparse.operators.softmax_sample import reference
from tvm_sparse.operators.softmax_sample.problem import SLACK
from tvm_sparse.runtime.dispatch import Dispatcher

torch = pytest.importorskip("torch")
multiprocessing = pytest.importorskip("torch.multiprocessing")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch was built without torch.distributed", allow_module_level=True)

SEED = int(os.environ.get("TVM_SPARSE_TEST_SEED", 0)) or int.from_bytes(os.urandom(3), "little")
BATCH, HIDDEN, K = 4, 24, 16
LIMIT = datetime.timedelta(seconds=100)
# Rows of each process's shard, and words of the vocabulary: the others are padding.
TWO = ((40, 24), 61)
FOUR = ((16, 16, 16, 16), 45)  # the third has fewer words than k, the fourth has none


def words_of(rows: Sequence[int], total: int) -> list[int]:
    return [max(0, min(rows[i], total - sum(rows[:i]))) for i in range(len(rows))]


def keys(rows: Sequence[int], total: int) -> Iterator[str]:
    for words in {one for one in words_of(rows, total) if one}:
        k = min(K, words)
        yield f"head_topk/batch={BATCH},vocab={words},hidden={HIDDEN},k={k},bias=1"
        yield f"candidate_logits/lists={BATCH},beam=1,vocab={words},hidden={HIDDEN},m={k},bias=1"


def check_process(rank: int, rows: Sequence[int], total: int, folder: str, seed: int, place: str) -> None:
    """What each process does: it makes the whole problem, and passes its own rows."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(rows), timeout=LIMIT
    )
    cache = Path(folder) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        use_dispatcher(patch, Dispatcher(logs=(), shipped=cache / "none", cache=cache))
        check_results(rank, rows, total, seed, place)
        check_errors(rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check_draws(head: Any, hidden: Any, given: dict[str, Any], processes: int) -> None:
    """Each token is one that the best words of the whole vocabulary give for its number, the same in all processes."""
    options = {name: given[name] for name in ("temperature", "bias")}
    logs, words, _ = (one.cpu().numpy() for one in head.topk(hidden, K, log=True, **options))
    chances, rows = np.exp(logs.astype(np.float64)), np.arange(BATCH)
    defined = np.isfinite(logs[:, 0])
    for number, (top_p, min_p) in enumerate(((1.0, 0.0), (0.6, 0.0), (0.9, 0.2))):
        uniforms = torch.rand(BATCH, generator=torch.Generator().manual_seed(number))
        tokens, logprobs = head.sample(hidden, K, uniforms.to(hidden.device), top_p=top_p, min_p=min_p, **options)
        every = [torch.empty_like(tokens) for _ in range(processes)]
        torch.distributed.all_gather(every, tokens)
        assert all(torch.equal(one, tokens) for one in every)
        tokens, logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        ranks = (words == tokens[:, None]).argmax(1)
        assert (words[rows, ranks] == tokens).all()
        np.testing.assert_allclose(logprobs, logs[rows, ranks], rtol=1e-6, atol=1e-6)
        assert not ranks[~defined].any()
        filters = reference.Filters(*(np.full(BATCH, one) for one in (options["temperature"], K, top_p, min_p)))
        fits = reference.possible(
            chances, ranks, filters, np.full(BATCH, K), uniforms.double().numpy(), SLACK, words, np.zeros(BATCH, bool)
        )
        assert fits[defined].all()


def check_bitmaps(head: Any, hidden: Any, bias: Any, seed: int) -> None:
    """Words that a row does not allow count as those with a bias of -inf."""
    mask = np.random.default_rng([seed, head.shard[0]]).random((BATCH, len(bias))) < 0.8
    allowed = torch.from_numpy(pack_bits(mask)).to(hidden.device)
    found = head.topk(hidden, K, log=True, bias=bias, allowed=allowed)
    tokens, _ = head.sample(hidden, K, torch.full((BATCH,), 0.7, device=hidden.device), bias=bias, allowed=allowed)
    for row in range(BATCH):
        masked = torch.where(torch.from_numpy(mask[row]).to(bias.device), bias, -torch.inf)
        wanted = head.topk(hidden[row : row + 1], K, log=True, bias=masked)
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have[row], want[0], rtol=1e-5, atol=1e-5)
        assert tokens[row] in wanted[1][0]


def check_results(rank: int, rows: Sequence[int], total: int, seed: int, place: str) -> None:
    problem = parse(f"head_topk/batch={BATCH},vocab={total},hidden={HIDDEN},k={K},bias=1")
    first = sum(rows[:rank])
    for number, structure in enumerate(problem.structures):
        inputs = problem.generate(seed + number, structure)
        hidden, embedding, scale, log, _, bias = inputs
        # Padding that would win, were it read.
        more = sum(rows) - total
        embedding = np.concatenate([embedding, np.full((more, HIDDEN), 100, np.float32)])[first : first + rows[rank]]
        bias = np.concatenate([bias, np.full(more, 1e6, np.float32)])[first : first + rows[rank]]
        head = tvm_sparse.distributed.TopkHead(torch.from_numpy(embedding).to(place), total=total)
        assert head.shard == (first, total)
        given = {"log": bool(log), "temperature": 1 / scale, "bias": torch.from_numpy(bias).to(place)}
        for batch in (BATCH, 1, 0):
            found = head.topk(torch.from_numpy(hidden[:batch]).to(place), K, **given)
            assert [tuple(one.shape) for one in found] == [(batch, K), (batch, K), (batch,)]
            if batch == BATCH:
                problem.check(inputs, problem.reference(inputs), [one.cpu().numpy() for one in found])
                every = [torch.empty_like(found[1]) for _ in rows]
                torch.distributed.all_gather(every, found[1])
                assert all(torch.equal(one, found[1]) for one in every)
                check_draws(head, torch.from_numpy(hidden).to(place), given, len(rows))
                if structure == "random":
                    check_bitmaps(head, torch.from_numpy(hidden).to(place), given["bias"], seed)
            elif batch:
                few = parse(f"head_topk/batch=1,vocab={total},hidden={HIDDEN},k={K},bias=1")
                some = [inputs[0][:1], *inputs[1:]]
                few.check(some, few.reference(some), [one.cpu().numpy() for one in found])


def check_errors(rank: int) -> None:
    """Every process raises the same error, so that none waits."""
    whole = torch.zeros(8, HIDDEN)
    makers: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (whole[:, : HIDDEN - rank], {}, ValueError, f"expected {HIDDEN} columns, .* got {HIDDEN - 1}, .* in rank 1"),
        (whole.to(torch.bfloat16 if rank else torch.float32), {}, ValueError, "torch.bfloat16 .* in rank 1"),
        (whole, {"total": 9 + rank}, ValueError, "total 9 as in rank 0, got .* 10 in rank 1"),
        (whole, {"total": 1000}, ValueError, r"total: expected 1 <= total <= the rows of all shards \(\d+\), got 1000"),
        (whole[: 8 * (1 - rank)], {}, ValueError, r"at least one row, got \(0, 24\) in rank 1"),
    ]
    for embedding, options, error, message in makers:
        with pytest.raises(error, match=message):
            tvm_sparse.distributed.TopkHead(embedding, **options)
    head = tvm_sparse.distributed.TopkHead(whole)
    assert head.shard == (8 * rank, 8 * torch.distributed.get_world_size())
    with pytest.raises(ValueError, match="k: expected 1 <= k"):
        head.topk(torch.zeros(1, HIDDEN), 1000)
    with pytest.raises(TypeError, match="embedding: expected a torch tensor"):
        tvm_sparse.distributed.TopkHead(whole.numpy())


CASES = [
    pytest.param(*TWO, "cpu", id="two"),
    thorough(*FOUR, "cpu", id="four"),
    pytest.param(*TWO, "cuda", id="two on one GPU", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("rows", "total", "place"), CASES)
def test_a_head_divided_over_processes(rows: Sequence[int], total: int, place: str, tmp_path: Path) -> None:
    if place == "cpu":
        with calls_run(keys(rows, total), tmp_path / "kernels"):
            pass
    multiprocessing.spawn(check_process, (rows, total, str(tmp_path), SEED, place), nprocs=len(rows))
