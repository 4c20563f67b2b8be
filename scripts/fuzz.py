"""Fuzzing: every file reader with inputs that coverage guides, every public function with arguments nearly right.

    python scripts/fuzz.py                            # 220,000 cases, some 16 minutes; writes results/fuzz-*.csv
    python scripts/fuzz.py --only manifest --scale 4 --seed 7

*Readers* get bytes that were mutated from valid files: of bytes, of JSON values, of two files crossed. An input that
reaches a way from line to line of the package that none before did is kept and mutated further. A reader may take the
input or raise the error that it documents; anything else is a finding, and so is what takes longer than `SLOW`.

*Functions* get arguments that Hypothesis draws: the right ones, with up to three of them changed in values, layout,
library, dtype, shape or kind. A call may raise what is documented. One that returns must leave its inputs as they were
and give, bit by bit, what the call of plain copies gives.

Both run in processes of their own: one that dies is a finding as well, with the input that it died of.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from reproduction import provenance, result_path, write_csv

import tvm_sparse
from tvm_sparse.artifacts import manifest, signing
from tvm_sparse.artifacts.manifest import Entry, ManifestError
from tvm_sparse.core import machine, registry, shape_files, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.formats import wta
from tvm_sparse.records import Best, Log, Session, Trial, codec, database, exchange, predictor, space
from tvm_sparse.runtime import dispatch, paths
from tvm_sparse.tuning import interchange

PACKAGE = str(Path(tvm_sparse.__file__).parent)
COLUMNS = ("target", "how", "cases", "taken", "refused", "kept", "ways", "findings", "seconds")
# A case that takes more of a processor's time, in seconds.
SLOW = 10.0
ARCH = "x86-64-v3"
TOPK = "softmax_topk/batch=3,vocab=37,k=4,dtype=float32"


@dataclass
class Report:
    """What came of a target's cases."""

    target: str
    how: str
    cases: int = 0
    taken: int = 0
    refused: int = 0
    kept: int = 0  # inputs that showed something new
    ways: int = 0  # from line to line of the package
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


# ------------------------------------------------------------------------------------------------------- coverage


class Coverage:
    """The ways from line to line of this package that the block has gone."""

    def __init__(self) -> None:
        self.ways: set[tuple[Any, int, int]] = set()

    def __enter__(self) -> Coverage:
        self.ways.clear()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, last = frame.f_code, 0
        if not code.co_filename.startswith(PACKAGE):
            return None
        ways = self.ways

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                ways.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


# -------------------------------------------------------------------------------------------------------- mutation

VALUES = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**48, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e-320, 1e308,
    "", "x", "x" * 5000, "../x", "/dev/zero", "\0", "é\u2028", "float32", "1e400", [], {}, [[]], [0] * 200, {"": None},
)  # fmt: skip


def mutated(data: bytes, others: list[bytes], rng: random.Random, structured: bool) -> bytes:
    """Another input: of this one, or of it and another."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if structured and rng.random() < 0.7:
            data = _other_value(data, others, rng)
        else:
            data = _other_bytes(data, others, rng)
    return data[: 1 << 16]


def _other_bytes(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + rng.choice((1, 2, 8, 64)))
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 1 if data:
            at = rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * rng.choice((2, 3, 100)) + data[end:]
        case 4:
            return (
                data[:at]
                + rng.choice(
                    (b"-1", b"0", b"99999999999999999999", b"nan", b"1e999", b'"', b"[", b"]", b"\n", b"\0", b"=", b",")
                )
                + data[end:]
            )
        case 5:
            other = rng.choice(others)
            there = rng.randrange(len(other) + 1)
            return data[:at] + other[there : there + rng.choice((4, 32, 256))] + data[end:]
        case _:
            return data[:at]


def _other_value(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """With one value of its JSON, or of one of its lines of JSON, replaced, removed, doubled or moved."""
    lines = data.split(b"\n") if b"\n{" in data or b"\n[" in data else [data]
    which = rng.randrange(len(lines))
    try:
        content = json.loads(lines[which])
    except (ValueError, RecursionError):
        return data
    places = list(_places(content))
    if not places:
        return data
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            del holder[key]
        case 3:
            other, theirs = rng.choice(places)
            holder[key] = copy.deepcopy(other[theirs])
        case 4 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        case _:
            value = holder[key]
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                holder[key] = [value]
            elif isinstance(value, str):
                at = rng.randrange(len(value) + 1)
                holder[key] = value[:at] + rng.choice(("0", "9" * 30, "=", ",", "/", "-1", "x")) + value[at + 1 :]
            else:
                holder[key] = rng.choice((-value, value + 1, value * 1000, value / 3))
    try:
        lines[which] = json.dumps(content).encode()
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a JSON document, by what holds it and where."""
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys: Any = (
            holder.keys() if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        )
        for key in list(keys):
            yield holder, key
            waiting.append(holder[key])


# --------------------------------------------------------------------------------------------------------- readers


@dataclass(frozen=True)
class Reader:
    """Something that reads a file: valid inputs, what it does with one, and the errors that it documents."""

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], None]
    errors: tuple[type[Exception], ...] = ()
    structured: bool = True
    share: float = 1.0  # of the cases, as some readers are slower than others


READERS: dict[str, Reader] = {}


def _entries() -> list[Entry]:
    where = machine.Machine("llvm", ARCH, "a CPU", cores=2)
    made = []
    for number, key in enumerate((TOPK, "softmax/batch=4,vocab=100", "bsr_matmul/m=4,k=64,n=48,block=8,sparsity=0.5")):
        problem = parse(key)
        workspaces = ({"name": "partial", "shape": [problem.batch_axis, 4], "dtype": "float32", "fill": 255},)
        figures = {"seconds": 1e-6, "fallback_seconds": 3e-6, "session": "s", "machine": "m", "date": ""}
        candidate = spaces.fallback(problem, where)
        chosen = ("exact", "predicted", "fallback")[number]
        made.append(
            Entry(problem.key, ARCH, "llvm", candidate, chosen, f"{number}.so", "0" * 64, workspaces, figures, None)
        )
    return made


def _manifests() -> list[bytes]:
    with tempfile.TemporaryDirectory() as name:
        manifest.write(Path(name), _entries())
        return [(Path(name) / manifest.NAME).read_bytes()]


def _read_manifest(data: bytes, folder: Path) -> None:
    entries = manifest.read(folder, data)
    # What was believed decides nothing but what it is about: look-ups of other problems work.
    own = dispatch.Dispatcher(logs=(), shipped=folder / "none", cache=folder / "none")
    own._folders = [dispatch._Source("folder", folder, entries)]
    own.explain(parse("softmax_topk/batch=5,vocab=37,k=4"), machine.cpu())


READERS["manifest"] = Reader(_manifests, _read_manifest, (ManifestError,))


def _signatures() -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "a").write_text("a")
        return [signing.sign(Path(name), ed25519.Ed25519PrivateKey.from_private_bytes(b"1" * 32)).read_bytes()]


def _read_signature(data: bytes, folder: Path) -> None:
    (folder / signing.NAME).write_bytes(data)
    public = json.loads(_signatures.seed)["key"]  # type: ignore[attr-defined]
    found = signing.check(folder, [public])
    if dict(found.files) != json.loads(_signatures.seed)["files"]:  # type: ignore[attr-defined]
        raise AssertionError("a changed list of files passed for the signed one")


def _seeded_signatures() -> list[bytes]:
    [_signatures.seed] = found = _signatures()  # type: ignore[attr-defined]
    return found


READERS["signature"] = Reader(_seeded_signatures, _read_signature, (signing.SignatureError,))


def _read_keys(data: bytes, folder: Path) -> None:
    (folder / "keys").write_bytes(data)
    signing.public_keys(folder / "keys")


READERS["trusted keys"] = Reader(
    lambda: [json.loads(_signatures()[0])["key"].encode() + b" comment\n# more\n"],
    _read_keys, (signing.SignatureError,), structured=False,
)  # fmt: skip


def _logs() -> list[bytes]:
    candidate, problem = Candidate("row_scan", 2, (("chunk", 64), ("simd", 8))), parse(TOPK).key
    session = Session("s1", "2026-01-02T03:04:05Z", {"name": "m"}, {}, "t", {"seed": 1})
    trial = Trial(problem, ARCH, candidate, "ok", "", (2e-6, 1e-6), 0.5, "s1", 0, {"registers": 40})
    failed = Trial(problem, ARCH, candidate, "crash", "why", (), None, "s1", 1)
    best = Best(problem, ARCH, candidate, 1e-6, candidate, 2e-6, 3, "s1", 2)
    return [b"".join(map(codec.encode, (session, trial, failed))), codec.encode(best) * 2]


def _with_sums(data: bytes) -> bytes:
    """With the right checksums, as whoever wants to deceive would write it."""
    lines = []
    for line in data.split(b"\n"):
        try:
            content = json.loads(line)
            content.pop("sum", None)
            content["sum"] = codec._checksum(content)
            lines.append(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
        except (ValueError, TypeError, AttributeError, RecursionError):
            lines.append(line)
    return b"\n".join(lines)


def _read_log(data: bytes, folder: Path) -> None:
    log = Log(folder, ARCH, "softmax_topk")
    log.trials_path.parent.mkdir(parents=True, exist_ok=True)
    data = _with_sums(data) if len(data) % 4 else data
    log.trials_path.write_bytes(data)
    log.best_path.write_bytes(data)
    log.read(), log.best(), log.sessions(), database.verify(folder)
    own = dispatch.Dispatcher(logs=(folder,), shipped=folder / "none", cache=folder / "none")
    own.explain(parse("softmax_topk/batch=5,vocab=37,k=4"), machine.Machine("llvm", ARCH, "a CPU", cores=2))


READERS["log"] = Reader(_logs, _read_log, share=0.5)


def _predictors() -> list[bytes]:
    content = json.loads((paths.shipped_logs() / "sm_90a" / "nhot_lookup" / "predictor.json").read_text())
    # A few of its trees: a file of 200 KB would be mutated where nothing looks.
    end = content["roots"][2]
    content["roots"] = content["roots"][:2]
    for name in ("feature", "value", "left", "missing_left"):
        content[name] = content[name][:end]
    content.update(probes=content["probes"][:1], problems=content["problems"][:2], known=content["known"][:3])
    return [json.dumps(content).encode()]


def _read_predictor(data: bytes, folder: Path) -> None:
    (folder / predictor.NAME).write_bytes(data)
    found = predictor.read(folder / predictor.NAME)
    if found.operator in registry.operators() and found.outdated is None:
        where = machine.Machine("cuda", "sm_90a", "a GPU", cores=132)
        found.choose(parse("nhot_lookup/rows=100,vocab=53,width=33,nonzeros=3,weighted=1"), where)


READERS["predictor"] = Reader(_predictors, _read_predictor, (predictor.PredictorError,), share=0.3)


def _shapes() -> list[bytes]:
    scripts = Path(__file__).parent
    own = b"[[softmax_topk]]\nbatch = [1, 10]\nvocab = 100\nk = [5, 50]\n[softmax]\nbatch = 3\nvocab = 10\n"
    return [own, (scripts / "weights.toml").read_bytes()]


def _read_shapes(data: bytes, folder: Path) -> None:
    (folder / "shapes.toml").write_bytes(data)
    shape_files.read(folder / "shapes.toml")


READERS["shapes"] = Reader(_shapes, _read_shapes, (ProblemError,), structured=False)


def _read_key(data: bytes, folder: Path) -> None:
    parse(data.decode(errors="surrogateescape"))


READERS["problem's key"] = Reader(
    lambda: [problem.encode() for operator in registry.operators().values() for problem in operator.shapes.AWKWARD],
    _read_key, (ProblemError,), structured=False,
)  # fmt: skip


def _read_candidate(data: bytes, folder: Path) -> None:
    found = Candidate.parse(data.decode(errors="surrogateescape"))
    assert Candidate.parse(str(found)) == found


READERS["candidate"] = Reader(
    lambda: [b"row_scan@2(chunk=64, simd=8)", b"a@0()"], _read_candidate, (ValueError,), structured=False
)


def _databases() -> list[bytes]:
    problem = parse("bsr_matmul/m=4,k=64,n=48,block=8,sparsity=0.5")
    candidate = spaces.fallback(problem, machine.resolve("sm_90a"))
    notes = {
        interchange.PROBLEM: problem.key, interchange.ARCH: "sm_90a", interchange.VERSION: str(candidate.version),
        "tvm_sparse.template": candidate.template,
    }  # fmt: skip
    trace: list[Any] = [["GetSBlock", [], ["root", "main"], ["b0"]]]
    trace += [["Annotate", ["b0", f'"{text}"'], [name], []] for name, text in notes.items()]
    decisions = []
    for number, (name, value) in enumerate(candidate.decisions):
        decisions.append([len(trace), 1])
        trace.append(["SampleCategorical", [], [[0, value], [0.5, 0.5]], [f"v{number}"]])
        trace.append(["Annotate", ["b0", f"v{number}"], [f"tvm_sparse.{name}"], []])
    return [json.dumps([0, [[trace, decisions], [1e-6], {"kind": "cuda", "arch": "sm_90a"}, []]]).encode()]


def _read_database(data: bytes, folder: Path) -> None:
    (folder / interchange.RECORDS).write_bytes(data)
    for one in interchange.read(folder):
        assert spaces.refusal(one.candidate, one.problem, one.machine) is None


READERS["MetaSchedule database"] = Reader(_databases, _read_database, (interchange.Refused,))


def _some_trials() -> tuple[list[Session], list[Trial]]:
    lines = _logs()[0].splitlines()
    session, *trials = (codec.decode(line, {one.kind: one for one in (Session, Trial)}) for line in lines)
    other = dataclasses.replace(trials[1], candidate=Candidate("row_scan", 2, (("chunk", 32), ("simd", 8))))
    return [session], [trials[0], other]  # type: ignore[list-item]


def _results() -> list[bytes]:
    ours = exchange.results_of(*_some_trials())
    theirs = json.loads(json.dumps(ours))
    for result in theirs["results"]:
        del result["provenance"]
    return [json.dumps(document).encode() for document in (ours, theirs)]


def _read_results(data: bytes, folder: Path) -> None:
    path = folder / "results.json"
    path.write_bytes(data)
    database.rows([path])


READERS["results (T4)"] = Reader(_results, _read_results, (exchange.ExchangeError,), share=0.25)


def _inputs() -> list[bytes]:
    named = {"threads": "[32, 64]", "vec": "[1, 2]"}
    parameters = [{"Name": name, "Type": "int", "Values": values} for name, values in named.items()]
    conditions = [{"Expression": "threads * vec <= 1024 and threads in (32, 64)", "Parameters": list(named)}]
    return [json.dumps({"ConfigurationSpace": {"TuningParameters": parameters, "Conditions": conditions}}).encode()]


def _read_inputs(data: bytes, folder: Path) -> None:
    path = folder / "space.json"
    path.write_bytes(data)
    found = exchange.read_inputs(path)
    if found.product < 1000:
        found.refused()


READERS["space (T1)"] = Reader(_inputs, _read_inputs, (exchange.ExchangeError,), share=0.25)


def _spaces() -> list[bytes]:
    sessions, trials = _some_trials()
    text = b"".join(map(codec.encode, (*sessions, *trials)))
    return [text, lzma.compress(text)]


def _read_space(data: bytes, folder: Path) -> None:
    path = folder / ("space.jsonl.xz" if data[:1] == b"\xfd" else "space.jsonl")
    path.write_bytes(data)
    found = space.read(path)
    assert found.points >= 0 or not found.complete


READERS["measured space"] = Reader(_spaces, _read_space, (space.SpaceError,), structured=False, share=0.25)


def _saved(make: Callable[[], Any], suffix: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as name:
            return [make().save(Path(name) / f"saved{suffix}").read_bytes()]

    return seeds


def _head() -> Any:
    rng = np.random.default_rng(0)
    return tvm_sparse.LshHead(rng.standard_normal((50, 8)).astype(np.float32), k=2, units=2, bands=3, threshold=1)


def _layer() -> Any:
    rng = np.random.default_rng(0)
    return tvm_sparse.SparseLSTM(rng.standard_normal((16, 4)).astype(np.float32), density=0.5)


def _read_saved(kind: Any, suffix: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        path = folder / f"saved{suffix}"
        path.write_bytes(_with_lengths(data) if suffix == ".safetensors" else data)
        kind().load(path)

    return read


def _with_lengths(data: bytes) -> bytes:
    """A safetensors file begins with the length of its header, which a longer header would else contradict."""
    end = data.find(b"}}", 8)
    return (end + 2 - 8).to_bytes(8, "little") + data[8:] if len(data) % 2 and end > 0 else data


for _suffix, _share in ((".npz", 0.2), (".safetensors", 0.5)):
    for _name, _make, _kind in (
        ("head", _head, lambda: tvm_sparse.LshHead),
        ("recurrent layer", _layer, lambda: tvm_sparse.SparseLSTM),
    ):
        READERS[f"{_name} {_suffix}"] = Reader(
            _saved(_make, _suffix), _read_saved(_kind, _suffix), (ValueError,), False, _share
        )


def guided(name: str, cases: int, seed: int, last: Path) -> Report:
    """Mutate the reader's inputs, and keep those that show something new."""
    reader, rng, report = READERS[name], random.Random(seed), Report(name, "coverage-guided")
    known: set[Any] = set()
    coverage, started = Coverage(), time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        corpus = reader.seeds()
        for data in corpus:
            reader.read(data, Path(place))  # the seeds are valid
        for number in range(cases):
            data = (
                mutated(rng.choice(corpus), corpus, rng, reader.structured) if number >= len(corpus) else corpus[number]
            )
            last.write_bytes(data)
            report.cases += 1
            begun = time.process_time()
            try:
                with coverage:
                    reader.read(data, Path(place))
                report.taken += 1
            except reader.errors:
                report.refused += 1
            except BaseException as error:
                _found(report, error, repr(data[:2000]))
            if time.process_time() - begun > SLOW:
                _found(report, TimeoutError(f"took {time.process_time() - begun:.0f} s"), repr(data[:2000]))
            if not coverage.ways <= known:
                known |= coverage.ways
                corpus.append(data)
                report.kept += 1
    report.ways, report.seconds = len(known), time.monotonic() - started
    return report


def _found(report: Report, error: BaseException, what: str) -> None:
    """Note a finding, the same one once."""
    import traceback

    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    at = f"{Path(where[-1].filename).relative_to(PACKAGE)}:{where[-1].lineno}" if where else "?"
    text = f"{report.target}: {type(error).__name__} at {at}: {str(error)[:300]}"
    if not any(one.startswith(text[:80]) for one in report.findings):
        report.findings.append(f"{text}\n    {what}")


# ------------------------------------------------------------------------------------------------------- functions


class Foreign:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _integers(high: int, *shape: int, dtype: str = "int32") -> np.ndarray:
    return np.random.default_rng(high).integers(0, high, shape).astype(dtype)


def _blocks() -> tuple[np.ndarray, ...]:
    inputs = parse("bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5").generate(0)
    return tuple(inputs[1:4])


def _rows() -> tuple[np.ndarray, ...]:
    inputs = parse("nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted=1").generate(0)
    return tuple(inputs[:-1])


def _lists() -> np.ndarray:
    found = np.stack([np.random.default_rng(i).permutation(61)[:12] for i in range(7)])
    return np.sort(found, axis=1).astype(np.int32)


def _pruned() -> np.ndarray:
    return tvm_sparse.prune(_normal(64, 16), 0.5)


def _tables() -> dict[str, np.ndarray]:
    hashing = _head().hashing
    return {"words": hashing.words, "table": hashing.table, "always": _integers(2, 2)}


# The right arguments of each function, by name.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "softmax_topk": lambda: {"logits": _normal(7, 61), "k": 5, "log": False, "temperature": 1.0},
    "softmax": lambda: {"logits": _normal(7, 97), "algorithm": "online"},
    "log_softmax": lambda: {"logits": _normal(7, 97)},
    "logsumexp": lambda: {"logits": _normal(7, 97)},
    "softmax_sample": lambda: {
        "logits": _normal(7, 61), "temperature": 1.0, "top_k": 8, "top_p": 0.9, "min_p": 0.0, "seed": 3, "offset": 0,
    },
    "bsr_matmul": lambda: {"x": _normal(7, 66), "weight": _blocks(), "bias": None, "activation": None},
    "nhot_lookup": lambda: {"csr": _rows(), "table": _normal(50, 33), "validate": False},
    "head_topk": lambda: {"hidden": _normal(7, 16), "embedding": _normal(61, 16), "k": 5, "log": False},
    "candidate_topk": lambda: {
        "hidden": _normal(7, 16), "embedding": _normal(61, 16), "candidates": _lists(), "n": 4, "log": True,
    },
    "candidate_logits": lambda: {"hidden": _normal(7, 16), "embedding": _normal(61, 16), "candidates": _lists()},
    "wta_hash": lambda: {"hidden": _normal(7, 16), "permutations": wta.permutations(16, 2, 2, 5, 0)},
    "compaction": lambda: {"chosen": _integers(2**31 - 1, 3, 4), "vocab": 100, "capacity": 40},
    "lsh_lookup": lambda: {"codes": _integers(4, 2, 3, 3), **_tables(), "threshold": 2, "validate": True},
    "lsh_candidates": lambda: {
        "hidden": _normal(2, 3, 8), "permutations": _head().hashing.permutations, **_tables(), "threshold": 2,
        "capacity": 20, "validate": True,
    },
    "sparse_recurrent": lambda: {
        "weights": tvm_sparse.recurrent_weights(_pruned(), 4), "x_projected": _normal(3, 2, 64), "h0": _normal(2, 16),
        "c0": _normal(2, 16), "cell": "lstm", "lengths": np.array([3, 2], np.int32), "validate": False,
    },
    "block_recurrent": lambda: {
        "weights": tvm_sparse.block_recurrent_weights(_pruned(), 4), "x_projected": _normal(3, 2, 64),
        "h0": _normal(2, 16), "c0": _normal(2, 16), "cell": "lstm",
    },
    "recurrent_weights": lambda: {"matrix": _pruned(), "gates": 4, "dtype": None, "order": "banks", "banks": 8},
    "block_recurrent_weights": lambda: {"matrix": _pruned(), "gates": 4, "dtype": None},
    "BsrWeight": lambda: {"weight": _blocks(), "columns": 66, "validate": False, "balance": True},
    "CsrRows": lambda: {"csr": _rows(), "columns": 50, "validate": False},
    "LshHead": lambda: {
        "embedding": _normal(50, 8), "k": 2, "units": 2, "bands": 3, "threshold": 1, "frequent": None, "capacity": 40,
    },
    "SparseLSTM": lambda: {"weight_hh": _normal(64, 16), "density": 0.5, "method": "magnitude", "form": "auto"},
    "SparseGRU": lambda: {"weight_hh": _normal(48, 16), "hidden_bias": _normal(16), "density": 0.5},
    "SparseRNN": lambda: {"weight_hh": _normal(16, 16), "nonlinearity": "tanh", "density": 0.5},
    "project_inputs": lambda: {
        "x": _normal(3, 2, 5), "weight_ih": _normal(64, 5), "bias_ih": _normal(64), "cell": "lstm",
    },
    "prune": lambda: {"weight": _normal(32, 32), "density": 0.5, "method": "magnitude", "block": 16, "gates": 1},
    "pruning_mask": lambda: {"weight": _normal(32, 32), "density": 0.5, "method": "block", "block": 8, "gates": 1},
    "cubic_schedule": lambda: {"final": 0.1, "begin": 1, "end": 100, "every": 10, "initial": 1.0},
    "constant_schedule": lambda: {"final": 0.1, "begin": 1, "end": 100, "every": 10},
    "explain": lambda: {"problem": "softmax_topk", "batch": 7, "vocab": 61, "k": 5, "target": "cpu"},
    "warmup": lambda: {"problems": [TOPK], "target": "cpu", "builders": 1},
    "configure": lambda: {"policy": "any"},
    "load": lambda: {"folder": "/nowhere"},
}  # fmt: skip
# What a call may raise, by its documentation; a LoadError is one of a kernel that is not at hand.
RAISED = (TypeError, ValueError, MemoryError, tvm_sparse.Miss, ManifestError)
ODD = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.5, float("nan"), float("inf"), "", "x", "relu",
    b"x", [], {}, (), [1.0], object(), np.float32(2), np.int64(3), np.array(2.0), np.zeros((0,)),
    np.array("x"), np.array([object()]),
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64")


def changed_array(array: np.ndarray, draw: Callable[[Any], Any]) -> Any:
    """The same array with other values, in another place, of another library, dtype or shape."""
    if array.dtype.kind not in "fiubcV" or type(array) is not np.ndarray:
        return array
    how = draw(st.integers(0, 15))
    if how == 0:
        flat = array.copy().reshape(-1)
        special = (
            [np.nan, np.inf, -np.inf, 0, 1e30]
            if array.dtype.kind == "f"
            else [-1, 0, 2**31 - 1, array.max(initial=0) + 1]
        )
        value = np.array(draw(st.sampled_from(special))).astype(array.dtype)
        flat[draw(st.integers(0, flat.size - 1)) :: draw(st.integers(1, 5))] = value
        return flat.reshape(array.shape)
    if how == 1:
        dtype = draw(st.sampled_from(DTYPES))
        return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if how == 2:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == 3:
        return array[::-1]
    if how == 4:
        return np.asfortranarray(array)
    if how == 5:
        behind = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
        behind[...] = array
        return behind
    if how == 6:
        fixed = array.copy()
        fixed.flags.writeable = False
        return fixed
    if how == 7:
        return array[: draw(st.integers(0, 3))]
    if how == 8:
        return array[..., : draw(st.integers(0, 3))]
    if how == 9:
        return array.reshape(draw(st.sampled_from([(-1,), (1, *array.shape), (*array.shape, 1), array.shape[::-1]])))
    if how == 10:
        return array.tolist()
    if how == 11:
        return np.ma.masked_array(array, mask=array > 1)
    if how == 12:
        return Foreign(array)
    if how == 13:
        return array.view(array.dtype.newbyteorder())
    if array.dtype.byteorder == ">" or array.dtype.kind not in "fiub" or array.dtype == ml_dtypes.bfloat16:
        return array  # PyTorch has no such
    import torch

    tensor = torch.from_numpy(array.copy())  # of one element strides may be negative else
    return tensor if how == 14 else torch.empty((array.shape[0], 0)) if array.ndim else tensor


@st.composite
def calls(draw: Callable[[Any], Any], name: str) -> dict[str, Any]:
    """The arguments of a call: the right ones, up to three of them changed."""
    given = CALLS[name]()
    # Unchecked, bad tables are read out of bounds, as is documented.
    names = sorted(key for key in given if given[key] is not True)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(names))
        value = given[key]
        if isinstance(value, np.ndarray) and value.ndim and value.size and draw(st.integers(0, 4)):
            given[key] = changed_array(value, draw)
        elif isinstance(value, tuple) and value and draw(st.integers(0, 4)):
            which = draw(st.integers(0, len(value) - 1))
            part = value[which]
            changed = changed_array(part, draw) if isinstance(part, np.ndarray) and part.size and part.ndim else None
            given[key] = (*value[:which], changed, *value[which + 1 :])
        elif isinstance(value, str) and draw(st.booleans()):
            given[key] = value + draw(st.text(max_size=3))
        else:
            given[key] = copy.copy(draw(st.sampled_from(ODD)))
    return given


def _plain(value: Any) -> Any:
    """What is read of an argument: arrays as contiguous copies of NumPy's."""
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    if isinstance(value, Foreign):
        return _plain(value._array)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return np.array(value)
    if type(value).__module__ == "torch":
        return np.array(value)
    return value


def _bits(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_bits(one) for one in value]
    if type(value).__module__ == "torch":
        value = value.numpy()
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        value = np.from_dlpack(value)
    return (value.shape, str(value.dtype), value.tobytes()) if isinstance(value, np.ndarray) else None


def called(name: str, given: Mapping[str, Any], report: Report) -> None:
    """One case: what the call gives, beside that of plain copies."""
    function = getattr(tvm_sparse, name)
    try:
        before = {key: _bits(_plain(value)) for key, value in given.items()}
    except (TypeError, ValueError):  # lists of unequal lengths and the like, which no array is made of
        before = {}
    try:
        result = function(**given)
    except RAISED:
        report.refused += 1
        return
    report.taken += 1
    if before and {key: _bits(_plain(value)) for key, value in given.items()} != before:
        raise AssertionError("an argument was written")
    plain = {key: _plain(value) for key, value in given.items()}
    # A dense product of another layout is summed in another order; calls like an earlier one take True for 1.
    numbers = [key for key, value in CALLS[name]().items() if type(value) in (int, float)]
    if (
        name == "project_inputs"
        or (name == "softmax_sample" and given["seed"] is None)
        or any(isinstance(given[key], bool) for key in numbers)
    ):
        return
    if any(isinstance(value, np.ndarray | tuple) for value in plain.values()):
        again = function(**plain)
        if _bits(result) != _bits(again):
            raise AssertionError("plain copies of the arguments give something else")


def property_based(name: str, cases: int, seed: int, last: Path) -> Report:
    report, started = Report(name, "property-based"), time.monotonic()

    @seeded(seed)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(name))
    def run(arguments: dict[str, Any]) -> None:
        last.write_text(f"{name}(**{arguments!r})"[:20000])
        report.cases += 1
        begun = time.process_time()
        try:
            called(name, arguments, report)
        except BaseException as error:
            _found(report, error, repr(arguments)[:2000])
        if time.process_time() - begun > SLOW:
            _found(report, TimeoutError(f"took {time.process_time() - begun:.0f} s"), repr(arguments)[:2000])

    run()
    report.seconds = time.monotonic() - started
    return report


def functions(names: list[str], cases: int, seed: int, last: Path, kernels: bool) -> Iterator[Report]:
    """Every function in turn; with `kernels` the right calls are compiled before, else they raise `Miss`."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        for one in names if kernels else ():
            if one not in ("load", "configure", "warmup"):
                getattr(tvm_sparse, one)(**CALLS[one]())
        for one in names:
            tvm_sparse.configure(policy="any", compile=False)
            yield property_based(one, cases, seed, last)


# --------------------------------------------------------------------------------------------------------- the run

READER_CASES, FUNCTION_CASES = 16_000, 2_000
# Functions in one process: imports and kernels take longer than their cases.
TOGETHER = 11


def work(targets: list[str], scale: float, seed: int, last: Path, kernels: bool = True) -> Iterator[Report]:
    """The cases of some readers and functions."""
    for name in targets:
        if name in READERS:
            yield guided(name, max(1, round(READER_CASES * READERS[name].share * scale)), seed, last)
    names = [name for name in targets if name in CALLS]
    yield from functions(names, max(1, round(FUNCTION_CASES * scale)), seed, last, kernels)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Targets whose name has this; may be given again.")] = None,
    scale: Annotated[float, typer.Option(help="Of how many cases a whole run has.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For the same cases again.  [default: a new one]")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the table goes.  [default: results/, of a whole run]")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Fuzz readers and functions; the exit code is 1 if anything was found."""
    import logging

    logging.getLogger("tvm_sparse").setLevel(logging.ERROR)
    np.set_printoptions(threshold=20, edgeitems=2)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    targets = [name for name in (*READERS, *CALLS) if not only or any(word in name for word in only)]
    if worker is not None:
        faulthandler.enable()
        for report in work(list(only or ()), scale, seed, worker):
            print(json.dumps(asdict(report)), flush=True)
        return
    print(f"seed {seed}, {len(targets)} targets", flush=True)
    reports = []
    with tempfile.TemporaryDirectory() as name:
        last = Path(name) / "last"
        calls_ = [target for target in targets if target in CALLS]
        groups = [[target] for target in targets if target in READERS]
        for group in groups + [calls_[i : i + TOGETHER] for i in range(0, len(calls_), TOGETHER)]:
            named = [word for target in group for word in ("--only", target)]
            argv = [sys.executable, __file__, *named, "--scale", str(scale), "--seed", str(seed)]
            for _ in range(2):  # once more if it was killed: on a shared machine for another's want of memory
                done = subprocess.run([*argv, "--worker", str(last)], capture_output=True, text=True)
                if done.returncode != -9:
                    break
            found = [Report(**json.loads(line)) for line in done.stdout.splitlines()]
            if len(found) < len(group):
                what = last.read_bytes()[:2000] if last.exists() else b""
                whose = ", ".join(group[len(found) :])
                crash = f"{whose}: the process ended with {done.returncode}: {done.stderr[-2000:]}\n    {what!r}"
                found.append(Report(whose, "died", findings=[crash]))
            for report in found:
                print(
                    f"{report.target}: {report.cases} cases, {report.taken} taken, {report.refused} refused,"
                    f" {report.kept} kept, {report.ways} ways, {len(report.findings)} findings"
                    f" ({report.seconds:.0f} s)",
                    flush=True,
                )
                for finding in report.findings:
                    print(f"  {finding}", flush=True)
            reports += found
    print(f"{sum(report.cases for report in reports)} cases")
    if csv is None and scale == 1 and not only:
        csv = result_path("fuzz", machine.cpu()).with_suffix(".csv")
    if csv is not None:
        facts = {k: v for k, v in provenance(machine.cpu()).items() if k != "timing"} | {"seed": str(seed)}
        rows = [
            [
                len(r.findings) if c == "findings" else round(r.seconds) if c == "seconds" else getattr(r, c)
                for c in COLUMNS
            ]
            for r in reports
        ]
        write_csv(csv, facts, COLUMNS, rows)
    if any(report.findings for report in reports):
        raise SystemExit(1)


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
