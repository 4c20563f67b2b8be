"""Manifests and the bytes that they vouch for: what is written is read back, and what is amiss is refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from tvm_sparse.artifacts import manifest, runtime_libraries, runtime_loading, signing, trust
from tvm_sparse.artifacts.compile import CompileError
from tvm_sparse.artifacts.manifest import Entry, ManifestError
from tvm_sparse.core import machine, scratch, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Best, Log, Session
from tvm_sparse.records.queries import best_records
from tvm_sparse.runtime import dispatch, loading
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.runtime.loading import LoadError
from tvm_sparse.shipping import export, hub
from tvm_sparse.workers.building import build
from tvm_sparse.workers.processes import Reply

ARCH = machine.cpu().arch
TOPK = "softmax_topk/batch=3,vocab=37,k=4,dtype=float32"
PRODUCT = "bsr_matmul/m=2,k=12,n=10,block=5x3,sparsity=0.5,pattern=uniform,dtype=float32"


def entry(**changed: Any) -> Entry:
    right = Entry(
        problem=TOPK,
        arch="sm_90a",
        kind="cuda",
        candidate=Candidate("threshold_gate", 3, (("threads", 256), ("vectors", 2))),
        chosen="exact",
        library="softmax_topk-0123456789abcdef.so",
        sha256="0" * 64,
        workspaces=({"name": "partial", "shape": ["batch", 4], "dtype": "float32", "fill": 255},),
        figures={"seconds": 1.25e-6, "fallback_seconds": 3e-6, "session": "s", "machine": "H100", "date": ""},
        resources={"registers": 40, "spill_instructions": 0},
    )
    return dataclasses.replace(right, symbol="", **changed)


def tuned(root: Path, *keys: str, arch: str = ARCH, version: int = 0, **changed: Any) -> None:
    """A final ranking of each problem, won by a point that is not the default."""
    cpu = machine.cpu()
    for key in keys:
        default = spaces.fallback(parse(key), cpu)
        decisions = {"row_scan": {"chunk": 64, "simd": 8}, "block_rows": {"tile_m": 1, "tile_n": 1, "simd": 1}}[
            default.template
        ]
        winner = Candidate(default.template, default.version + version, tuple(decisions.items()))
        log = Log(root, arch, key.partition("/")[0])
        log.append(Session("s1", "2026-01-02T03:04:05Z", {"name": "a machine"}, {}, "a timer", {"seed": 1}))
        log.append_best(Best(**{
            "problem": parse(key).key, "arch": arch, "candidate": winner, "seconds": 1e-6, "fallback": default,
            "fallback_seconds": 2e-6, "rounds": 3, "session": "s1", **changed,
        }))  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Logs of two tuned problems, and the folder that they were exported into."""
    logs, folder = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("exported")
    tuned(logs, TOPK, PRODUCT)
    export.export(machine.cpu(), folder, [logs])
    return logs, folder


# ---- the manifest --------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = (entry(), entry(library="b.so", resources=None, workspaces=(), figures={}, chosen="fallback"))
    folder = tmp_path / "made" / "on the way"
    manifest.write(folder, entries)
    assert manifest.read(folder) == entries
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert (folder / "manifest.json").stat().st_mode & 0o777 == 0o644
    manifest.write(folder, entries[1:])
    assert manifest.read(folder) == entries[1:]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.write(tmp_path, [entry()])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.write(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert manifest.read(tmp_path) == (entry(),)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=re.escape(f"{tmp_path}/manifest.json: no such file; export kernels")):
        manifest.read(tmp_path)
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ManifestError, match="manifest.json: .*[Ii]s a directory"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "format is 'list', expected 7"),
        (b"{}", "format is None, expected 7"),
        (b'{"format": 2}', "format is 2, expected 7; export again"),
        (b'{"format": "2"}', "format is '2', expected 7"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_what_is_no_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match=f"manifest.json: .*{message}"):
        manifest.read(tmp_path)


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """A right manifest, but for one edit."""
    manifest.write(folder, [entry(), entry(library="b.so")])
    content = json.loads((folder / "manifest.json").read_text())
    edit(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_an_edit_that_changes_nothing_is_read(tmp_path: Path) -> None:
    """The edits below are refused for what they change, not for being edits."""
    edited(tmp_path, lambda content: None)
    assert manifest.read(tmp_path) == (entry(), entry(library="b.so"))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Entry)])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    edited(tmp_path, lambda content: content["kernels"][1].pop(field))
    with pytest.raises(ManifestError, match=f"manifest.json: kernel 1: missing {field}$"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Entry)])
@pytest.mark.parametrize("value", [7, [7], "text", {"a": 1}, None, True], ids=repr)
def test_a_field_of_a_wrong_type_is_named(tmp_path: Path, field: str, value: Any) -> None:
    right = {"workspaces": list, "figures": dict, "resources": dict | None, "resident": type(None)}.get(field, str)
    if isinstance(value, right) and field != "candidate":
        pytest.skip("of the right type")
    edited(tmp_path, lambda content: content["kernels"][1].update({field: value}))
    with pytest.raises(
        ManifestError, match="manifest.json: kernel 1: .*" + ("candidate" if field == "candidate" else field)
    ):
        manifest.read(tmp_path)


@pytest.mark.parametrize("value", [None, {}, "text", 7])
def test_kernels_are_a_list_of_objects(tmp_path: Path, value: Any) -> None:
    edited(tmp_path, lambda content: content.update(kernels=value))
    with pytest.raises(ManifestError, match=f"kernels must be a list, got {type(value).__name__}"):
        manifest.read(tmp_path)
    if value is not None:
        edited(tmp_path, lambda content: content.update(kernels=[value]))
        if not isinstance(value, dict):
            with pytest.raises(ManifestError, match=f"kernel 0: expected an object, got {type(value).__name__}"):
                manifest.read(tmp_path)


@pytest.mark.parametrize(
    "library", ["../b.so", "/tmp/b.so", "a/b.so", "", ".", "..", "b.so/", "./b.so", "b\0.so", "b.so\n", "~", "a\\b.so"]
)
def test_a_library_elsewhere_is_refused(tmp_path: Path, library: str) -> None:
    edited(tmp_path, lambda content: content["kernels"][1].update(library=library))
    with pytest.raises(ManifestError, match="kernel 1: library must be a file name in the same folder"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("version", ["0.26.0", "", None, 27])
def test_another_compiler_version_is_refused(tmp_path: Path, version: Any) -> None:
    edited(tmp_path, lambda content: content["versions"].update({"apache-tvm": version}))
    message = (
        f"exported with apache-tvm {version!r}, but {manifest.versions()['apache-tvm']} is installed; export again"
    )
    with pytest.raises(ManifestError, match=re.escape(message)):
        manifest.read(tmp_path)


@pytest.mark.parametrize("versions", [None, [], "text", {}])
def test_versions_that_are_none_are_refused(tmp_path: Path, versions: Any) -> None:
    edited(tmp_path, lambda content: content.update(versions=versions))
    with pytest.raises(ManifestError, match="exported with apache-tvm None"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "row_scan", "row_scan@x()", "row_scan@1(lanes)", "row_scan@1(lanes=1.5)", "row_scan@1(a=1, a=2)", "@1()"],
)
def test_a_candidate_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    edited(tmp_path, lambda content: content["kernels"][1].update(candidate=text))
    with pytest.raises(ManifestError, match="kernel 1: .*(candidate|decision)"):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "rocm"),
        ("chosen", "guessed"),
        ("arch", "a" * 101),
        ("sha256", "0" * 63),
        ("library", "a" * 201),
        ("problem", "softmax_topk/batch=" + "9" * 5000),
        ("workspaces", [{"name": "a", "shape": [-1], "dtype": "float32", "fill": 0}]),
        ("workspaces", [{"name": "a", "shape": [4], "dtype": "object", "fill": 0}]),
        ("workspaces", [{"name": "a", "shape": [4], "dtype": "float32", "fill": 256}]),
        ("workspaces", [{"name": "a", "shape": [4], "dtype": "float32"}]),
        ("workspaces", [7]),
        ("figures", {"seconds": 1.0}),
        ("figures", {"seconds": 1.0, "fallback_seconds": 1.0, "way_seconds": "1", "machine": "", "date": ""}),
        ("figures", {"seconds": float("nan"), "fallback_seconds": 1.0, "machine": "", "date": ""}),
        ("resources", {"registers": "many"}),
        ("resident", {"blocks": -1, "threads": 32, "shared_bytes": 0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_out_of_range_is_named(tmp_path: Path, field: str, value: Any) -> None:
    edited(tmp_path, lambda content: content["kernels"][1].update({field: value}))
    with pytest.raises(ManifestError, match=f"manifest.json: kernel 1: {field} must be "):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("problem", TOPK.replace("k=4", "k=5")),
        ("candidate", "threshold_gate@3(threads=512, vectors=2)"),
        ("workspaces", [{"name": "partial", "shape": ["batch", 1], "dtype": "float32", "fill": 255}]),
    ],
    ids=lambda value: str(value)[:10],
)
def test_an_entry_that_was_changed_is_not_its_kernels(tmp_path: Path, field: str, value: Any) -> None:
    edited(tmp_path, lambda content: content["kernels"][1].update({field: value}))
    with pytest.raises(ManifestError, match="kernel 1: symbol must be the hash of problem"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("what", ["pipe", "device", "endless"])
def test_what_is_no_plain_file_of_a_manifests_size_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "manifest.json"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, manifest.MOST_BYTES + 1)
    with pytest.raises(ManifestError, match="is not a plain file" if what != "endless" else "expected at most"):
        manifest.read(tmp_path)


# ---- who may say what runs -----------------------------------------------------------------------


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's; without the right to, be another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)


@pytest.mark.parametrize("whose", ["folder", "manifest.json"])
@pytest.mark.parametrize("how", ["foreign", "writable"])
def test_what_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str, how: str
) -> None:
    folder = tmp_path / "folder"
    manifest.write(folder, [entry()])
    path = folder if whose == "folder" else folder / whose
    if how == "foreign":
        give_away(path, monkeypatch)
    else:
        path.chmod(0o777)
    with pytest.raises(ManifestError, match="belongs to user|may be written by others") as caught:
        manifest.read(folder)
    assert str(path) in str(caught.value) and trust.TRUST in str(caught.value)
    monkeypatch.setenv(trust.TRUST, f"/nowhere:{tmp_path}")
    assert manifest.read(folder) == (entry(),)


def test_folders_have_their_mode_whatever_the_umask_is(tmp_path: Path) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            trust.make_folder(tmp_path / f"{umask}" / "a" / "b")
        finally:
            os.umask(before)
        for path in (tmp_path / f"{umask}", tmp_path / f"{umask}" / "a" / "b"):
            assert path.stat().st_mode & 0o777 == 0o700


# ---- the libraries -------------------------------------------------------------------------------


@pytest.fixture
def library(exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A copy of an exported library and its hash; nothing may be handed to the loader."""
    found = next(e for e in manifest.read(exported[1]) if e.problem == TOPK)
    shutil.copy(exported[1] / found.library, tmp_path)
    monkeypatch.setattr(loading, "_opened", lambda *_: pytest.fail("a library was loaded"))
    return tmp_path / found.library, found.sha256


def test_the_library_itself_is_loaded(exported: tuple[Path, Path]) -> None:
    for found in manifest.read(exported[1]):
        path = exported[1] / found.library
        assert callable(loading.load_function(path, found.kind, found.sha256, found.symbol))


def test_a_missing_library(library: tuple[Path, str]) -> None:
    path, sha256 = library
    path.unlink()
    with pytest.raises(LoadError, match=re.escape(f"{path}: no such library; export it again")):
        loading.load_function(path, "llvm", sha256)
    path.mkdir()
    with pytest.raises(LoadError, match="no such library"):
        loading.load_function(path, "llvm", sha256)


@pytest.mark.parametrize("left", [0, 1, 0.5, -1])
def test_a_truncated_library(library: tuple[Path, str], left: float) -> None:
    path, sha256 = library
    size = path.stat().st_size
    os.truncate(path, {0: 0, 1: 1, 0.5: size // 2, -1: size - 1}[left])
    with pytest.raises(LoadError, match="not the one that its manifest describes"):
        loading.load_function(path, "llvm", sha256)


def test_a_flipped_bit(library: tuple[Path, str]) -> None:
    path, sha256 = library
    whole = path.read_bytes()
    for bit in [0, 8 * len(whole) - 1, *(random.randrange(8 * len(whole)) for _ in range(50))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(LoadError, match="not the one that its manifest describes"):
            loading.load_function(path, "llvm", sha256)


def test_swapped_libraries(exported: tuple[Path, Path], library: tuple[Path, str]) -> None:
    path, sha256 = library
    other = next(e.library for e in manifest.read(exported[1]) if e.problem == PRODUCT)
    shutil.copy(exported[1] / other, path)
    with pytest.raises(LoadError, match="not the one that its manifest describes"):
        loading.load_function(path, "llvm", sha256)


def test_libraries_swapped_together_with_their_hashes(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """What a library holds is named after what it was built for."""
    shutil.copytree(exported[1], tmp_path / "swapped")
    first, second = manifest.read(exported[1])
    swapped = [
        dataclasses.replace(one, library=other.library, sha256=other.sha256)
        for one, other in ((first, second), (second, first))
    ]
    manifest.write(tmp_path / "swapped", swapped)
    for found in manifest.read(tmp_path / "swapped"):
        with pytest.raises(LoadError, match=f"holds no kernel {found.symbol}.* it was built for something else"):
            loading.load_function(tmp_path / "swapped" / found.library, found.kind, found.sha256, found.symbol)


def test_what_was_hashed_is_what_is_loaded(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written over between the two is not looked at again."""
    found = next(e for e in manifest.read(exported[1]) if e.problem == TOPK)
    path = Path(shutil.copy(exported[1] / found.library, tmp_path))
    real = loading._opened

    def swapped(*arguments: Any) -> Any:
        path.write_bytes(b"something else")
        return real(*arguments)

    monkeypatch.setattr(loading, "_opened", swapped)
    assert callable(loading.load_function(path, found.kind, found.sha256, found.symbol))


def test_a_library_of_another_user(library: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256 = library
    give_away(path, monkeypatch)
    with pytest.raises(LoadError, match="belongs to user"):
        loading.load_function(path, "llvm", sha256)


def test_workspaces_beyond_reason_are_not_allocated() -> None:
    for shape, message in (([1 << 40], "would take 4398046511104 bytes"), (["words"], "workspace a: no such extent")):
        workspace = {"name": "a", "shape": shape, "dtype": "float32", "fill": 0}
        with pytest.raises(LoadError, match=message):
            loading.allocated([workspace], parse(TOPK), loading.on_host)


def test_what_is_no_library_does_not_load(tmp_path: Path) -> None:
    """Without a hash to compare with it is the loader that refuses, and still by a LoadError."""
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(LoadError, match=re.escape(str(path))):
        loading.load_function(path, "llvm", None)


# ---- signatures ----------------------------------------------------------------------------------


def key_pair(folder: Path, name: str = "key") -> tuple[Any, str]:
    """A private key, and its public one as OpenSSH writes it, with a comment."""
    key = ed25519.Ed25519PrivateKey.generate()
    openssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (folder / name).write_bytes(key.private_bytes(serialization.Encoding.PEM, openssh, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_text(f"# of a release\n\n{public.decode()} me@here\n")
    return signing.private_key(folder / name, lambda: pytest.fail("asked for a passphrase")), public.decode()


@pytest.fixture
def signed(exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A signed copy of the exported folder that another user owns, and the key's public half; no user's keys."""
    key, public = key_pair(tmp_path)
    folder = tmp_path / "signed"
    shutil.copytree(exported[1], folder)
    signing.sign(folder, key)
    give_away(folder, monkeypatch)
    monkeypatch.setenv("TVM_SPARSE_TRUSTED_KEYS", str(tmp_path / "none"))
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path / "cache")
    monkeypatch.setattr(dispatch, "dispatcher", own)
    return folder, public


def test_a_signed_folder_of_a_trusted_key_is_used_whoever_owns_it(
    signed: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, public = signed
    with pytest.raises(ManifestError, match=re.escape(f"is signed by {public!r}, which is none of the 0 trusted keys")):
        dispatch.load(folder)
    for keys in (public, f"{public} with a comment", tmp_path / "key.pub", [key_pair(tmp_path, "other")[1], public]):
        if os.geteuid() != 0 and isinstance(keys, Path):
            continue  # this user is another one now
        assert dispatch.load(folder, trusted_keys=keys) == 2
    if os.geteuid() == 0:
        monkeypatch.setenv("TVM_SPARSE_TRUSTED_KEYS", str(tmp_path / "key.pub"))
        assert dispatch.load(folder) == 2
    problem = parse(TOPK)
    found = dispatch.dispatcher.kernel(problem, machine.cpu())
    inputs, outputs = problem.generate(random.randrange(2**32)), problem.empty_outputs()
    found.function(*(tvm_ffi.from_dlpack(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs)))
    problem.check(inputs, problem.reference(inputs), outputs)
    # The signature vouches for the bytes, not for the folder.
    other = next(e for e in manifest.read(folder, (folder / "manifest.json").read_bytes()) if e.problem == PRODUCT)
    (folder / other.library).write_bytes((folder / other.library).read_bytes() + b"more")
    with pytest.raises(LoadError, match="not the one that its manifest describes"):
        dispatch.dispatcher.kernel(parse(PRODUCT), machine.cpu())


@pytest.mark.parametrize("what", ["manifest", "list", "signature", "signed by another", "none", "format", "texts"])
def test_a_folder_whose_signature_does_not_hold_is_refused(signed: tuple[Path, str], tmp_path: Path, what: str) -> None:
    folder, public = signed
    path = folder / signing.NAME
    content = json.loads(path.read_text())
    if what == "manifest":
        described = folder / manifest.NAME
        described.write_text(described.read_text().replace("exact", "nearby"))
    elif what == "list":
        content["files"][manifest.NAME] = "0" * 64
    elif what == "signature":
        content["signature"] = base64.b64encode(b"0" * 64).decode()
    elif what == "signed by another":
        signing.sign(folder, key_pair(tmp_path, "other")[0])
        content = json.loads(path.read_text())
    elif what == "format":
        content["format"] = 2
    elif what == "texts":
        content["files"] = [7]
    path.write_text(json.dumps(content))
    if what == "none":
        path.unlink()
    messages = {
        "manifest": "manifest.json: is not the file that manifest.json.sig was made for",
        "list": "the signature does not hold",
        "signature": "the signature does not hold",
        "signed by another": "which is none of the 1 trusted keys",
        "none": "is not signed",
        "format": "format is 2, expected 1",
        "texts": "expected texts key and signature",
    }
    with pytest.raises(ManifestError, match=messages[what]):
        dispatch.load(folder, trusted_keys=public)


def test_runtime_libraries_of_a_signed_folder_are_those_that_were_signed(
    signed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no compiler is installed they come with the kernels, and run as code before any of them."""
    folder, public = signed
    loaded: list[str] = []

    def library(name: str, mode: int) -> None:
        if mode & os.RTLD_NOLOAD:
            raise OSError
        loaded.append(name)

    monkeypatch.setattr(runtime_libraries, "compiler", lambda: None)
    monkeypatch.setattr(runtime_loading.ctypes, "CDLL", library)
    reader = signing.check(folder, [public]).read
    assert runtime_loading.load("libtvm_runtime.so", folder, reader) and loaded[0].startswith("/proc/self/fd/")
    path = folder / "runtime" / "libtvm_runtime.so"
    path.write_bytes(path.read_bytes() + b"more")
    found = manifest.read(folder, reader(manifest.NAME, manifest.MOST_BYTES))[0]
    with pytest.raises(LoadError, match=r"libtvm_runtime.so: is not the file that manifest\.json\.sig was made for"):
        loading.load_library(folder / found.library, found.kind, found.sha256, reader)
    assert len(loaded) == 1


def test_runtime_libraries_are_those_that_the_manifest_describes(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a signature too; and what is loaded is what was compared, whatever becomes of the file meanwhile."""
    folder = tmp_path / "folder"
    shutil.copytree(exported[1], folder)
    path = folder / "runtime" / "libtvm_runtime.so"
    right = path.read_bytes()
    assert manifest.runtime(folder) == {
        file.name: manifest.digest(file) for file in (folder / "runtime").iterdir()
    } and {*runtime_libraries.LIBRARIES["llvm"], "VERSION"} < set(manifest.runtime(folder))
    loaded: list[bytes] = []

    def library(name: str, mode: int) -> None:
        if mode & os.RTLD_NOLOAD:
            raise OSError
        path.write_bytes(b"swapped")
        loaded.append(Path(name).read_bytes())
        assert name.startswith("/proc/self/fd/")

    monkeypatch.setattr(runtime_libraries, "compiler", lambda: None)
    monkeypatch.setattr(runtime_loading.ctypes, "CDLL", library)
    assert runtime_loading.load("libtvm_runtime.so", folder) == str(path) and loaded == [right]
    with pytest.raises(trust.Refused, match=r"libtvm_runtime\.so: the file is not the one that .*manifest\.json desc"):
        runtime_loading.load("libtvm_runtime.so", folder)
    path.write_bytes(right)
    path.chmod(0o666)
    with pytest.raises(trust.Refused, match="may be written by others"):
        runtime_loading.load("libtvm_runtime.so", folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(trust.Refused, match="is not a plain file"):
        runtime_loading.load("libtvm_runtime.so", folder)
    path.unlink()
    path.write_bytes(right)
    described = json.loads((folder / manifest.NAME).read_text())
    for found, message in (
        ({**described, "runtime": {"VERSION": "0" * 64}}, "sha256 differs"),
        ({**described, "runtime": {"libtvm_runtime.so": 7}}, "runtime must have hashes of"),
        ({**described, "runtime": {"../other.so": "0" * 64}}, "runtime must have hashes of"),
        ({**described, "runtime": None}, "runtime must have hashes of .*export again"),
        ({**described, "format": 6}, "format is 6, expected 7; export again with this version"),
    ):
        (folder / manifest.NAME).write_text(json.dumps(found))
        with pytest.raises(trust.Refused, match=message):
            runtime_loading.load("libtvm_runtime.so", folder)
    assert len(loaded) == 1


def test_the_version_of_runtime_libraries_is_no_endless_file(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(exported[1], folder)
    monkeypatch.setattr(runtime_libraries, "compiler", lambda: None)
    assert manifest.read(folder) == manifest.read(exported[1])
    (folder / "runtime" / "VERSION").unlink()
    os.mkfifo(folder / "runtime" / "VERSION")
    with pytest.raises(ManifestError, match="VERSION: is not a plain file"):
        manifest.read(folder)


def test_a_signature_covers_what_the_manifest_names_and_nothing_else(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    key, public = key_pair(tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(exported[1], folder)
    for name in ("unfinished-0a1b2c3d.so", "notes", "softmax_topk-0123456789abcdef.so"):
        (folder / name).write_text("not ours")
    (folder / "runtime" / "other.so").write_text("not ours")
    signing.sign(folder, key)
    named = {path.relative_to(exported[1]).as_posix() for path in exported[1].rglob("*") if path.is_file()}
    assert set(signing.check(folder, [public]).files) == named
    for name in sorted(named - {manifest.NAME}):
        shutil.copyfile(folder / name, tmp_path / "kept")
        with (folder / name).open("ab") as file:
            file.write(b"more")
        with pytest.raises(signing.SignatureError, match=rf"{re.escape(name)}: the file is not the one that manifest"):
            signing.sign(folder, key)
        (folder / name).unlink()
        with pytest.raises(signing.SignatureError, match=rf"{re.escape(name)}: No such file"):
            signing.sign(folder, key)
        shutil.copyfile(tmp_path / "kept", folder / name)


def test_a_folder_is_found_from_wherever_the_process_is(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Dispatcher(logs=(), shipped=tmp_path / "none", cache=tmp_path / "cache")
    monkeypatch.setattr(dispatch, "dispatcher", own)
    monkeypatch.chdir(exported[1].parent)
    assert dispatch.load(exported[1].name) == 2
    monkeypatch.chdir(tmp_path)
    assert callable(own.kernel(parse(TOPK), machine.cpu()).function)
    assert own.explain(parse(TOPK), machine.cpu()).library.startswith(str(exported[1]))


def test_keys_are_named_where_they_cannot_be_used(tmp_path: Path) -> None:
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "rsa").write_bytes(rsa_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    key = ed25519.Ed25519PrivateKey.generate()
    locked = serialization.BestAvailableEncryption(b"open")
    (tmp_path / "locked").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))
    (tmp_path / "text").write_text("no key")
    for name, message in (("rsa", "expected an Ed25519 key"), ("text", "no private key"), ("gone", "No such file")):
        with pytest.raises(signing.SignatureError, match=message):
            signing.private_key(tmp_path / name, lambda: "")
    with pytest.raises(signing.SignatureError, match="no private key that can be read"):
        signing.private_key(tmp_path / "locked", lambda: "wrong")
    found = signing.private_key(tmp_path / "locked", lambda: "open").public_key()
    (tmp_path / "pem").write_bytes(found.public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    assert signing.public_keys(tmp_path / "pem")[0].startswith("ssh-ed25519 ")
    for given, message in (
        ("ssh-ed25519 AAAA", "trusted_keys: holds no public key"),
        (tmp_path / "text", "holds no public key that can be read: 'no key'"),
        (tmp_path / "gone", "gone: No such file"),
    ):
        with pytest.raises(signing.SignatureError, match=message):
            signing.public_keys(given)
    with pytest.raises(TypeError, match="trusted_keys: expected keys or paths"):
        signing.public_keys([7])  # type: ignore[list-item]
    (tmp_path / "pem").chmod(0o666)
    with pytest.raises(signing.SignatureError, match="may be written by others"):
        signing.public_keys(tmp_path / "pem")


def test_an_export_is_signed_and_loses_an_old_signature(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, public = key_pair(tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(exported[1], folder)
    entries = list(manifest.read(folder))
    monkeypatch.setattr(export, "build", lambda *_, **__: entries)  # they lie there
    export.export(machine.cpu(), folder, [exported[0]], key=key)
    assert {"manifest.json", "runtime/libtvm_runtime.so"} < set(signing.check(folder, [public]).files)
    [repository] = hub.arrange([folder], tmp_path / "repository", key=key)
    assert signing.check(repository, [public]).read(manifest.NAME, 1 << 20)
    assert signing.NAME in json.loads((repository / hub.METADATA).read_text())["digest"]["files"]
    export.export(machine.cpu(), folder, [exported[0]])
    assert not signing.is_signed(folder)


# ---- export --------------------------------------------------------------------------------------


def test_export_describes_what_it_wrote(exported: tuple[Path, Path]) -> None:
    logs, folder = exported
    entries = manifest.read(folder)
    assert sorted(e.problem for e in entries) == sorted([TOPK, PRODUCT])
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "runtime", *(e.library for e in entries)}
    for found in entries:
        assert (found.arch, found.kind, found.chosen, found.resources) == (ARCH, "llvm", "exact", None)
        assert found.sha256 == manifest.digest(folder / found.library)
        assert found.figures == {
            "arch": ARCH, "problem": found.problem, "seconds": 1e-6, "fallback_seconds": 2e-6, "session": "s1",
            "machine": "a machine", "date": "2026-01-02T03:04:05Z",
        }  # fmt: skip
        problem = parse(found.problem)
        inputs, outputs = problem.generate(random.randrange(2**32)), problem.empty_outputs()
        loading.load_function(folder / found.library, "llvm", found.sha256, found.symbol)(
            *(tvm_ffi.from_dlpack(a) if isinstance(a, np.ndarray) else a for a in (*inputs, *outputs))
        )
        problem.check(inputs, problem.reference(inputs), outputs)


def test_export_is_reproducible(exported: tuple[Path, Path], tmp_path: Path) -> None:
    logs, folder = exported
    export.export(machine.cpu(), tmp_path / "elsewhere", [logs], builders=2)
    elsewhere = {p.name: p.read_bytes() for p in (tmp_path / "elsewhere").iterdir() if p.is_file()}
    assert elsewhere == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_export_removes_what_it_no_longer_names_and_nothing_else(exported: tuple[Path, Path], tmp_path: Path) -> None:
    logs, folder = exported
    shutil.copytree(folder, tmp_path / "again")
    kept = [
        "mine-0123456789abcdef.so",
        "softmax_topk-my_own_notes_abc.so",
        "README",
        "softmax_topk-0123456789abcdef.so.txt",
    ]
    for name in (*kept, "softmax_topk-0123456789abcdef.so"):
        (tmp_path / "again" / name).write_text("")
    export.export(machine.cpu(), tmp_path / "again", [logs], only=lambda problem: problem.key == TOPK)
    [left] = manifest.read(tmp_path / "again")
    assert left.problem == TOPK
    assert {path.name for path in (tmp_path / "again").iterdir()} == {"manifest.json", "runtime", left.library, *kept}


def test_a_build_whose_worker_ends_leaves_no_part_of_a_library(tmp_path: Path) -> None:
    """As where the disk is full: LLVM ends the process. What a process that lives is writing stays."""

    class Ended:
        def map(self, requests: Any, *, timeout: float) -> Any:
            killed_while_writing(tmp_path)
            yield Reply("crash", message="build-0 ended with exit status 1")

    problem = parse(TOPK)
    with scratch.folder(tmp_path) as other:
        with pytest.raises(CompileError, match="exit status 1"):
            build(
                [(problem, spaces.fallback(problem, machine.cpu()), "exact", {})],
                machine.cpu(),
                tmp_path,
                using=Ended(),
            )
        assert list(tmp_path.iterdir()) == [other]


def killed_while_writing(folder: Path) -> Path:
    """What is left of a process that was killed while it wrote a library there."""
    code = "import os, sys; from pathlib import Path; from tvm_sparse.core import scratch;"
    code += "block = scratch.written(Path(sys.argv[1]) / 'new.so'); path = block.__enter__();"
    code += "path.write_text('half'); print(path, flush=True); os._exit(9)"
    argv = [sys.executable, "-c", code, str(folder)]
    left = Path(subprocess.run(argv, capture_output=True, text=True).stdout.strip())
    assert left.read_text() == "half" and left.parent.parent == folder
    return left.parent


def test_a_later_export_removes_what_a_killed_one_left(exported: tuple[Path, Path], tmp_path: Path) -> None:
    logs, folder = exported
    shutil.copytree(folder, tmp_path / "again")
    names = {path.name for path in folder.iterdir()}
    killed_while_writing(tmp_path / "again")
    (tmp_path / "again" / f"{scratch.UNFINISHED}0a1b2c3d.so").touch()  # as versions before 7 of the manifest did
    export.export(machine.cpu(), tmp_path / "again", [logs])
    assert {path.name for path in (tmp_path / "again").iterdir()} == names


def test_an_export_into_a_folder_in_use_writes_over_no_file(
    exported: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has a file mapped, which is another one afterwards, keeps its own; the manifest is the last."""
    logs, folder = exported
    shutil.copytree(folder, again := tmp_path / "again")
    files = [path for path in again.rglob("*") if path.is_file()]
    for path in files:
        if path.name != manifest.NAME:
            path.write_bytes(b"of before")
    opened = {path: path.open("rb") for path in files}
    before = {path: path.read_bytes() for path in files}
    real, order = os.replace, []

    def replace(source: Any, target: Any) -> None:
        order.append(Path(target).relative_to(again).as_posix())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    export.export(machine.cpu(), again, [logs])
    for path, file in opened.items():
        assert file.read() == before[path], path
        file.close()
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {p.relative_to(again) for p in again.rglob("*")}
    assert order[-1] == manifest.NAME and "runtime/libtvm_runtime.so" in order
    # What is the same already is left alone.
    order.clear()
    export.export(machine.cpu(), again, [logs])
    assert not [name for name in order if name.startswith("runtime/")]


def test_an_export_that_fails_leaves_the_folder_as_it_was(exported: tuple[Path, Path], tmp_path: Path) -> None:
    logs, folder = exported
    shutil.copytree(folder, tmp_path / "again")
    tuned(
        tmp_path / "bad",
        "softmax_topk/batch=3,vocab=38,k=4",
        candidate=Candidate("row_scan", _version(), (("chunk", 7), ("simd", 8))),
    )
    with pytest.raises(CompileError, match="vocab=38.*chunk=7 is not among"):
        export.export(machine.cpu(), tmp_path / "again", [logs, tmp_path / "bad"])
    assert manifest.read(tmp_path / "again") == manifest.read(folder)
    for found in manifest.read(tmp_path / "again"):
        assert manifest.digest(tmp_path / "again" / found.library) == found.sha256


def _version() -> int:
    return spaces.find("row_scan").version


def test_records_that_mean_nothing_now_are_left_out(tmp_path: Path) -> None:
    tuned(tmp_path, TOPK)
    tuned(tmp_path, "softmax_topk/batch=3,vocab=38,k=4", version=1)
    tuned(tmp_path, "softmax_topk/batch=3,vocab=39,k=4", candidate=Candidate("gone", 1))
    tuned(tmp_path, "softmax_topk/batch=3,vocab=40,k=4", problem="softmax_topk/batch=3,words=40,k=4")
    tuned(tmp_path, "softmax_topk/batch=3,vocab=41,k=4", arch="sm_90a")
    assert list(best_records([tmp_path], ARCH)) == [TOPK]


def test_later_folders_win(tmp_path: Path) -> None:
    tuned(tmp_path / "a", TOPK)
    tuned(tmp_path / "b", TOPK, candidate=Candidate("row_scan", _version(), (("chunk", 128), ("simd", 8))))
    for order, chunk in (("ab", 128), ("ba", 64)):
        best, _ = best_records([tmp_path / name for name in order], ARCH)[TOPK]
        assert best.candidate.values["chunk"] == chunk


def test_nothing_to_export(tmp_path: Path) -> None:
    tuned(tmp_path / "logs", TOPK, arch="sm_90a")
    with pytest.raises(LookupError, match=re.escape(f"no record for {ARCH} in {tmp_path / 'logs'}; tune first")):
        export.export(machine.cpu(), tmp_path / "out", [tmp_path / "logs"])
    assert not (tmp_path / "out").exists()
