"""Files of shapes and of layers from somebody else: what they cost is bounded, and the error names file and bound."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tvm_sparse.core import plain_files, shape_files
from tvm_sparse.core.shape_files import MOST_BYTES, MOST_NESTING, MOST_PARTS, MOST_PROBLEMS, ShapesError
from tvm_sparse.layers import storage

# Of a hostile file in a process of its own, which is killed beyond these; imports take some of both.
SECONDS, MEMORY = 30, 2 << 30
HEAD = "[[softmax_topk]]\nbatch = 1\nvocab = 100\nk = 5\n"

READ = """
import resource, sys
from pathlib import Path
from tvm_sparse.core import shape_files
from tvm_sparse.layers import storage
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
for name in sys.argv[3:]:
    try:
        (shape_files.read if name.endswith("toml") else storage.read)(Path(name))
        print("taken")
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""


def read(*paths: Path) -> list[str]:
    """What becomes of files, in a process with little memory and time: an error's text, or `taken`."""
    argv = [sys.executable, "-c", READ, str(MEMORY), str(SECONDS), *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10 * SECONDS)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    said = done.stdout.splitlines()
    assert len(said) == len(paths)
    for path, text in zip(paths, said, strict=True):
        assert text == "taken" or str(path) in text
        assert len(text) < 3000
    return said


def deep(rng: random.Random) -> str:
    """Brackets within each other, with what the parser skips between them."""
    count = rng.choice((MOST_NESTING + 1, 300, 20_000, 100_000))
    opening, closing = rng.choice((("[", "]"), ("{a=", "}"), ("[{a=[", "]}]")))
    count = min(count, MOST_BYTES // 3 // (len(opening) + len(closing)))
    return opening * count + "1" + closing * count if rng.random() < 0.7 else opening * count


def dotted(rng: random.Random) -> str:
    """A key of many parts: bare, in quotes, with space."""
    count = rng.choice((MOST_PARTS + 1, 3000, 50_000))
    return rng.choice((".", " . ", "\t.")).join([rng.choice(("a", '"a"', "'a'", '"a.b"'))] * count)


def skipped(rng: random.Random) -> str:
    """A value whose end is not where it may seem to be."""
    quotes = rng.choice(("'", '"'))
    return rng.choice((
        f"{quotes}[.{quotes}", f"{quotes * 3}\n[{quotes}\n{quotes * 3}", quotes * 7, f"{quotes * 3}a{quotes * 5}",
        f"{quotes * 3}{'#' if quotes == chr(39) else chr(92) + quotes}{quotes * 3}", "1 # [[[ ''' \"\"\"\n",
    ))  # fmt: skip


KINDS: dict[str, tuple[Callable[[random.Random], str], str]] = {
    "deep": (lambda rng: f"a = {deep(rng)}\n", "more than 16 deep|not TOML"),
    "deep after a text": (lambda rng: f"a = [{skipped(rng)}, {deep(rng)}]\n", "more than 16 deep|not TOML"),
    "deep header": (lambda rng: f"[{dotted(rng)}]\n", "parts; expected at most 8|not TOML"),
    "dotted": (lambda rng: f"{HEAD}{dotted(rng)} = 1\n", "parts; expected at most 8|not TOML"),
    "dotted after a text": (
        lambda rng: f"a = {{b = {skipped(rng)}, {dotted(rng)} = 1}}\n", "parts; expected at most 8|not TOML",
    ),
    "many tables": (
        lambda rng: "".join(
            f"[[softmax_topk]]\nbatch = [{'1,' * 300}]\nvocab = [{'9,' * 300}]\nk = 5\n" for _ in range(200)
        ),
        "its 200 tables mean 18,000,000 problems; expected at most 100,000 in a file",
    ),
    "one table": (lambda rng: HEAD.replace("5", f"[{'5,' * (MOST_PROBLEMS + 1)}]"), "mean 100,001 problems"),
    "long texts": (
        lambda rng: f"{HEAD}a = {rng.choice((chr(39), chr(34)))}" + rng.choice(('\\"', "'\"", "x")) * 300_000,
        "not TOML|unknown axis",
    ),
    "large numbers": (lambda rng: HEAD.replace("100", "0x" + "f" * 900_000), "below 2.48|vocab"),
    "many keys": (lambda rng: HEAD + "".join(f"k{i} = 1\n" for i in range(90_000)), "unknown axis 'k0'"),
    "a large value": (lambda rng: f"softmax_topk = '{'x' * 900_000}'", r"got 'xxx.*\.\.\."),
    "a large list": (lambda rng: f"{HEAD}dtype = [{{a = [{'1,' * 400_000}]}}]", r"dtype: expected .* got .*\.\.\."),
    "bytes": (lambda rng: "\0" * 1000, "not TOML"),
}  # fmt: skip


def test_drawn_files_of_shapes_end_in_an_error_within_bounds(tmp_path: Path) -> None:
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    paths, expected = [], []
    for kind, (make, said) in KINDS.items():
        for number in range(2):
            paths.append(tmp_path / f"{kind} {number}.toml")
            paths[-1].write_text(make(rng))
            assert paths[-1].stat().st_size <= MOST_BYTES, kind
            expected.append(said)
    for path, text, said in zip(paths, read(*paths), expected, strict=True):
        assert re.search(said, text), (seed, path.name, text)


def test_what_is_no_plain_file_or_too_large_is_refused(tmp_path: Path) -> None:
    pipe, device, large = (tmp_path / f"{name}.toml" for name in ("pipe", "device", "large"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    large.touch()
    os.truncate(large, 1 << 40)
    layers = [path.with_suffix(suffix) for path in (pipe, device) for suffix in storage.SUFFIXES]
    for path in layers:
        os.mkfifo(path) if path.stem == "pipe" else path.symlink_to("/dev/zero")
    paths = (pipe, device, *layers, large)
    for path, text in zip(paths, read(*paths), strict=True):
        assert ("expected at most 1048576" if path == large else "is not a plain file") in text
    with pytest.raises(ShapesError, match="Is a directory|is a directory"):
        shape_files.read(tmp_path)


def test_good_files_of_shapes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shapes.toml"
    path.write_bytes(
        b"# [[[[ ''' \"\"\"\r\n[[softmax_topk]]\r\n"
        b"batch = [1, 10]\r\nvocab = 100 # 'a.b.c\r\nk = [\r\n  5,\r\n  50,]\r\n"
        b'[softmax]\nbatch = 3\nvocab = 0x10\n"dtype" = """\\\n   float16"""\n'
    )
    keys = [problem.key for problem in shape_files.read(path)]
    assert len(keys) == 5 and keys[-1].startswith("softmax/batch=3,vocab=16,") and "dtype=float16" in keys[-1]
    monkeypatch.setattr(shape_files, "MOST_PROBLEMS", 100)
    for count in (100, 101):
        path.write_text(HEAD.replace("1\n", f"[{','.join(map(str, range(1, count + 1)))}]\n", 1))
        if count == 100:
            assert len(shape_files.read(path)) == 100
        else:
            with pytest.raises(ShapesError, match="mean 101 problems; expected at most 100"):
                shape_files.read(path)


# ---- layers --------------------------------------------------------------------------------------


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def array(shape: tuple[int, ...], content: bytes, version: tuple[int, int] = (1, 0)) -> bytes:
    """What NumPy writes of an array of bytes with this shape, whatever it holds."""
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    (np.lib.format.write_array_header_1_0 if version == (1, 0) else np.lib.format.write_array_header_2_0)(file, header)
    return file.getvalue() + content


def test_npz_files_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    gigabytes = 2 << 30
    numbers = array((2,), b"{}")
    hostile = {
        "compressed": (zipped({"a": array((gigabytes,), bytes(gigabytes >> 2)) }), "expand to"),
        "claimed": (zipped({"a": array((1 << 40,), b"x"), "tvm_sparse": numbers}), "claims 1,099,511,627,776 bytes"),
        "negative": (zipped({"a": array((-(1 << 40), -1), b"x"), "tvm_sparse": numbers}), "claims|negative|array"),
        "many": (zipped({f"a{i}": b"" for i in range(20_000)}), "20,000 arrays; expected at most 10,000"),
        "another version": (zipped({"a": array((1,), b"x", (2, 0))}), "version 1.0"),
        "no array": (zipped({"a": b"x" * 100}), "magic"),
        "no archive": (b"x" * 1000, "zip"),
    }  # fmt: skip
    paths = []
    for name, (content, _) in hostile.items():
        paths.append(tmp_path / f"{name}.npz")
        paths[-1].write_bytes(content)
    for path, text in zip(paths, read(*paths), strict=True):
        assert re.search(hostile[path.stem][1], text), (path.stem, text)
        with pytest.raises(ValueError, match=hostile[path.stem][1]):
            storage.from_bytes(path.read_bytes(), "state")


def test_an_npz_file_that_was_compressed_later_is_read(tmp_path: Path) -> None:
    given = {"a": np.zeros(1 << 20, np.float32), "b": np.arange(5)}
    path = storage.write(tmp_path / "layer.npz", given, {"k": 1})
    with np.load(path) as found:
        np.savez_compressed(tmp_path / "again.npz", **found)
    assert (tmp_path / "again.npz").stat().st_size < path.stat().st_size / 16
    for one in (path, tmp_path / "again.npz"):
        arrays, meta = storage.read(one)
        assert meta == {"k": 1} and all((arrays[name] == given[name]).all() for name in given)


def test_plain_files_leave_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/dev/fd"))
    for path, most in ((tmp_path, 10), (tmp_path / "pipe", 10), (tmp_path / "file", 6), (tmp_path / "none", 1)):
        with pytest.raises(OSError):
            plain_files.opened(path, most)
    with plain_files.opened(tmp_path / "file", 7) as file:
        assert file.read() == b"content"
    assert len(os.listdir("/dev/fd")) == before
