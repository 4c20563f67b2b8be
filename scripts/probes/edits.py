"""What penalties in place cost on a GPU: `edit_logits` before `softmax_sample`, over the sampler alone, in one process.

    python scripts/probes/edits.py --csv edits.csv [--rows 64 --rows 256]

Each row has SEEN words with penalties, in arrays with room for ROOM. A line has the microseconds of the sampler, of the
edits, and of both in turn, in CUDA graphs; and the time of both over the sampler's.
"""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from caps import microseconds

import tvm_sparse

VOCAB, SEEN, ROOM = 128256, 100, 256
FILTERS = {"temperature": {"temperature": 0.8}, "top_k": {"temperature": 0.8, "top_k": 50, "top_p": 0.95}}
COLUMNS = ("rows", "dtype", "filter", "sampler", "edits", "both", "over_sampler")
# So that repeated calls leave the logits about as they are.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 1e-9}


def main(
    rows: Annotated[list[int] | None, typer.Option()] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv")] = None,
) -> None:
    lines = []
    for count, dtype in itertools.product(rows or (1, 16, 64, 256, 512), (torch.float32, torch.bfloat16)):
        logits = torch.randn(count, VOCAB, device="cuda").to(dtype)
        seeds = torch.zeros(count, 2, dtype=torch.int64, device="cuda")
        seen = torch.full((count, ROOM), -1, dtype=torch.int32, device="cuda")
        seen[:, :SEEN] = torch.rand(count, VOCAB, device="cuda").topk(SEEN).indices
        times = torch.ones_like(seen)
        for name, filters in FILTERS.items():

            def edit(logits=logits, seen=seen, times=times):
                return tvm_sparse.edit_logits(logits, seen_ids=seen, generated=times, **PENALTIES, out=logits)

            def sample(logits=logits, seeds=seeds, filters=filters):
                return tvm_sparse.softmax_sample(logits, seed=seeds, **filters)

            def both(edit=edit, sample=sample):
                edit()
                return sample()

            found = microseconds({"sampler": sample, "edits": edit, "both": both})
            times_as = found["both"] / found["sampler"]
            cells = (f"{found[one]:.2f}" for one in ("sampler", "edits", "both"))
            lines.append((count, str(dtype)[6:], name, *cells, f"{times_as:.3f}"))
            print(*lines[-1], flush=True)
        if csv_path:
            with csv_path.open("w", newline="") as file:
                date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                facts = {"device": torch.cuda.get_device_name(), "date": date, "torch": torch.__version__}
                facts["timing"] = "CUDA graphs of 40 calls, median of 5 rounds in turn"
                file.writelines(f"# {name}: {fact}\n" for name, fact in facts.items())
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(lines)


if __name__ == "__main__":
    typer.run(main)
