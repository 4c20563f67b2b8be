"""Host time of calls, and of first calls."""

from __future__ import annotations

import statistics
import textwrap

from .register import part
from .results import provenance, results
from .text import WIDTH, code, listed, span, table, us


@part
def call_costs() -> str:
    found = results("host-time-h200")
    shown = ("raw", "allocations", "ours", "torch", "custom", "idle")
    ratios = ("ours / (raw + allocations)", "ours / torch", "custom / ours")

    def call(problem: str) -> str:
        """The operator, with the details that distinguish its calls: their form, and whether a sampler has a top_k."""
        words, _, form = problem.rstrip(")").partition(" (")
        told = [*(["no top_k"] if "whole=1" in words else []), *([form] if form else [])]
        return code(words.split()[0]) + (f", {', '.join(told)}" if told else "")

    def figure(value: str) -> str:
        return value if value == "-" else us(float(value))

    rows = [
        [call(row["problem"]), *(figure(row[name]) for name in shown), *(row[name] for name in ratios)]
        for row in found.rows
    ]
    return f"{provenance('host-time-h200')}:\n\n{table(('call', *shown, *ratios), rows)}"


@part
def first_calls() -> str:
    """A table of first calls, with kernels that are compiled and with prebuilt ones."""
    sentences = []
    for name, what in (
        ("first-call-compiled-h200", "at shapes that nobody had tuned, in a process with PyTorch imported"),
        ("first-call-prebuilt-h200", "whose kernels a wheel brought"),
    ):
        rows = results(name).rows
        seconds = [float(row["first result ms"].split()[0]) / 1e3 for row in rows]
        calls = listed([code(row["problem"].split()[0]) for row in rows])
        sentences.append(f"First results of {calls} {what}: {span(seconds, 2)} seconds ({provenance(name)}).")
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


@part
def host_time() -> str:
    spent = [float(r["host_microseconds"]) for r in results("peers-h200").rows if r["host_microseconds"]]
    return (
        f"A call of `softmax_topk` from Python, which allocates two outputs, costs the host {min(spent):.0f} to"
        f" {max(spent):.0f} microseconds in these runs, {statistics.median(spent):.0f} in the median; hosts differ by a"
        " factor of two."
    )
