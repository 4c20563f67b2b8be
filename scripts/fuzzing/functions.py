"""Fuzzing every public function with nearly valid arguments."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from foreign import Foreign
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import tvm_sparse
from tvm_sparse.artifacts.manifest import ManifestError
from tvm_sparse.core.registry import parse
from tvm_sparse.formats import wta

from .readers import TOPK, small_head
from .report import SLOW, Report, found_error


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
    hashing = small_head().hashing
    return {"words": hashing.words, "table": hashing.table, "always": _integers(2, 2)}


# Valid arguments of each function, by name.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "softmax_topk": lambda: {"logits": _normal(7, 61), "k": 5, "log": False, "temperature": 1.0},
    "softmax": lambda: {"logits": _normal(7, 97), "algorithm": "online"},
    "log_softmax": lambda: {"logits": _normal(7, 97)},
    "logsumexp": lambda: {"logits": _normal(7, 97)},
    "softmax_sample": lambda: {
        "logits": _normal(7, 61), "temperature": 1.0, "top_k": 8, "top_p": 0.9, "min_p": 0.0, "seed": 3, "offset": 0,
    },
    "edit_logits": lambda: {
        "logits": _normal(7, 61), "seen_ids": _integers(61, 7, 4), "generated": _integers(3, 7, 4),
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    },
    "bsr_matmul": lambda: {"x": _normal(7, 66), "weight": _blocks(), "bias": None, "activation": None},
    "csr_linear": lambda: {"x": _normal(7, 50), "weight": _rows(), "validate": False},
    "nhot_lookup": lambda: {
        "csr": _rows(), "table": _normal(50, 33), "mode": "sum", "padding_idx": 3, "validate": False,
    },
    "head_topk": lambda: {"hidden": _normal(7, 16), "embedding": _normal(61, 16), "k": 5, "log": False},
    "candidate_topk": lambda: {
        "hidden": _normal(7, 16), "embedding": _normal(61, 16), "candidates": _lists(), "n": 4, "log": True,
    },
    "candidate_logits": lambda: {"hidden": _normal(7, 16), "embedding": _normal(61, 16), "candidates": _lists()},
    "wta_hash": lambda: {"hidden": _normal(7, 16), "permutations": wta.permutations(16, 2, 2, 5, 0)},
    "compaction": lambda: {"chosen": _integers(2**31 - 1, 3, 4), "vocab": 100, "capacity": 40},
    "lsh_lookup": lambda: {"codes": _integers(4, 2, 3, 3), **_tables(), "threshold": 2, "validate": True},
    "lsh_candidates": lambda: {
        "hidden": _normal(2, 3, 8), "permutations": small_head().hashing.permutations, **_tables(), "threshold": 2,
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
# The documented errors of calls; a LoadError means that a kernel is not available.
RAISED = (TypeError, ValueError, MemoryError, tvm_sparse.Miss, ManifestError)
ODD = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**30, 0.5, -0.5, float("nan"), float("inf"), "", "x", "relu",
    b"x", [], {}, (), [1.0], object(), np.float32(2), np.int64(3), np.array(2.0), np.zeros((0,)),
    np.array("x"), np.array([object()]),
)  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64")


def changed_array(array: np.ndarray, draw: Callable[[Any], Any]) -> Any:
    """The same array with other values, or with another layout, library, dtype or shape."""
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
        return array  # PyTorch does not have it
    import torch

    tensor = torch.from_numpy(array.copy())  # with one element, strides may be negative otherwise
    return tensor if how == 14 else torch.empty((array.shape[0], 0)) if array.ndim else tensor


@st.composite
def calls(draw: Callable[[Any], Any], name: str) -> dict[str, Any]:
    """The arguments of a call: valid ones, with up to three of them changed."""
    given = CALLS[name]()
    # Invalid tables that are not checked cause reads out of bounds, as documented.
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
    """The part of an argument that is read: arrays as contiguous NumPy copies."""
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
    """Run one case: compare the call with one on plain copies."""
    function = getattr(tvm_sparse, name)
    try:
        before = {key: _bits(_plain(value)) for key, value in given.items()}
    except (TypeError, ValueError):  # lists of unequal lengths, for example, which cannot become an array
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
    # A dense product of another layout is summed in another order; repeated calls accept True for 1.
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
            found_error(report, error, repr(arguments)[:2000])
        if time.process_time() - begun > SLOW:
            found_error(report, TimeoutError(f"took {time.process_time() - begun:.0f} s"), repr(arguments)[:2000])

    run()
    report.seconds = time.monotonic() - started
    return report


def functions(names: list[str], cases: int, seed: int, last: Path, kernels: bool) -> Iterator[Report]:
    """Test every function in turn; with `kernels` valid calls are compiled first, otherwise they raise `Miss`."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        for one in names if kernels else ():
            if one not in ("load", "configure", "warmup"):
                getattr(tvm_sparse, one)(**CALLS[one]())
        for one in names:
            tvm_sparse.configure(policy="any", compile=False)
            yield property_based(one, cases, seed, last)
