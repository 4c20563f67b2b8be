"""Scaling of tuning with devices, and predictions of look-up."""

from __future__ import annotations

from .register import part
from .results import RESULTS, Row, results
from .text import code, percent, table, times_as


@part
def predicted_choices() -> str:
    """Times of predicted choices over the best recorded ones, for problems left out with all their batches."""
    found: dict[str, dict[str, Row]] = {}
    for row in results("prediction-sm_90a").rows:
        if row["left_out"] == "all batches":
            found.setdefault(row["operator"], {})[row["way"]] = row
    rows = []
    for operator, ways in found.items():
        losses = [
            f"{float(row['geometric_mean']):.2f}, worst {float(row['worst']):.2f} ({row['measured']})"
            if int(row["measured"])
            else "-"
            for row in (ways["default"], ways["nearest"], ways["chosen"])
        ]
        nearest = ways["nearest"]
        over = f"{float(nearest['over_chosen']):.2f} ({nearest['both']})" if int(nearest["both"]) else "-"
        rows.append([code(operator), ways["chosen"]["problems"], *losses, over])
    head = "operator", "problems", "template's default", "nearest record", "chosen by the model", "nearest over chosen"
    return table(head, rows)


# A projection uses measurements on the kind of device with most of them: GPUs if there are such results.
SCALING = ("tuning-scaling-h200", "tuning-scaling-x86-64-v4")
PROJECTED = (1, 8, 100)


def scaling_results() -> list[str]:
    return [name for name in SCALING if (RESULTS / f"{name}.csv").exists()]


@part
def tuning_scaling() -> str:
    parts = []
    for name in scaling_results():
        found = results(name)
        rows = []
        for row in found.rows:
            seconds, count = float(row["seconds"]), int(row["devices"])
            busy = float(row["device_seconds"]) / seconds / count
            rows.append(
                [
                    row["devices"],
                    row["builders"],
                    f"{int(row['trials']):,}",
                    f"{seconds:.1f}",
                    times_as(float(found.rows[0]["seconds"]) / seconds),
                    percent(busy),
                ]
            )
        facts = found.facts
        where = (
            f"{facts['device']}, {facts['cores']} cores, load average {facts['load']} at the end, {facts['date'][:10]}"
        )
        head = ("devices", "builders", "trials", "seconds", "times as fast", "busy")
        parts.append(f"{where}:\n\n{table(head, rows)}" + (f"\n\n{facts['runs']}" if "runs" in facts else ""))
    return "\n\n".join(parts)


@part
def tuning_projection() -> str:
    found = results(scaling_results()[0])
    one, last = found.rows[0], found.rows[-1]
    trials = int(last["trials"])
    driver, search, build = (float(last[f"{what}_seconds"]) / trials for what in ("driver", "search", "build"))
    rate = int(one["trials"]) / float(one["seconds"])
    rows = [
        [
            str(count),
            f"{rate * count:,.1f}",
            f"{rate * count * build:,.1f}",
            f"{rate * count * search:,.1f}",
            percent(rate * count * driver),
        ]
        for count in PROJECTED
    ]
    head = ("devices", "trials/s", "cores that build", "cores that search", "of the driver's core")
    full = f"The driver's core is full at about {1 / (rate * driver):,.0f} devices of {found.facts['device']}."
    return f"{table(head, rows)}\n\n{full}"
