"""The exact head, lists of candidates, the LSH head, and the tables of Shi, Xu & Knight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from tvm_sparse.core import machine, registry, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import Problem
from tvm_sparse.records import Log
from tvm_sparse.schedules.vocabulary import present

from .register import PARTS, part
from .results import ROOT, Row, Times, exists, loses, provenance, results, where
from .text import listed, percent, span, table, times_as, us

HEAD, SPECVOCAB, TABLE4, STEPS = "head-h200", "specvocab-h200", "shi-xu-knight-table4-h200", "lsh-h200"
QUALITY = "shi-xu-knight-figure6-docstrings-lstm-h200"
OF_HEAD, OF_LISTS = ("batch", "vocab", "hidden", "k", "dtype"), ("hidden", "vocab", "m")
UNPROMISED = "head_topk, no promise"
CHAIN, TORCH_HEAD = "product + softmax_topk", "torch product + softmax + topk"
TORCH_LISTS = "torch gather + bmm + softmax + topk"
READ_ALL, AFTER = "read of the embedding", "after-product-h200"
HEAD_COLD, HEAD_AGAIN = "head-cold-h200", "head-tiles-h200"
TIMELINE, TIMELINE_AFTER = "timeline-h200", "timeline-after-product-h200"
QUANTIZED = "quantized-heads-h200"
DRAWS, BEST_WORDS = "head-draws-flashinfer-h200", "head_topk k=20"
# Contenders of `scripts/head_draws.py` that a page shows, with their headings.
OF_DRAWS = {
    "head_sample": "a draw",
    "head_sample, top_k=20": "with top_k=20",
    "product + softmax_sample": "float32 product + `softmax_sample`",
    "product + FlashInfer": "float32 product + FlashInfer's sampler",
}
# Contenders of `scripts/quantized_heads.py` that a page shows beside the head in bfloat16.
OF_QUANTIZED = ("int8", "float8_e4m3fn", "int8, groups of 128", "bfloat16, allowed", "int8, allowed")
TABLES = "lsh-tables-h200"
RECALLS = ("lsh-recall-minilm", "lsh-recall-minilm-beam12")


def least_read(name: str) -> dict[tuple[str, ...], dict[str, Row]]:
    """By hash (k, units, bands) and recall, the line that reads least, over all numbers of frequent words."""
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in results(name).rows:
        lines = found.setdefault((row["k"], row["units"], row["bands"]), {})
        if row["goal"] not in lines or float(row["share"]) < float(lines[row["goal"]]["share"]):
            lines[row["goal"]] = row
    return found


@part
def lsh_recall() -> str:
    found = least_read(RECALLS[0])
    goals = list(next(iter(found.values())))
    rows = []
    for numbers, lines in found.items():
        named = numbers[0] if numbers[0] == "TOP" else ", ".join(numbers)
        cells = []
        for goal in goals:
            row = lines[goal]
            at = f"T {row['frequent']}" + (f", t {row['threshold']}" if row["threshold"] else "")
            cells.append("all" if row["threshold"] == "0" else f"{100 * float(row['share']):.1f} % ({at})")
        rows.append([named, *cells])
    return table(["k, units, bands", *(f"recall@12 of {goal}" for goal in goals)], rows)


@part
def lsh_recall_sentence() -> str:
    own, shared = (
        {goal: min((lines[goal] for lines in least_read(name).values()), key=lambda row: float(row["share"]))
         for goal in ("0.9", "0.95", "0.99", "0.999")}
        for name in RECALLS
    )  # fmt: skip
    parts = [f"{100 * float(row['share']):.1f} % for {goal}" for goal, row in own.items()]
    row = own["0.99"]
    return (
        f"A vocabulary of {results(RECALLS[0]).facts['model'].partition(': ')[2]}: the least share that is read for a"
        f" recall of the 12 best words is {listed(parts)}. A recall of 0.99 takes k = {row['k']}, units ="
        f" {row['units']} and bands = {row['bands']}: the best word itself is found for"
        f" {100 * float(row['recall_1']):.2f} % of the states, and the look-up counts {float(row['increments']):.0f}"
        f" hits a word of the vocabulary. With a list that 12 neighbouring states of a text share it reads"
        f" {100 * float(shared['0.99']['share']):.1f} %."
    )


VARIANTS = "lsh-recall-variants-minilm"


@part
def lsh_recall_variants() -> str:
    """Ways of hashing that may even buckets out: shares that are read, and counter increments of a state."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    counted = {}
    for row in results(VARIANTS).rows:
        key = (row["variant"], row["k"], row["units"], row["bands"])
        if row["variant"] and row["goal"] in ("0.95", "0.99"):
            shares = found.setdefault(key, {})
            shares[row["goal"]] = min(float(row["share"]), shares.get(row["goal"], 1))
            counted[key] = row["counted"]
    rows = [
        [", ".join(key[1:]), key[0], *(f"{100 * shares[goal]:.1f} %" for goal in ("0.95", "0.99")), counted[key]]
        for key, shares in found.items()
        if shares["0.95"] < 1
    ]
    heads = ["k, units, bands", "buckets", "recall@12 of 0.95", "recall@12 of 0.99", "increments a word"]
    return table(heads, rows)


# The steps of Shi, Xu & Knight 2018, table 4, and the programs that combine several.
LSH_STEPS = ("WTA hash", "look-up", "candidate list", "copy of embeddings", "product", "softmax + top-n")
FUSED_STEPS = {"hash to list, fused": "lsh_candidates", "gathered product": "candidate_logits",
               "gathered product to top-n, fused": "candidate_topk"}  # fmt: skip
LSH_HEAD, EXACT_HEAD, TORCH_GATHERED = "LSH head", "exact head", "torch gather + product + softmax + topk"
LSH_LISTS = "LSH by lists"
TABLE1, TABLE8 = "shi-xu-knight-table1-h200", "shi-xu-knight-table8-h200"


def table4() -> dict[str, Row]:
    return {row["step"]: row for row in results(TABLE4).rows}


def step_sums() -> tuple[float, float]:
    """Sums of the steps' microseconds: over all words, and by LSH."""
    steps = table4()
    full, lsh = (
        sum(float(steps[prefix + n]["microseconds"]) for n in LSH_STEPS if prefix + n in steps)
        for prefix in ("full: ", "")
    )
    return full, lsh


@part
def shi_xu_knight_table4() -> str:
    steps = table4()
    rows = []
    for name in LSH_STEPS:
        full, row = steps.get(f"full: {name}"), steps[name]
        naive = row["naive_microseconds"]
        rows.append([name, us(float(full["microseconds"])) if full else "-", us(float(row["microseconds"]))]
                    + [us(float(naive)) if naive else "-"]
                    + [times_as(float(naive) / float(row["microseconds"])) if naive else "-"])  # fmt: skip
    rows.append(["sum", *map(us, step_sums()), "-", "-"])
    return table(["step", "all words", "LSH", "naive form", "naive over ours"], rows)


@part
def shi_xu_knight_calls() -> str:
    steps = table4()
    ours = float(steps[LSH_HEAD]["microseconds"])
    rows = []
    for name in (*FUSED_STEPS, LSH_HEAD, EXACT_HEAD, CHAIN, TORCH_HEAD, TORCH_GATHERED):
        time = float(steps[name]["microseconds"])
        rows.append([name, us(time), "-" if name in FUSED_STEPS else times_as(time / ours)])
    return table(["program, or what a decoder calls", "microseconds", "over the LSH head"], rows)


@part
def lsh_steps() -> str:
    """Steps of the LSH head and its peers, one line for each vocabulary and dtype."""
    names = (LSH_HEAD, EXACT_HEAD, CHAIN, TORCH_HEAD)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results(STEPS).rows:
        found.setdefault((row["vocab"], row["dtype"]), {})[row["implementation"]] = float(row["microseconds"])
    rows = [
        [vocab, dtype, *(us(times[name]) for name in names), times_as(times[TORCH_HEAD] / times[LSH_HEAD])]
        for (vocab, dtype), times in found.items()
    ]
    return table(["words", "dtype", *names, "PyTorch / LSH"], rows)


@part
def lsh_tables() -> str:
    """The LSH head with cuckoo tables beside direct ones, by vocabulary."""
    if not exists(TABLES):
        return "Their times have not been compared."
    found: dict[str, dict[str, float]] = {}
    for row in results(TABLES).rows:
        if row["implementation"] == LSH_HEAD:
            found.setdefault(row["vocab"], {})[row["table"]] = float(row["microseconds"])
    times = listed([
        f"{us(times['cuckoo'])} us instead of {us(times['direct'])} at {int(vocab):,} words"
        for vocab, times in found.items()
    ])  # fmt: skip
    return f"With cuckoo tables a step of 12 bits and 6,000 candidates takes {times} ({provenance(TABLES)})."


@part
def lsh_beam_step() -> str:
    """Parts of a beam-search step, by its output layer."""
    found: dict[str, dict[str, float]] = {}
    for row in results(TABLE1).rows:
        found.setdefault(row["part"], {})[row["output"]] = float(row["microseconds"])
    names = (TORCH_HEAD, EXACT_HEAD, LSH_HEAD)
    rows = [
        [name, *(us(times[one]) for one in names), times_as(times[TORCH_HEAD] / times[LSH_HEAD])]
        for name, times in found.items()
    ]
    return table(["part", *names, "PyTorch / LSH"], rows)


@part
def lsh_beams() -> str:
    """Steps of the LSH head by the size of the beam."""
    names = (LSH_HEAD, LSH_LISTS, EXACT_HEAD, CHAIN, TORCH_HEAD)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in results(TABLE8).rows:
        found.setdefault((row["beam"], row["candidates"]), {})[row["implementation"]] = float(row["microseconds"])
    rows = [
        [*key, *(us(times[name]) for name in names), times_as(times[TORCH_HEAD] / times[LSH_HEAD])]
        for key, times in found.items()
    ]
    return table(["beam", "candidates", *names, "PyTorch / LSH"], rows)


@part
def shi_xu_knight_sentence() -> str:
    steps = table4()
    row, (full, lsh) = steps[LSH_HEAD], step_sums()
    ours, slower = float(row["microseconds"]), []
    for name in LSH_STEPS:
        naive, time = steps[name]["naive_microseconds"], float(steps[name]["microseconds"])
        if naive and float(naive) < time:
            kernel = steps[name]["kernel"].partition("@")[0]
            plain = steps[name]["naive_kernel"].partition(": ")[2]
            slower.append(
                f"The {name} is slower than its naive form here: `{kernel}`, at its default and untuned, takes"
                f" {us(time)} microseconds, `{plain}` {us(float(naive))}."
            )
    others = [
        f"{what} {us(float(steps[name]['microseconds']))} ({times_as(float(steps[name]['microseconds']) / ours)} times)"
        for name, what in (
            (EXACT_HEAD, "the exact head"),
            (CHAIN, "product + `softmax_topk`"),
            (TORCH_HEAD, "PyTorch's product, softmax and top-k"),
        )
    ]
    return " ".join(
        [
            f"At {int(row['vocab']):,} words, hidden {row['hidden']}, beam {row['beam']}, {row['dtype']} and"
            f" {int(row['candidates']):,} candidates the LSH head takes {us(ours)} microseconds, {listed(others)}."
            f" One by one its steps take {us(lsh)}, and product and `softmax_topk` over all words {us(full)}.",
            *slower,
        ]
    )


def of_shape(key: Sequence[str]) -> str:
    batch, vocab, hidden, _, dtype = key
    return f"({batch}, {vocab}, {hidden}) in {dtype}"


def heads() -> dict[tuple[str, ...], tuple[Times, float]]:
    """By contender, microseconds and the share of the memory limit reached by the head, from each
    shape's latest run.
    """
    found: dict[tuple[str, ...], tuple[Times, float]] = {}
    for name in (HEAD, HEAD_AGAIN):
        shares = {
            tuple(row[c] for c in OF_HEAD): float(row["share_of_matrix_limit"])
            for row in results(name).rows
            if row["implementation"] == "head_topk" and row["microseconds"]
        }
        times = results(name).by(*OF_HEAD)
        found |= {key: (times[key], share) for key, share in shares.items()}
    return found


@part
def head_peers() -> str:
    rows = []
    for key, (times, share) in heads().items():
        ours = times["head_topk"]
        names = (UNPROMISED, "product", CHAIN, TORCH_HEAD, READ_ALL)
        ratios = (ours / times["product"], times[CHAIN] / ours, times[TORCH_HEAD] / ours)
        rows.append([*key, us(ours), *(us(times.get(name)) for name in names)]
                    + [*(f"{ratio:.2f}" for ratio in ratios), percent(share)])  # fmt: skip
    return table(
        [*OF_HEAD, "`head_topk`", "no promise", "product", "+ `softmax_topk`", "PyTorch", "read alone",
         "head / product", "+ `softmax_topk` / head", "PyTorch / head", "of the limit"],
        rows,
    )  # fmt: skip


@part
def head_cold() -> str:
    """The head with nothing of the embedding in the L2 cache, and with calls that follow each other directly."""
    hot = results(HEAD).by(*OF_HEAD)
    rows = []
    for key, times in results(HEAD_COLD).by(*OF_HEAD).items():
        names = ("product", CHAIN, READ_ALL)
        rows.append([*key, us(hot[key]["head_topk"]), us(times["head_topk"]), *(us(times.get(name)) for name in names),
                     f"{times['head_topk'] / times['product']:.2f}"])  # fmt: skip
    return table([*OF_HEAD, "hot", "cold", "product", "+ `softmax_topk`", "read alone", "head / product"], rows)


@part
def head_sentence() -> str:
    found = {key: times for key, (times, _) in heads().items()}
    chain = {key: times[CHAIN] / times["head_topk"] for key, times in found.items()}
    lost = [f"{of_shape(key)} ({ratio:.2f})" for key, ratio in chain.items() if loses(ratio)]
    won = [ratio for ratio in chain.values() if not loses(ratio)]
    product = {key: times["head_topk"] / times["product"] for key, times in found.items()}
    half = [ratio for key, ratio in product.items() if key[-1] != "float32"]
    full = [ratio for key, ratio in product.items() if key[-1] == "float32"]
    shares = [100 * share for _, share in heads().values()]
    reads = [times[READ_ALL] / times["head_topk"] for times in found.values()]
    missing = [
        f"At {of_shape([row[c] for c in OF_HEAD])} it has no time: {row['note']}."
        for row in results(HEAD).rows
        if row["implementation"] == "head_topk" and not row["microseconds"]
    ]
    return " ".join(
        [
            f"The exact head takes {span(half)} times as long as the product alone in float16 and bfloat16,"
            f" {span(full)} times in float32, and reads the embedding at {span(shares, 0)} % of the card's limit."
            f" PyTorch's product, softmax and top-k take"
            f" {span(times[TORCH_HEAD] / times['head_topk'] for times in found.values())} times as long."
            f" Product + `softmax_topk` takes {span(won)} times as long at {len(won)} shapes."
            + (f" The head loses to it at {len(lost)}, (batch, vocab, hidden): {listed(lost)}." if lost else "")
            + f" A kernel that only reads the embedding takes {span(reads)} times as long as the head.",
            *missing,
        ]
    )


@part
def after_product() -> str:
    """Kernels after a product, and the time they add, one line for each batch."""
    found: dict[str, dict[str, Row]] = {}
    for row in results(AFTER).rows:
        found.setdefault(row["batch"], {})[row["behind_product"]] = row
    names = ("softmax_topk", "torch softmax + topk", "read of the logits", "head_topk instead")

    def added(line: Row) -> str:
        ends = [us(float(line[name])) for name in ("least", "most")]
        return us(float(line["added"])) + (f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else "")

    rows = [
        [batch, us(float(lines["product"]["microseconds"])), *(added(lines[name]) for name in names)]
        for batch, lines in found.items()
    ]
    adds = ("`softmax_topk` adds", "PyTorch's softmax and top-k", "read alone", "`head_topk` in its place")
    return table(["batch", "product", *adds], rows)


# By template, the event at the end of each phase, in order, and the phases that a kernel has once.
SEEN = {
    "head_rings": {
        "hidden states loaded": ("taken: end_states", "taken: load_states", "dealt: load_states"),
        "words multiplied": ("taken: join_tiles", "dealt: join_tiles"),
        "second kernel proceeds": ("kernel: wait",),
        "best tiles found": ("search: collect_bits", "search: collect"),
        "their words that count found": ("kernel: collect_near",),
        "ranked and written": ("search: rank_few", "search: rank"),
    },
    # As results of before name its phases.
    "head_tiles": {
        "hidden states loaded": ("dynamic: end_states", "dynamic: load_states"),
        "words multiplied": ("dynamic: join_sums",),
        "second kernel proceeds": ("best: wait",),
        "best tiles found": ("best: collect_bits", "best: collect"),
        "their words that count found": ("best: collect_near",),
        "ranked and written": ("best: rank_few", "best: rank"),
    },
    "fused_step": {
        "row hashed": ("look_up: find_places",),
        "its buckets found": ("look_up: lengthen",),
        "their words counted": ("look_up: count_pieces",),
        "words that reach the threshold listed": ("look_up: list_reached",),
        "product proceeds with them": ("kernel: wait",),
        "multiplied": ("kernel: multiply_all",),
        "third kernel proceeds": ("merge: wait",),
        "ranked and written": ("merge: rank",),
    },
    "held_rows": {
        "row requested": ("kernel: load_row", "kernel: stage_row"),
        "largest elements sent": ("held: offer_top", "paced: offer_top", "kernel: find_tops"),
        "row complete, exponentials taken": ("kernel: take_held", "kernel: take_steps"),
        "what reaches the bound found": ("kernel: find_keys",),
        "keys of the cluster there": ("kernel: share_parts",),
        "ranked and written": ("kernel: finish_agreed", "kernel: finish_row"),
    },
}


def timeline(name: str, template: str, axes: Sequence[str]) -> str:
    """Microseconds from the first wait until the last thread block has reached the end of each phase, one column for
    each problem; the last line is a whole call, for calls without a preceding product.
    """
    ends: dict[str, dict[str, float]] = {}
    calls: dict[str, str] = {}
    for row in results(name).rows:
        if row["kernel"].startswith(f"{template}@"):
            problem = registry.parse(row["problem"])
            shown = ", ".join(str(problem.axes[axis]) for axis in axes)
            ends.setdefault(shown, {})[row["phase"]] = float(row["last_ns"]) / 1000
            if row["behind"] == "0":
                calls[shown] = us(float(row["plain_microseconds"]))

    def end(shown: str, phases: Sequence[str]) -> str:
        return next((f"{ends[shown][phase]:.1f}" for phase in phases if phase in ends[shown]), "-")

    rows = [[step, *(end(shown, phases) for shown in ends)] for step, phases in SEEN[template].items()]
    heads = [f"({shown})" if len(axes) > 1 else f"{axes[0]} {shown}" for shown in ends]
    if calls:
        rows.append(["a call in the graph", *calls.values()])
    return table(["after the first wait", *heads], rows)


@part
def specvocab() -> str:
    shares = {
        tuple(row[c] for c in OF_LISTS): float(row["share_of_limit"])
        for row in results(SPECVOCAB).rows
        if row["implementation"] == "candidate_topk"
    }
    names = ("candidate_topk", TORCH_LISTS, "candidate_logits", "torch gather + bmm")
    rows = []
    for key, times in results(SPECVOCAB).by(*OF_LISTS).items():
        ratio = times[TORCH_LISTS] / times["candidate_topk"]
        rows.append([*key, *(us(times[name]) for name in names), f"{ratio:.2f}", percent(shares[key])])
    return table(
        [*OF_LISTS, "`candidate_topk`", "PyTorch", "`candidate_logits`", "PyTorch's", "PyTorch / ours", "of the limit"],
        rows,
    )  # fmt: skip


@part
def specvocab_sentence() -> str:
    found = results(SPECVOCAB).by(*OF_LISTS)
    row = results(SPECVOCAB).rows[0]
    gains = {key: times[TORCH_LISTS] / times["candidate_topk"] for key, times in found.items()}
    shares: dict[str, list[float]] = {}
    for line in results(SPECVOCAB).rows:
        if line["implementation"] == "candidate_topk":
            shares.setdefault(line["m"], []).append(100 * float(line["share_of_limit"]))
    parts = [f"{span(some, 0)} % at {m}" for m, some in shares.items()]
    logits = [times["torch gather + bmm"] / times["candidate_logits"] for times in found.values()]
    exact = [times["head_topk"] / times["candidate_topk"] for times in found.values()]
    return (
        f"{row['batch']} rows in {row['dtype']}, k = {row['k']}: PyTorch's gather, product, softmax and top-k take"
        f" {span(gains.values())} times as long as `candidate_topk`, the gather and product alone {span(logits)} times"
        f" as long as `candidate_logits`; the exact head takes {span(exact)} times as long as `candidate_topk`. The"
        f" distinct rows of the lists are read at these shares of the card's limit, by the number of candidates:"
        f" {listed(parts)}."
    )


@part
def lsh_quality() -> str:
    rows = []
    for row in results(QUALITY).rows:
        hashed = ", ".join(row[name] for name in ("k", "units", "bands")) if row["k"] else "-"
        shares = [f"{100 * float(row[name]):.1f} %" for name in ("share", "recall_1", "recall_12")]
        time = us(float(row["microseconds"])) if row["microseconds"] else "-"
        series = row["implementation"].split(" ")[0] if row["k"] else row["implementation"]
        gains = (f"{float(row[name]):.2f}" if row[name] else "-" for name in ("exact_over_this", "torch_over_this"))
        rows.append([series, hashed, row["frequent"] or "-", row["threshold"] or "-", *shares, time, *gains])
    names = ["candidates", "k, units, bands", "T", "t", "of the words", "recall@1", "recall@12", "microseconds"]
    return table([*names, "exact head / this", "PyTorch / this"], rows)


@part
def lsh_quality_data() -> str:
    facts = results(QUALITY).facts
    return f"{where(QUALITY)} {facts['states'].partition(': ')[2][0].upper()}{facts['states'].partition(': ')[2][1:]}."


def measured_decisions() -> Iterator[tuple[str, Problem, str, str]]:
    """File, problem, decisions and their origin, for our kernels in the runs of the output layer."""
    again = results(HEAD_AGAIN).by(*OF_HEAD)
    for name in (HEAD, HEAD_AGAIN, SPECVOCAB, TABLE4):
        for row in results(name).rows:
            if name == HEAD and tuple(row[c] for c in OF_HEAD) in again:
                continue
            operator = FUSED_STEPS.get(row["step"]) if name == TABLE4 else row["implementation"]
            if not operator or not row["kernel"] or not row["microseconds"]:
                continue
            if name == TABLE4:
                given = {**row, "lists": "1", "m": row["candidates"], "capacity": row["candidates"]}
                given["k"] = row["k" if operator == "lsh_candidates" else "n"]
            else:
                given = {**row, "lists": row["batch"], "beam": "1"}
            axes = [f.name for f in dataclasses.fields(registry.find(operator).problem) if f.name in given]
            problem = registry.parse(f"{operator}/{','.join(f'{axis}={given[axis]}' for axis in axes)}")
            decisions, _, origin = row["kernel"].rpartition(" (")
            run = Candidate.parse(decisions)
            # Under the present names of template and decisions.
            yield name, problem, str(present(run)), origin.rstrip(")")


OUTPUT_LAYER = (
    "head_topk", "lsh_topk", "candidate_topk", "candidate_logits", "lsh_candidates", "wta_hash", "lsh_lookup",
    "compaction",
)  # fmt: skip


def records_of(operator: str) -> int:
    """Number of an operator's problems with a shipped record of the H200."""
    return len(Log(ROOT / "tuning_logs", "sm_90a", operator).best())


@part
def head_decisions() -> str:
    """The origin of the decisions in the runs of the output layer, and which of them are still the defaults."""
    card = machine.Machine("cuda", "sm_90a", "sm_90a", cores=132)
    recorded: list[str] = []
    heads = 0
    changed: dict[str, list[bool]] = {}
    for name, problem, decisions, origin in measured_decisions():
        heads += problem.operator == "head_topk"
        if origin == "fallback":
            what = f"`{problem.operator}` in `{name}.csv`"
            changed.setdefault(what, []).append(str(spaces.fallback(problem, card)) != decisions)
        elif problem.operator == "head_topk":
            recorded.append(of_shape([str(problem.axes[axis]) for axis in OF_HEAD]))
    moved = [f"{sum(some)} of {len(some)} shapes of {what}" for what, some in changed.items() if any(some)]
    tuned = {name: records_of(name) for name in OUTPUT_LAYER}
    have = [f"{number} of `{name}`" for name, number in tuned.items() if number]
    lack = [f"`{name}`" for name, number in tuned.items() if not number]
    sentence = f"Records for {card.arch}: {listed(have)}" if have else "No records ship"
    if have and lack:
        sentence += f"; none of {listed(lack)}, whose figures are those of the templates' defaults"
    if recorded:
        which = "all figures" if len(recorded) == heads else listed(recorded)
        sentence += f". Decisions of records were measured for {which} of `head_topk`"
    if moved:
        sentence += f". The default differs from the measured one for {listed(moved)}"
    return f"{sentence}."


PARTS["where-head"] = partial(where, HEAD, HEAD_AGAIN)
PARTS["where-head-cold"] = partial(where, HEAD_COLD)
PARTS["where-specvocab"] = partial(where, SPECVOCAB)
PARTS["where-after-product"] = partial(where, AFTER)
PARTS["timeline-after-product"] = partial(timeline, TIMELINE_AFTER, "held_rows", ("batch",))
PARTS["timeline-head"] = partial(timeline, TIMELINE, "head_tiles", ("batch", "vocab", "hidden"))
PARTS["timeline-lsh"] = partial(timeline, TIMELINE, "fused_step", ("beam",))
PARTS["where-table4"] = partial(where, TABLE4)


@part
def head_draws() -> str:
    """Draws from a head, and from a product's scores by two samplers, over the time of its best words."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in results(DRAWS).rows:
        found.setdefault((row["rows"], row["vocab"], row["hidden"]), {})[row["implementation"]] = row["microseconds"]
    lines = []
    for (rows, vocab, hidden), each in found.items():
        first = float(each[BEST_WORDS])
        ratios = (f"{float(each[name]) / first:.2f}" if each.get(name) else "-" for name in OF_DRAWS)
        lines.append([rows, f"{int(vocab):,} x {int(hidden):,}", us(first), *ratios])
    head = ["rows", "words x columns", "the 20 best words, us", *OF_DRAWS.values()]
    return f"{provenance(DRAWS)}; bfloat16; times as long as the best words.\n\n{table(head, lines)}"


@part
def quantized_heads() -> str:
    """Times of heads in eight bits, and of those with a bitmap, beside the head in bfloat16."""
    found = _quantized()
    names = [name for name in OF_QUANTIZED if any(name in each for each in found.values())]
    lines = []
    for (vocab, hidden, rows, k), each in found.items():
        if k == "20":
            whole = each["bfloat16"]
            others = (f"{us(each[name])} ({times_as(each[name] / whole)})" if name in each else "-" for name in names)
            lines.append([f"{int(vocab):,} x {int(hidden):,}", rows, us(whole), *others])
    head = ["words x columns", "rows", "bfloat16, us", *(f"{name} (times as long)" for name in names)]
    return (
        f"{provenance(QUANTIZED)}; CUDA graphs, inputs hot; random words and states in bfloat16; k = 20.\n\n"
        f"{table(head, lines)}"
    )


@part
def screened_heads() -> str:
    """What the screened head takes, beside the exact one without and with scores, and how many words survive."""
    names = ("bfloat16", "with shard", "screened", "screened, normaliser")
    found = {key: each for key, each in _quantized().items() if all(name in each for name in names)}
    survivors = {_of_line(row): row["survivors"] for row in results(QUANTIZED).rows if row["survivors"]}
    ratios = [
        (each[names[2]] / each[names[0]], each[names[2]] / each[names[1]], each[names[3]] / each[names[1]])
        for each in found.values()
    ]
    faster, scored, summed = (span(each) for each in zip(*ratios, strict=True))
    said = (
        f"In a CUDA graph, with random words, the screened head takes {faster} times as long as `head_topk`, and"
        f" {scored} times as long as `head_topk(shard=...)`, which also returns scores, and the normaliser. With"
        f" `normaliser=True` it takes {summed} times as long as that."
    )
    lines = []
    for (vocab, hidden, rows, k), each in found.items():
        times = (us(each[name]) for name in (names[2], names[0], names[1], names[3]))
        left = f"{int(survivors[vocab, hidden, rows, k]):,}"
        lines.append([f"{int(vocab):,} x {int(hidden):,}", rows, k, *times, left])
    head = [
        *("words x columns", "rows", "k", "screened, us", "`head_topk`", "with `shard`", "screened, normaliser"),
        "words multiplied in full",
    ]
    return f"{said}\n\n{table(head, lines)}"


def _of_line(row: Row) -> tuple[str, str, str, str]:
    return row["vocab"], row["hidden"], row["rows"], row["k"]


def _quantized() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """Microseconds of each contender that has a time, by words, columns, rows and k."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in results(QUANTIZED).rows:
        if row["us"]:
            found.setdefault(_of_line(row), {})[row["contender"]] = float(row["us"])
    return found
