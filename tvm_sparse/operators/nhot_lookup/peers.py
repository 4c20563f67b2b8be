"""Peers of `nhot_lookup`, and the public call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.formats.quantized import QuantizedEmbedding

from .call import EmbeddingTables, nhot_lookup
from .problem import NhotLookup
from .rows import CsrRows


def _nhot_tensors(problem: NhotLookup, inputs: Sequence[Any], device: str) -> tuple[Any, Any, Any, Any]:
    """indptr, indices, values or None, and the table, in the result's dtype, on the device."""
    given = problem.named(inputs)
    table = given.table
    if problem.stored:
        table = QuantizedEmbedding.of_octets(table, given.scales, problem.stored).dequantized()
        table = table.astype(numpy_dtype(problem.dtype))
    arrays = (given.indptr, given.indices, given.values, table)
    return tuple(None if one is None else torch_tensor(one, device) for one in arrays)  # type: ignore[return-value]


def _refuse_bags(problem: NhotLookup) -> None:
    if not problem.plain:
        raise ValueError("a product is a sum of all entries of one dense table")


def _torch_embedding_bag(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    """Of several tables a call for each, and their results side by side."""
    import torch

    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    given = problem.named(inputs)
    first_rows = [0] if problem.tables == 1 else given.first_rows.tolist()
    bags = (len(indptr) - 1) // problem.tables
    calls = []
    for number, (first, last) in enumerate(itertools.pairwise([*first_rows, len(table)])):
        starts = indptr[number * bags : (number + 1) * bags + 1]
        own = slice(int(starts[0]), int(starts[-1]))
        arrays = indices[own], table[first:last], starts - starts[0]
        options = {"mode": problem.mode, "padding_idx": given.padding, "include_last_offset": True}
        if given.padding is not None and given.padding >= last - first:
            options["padding_idx"] = None
        options["per_sample_weights"] = None if values is None else values[own]
        calls.append(functools.partial(torch.nn.functional.embedding_bag, *arrays, **options))
    return calls[0] if problem.tables == 1 else lambda: torch.cat([call() for call in calls], 1)


def _torch_embedding(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import torch

    _refuse_bags(problem)
    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    if values is not None or not bool((torch.diff(indptr) == 1).all()):
        raise ValueError("an embedding has one entry a row, without a value")
    return lambda: torch.nn.functional.embedding(indices, table)


def _torch_csr(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import warnings

    import torch

    _refuse_bags(problem)
    indptr, indices, values, table = _nhot_tensors(problem, inputs, device)
    if values is None:
        values = torch.ones(len(indices), dtype=table.dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        a = torch.sparse_csr_tensor(indptr, indices, values, size=(len(indptr) - 1, problem.vocab))
    return lambda: a @ table


def _dense_rows(problem: NhotLookup, inputs: Sequence[Any]) -> Any:
    """The sparse rows in the inputs as a dense `(rows, vocab)` array."""
    import numpy as np

    _refuse_bags(problem)
    indptr, indices, *values, table = inputs
    dense = np.zeros((len(indptr) - 1, problem.vocab), np.float32)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    np.add.at(dense, (rows, indices), values[0].astype(np.float32) if values else np.float32(1))
    return dense.astype(table.dtype)


def _torch_dense_rows(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    a, table = torch_tensor(_dense_rows(problem, inputs), device), torch_tensor(inputs[-1], device)
    return lambda: a @ table


def _scipy_csr(problem: NhotLookup, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np
    import scipy.sparse

    _refuse_bags(problem)
    indptr, indices, *values, table = inputs
    if problem.dtype != "float32":
        raise TypeError(f"SciPy has no {problem.dtype}")
    data = values[0] if values else np.ones(len(indices), table.dtype)
    a = scipy.sparse.csr_array((data, indices, indptr), shape=(len(indptr) - 1, problem.vocab))
    return lambda: a @ table


def ours(problem: NhotLookup, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    import numpy as np

    given = problem.named([convert(one) if hasattr(one, "shape") else one for one in inputs])
    several = problem.tables > 1
    sizes = np.diff([*problem.named(inputs).first_rows, problem.vocab]).tolist() if several else ()
    rows = CsrRows((given.indptr, given.indices, given.values), columns=sizes or problem.vocab, validate=True)
    options: dict[str, Any] = {"mode": problem.mode, "padding_idx": given.padding, "dtype": problem.dtype}
    table = given.table
    if problem.stored:
        table = QuantizedEmbedding.of_octets(table, given.scales, problem.stored)
    if several:
        table = EmbeddingTables(table, sizes)
    axes = {name: problem.axes[name] for name in problem.added_axes}
    called = dataclasses.replace(rows.problem(problem.width, problem.dtype), **axes)
    return lambda: nhot_lookup(rows, table, **options), called


PEERS = (
    Peer("torch embedding_bag", "torch", BOTH, _torch_embedding_bag),
    Peer("torch embedding", "torch", BOTH, _torch_embedding),
    Peer("torch CSR @ dense", "torch", BOTH, _torch_csr),
    Peer("torch dense", "torch", BOTH, _torch_dense_rows),
    Peer("SciPy CSR @ dense", "scipy", CPU, _scipy_csr),
)
