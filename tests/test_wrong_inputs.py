"""What takes a matrix, an embedding or a module says of every other kind of input what it is, and what was expected."""

from __future__ import annotations

import inspect
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import tvm_sparse

torch = pytest.importorskip("torch")
nn = tvm_sparse.nn

# Whatever takes one of these as its first argument, with what else it needs. Parts of a structure have their own names.
BSR, CSR = ("data", "indices", "indptr"), ("indptr", "indices", "values")
DENSE = np.eye(8, dtype=np.float32)
TAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "BsrWeight": (tvm_sparse.BsrWeight, {}, BSR),
    "CsrRows": (tvm_sparse.CsrRows, {}, CSR),
    "RecurrentWeights": (tvm_sparse.recurrent_weights, {}, ()),
    "BlockRecurrentWeights": (tvm_sparse.block_recurrent_weights, {}, ()),
    "SparseRNN": (tvm_sparse.SparseRNN, {}, ()),
    "SparseLSTM": (tvm_sparse.SparseLSTM, {}, ()),
    "SparseGRU": (tvm_sparse.SparseGRU, {}, ()),
    "LshHead": (tvm_sparse.LshHead, {}, ()),
    "LmHead": (tvm_sparse.LmHead, {}, ()),
    "QuantizedEmbedding": (tvm_sparse.QuantizedEmbedding, {"scales": DENSE[:, :1]}, ()),
    "quantize_embedding": (tvm_sparse.quantize_embedding, {}, ()),
    "ScreenedHead": (tvm_sparse.ScreenedHead, {}, ()),
    "RecurrentStack": (tvm_sparse.RecurrentStack, {"inputs": []}, ()),
    "GradualPruning": (tvm_sparse.GradualPruning, {"schedule": lambda _: None}, ()),
    "BsrLinear": (nn.BsrLinear, {}, BSR),
    "BsrLinear.from_dense": (nn.BsrLinear.from_dense, {}, ()),
    "BsrLinear.from_torch": (nn.BsrLinear.from_torch, {}, ()),
    "NHotEmbeddingBag.from_torch": (nn.NHotEmbeddingBag.from_torch, {}, ()),
    "NHotEmbeddingBags.from_torch": (nn.NHotEmbeddingBags.from_torch, {}, ()),
    "EmbeddingTables": (tvm_sparse.EmbeddingTables, {"sizes": (3, 5)}, ()),
    "LmHead.replace": (tvm_sparse.LmHead.replace, {}, ()),
    "from_torch": (tvm_sparse.from_torch, {}, ()),
    "prune": (tvm_sparse.prune, {"density": 0.5}, ()),
    "pruning_mask": (tvm_sparse.pruning_mask, {"density": 0.5}, ()),
}
# Public classes that are not made of such an argument.
OTHERS = {"Explanation", "Miss", "NHotEmbeddingBag", "NHotEmbeddingBags", "SampleDetails"}


class Frame:
    """What looks like a DataFrame of pandas."""

    shape, values = (8, 8), DENSE

    def to_numpy(self) -> Any:
        return DENSE


def sparse_tensor(layout: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        dense = torch.from_numpy(DENSE)
        return dense.to_sparse(layout=getattr(torch, layout), **({"blocksize": (2, 2)} if "bs" in layout else {}))


INPUTS: dict[str, Callable[[], Any]] = {
    "path": lambda: "m.smtx",
    "long path": lambda: "/somewhere/" * 40,
    "bytes": lambda: b"m.npz",
    "pathlib": lambda: pathlib.Path("m.mtx"),
    "texts": lambda: ["a", "b", "c"],
    "numbers": lambda: [[1.0, 0.0], [0.0, 1.0]],
    "nothing": lambda: [],
    "three paths": lambda: ("a.npy", "b.npy", "c.npy"),
    "frame": Frame,
    "None": lambda: None,
    "number": lambda: 3,
    "class": lambda: torch.nn.Linear,
    "dict": lambda: {"data": DENSE},
    "set": lambda: {1, 2, 3},
    "function": lambda: len,
    "module": lambda: torch.nn.Conv1d(3, 3, 1),
    "array of texts": lambda: np.array([["a", "b"], ["c", "d"]]),
    "array of objects": lambda: np.array([[None, None], [None, None]]),
    "array of complex": lambda: DENSE.astype(complex),
    "array of integers": lambda: DENSE.astype(np.int32),
    "array of one dimension": lambda: DENSE[0],
    "array of no dimension": lambda: np.float32(3),
    "masked array": lambda: np.ma.masked_array(DENSE, DENSE == 0),
    "complex tensor": lambda: torch.eye(8, dtype=torch.complex64),
    "meta tensor": lambda: torch.eye(8, device="meta"),
    **{f"scipy {form}": lambda form=form: scipy.sparse.eye_array(8, format=form) for form in
       ("coo", "csc", "csr", "bsr", "dia", "dok", "lil")},
    **{f"torch {layout}": lambda layout=layout: sparse_tensor(layout) for layout in
       ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")},
}  # fmt: skip
# What is right for some.
RIGHT = {
    "BsrWeight": {"torch sparse_bsr", "three arrays"},
    "CsrRows": {"torch sparse_csr"},
    "BsrLinear": {"torch sparse_bsr"},
    "BsrLinear.from_torch": {"torch sparse_bsr"},
    **{
        name: {one for one in INPUTS if one.startswith(("scipy", "torch sparse"))}
        for name in ("RecurrentWeights", "BlockRecurrentWeights", "SparseRNN")
    },
}


def test_every_public_class_is_asked() -> None:
    public = {name: getattr(tvm_sparse, name) for name in tvm_sparse.__all__}
    public |= {name: getattr(nn, name) for name in nn.__all__}
    assert {name for name, value in public.items() if isinstance(value, type)} <= {*TAKERS, *OTHERS}


@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_given_is_named(taker: str) -> None:
    call, more, parts = TAKERS[taker]
    argument = next(iter(inspect.signature(call).parameters))
    for kind, make in INPUTS.items():
        if kind in RIGHT.get(taker, ()):
            continue
        given = make()
        with pytest.raises((TypeError, ValueError)) as caught:
            call(given, **more)
        message = str(caught.value)
        names = "|".join((argument, *parts))
        assert re.match(rf"({names}): ", message), (kind, message)
        assert "expected" in message or "filled" in message, (kind, message)
        assert "built-in method" not in message and len(message) < 400, (kind, message)
        if kind in ("path", "pathlib", "bytes"):
            assert "got" in message and type(given).__name__ in message, (kind, message)
            if taker in ("BsrWeight", "CsrRows", "SparseLSTM", "LshHead", "prune"):
                assert "m." in message and "read a file first" in message, (kind, message)
