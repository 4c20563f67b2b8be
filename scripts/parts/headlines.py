"""Times of the fastest other library over ours: the sentence of README.md, and the data of its chart."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from tvm_sparse.bench.compare import NAME

from .output_layer import CHAIN, HEAD, OF_HEAD, OF_LISTS, SPECVOCAB, TORCH_HEAD, TORCH_LISTS
from .recurrent import LAYER, LAYER_PRODUCT, MODULE, OF_CALL, RNN
from .register import part
from .results import Times, best, loses, provenance, results
from .text import listed, times_as


@dataclass(frozen=True)
class Headline:
    """Ratios of one kind: the peer's time over ours, for each problem."""

    what: str
    against: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)


GU_SPARSE = ("torch BSR", "torch bsr_dense_mm", "cuSPARSE")
HEADLINE_FILES = ("peers-h200", "peers-softmax-h200", "gu-tables-h200", "peers-float16-h200", "peers-rotated-h200",
                  "argueta-chiang-table1-h200", HEAD, SPECVOCAB, RNN)  # fmt: skip


@functools.cache
def headlines() -> tuple[Headline, ...]:
    def ratios(cases: Iterable[Times], *prefixes: str) -> tuple[float, ...]:
        return tuple(best(times, *prefixes) / times[NAME] for times in cases)

    gu = list(results("gu-tables-h200").by("m", "k", "n", "block", "sparsity").values())
    half = list(results("peers-float16-h200").by_problem().values())
    lookups = [t for (_, values), t in results("argueta-chiang-table1-h200").by("nonzeros", "values").items()]
    heads = [times for times in results(HEAD).by(*OF_HEAD).values() if "head_topk" in times]
    lists = results(SPECVOCAB).by(*OF_LISTS).values()
    layers = results(RNN).by(*OF_CALL, "dtype")
    half_layers = [times for (*_, dtype), times in layers.items() if dtype == "float16"]
    loops = [times for (*_, dtype), times in layers.items() if dtype == "float32" and "sparse step loop" in times]
    return (
        Headline("softmax_topk, float32", "PyTorch", ratios(results("peers-h200").by_problem().values(), "torch")),
        Headline("softmax, float32", "PyTorch", ratios(results("peers-softmax-h200").by_problem().values(), "torch")),
        Headline("bsr_matmul, float32", "sparse: cuSPARSE, PyTorch, Triton", ratios(gu, *GU_SPARSE)),
        Headline("bsr_matmul, float32", "dense: cuBLAS in float32, TF32, float16", ratios(gu, "cuBLAS")),
        Headline("bsr_matmul, float16", "sparse: PyTorch, Triton", ratios(half, "torch BSR", "torch bsr_dense_mm")),
        Headline("bsr_matmul, float16", "dense: cuBLAS", ratios(half, "torch dense")),
        Headline(
            "bsr_matmul, float16, from memory",
            "dense: cuBLAS",
            ratios(results("peers-rotated-h200").by_problem().values(), "torch dense"),
        ),
        Headline("nhot_lookup, float32", "PyTorch, cuSPARSE", ratios(lookups)),
        Headline("head_topk", "PyTorch", tuple(t[TORCH_HEAD] / t["head_topk"] for t in heads)),
        Headline("head_topk", "cuBLAS, then softmax_topk", tuple(t[CHAIN] / t["head_topk"] for t in heads)),
        Headline(
            "candidate_topk, bfloat16, a list a row",
            "PyTorch",
            tuple(t[TORCH_LISTS] / t["candidate_topk"] for t in lists),
        ),
        Headline("SparseRNN, LSTM, GRU, float16", "cuDNN", tuple(t[MODULE] / t[LAYER_PRODUCT] for t in half_layers)),
        Headline(
            "SparseRNN, float32",
            "a step: cuBLAS, cuSPARSE",
            tuple(best(t, "dense", "sparse step") / t[LAYER] for t in loops),
        ),
    )


@part
def headline_sentence() -> str:
    topk = headlines()[0]
    lost = [f"{h.what}, against {h.against} ({min(h.ratios):.2f})" for h in headlines() if loses(min(h.ratios))]
    return (
        f"Times of the fastest other library over ours: {provenance(*HEADLINE_FILES)}. Bars are geometric means, lines"
        f" reach from the least favourable shape to the most; `softmax_topk` is {times_as(min(topk.ratios))} to"
        f" {times_as(max(topk.ratios))} times as fast as PyTorch, {times_as(topk.mean)} in the mean of"
        f" {len(topk.ratios)} shapes."
    ) + (f" The other is faster at some shapes of {listed(lost)}." if lost else "")
