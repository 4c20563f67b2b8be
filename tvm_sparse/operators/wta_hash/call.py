"""The public call of winner-take-all hashing."""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.problem import FLOATS, ProblemError
from tvm_sparse.formats import wta
from tvm_sparse.runtime import arrays, repeat
from tvm_sparse.runtime.calls import (
    check_floats,
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Array, Number, Output, Signature

from .problem import WtaHash

SIGNATURES = {
    "wta_hash": Signature(
        ("hidden", Array(("batch", "hidden"), FLOATS)),
        ("permutations", Array(("bands", "units", "k"), ("int16",), below="hidden")),
        ("validate", Number("bool")),
        outputs=(Output("codes"),),
        operator=False,
    )
}


def wta_hash(hidden: Any, permutations: Any, *, out: Any = None, validate: bool = False) -> Any:
    """Band codes of hidden states by winner-take-all hashing: rows that order their columns alike get equal codes.

    codes[i, w] = sum_u I[i, w, u] * 2^(bits * (units - 1 - u)),  bits = ceil(log2(k)),
    I[i, w, u] = arg max_j hidden[i, permutations[w, u, j]], the first of equals; NaN counts as -inf.

    Parameters
    ----------
    hidden
        Shape `(batch, hidden)`; float32, float16 or bfloat16. A torch tensor on CPU or CUDA, a NumPy array, or another
        DLPack array. Copied first if it is not contiguous, or not aligned to 16 bytes on a GPU.
    permutations
        Shape `(bands, units, k)`, int16, columns in [0, hidden), on the same device: drawn by
        `formats.wta.permutations`. A code has units * bits bits, at most 30.
    out
        `(batch, bands)` int32 array to write into, contiguous and on the same device.
    validate
        Also check permutations on a GPU, which costs a synchronisation; on the host they are always checked. Invalid
        columns that are not checked cause reads out of bounds.

    Returns
    -------
    codes
        `(batch, bands)` int32.

    Raises
    ------
    TypeError
        If an argument is not an array.
    ValueError
        For another rank, dtype or device, a code of more than 30 bits, columns out of range, or an `out` that does not
        fit.
    RuntimeError
        If `hidden` requires a gradient: a hash has none.

    Notes
    -----
    Source: Yagnik et al. 2011, "The power of comparative reasoning"; Shi, Xu & Knight 2018, equations 4 to 8.
    """
    found = None if validate else repeat.again(dispatcher.launchers, "wta_hash", (hidden, permutations), out)
    if found is not None:
        return found

    known = arrays.facts("hidden", hidden)
    check_floats("hidden", known, rank=2)
    refuse_gradient("hidden", hidden)
    where = SIGNATURES["wta_hash"].beside("permutations", permutations, known, "hidden is")
    batch, columns = known.shape
    bands, units, k = where[1].shape
    if where[1].device == "cpu" or validate:
        wta.check_permutations(arrays.as_numpy(permutations), columns)
    [result] = outputs_for(out, (("out", (batch, bands), "int32"),), hidden, known)
    SIGNATURES["wta_hash"].refuse_overlap(out, hidden=hidden, permutations=permutations)
    if batch:
        try:
            problem = WtaHash(batch, columns, k, units, bands, known.dtype)
        except ProblemError as error:
            raise ValueError(f"permutations: {error}") from None
        ready = arrays.ready("hidden", hidden, known), arrays.ready("permutations", permutations, where[1])
        kept = known.device != "cpu" or None  # permutations on the host are checked at every call
        launch(dispatcher, problem, machine_of("hidden", known), "wta_hash", ready, (result,), single=True, kept=kept)
    return out if out is not None else arrays.returned(result, hidden)
