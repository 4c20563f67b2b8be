"""`nhot_lookup`, and the tables of Argueta & Chiang."""

from __future__ import annotations

from functools import partial

from tvm_sparse.bench.compare import NAME

from .register import PARTS, part
from .results import best, results, where
from .text import percent, table, times_as, us


@part
def argueta_chiang_table2() -> str:
    others, packed = [], []
    for times in results("argueta-chiang-table2-h200").by_problem().values():
        others.append(best(times, "torch", "FlashInfer") / times[NAME])
        packed.append(times["packed insertion"] / times[NAME])
    return (
        f"For N = 10 to 400 in batches of 1, 512 and 1024 rows of 10,240 the best other library takes"
        f" {times_as(min(others))} to {times_as(max(others))} times as long as ours, and that paper's own packed"
        f" insertion {times_as(min(packed))} to {times_as(max(packed))} times."
    )


@part
def nhot_table1() -> str:
    cases = results("argueta-chiang-table1-h200").by("values", "nonzeros")
    counts = sorted({int(nonzeros) for _, nonzeros in cases})
    wanted = (("tvm_sparse", NAME), ("torch embedding_bag", "torch embedding_bag"), ("cuSPARSE", "torch CSR @ dense"))
    rows = [[shown, *(us(cases["stored", str(n)].get(name)) for n in counts)] for shown, name in wanted]
    return table(["nonzeros a row", *map(str, counts)], rows)


@part
def nhot_ratios() -> str:
    full, half = (results(f"argueta-chiang-table1{d}-h200").by("values", "nonzeros") for d in ("", "-float16"))
    most = str(max(int(nonzeros) for _, nonzeros in full))
    one = full["ones", "1"]
    return (
        f"One-hot rows without values take {us(one[NAME])}, `F.embedding` {us(one['torch embedding'])}. At {most}"
        f" nonzeros a float16 table takes {us(half['stored', most][NAME])} with values and"
        f" {us(half['ones', most][NAME])} without, a float32 one {us(full['stored', most][NAME])} and"
        f" {us(full['ones', most][NAME])}."
    )


@part
def bags() -> str:
    """Embedding bags of several tables, in eight bits, and as means, beside a call of PyTorch for each table."""
    shares = {row["problem"]: float(row["share_of_limit"]) for row in results("bags-h200").rows
              if row["implementation"] == NAME}  # fmt: skip
    rows = []
    for problem, times in results("bags-h200").by_problem().items():
        words = problem.vocab // problem.tables
        what = f"{problem.tables} x ({words:,}, {problem.width}) {problem.stored or problem.dtype}"
        theirs = times["torch embedding_bag"]
        rows.append([what, f"{problem.rows:,} x {problem.nonzeros}", problem.mode or "sum", us(times[NAME]),
                     percent(shares[problem.key]), us(theirs), times_as(theirs / times[NAME])])  # fmt: skip
    head = ["tables", "bags", "mode", "tvm_sparse", "of the limit", "torch embedding_bag", "times faster"]
    return f"{where('bags-h200')}\n\n{table(head, rows)}"


PARTS["where-nhot"] = partial(where, "argueta-chiang-table1-h200", "argueta-chiang-table1-float16-h200")
PARTS["where-table2"] = partial(where, "argueta-chiang-table2-h200")
