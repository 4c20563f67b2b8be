"""Fuzzing every file reader with coverage-guided inputs."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tvm_sparse
from tvm_sparse.artifacts import manifest, runtime_libraries, signing
from tvm_sparse.artifacts.manifest import Entry, ManifestError
from tvm_sparse.core import machine, registry, shape_files, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session, Trial, codec, database, exchange, predictor, space
from tvm_sparse.runtime import dispatch, paths
from tvm_sparse.tuning import interchange

from .mutation import mutated
from .report import SLOW, Coverage, Report, found_error

ARCH = "x86-64-v3"
TOPK = "softmax_topk/batch=3,vocab=37,k=4,dtype=float32"


@dataclass(frozen=True)
class Reader:
    """A file reader: valid inputs, the function that reads one, and its documented errors."""

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], None]
    errors: tuple[type[Exception], ...] = ()
    structured: bool = True
    share: float = 1.0  # of the cases, since some readers are slower than others


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
        carried = Path(name) / runtime_libraries.FOLDER
        carried.mkdir()
        for file in runtime_libraries.FILES:
            (carried / file).write_text(file)
        manifest.write(Path(name), _entries())
        return [(Path(name) / manifest.NAME).read_bytes()]


def _read_manifest(data: bytes, folder: Path) -> None:
    entries = manifest.read(folder, data)
    assert set(manifest.runtime(folder, data)) <= set(runtime_libraries.FILES)
    # Accepted content must affect nothing else: look-ups of other problems still work.
    own = dispatch.Dispatcher(logs=(), shipped=folder / "none", cache=folder / "none")
    own._folders = [dispatch._Source("folder", folder, entries)]
    own.explain(parse("softmax_topk/batch=5,vocab=37,k=4"), machine.cpu())


READERS["manifest"] = Reader(_manifests, _read_manifest, (ManifestError,))


def _signatures() -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    with tempfile.TemporaryDirectory() as name:
        for entry in (entries := _entries()):
            (Path(name) / entry.library).write_text(entry.problem)
        described = [dataclasses.replace(one, sha256=manifest.digest(Path(name) / one.library)) for one in entries]
        manifest.write(Path(name), described)
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
    """The input with right checksums, as an attacker would write them."""
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
    # Only a few of its trees: in a file of 200 KB most mutations would hit data that is not checked.
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
    scripts = Path(__file__).parent.parent
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


def small_head() -> Any:
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
    """A safetensors file begins with the length of its header, which must match a mutated header."""
    end = data.find(b"}}", 8)
    return (end + 2 - 8).to_bytes(8, "little") + data[8:] if len(data) % 2 and end > 0 else data


for _suffix, _share in ((".npz", 0.2), (".safetensors", 0.5)):
    for _name, _make, _kind in (
        ("head", small_head, lambda: tvm_sparse.LshHead),
        ("recurrent layer", _layer, lambda: tvm_sparse.SparseLSTM),
    ):
        READERS[f"{_name} {_suffix}"] = Reader(
            _saved(_make, _suffix), _read_saved(_kind, _suffix), (ValueError,), False, _share
        )


def guided(name: str, cases: int, seed: int, last: Path) -> Report:
    """Mutate the reader's inputs, and keep those that reach new transitions."""
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
                found_error(report, error, repr(data[:2000]))
            if time.process_time() - begun > SLOW:
                found_error(report, TimeoutError(f"took {time.process_time() - begun:.0f} s"), repr(data[:2000]))
            if not coverage.ways <= known:
                known |= coverage.ways
                corpus.append(data)
                report.kept += 1
    report.ways, report.seconds = len(known), time.monotonic() - started
    return report
