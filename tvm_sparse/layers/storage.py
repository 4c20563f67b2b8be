"""Arrays and a few numbers in one file: safetensors or npz, never pickle.

Both formats hold plain arrays, so that a file from somebody else runs no code when it is read. What it says is checked
by who reads it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SUFFIXES = (".safetensors", ".npz")
_META = "tvm_sparse"  # the entry that holds the numbers, as JSON


def write(path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
    """Write a file of the format that its suffix names; without one safetensors if installed, else npz.

    Returns the path with its suffix. A file that is there is replaced once the new one is whole.

    Raises
    ------
    ValueError
        For another suffix.
    ModuleNotFoundError
        For `.safetensors` where that package is not installed.
    """
    if not path.suffix:
        path = path.with_suffix(SUFFIXES[0] if importlib.util.find_spec("safetensors") else SUFFIXES[1])
    _check_suffix(path)
    bits = [name for name, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    # As their bits: neither format's NumPy side knows bfloat16 in every version.
    plain = {
        name: np.ascontiguousarray(array.view(np.uint16) if name in bits else array) for name, array in arrays.items()
    }
    text = json.dumps({**meta, "bfloat16": bits})
    part = path.with_name(f"{path.name}.part")
    if path.suffix == SUFFIXES[0]:
        from safetensors.numpy import save_file

        save_file(plain, part, metadata={_META: text})
    else:
        with open(part, "wb") as file:
            entries: dict[str, Any] = {_META: np.frombuffer(text.encode(), np.uint8), **plain}
            np.savez(file, **entries)
    part.replace(path)
    return path


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What `write` wrote.

    Raises
    ------
    ValueError
        If it is no such file.
    ModuleNotFoundError
        For `.safetensors` where that package is not installed.
    """
    _check_suffix(path)
    try:
        if path.suffix == SUFFIXES[0]:
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                text = (file.metadata() or {})[_META]
                arrays = {name: file.get_tensor(name) for name in file.keys()}
        else:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            text = arrays.pop(_META).tobytes().decode()
        meta = json.loads(text)
        for name in meta.pop("bfloat16"):
            arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    except (ModuleNotFoundError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(f"{path}: not a file that `save` wrote: {type(error).__name__}: {error}") from error
    return arrays, meta


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"path: expected a name that ends in {' or '.join(SUFFIXES)}, got {path.name!r}")
