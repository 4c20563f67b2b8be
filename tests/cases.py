"""What the tests of operators, templates and GPU have in common: awkward problems, machines, sampled candidates."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tvm_sparse import schedules
from tvm_sparse.machine import Machine, cpu
from tvm_sparse.operators import Problem, make, parse
from tvm_sparse.schedules import Template
from tvm_sparse.tuning.records import Candidate
from tvm_sparse.tuning.search import points

SM90 = Machine("cuda", "sm_90a", "sm_90a", cores=132)
SM80 = Machine("cuda", "sm_80", "sm_80", cores=108)
MACHINES = {"llvm": cpu(), "cuda": SM90}

AWKWARD = tuple(
    parse(key)
    for key in (
        "softmax_topk/batch=1,vocab=1,k=1",
        "softmax_topk/batch=2,vocab=7,k=7",
        "softmax_topk/batch=3,vocab=61,k=4,dtype=float16",  # less than a tile, prime
        "softmax_topk/batch=2,vocab=1009,k=1",  # prime
        "softmax_topk/batch=1,vocab=1501,k=50,dtype=bfloat16",
        "softmax_topk/batch=1,vocab=2048,k=5",  # whole tiles
        "softmax_topk/batch=1,vocab=1000,k=100,dtype=float16",  # more than the survivors that are ranked by counting
        "softmax_topk/batch=3,vocab=1001,k=20,dtype=float16,bias=1,ids=3",  # with all extras
        "softmax_topk/batch=1,vocab=1100,k=1100",  # k = vocab, beyond the threads of a block
        "softmax_topk/batch=1,vocab=2600,k=2100",  # more than fit into shared memory
        "softmax/batch=2,vocab=1",
        "softmax/batch=3,vocab=61,algorithm=safe,dtype=float16",
        "softmax/batch=1,vocab=1009,algorithm=naive,dtype=bfloat16",
        "softmax/batch=2,vocab=2051",  # rows begin between two vectors
        "softmax/batch=1,vocab=2048,dtype=bfloat16",  # whole vectors
        "logsumexp/batch=3,vocab=1501,dtype=float16",
        "bsr_matmul/m=1,k=1,n=1,block=1,sparsity=0",
        "bsr_matmul/m=3,k=66,n=35,block=5x3,sparsity=0.5,bias=1,activation=gelu",  # nothing is a power of two
        "bsr_matmul/m=17,k=128,n=64,block=32x16,sparsity=0.5,dtype=float16",
        "bsr_matmul/m=4,k=192,n=64,block=2x32,sparsity=0.7,dtype=bfloat16,bias=1,activation=relu",
        "bsr_matmul/m=9,k=576,n=48,block=8,sparsity=0.5,dtype=float16,activation=silu",  # tensor cores, several steps
        "bsr_matmul/m=10,k=64,n=128,block=64x8,sparsity=0.3,dtype=bfloat16,bias=1",
        "bsr_matmul/m=2,k=64,n=64,block=8,sparsity=1",  # no block at all
        "bsr_matmul/m=2,k=128,n=32,block=1,sparsity=0.95,pattern=skewed",
        "bsr_matmul/m=9,k=512,n=16,block=4x64,sparsity=0.25",  # long rows: every lane takes several steps
        "nhot_lookup/rows=1,vocab=1,width=1,nonzeros=1",
        "nhot_lookup/rows=7,vocab=53,width=33,nonzeros=3,weighted=1,index=int64",  # no wide loads
        "nhot_lookup/rows=9,vocab=300,width=136,nonzeros=10,dtype=float16",  # a tile and a part of one
        "nhot_lookup/rows=4,vocab=61,width=260,nonzeros=40,dtype=bfloat16,weighted=1",  # more than the ids of a warp
        "nhot_lookup/rows=5,vocab=40,width=6,nonzeros=20,weighted=1",  # fewer columns than a warp has lanes
        "nhot_lookup/rows=33,vocab=17,width=128,nonzeros=1,index=int64",
    )
)

# Sizes at which people run these, for what only shows there: registers and shared memory.
REALISTIC = tuple(
    parse(key)
    for key in (
        "softmax_topk/batch=10,vocab=25000,k=5",
        "softmax_topk/batch=64,vocab=128256,k=50,dtype=bfloat16",
        "softmax_topk/batch=4,vocab=32000,k=2048,dtype=float16",
        "softmax_topk/batch=4,vocab=50257,k=100",
        "softmax/batch=512,vocab=50257,dtype=bfloat16",
        "logsumexp/batch=10,vocab=25000",
        "bsr_matmul/m=1,k=1024,n=4096,block=16,sparsity=0.9",
        "bsr_matmul/m=64,k=4096,n=4096,block=32,sparsity=0.9,dtype=float16",
        "bsr_matmul/m=128,k=768,n=768,block=64x8,sparsity=0.5",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=1",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=100,weighted=1",
        "nhot_lookup/rows=64,vocab=131072,width=4096,nonzeros=64,weighted=1,index=int64,dtype=float16",
        "nhot_lookup/rows=8192,vocab=1000,width=50,nonzeros=20,dtype=bfloat16",
    )
)


def cases(kind: str, problems: tuple[Problem, ...] = AWKWARD, **having: Any) -> list[tuple[Template, Problem]]:
    """The templates of a kind of machine whose attributes are `having`, with each problem that they apply to."""
    pairs = [(schedules.find(name), p) for p in problems for name in schedules.applicable(p, MACHINES[kind])[0]]
    return [pair for pair in pairs if all(getattr(pair[0], name) == value for name, value in having.items())]


def sampled(template: Template, problem: Problem, machine: Machine, count: int) -> list[Candidate]:
    """The default, and `count` other points of the space, the same ones in every run."""
    default = template.candidate(template.default(problem, machine))
    others = [c for c in points(problem, machine, {template.name: template.space(problem, machine)}) if c != default]
    return [default, *random.Random(f"{template.name} {problem}").sample(others, min(count, len(others)))]


def case_id(value: Any) -> str | None:
    """For `pytest.mark.parametrize(ids=)`: the template's name, the problem's axes without what is default."""
    if isinstance(value, Template):
        return value.name
    if isinstance(value, Problem):
        full = {"dtype": "float32", "pattern": "uniform"}
        full |= {field.name: field.default for field in dataclasses.fields(value) if field.metadata.get("optional")}
        return ",".join(f"{name}={axis}" for name, axis in value.axes.items() if full.get(name) != axis)
    return None


__all__ = ["AWKWARD", "MACHINES", "REALISTIC", "SM80", "SM90", "case_id", "cases", "make", "sampled"]
