"""Arrays and a few numbers in one file: safetensors or npz, never pickle.

Both formats contain plain arrays, so reading a foreign file runs no code, and takes about as much memory as the file
has bytes: for a compressed npz file the expanded size is checked beforehand, from its directory. Readers check the
content.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ..core import npz_files, plain_files

SUFFIXES = (".safetensors", ".npz")
_META = "tvm_sparse"  # name of the entry with the numbers, as JSON
MOST_BYTES = 1 << 44


def write(path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a file in the format of its suffix; without one, safetensors if installed, else npz.

    Returns the path with its suffix. An existing file is replaced when the new one is complete.

    Raises
    ------
    ValueError
        For another suffix.
    ModuleNotFoundError
        For `.safetensors`, if that package is not installed.
    """
    if not path.suffix:
        path = path.with_suffix(SUFFIXES[0] if importlib.util.find_spec("safetensors") else SUFFIXES[1])
    _check_suffix(path)
    plain, text = _plain(arrays, meta)
    part = path.with_name(f"{path.name}.part")
    if path.suffix == SUFFIXES[0]:
        from safetensors.numpy import save_file

        save_file(plain, part, metadata={_META: text})
    else:
        with open(part, "wb") as file:
            _write_npz(file, plain, text)
    part.replace(path)
    return path


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a file written by `write`.

    Raises
    ------
    ValueError
        If it is not such a file.
    ModuleNotFoundError
        For `.safetensors`, if that package is not installed.
    """
    _check_suffix(path)
    try:
        if path.suffix == SUFFIXES[0]:
            from safetensors import safe_open

            plain_files.opened(path, MOST_BYTES).close()
            with safe_open(path, framework="numpy") as file:
                text = (file.metadata() or {})[_META]
                arrays = {name: file.get_tensor(name) for name in file.keys()}
        else:
            with plain_files.opened(path, MOST_BYTES) as opened:
                arrays, text = _read_npz(opened)
        return _given(arrays, text)
    except (ModuleNotFoundError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"{path}: not a file that `save` wrote: {type(error).__name__}: {error}") from error


def to_bytes(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bytes:
    """The content of an npz file, as bytes."""
    file = io.BytesIO()
    _write_npz(file, *_plain(arrays, meta))
    return file.getvalue()


def from_bytes(data: bytes, source: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Inverse of `to_bytes`.

    Raises
    ------
    ValueError
        If the bytes are not valid, naming the `source`.
    """
    try:
        return _given(*_read_npz(io.BytesIO(data)))
    except Exception as error:  # damaged bytes may raise anything
        raise ValueError(f"{source}: not what a layer is kept as: {type(error).__name__}: {error}") from error


def _plain(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], str]:
    """Arrays for a file, and `meta` as JSON: bfloat16 is stored as uint16, as not every version of a format has it."""
    bits = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    plain = {
        name: np.ascontiguousarray(array.view(np.uint16) if name in bits else array) for name, array in arrays.items()
    }
    return plain, json.dumps({**meta, "bfloat16": bits})


def _given(arrays: dict[str, np.ndarray], text: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Inverse of `_plain`."""
    meta = json.loads(text)
    for name in meta.pop("bfloat16"):
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    return arrays, meta


def _write_npz(file: Any, plain: Mapping[str, np.ndarray], text: str) -> None:
    entries: dict[str, Any] = {_META: np.frombuffer(text.encode(), np.uint8), **plain}
    np.savez(file, **entries)


def _read_npz(file: BinaryIO) -> tuple[dict[str, np.ndarray], str]:
    arrays = npz_files.read(file)
    return arrays, arrays.pop(_META).tobytes().decode()


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path: expected a name that ends in {' or '.join(SUFFIXES)}, got {path.name!r}")
