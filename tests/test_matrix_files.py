"""Sparse matrices from files: read as they are, and refused with a reason where they are not what they claim."""

from __future__ import annotations

import dataclasses
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse

import tvm_sparse
from tvm_sparse.bench import measure
from tvm_sparse.cli.common import problem_of, structure_of
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.formats import matrix_files
from tvm_sparse.records import Log
from tvm_sparse.tuning.plans import make_plan
from tvm_sparse.tuning.session import tune
from tvm_sparse.tuning.workbench import NoValidRecord


def drawn(rows: int = 12, columns: int = 20, density: float = 0.2) -> Any:
    return scipy.sparse.random_array((rows, columns), density=density, format="csr", rng=np.random.default_rng(1))


def write_smtx(path: Path, matrix: Any) -> None:
    """As the Deep Learning Matrix Collection has it."""
    lines = (matrix.indptr, matrix.indices)
    sizes = f"{matrix.shape[0]}, {matrix.shape[1]}, {matrix.nnz}\n"
    path.write_text(sizes + "\n".join(" ".join(map(str, line)) for line in lines) + "\n")


def test_smtx_files(tmp_path: Path) -> None:
    matrix = drawn()
    write_smtx(path := tmp_path / "a.smtx", matrix)
    rows = tvm_sparse.CsrRows.from_file(path)
    assert rows.shape == (12, 20) and rows.values is None and rows.index == "int32"
    assert (rows.indptr == matrix.indptr).all() and (rows.indices == matrix.indices).all()
    weight = tvm_sparse.BsrWeight.from_file(path, (3, 4), dtype="bfloat16")
    wanted = matrix.toarray() != 0
    assert weight.block_shape == (3, 4) and (weight.to_dense().astype(bool) == wanted).all()
    blocks = wanted.reshape(4, 3, 5, 4).any((1, 3))
    assert weight.nnzb == blocks.sum() and weight.dtype == "bfloat16"


@pytest.mark.parametrize("field", ["real", "integer", "pattern"])
@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
def test_matrix_market_files(tmp_path: Path, field: str, symmetry: str) -> None:
    if (field, symmetry) == ("pattern", "skew-symmetric"):
        pytest.skip("ones have no sign")
    matrix = drawn(16, 16).toarray()
    if field == "integer":
        matrix = np.round(matrix * 9)
    if symmetry != "general":
        matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T * (-1 if "skew" in symmetry else 1)
    path = tmp_path / "a.mtx"
    given = scipy.sparse.coo_array(matrix.astype(int) if field == "integer" else matrix)
    scipy.io.mmwrite(path, given, comment="drawn\nat random", field=field, symmetry=symmetry)
    rows = tvm_sparse.CsrRows.from_file(path)
    found = scipy.sparse.csr_array(
        (np.ones(rows.nnz) if rows.values is None else rows.values, rows.indices, rows.indptr), shape=rows.shape
    ).toarray()
    np.testing.assert_allclose(found, matrix != 0 if field == "pattern" else matrix, rtol=1e-6)
    assert (rows.values is None) == (field == "pattern")
    np.testing.assert_allclose(tvm_sparse.BsrWeight.from_file(path, 4).to_dense(), found, rtol=1e-6)


def test_repeated_entries_are_added(tmp_path: Path) -> None:
    path = tmp_path / "a.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real general\n\n2 2 3\n1 2 1.5\n2 2 1\n1 2 2\n")
    assert tvm_sparse.BsrWeight.from_file(path, 1).to_dense().tolist() == [[0, 3.5], [0, 1]]


@pytest.mark.parametrize("kind", ["csr", "bsr"])
def test_npz_files(tmp_path: Path, kind: str) -> None:
    matrix = drawn()
    given = matrix if kind == "csr" else matrix.tobsr((3, 4))
    scipy.sparse.save_npz(path := tmp_path / "a.npz", given)
    weight = tvm_sparse.BsrWeight.from_file(path, (3, 4) if kind == "csr" else None)
    np.testing.assert_allclose(weight.to_dense(), matrix.toarray(), rtol=1e-6)
    if kind == "bsr":
        with pytest.raises(ValueError, match=r"a.npz is in blocks of 3x4, got 3"):
            tvm_sparse.BsrWeight.from_file(path, 3)
        with pytest.raises(ValueError, match=r"blocks of 3x4; use BsrWeight.from_file"):
            tvm_sparse.CsrRows.from_file(path)
    else:
        with pytest.raises(ValueError, match=r"^block: .*a.npz is not in blocks"):
            tvm_sparse.BsrWeight.from_file(path)
        with pytest.raises(ValueError, match=r"blocks of 5x4 do not divide the matrix's shape \(12, 20\)"):
            tvm_sparse.BsrWeight.from_file(path, (5, 4))
    with pytest.raises(ValueError, match="^dtype: expected float32, float16, bfloat16, got 'float64'"):
        tvm_sparse.BsrWeight.from_file(path, dtype="float64")


def test_tensors_from_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    matrix = drawn()
    scipy.sparse.save_npz(path := tmp_path / "a.npz", matrix)
    rows = tvm_sparse.CsrRows.from_file(path, dtype=torch.bfloat16, device="cpu")
    assert rows.values.dtype is torch.bfloat16 and rows.indices.dtype is torch.int32
    weight = tvm_sparse.BsrWeight.from_file(path, 4, dtype=torch.float16, device="cpu", constant=True)
    assert weight.constant and weight.data.dtype is torch.float16
    torch.testing.assert_close(weight.to_dense().double(), torch.from_numpy(matrix.toarray()), atol=1e-3, rtol=1e-3)


MARKET = "%%MatrixMarket matrix coordinate real general\n"
# By suffix: contents, and what is said of them.
HOSTILE: dict[str, tuple[tuple[str, str], ...]] = {
    ".smtx": (
        ("", "ends within its header"),
        ("2, 2\n0 1 2\n0 1\n", "a line with rows, columns and number of entries, got '2, 2'"),
        ("a, b, c\n", "a line with rows, columns"),
        ("2, 2, -1\n0 0 0\n\n", "no negative number"),
        ("99999999999, 2, 1\n0 1\n0\n", "at most 67,108,864 rows"),
        ("9" * 5000, "of its header has 1024 bytes or more"),
        ("2, 2, 99999999999\n0 1 2\n0 1\n", "columns: expected 99,999,999,999 numbers, got 2"),
        ("2, 2, 2\n0 1\n0 1\n", "row starts: expected 3 numbers, got 2"),
        ("2, 2, 2\n0 2 1\n0 1\n", "must start at 0 and end at 2"),
        ("3, 2, 2\n0 2 1 2\n0 1\n", "must never fall"),
        ("2, 2, 2\n0 1 2\n0 7\n", r"indices\[1\]=7 is outside \[0, 2\)"),
        ("2, 2, 2\n0 1 2\n0 -1\n", "outside"),
        ("2, 2, 2\n0 1 2\n0 99999999999999999999999\n", "outside|expected numbers"),
        ("2, 2, 2\n0 1 2\n0 x\n", "columns: expected numbers"),
        ("2, 2, 2\n0 1 2\n0 1.5\n", "columns: expected numbers"),
        ("2, 2, 2\n0 1 2\n0 \0\n", "columns: expected numbers"),
        ("2, 2, 2\n0 1 2\n0 é\n", "columns: expected numbers"),
    ),
    ".mtx": (
        ("2 2 1\n1 1 1\n", "does not begin with a line like"),
        (MARKET.replace("coordinate", "array"), "expected coordinates, .* got array real general"),
        (MARKET.replace("real", "complex"), "got coordinate complex general"),
        (MARKET.replace("general", "hermitian"), "hermitian"),
        (MARKET + "% only\n% comments\n", "ends within its header"),
        (MARKET + "2 2 9999999999\n1 1 1\n", "entries: expected 29,999,999,997 numbers, got 3"),
        (MARKET + "2 2 1\n0 1 1\n", "entry 1: expected a row from 1 to 2, got 0"),
        (MARKET + "2 2 1\n1 3 1\n", "entry 1: expected a column from 1 to 2, got 3"),
        (MARKET + "2 2 1\n1 1.5 1\n", "got 1.5"),
        (MARKET + "2 2 1\nnan 1 1\n", "got nan"),
        (MARKET + "2 2 1\n1 1 one\n", "entries: expected numbers"),
        (MARKET + "2000000000 2 0\n", "at most 67,108,864 rows"),
        (MARKET.replace("general", "symmetric") + "2 3 1\n1 1 1\n", "as many rows as columns"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("suffix", HOSTILE)
def test_hostile_texts_are_refused(tmp_path: Path, suffix: str) -> None:
    for number, (content, said) in enumerate(HOSTILE[suffix]):
        path = tmp_path / f"{number}{suffix}"
        path.write_text(content)
        with pytest.raises(ValueError, match=said) as error:
            tvm_sparse.CsrRows.from_file(path)
        assert str(path) in str(error.value) and len(str(error.value)) < 1000, content


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    good = {"format": np.array(b"csr"), "shape": np.array([2, 2]), "data": np.ones(2), "indices": np.array([0, 1]),
            "indptr": np.array([0, 1, 2])}  # fmt: skip
    hostile: dict[str, tuple[dict[str, Any], str]] = {
        "another format": ({"format": np.array(b"coo")}, "expected CSR or BSR format"),
        "pickled": ({"data": np.array([1, "a"], object)}, "allow_pickle|pickle|Object arrays"),
        "complex": ({"data": np.ones(2, complex)}, "data: expected a number"),
        "flat": ({"data": np.ones((2, 1))}, "data: expected a number"),
        "reals": ({"indices": np.ones(2)}, "indices: expected one dimension of integers"),
        "outside": ({"indices": np.array([0, 2])}, "outside"),
        "short": ({"indptr": np.array([0, 2])}, "indptr: expected 3 entries"),
        "huge": ({"shape": np.array([1 << 40, 2])}, "below 2.31"),
        "negative": ({"shape": np.array([-1, 2])}, "below 2.31"),
        "blocks": ({"format": np.array(b"bsr"), "data": np.ones((2, 3, 1))}, "blocks of 3x1 do not divide"),
        "no blocks": ({"format": np.array(b"bsr"), "data": np.ones((2, 0, 1))}, "do not divide"),
    }
    for name, (change, said) in hostile.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **{**good, **change})
        with pytest.raises(ValueError, match=said) as error:
            tvm_sparse.BsrWeight.from_file(path, 1)
        assert str(path) in str(error.value)
    np.savez(path := tmp_path / "less.npz", **{name: good[name] for name in good if name != "shape"})
    with pytest.raises(ValueError, match="expected CSR or BSR format"):
        tvm_sparse.BsrWeight.from_file(path, 1)
    with zipfile.ZipFile(path := tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", bytes(1 << 28))
    with pytest.raises(ValueError, match="expand to"):
        tvm_sparse.BsrWeight.from_file(path, 1)


def test_what_is_no_plain_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.smtx")
    with pytest.raises(ValueError, match="pipe.smtx: is not a plain file"):
        tvm_sparse.CsrRows.from_file(tmp_path / "pipe.smtx")
    with pytest.raises(ValueError, match="a.txt: expected a name that ends in .smtx, .mtx, .npz"):
        tvm_sparse.CsrRows.from_file(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        tvm_sparse.CsrRows.from_file(tmp_path / "none.mtx")
    write_smtx(path := tmp_path / "a.smtx", drawn())
    monkeypatch.setattr(matrix_files, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="expected at most 10"):
        tvm_sparse.CsrRows.from_file(path)


@pytest.mark.parametrize("suffix", [".smtx", ".mtx", ".npz"])
def test_damaged_files_end_in_an_error_or_in_a_valid_matrix(tmp_path: Path, suffix: str) -> None:
    """Bytes are replaced, left out or repeated, at drawn places."""
    rng, matrix, path = random.Random(seed := random.SystemRandom().randrange(2**32)), drawn(), tmp_path / f"a{suffix}"
    writers: dict[str, Callable[[], Any]] = {
        ".smtx": lambda: write_smtx(path, matrix),
        ".mtx": lambda: scipy.io.mmwrite(path, matrix),
        ".npz": lambda: scipy.sparse.save_npz(path, matrix, compressed=False),
    }
    writers[suffix]()
    good = path.read_bytes()
    for _ in range(150):
        content = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at, many = rng.randrange(len(content)), rng.choice((1, 1, 7))
            content[at : at + many] = rng.choice((b"", bytes([rng.randrange(256)]), b"9", content[at : at + 20]))
        path.write_bytes(content)
        try:
            rows = tvm_sparse.CsrRows.from_file(path)
        except ValueError as error:
            assert str(path) in str(error) or "columns" in str(error), seed
        else:
            rows.validate()


# ---- problems with the structure of a file ---------------------------------------------------------


def skewed_file(path: Path) -> Any:
    """The first rows are nearly full, and few others have an entry."""
    matrix = np.zeros((192, 40))
    matrix[:3, :36] = 1
    matrix[40, 7] = matrix[100, 39] = 1
    found = scipy.sparse.csr_array(matrix)
    scipy.sparse.save_npz(path, found)
    return found


def test_a_problem_has_the_structure_of_a_file(tmp_path: Path) -> None:
    matrix = skewed_file(path := tmp_path / "a.npz")
    blocks = matrix.toarray().reshape(64, 3, 10, 4).any((1, 3))
    axes = ["m=5", f"structure={path}"]
    for operator, more, found in (
        ("bsr_matmul", ["block=3x4"], f"block=3x4,sparsity={1 - blocks.mean():.2f},pattern=skewed,"),
        ("bsr_sddmm", ["block=3x4"], f"block=3x4,sparsity={1 - blocks.mean():.2f},pattern=skewed,"),
        ("csr_linear", [], f"sparsity={1 - matrix.nnz / (192 * 40):.2f},"),
    ):
        problem, structure = problem_of(operator, axes + more), structure_of(axes + more)
        assert problem.key.startswith(f"{operator}/m=5,k=40,n=192,{found}")
        inputs = problem.generate(1, structure)
        named = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
        wanted = scipy.sparse.csr_array(blocks if more else matrix)
        assert (named["indptr"] == wanted.indptr).all() and (named["indices"] == wanted.indices).all()
        problem.check(inputs, problem.reference(inputs), problem.reference(inputs))
        assert measure.prepared(problem, 1, "llvm", structure)[1].name.startswith(structure)


def test_the_axes_of_a_file_in_blocks_are_its_own(tmp_path: Path) -> None:
    blocks = scipy.sparse.bsr_array(skewed_file(tmp_path / "a.npz"), blocksize=(3, 4))
    scipy.sparse.save_npz(path := tmp_path / "b.npz", blocks)
    assert "block=3x4" in problem_of("bsr_matmul", ["m=5", f"structure={path}"]).key
    assert structure_of(["m=5"]) is None


WRONG_STRUCTURES = {
    "no file can hold that of softmax": ("softmax", "rows=3 structure={path}"),
    "k comes from the file of structure": ("csr_linear", "m=5 k=40 structure={path}"),
    "is not in blocks; expected": ("bsr_matmul", "m=5 structure={path}"),
    "do not divide the matrix's shape": ("bsr_matmul", "m=5 block=16 structure={path}"),
    "block must be like 16": ("bsr_matmul", "m=5 block=no structure={path}"),
    "c.npz: No such file": ("csr_linear", "m=5 structure={path.parent}/c.npz"),
    "expected a name that ends in": ("csr_linear", "m=5 structure={path}.txt"),
}


@pytest.mark.parametrize("reason", WRONG_STRUCTURES)
def test_a_structure_that_does_not_fit_is_refused(reason: str, tmp_path: Path) -> None:
    skewed_file(path := tmp_path / "a.npz")
    operator, axes = WRONG_STRUCTURES[reason]
    with pytest.raises(ProblemError, match=reason):
        problem_of(operator, axes.format(path=path).split())


def test_the_process_that_measures_reads_the_file(tmp_path: Path) -> None:
    """As a file that has changed since the plan was made shows."""
    skewed_file(path := tmp_path / "a.npz")
    axes = ["m=5", f"structure={path}"]
    problem = problem_of("csr_linear", axes)
    log = Log(tmp_path / "logs", cpu().arch, problem.operator)
    plan = dataclasses.replace(make_plan(problem, cpu(), 1, log, builders=1), structure=structure_of(axes))
    scipy.sparse.save_npz(path, drawn())
    with pytest.raises(NoValidRecord, match=r"has shape \(12, 20\); expected \(192, 40\)"):
        tune(plan, log)
    (session,) = log.read().sessions
    assert session.inputs["structure"] == "file:a.npz"
