"""A decoding step with each sampler: `examples/replace_sampler.py` and `examples/decode_models.py`."""

from __future__ import annotations

from .register import part
from .results import RESULTS, provenance, results
from .text import code, percent, table, us

REPLACED, MODELS, EDITS = "replace-sampler-h200", "decode-models-h200", "edits-h200"
BODY = "body alone"


@part
def replace_sampler() -> str:
    """The time that each way adds to the body of the model, eager and in a CUDA graph."""
    if not (RESULTS / f"{REPLACED}.csv").exists():
        return (
            "The script has not been run on the machine of this project's figures yet; run on yours it prints the time"
            " of a step of each way."
        )
    found = results(REPLACED)
    times = {(row["way"], row["timed"]): float(row["microseconds"]) for row in found.rows}
    how = list(dict.fromkeys(row["timed"] for row in found.rows))
    rows = []
    for way in dict.fromkeys(row["way"] for row in found.rows):
        cells = []
        for one in how:
            seconds, body = times.get((way, one)), times.get((BODY, one))
            cells.append("-" if seconds is None else us(seconds))
            cells.append("-" if seconds is None or body is None or way == BODY else us(seconds - body))
        rows.append([way if way in (BODY, "transformers") else code(way), *cells])
    first = found.rows[0]
    sizes = (
        f"{first['batch']} rows, {int(first['vocab']):,} words, hidden {first['hidden']}, {first['layers']} layers,"
        f" {first['dtype']}; {found.facts['timing']}"
    )
    head = ["way", *(word for one in how for word in (f"{one}: us a step", "added to the body"))]
    return f"{provenance(REPLACED)}; {sizes}.\n\n{table(head, rows)}"


@part
def decode_models() -> str:
    """Tokens a second of three models, and the share of a step that head and sampler have."""
    found = results(MODELS)
    ways = list(dict.fromkeys(row["way"] for row in found.rows if row["way"] != BODY))
    lines: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        if row["way"] != BODY:
            cell = f"{float(row['tokens_per_second']):,.0f} ({percent(float(row['share_of_head_and_sampler']))})"
            lines.setdefault((row["model"], row["batch"]), []).append(cell)
    head = ["sizes of", "rows", *(code(way) if "_" in way else way for way in ways)]
    body = table(head, [[*key, *cells] for key, cells in lines.items()])
    return f"{provenance(MODELS)}; {found.facts['timing']}; bfloat16, a CUDA graph a step.\n\n{body}"


@part
def edit_costs() -> str:
    """What penalties in place add to a sampler."""
    found = results(EDITS)
    lines: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        cell = f"{us(float(row['sampler']))}: {float(row['over_sampler']):.2f}"
        lines.setdefault((row["rows"], row["dtype"]), []).append(cell)
    names = list(dict.fromkeys(row["filter"] for row in found.rows))
    head = ["rows", "dtype", *(f"{name}, us: with penalties" for name in names)]
    body = table(head, [[*key, *cells] for key, cells in lines.items()])
    return f"{provenance(EDITS)}; {found.facts['timing']}; 128,256 words, 100 of each row with penalties.\n\n{body}"
