"""Calls of public functions in every form that their signatures declare: what `test_forms.py` is generated from.

A `Case` tells how a problem's inputs are passed to a public function. Everything else follows from the function's
`Signature`: `variants` lists the forms of each argument, `draw` makes a call of one of them with values of a seed, and
`Call.check` compares results with the problem's reference.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse
import torch
from foreign import Foreign
from test_calls import shifted, to_numpy, to_torch

import tvm_sparse
from tvm_sparse.core import registry
from tvm_sparse.core.problem import FLOATS, Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.formats.bitmap import pack_bits
from tvm_sparse.operators.block_recurrent.call import BlockRecurrentWeights
from tvm_sparse.operators.edit_logits.penalties import PENALTIES
from tvm_sparse.operators.head_topk import scores
from tvm_sparse.operators.head_topk.problem import HeadTopk
from tvm_sparse.operators.softmax_topk.reference import best_and_asked
from tvm_sparse.operators.sparse_recurrent.call import RecurrentWeights
from tvm_sparse.runtime.signature import ROWS, Absent, Number, Output, Shard, Signature, Stored, Structure, Text

# Every public function that takes arrays and is an operator's, by name.
SIGNATURES: dict[str, Signature] = {
    name: signature
    for operator in registry.operators().values()
    for name, signature in getattr(operator.call, "SIGNATURES", {}).items()
}
# Numbers that kernels take as arguments: what they are among a problem's inputs.
SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "log": ("log", int),
    "temperature": ("scale", lambda value: 1.0 / value),
    **{f"{name}_penalty": (name, float) for name in PENALTIES},
    "constant": ("constant", int),
}
# Numbers of which results, beside how many there are, do not depend.
FREE = ("normaliser", "validate", "rounded")

Arguments = dict[str, Any]


# Numbers and texts that are axes of a problem under the same name.
AXES = ("k", "n", "vocab", "capacity", "algorithm")


def plainly(problem: Problem, given: Mapping[str, Any]) -> Arguments:
    """The inputs and axes under their own names."""
    return {**{name: axis for name, axis in problem.axes.items() if name in AXES}, **given}


def topk_of(problem: Problem, given: Mapping[str, Any]) -> Arguments:
    """The inputs and axes, temperatures of rows under the name of the one of all rows."""
    heat = {"temperature": given["temperatures"]} if problem.axes["per_row"] else {}
    cap = {"soft_cap": given["cap"]} if problem.axes["capped"] else {}
    return {**plainly(problem, given), **heat, **cap}


def softmax_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """The arguments of softmax and its logarithm."""
    return {**plainly(problem, given), "dtype": problem.result or None}


def head_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """The arguments of the exact head, for which octets and scales of an embedding in eight bits are one."""
    parts = {"embedding": (given["embedding"], given["scales"])} if problem.stored else {}
    return {**topk_of(problem, given), **parts}


class MaskedHead(HeadTopk):
    """The exact head with words that each row allows, which no kernel reads: at least k of them."""

    mask: np.ndarray

    @classmethod
    def drawn(cls, problem: HeadTopk, rng: np.random.Generator) -> MaskedHead:
        found = cls(**problem.axes)
        mask = rng.random((problem.batch, problem.vocab)) < 0.5
        rows = rng.permuted(np.tile(np.arange(problem.vocab), (problem.batch, 1)), axis=1)
        np.put_along_axis(mask, rows[:, : problem.k], True, axis=1)
        object.__setattr__(found, "mask", mask)
        return found

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        bias, ids = self.extras(inputs)
        found = scores.scores(inputs[0], self.words(inputs), bias, self.cap(inputs))
        found = np.where(self.mask, found, -np.inf)
        (values, indices, *given), normaliser = best_and_asked(found, self.k, ids, *inputs[2:4])
        return [values, indices, normaliser, *given]


def rows_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Of functions with candidates."""
    hidden = given["hidden"].reshape(-1, problem.hidden)
    words = given["candidates"]
    words = words[0] if problem.lists == 1 else words
    return {**given, "hidden": hidden, "candidates": words, "n": problem.axes.get("k"), "block": 1}


def tables_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Of functions that look words up in hash tables."""
    table = given["starts"] if "starts" in given else given["entries"]
    return {**plainly(problem, given), "table": table, "multipliers": given.get("multipliers")}


def layer_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Of recurrent layers."""
    kind = RecurrentWeights if problem.operator == "sparse_recurrent" else BlockRecurrentWeights
    packed = list(given.values())[:3]
    return {**given, "cell": problem.cell, "weights": kind(problem.hidden, problem.gates, problem.dtype, *packed)}


def sample_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Of the sampler: filters are numbers, or arrays with one for each row."""
    names = ("temperature", "top_k", "top_p", "min_p")
    filters = {name: given[f"{name}s"] if problem.per_row else given[name] for name in names}
    filters |= {"soft_cap": given["cap"]} if problem.capped else {}
    seed = given.get("seeds", given.get("seed"))
    offset = given.get("offsets", given.get("offset", 0))
    return {**given, **filters, "seed": seed, "offset": offset, "max_top_k": problem.k if problem.whole else None}


def lookup_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Arguments of a call of the N-hot lookup, whose sparse rows are one argument."""
    rows = tuple(given.get(name) for name in ("indptr", "indices", "values"))
    parts = {"table": (given["table"], given["scales"]), "dtype": problem.dtype} if problem.stored else {}
    if problem.tables > 1:
        sizes = np.diff([*given["first_rows"], problem.vocab]).tolist()
        rows, parts["table"] = (given["offsets"], *rows[1:], sizes), (given["table"], sizes)
    return {**given, "csr": rows, "mode": problem.mode, "padding_idx": given.get("padding"), **parts}


def edits_of(problem: Any, given: Mapping[str, Any]) -> Arguments:
    """Arguments of edits of logits: penalties are numbers, or arrays with one for each row."""
    penalties = {
        f"{name}_penalty": given.get(many if problem.per_row else name, 1.0 if name == "repetition" else 0.0)
        for name, many in PENALTIES.items()
    }
    cap = {"soft_cap": given["cap"]} if problem.capped else {}
    return {**given, **penalties, **cap}


@dataclass(frozen=True)
class Case:
    """How a problem's inputs are passed to a public function."""

    key: str
    other: Mapping[str, Any]  # axes of another batch
    arguments: Callable[[Any, Mapping[str, Any]], Arguments] = plainly
    arrays: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # axes by an optional array's name
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # axes by the kind of a structure
    texts: Mapping[str, str] = field(default_factory=dict)  # axis by the name of an argument that is a text
    settings: Mapping[str, Any] = field(default_factory=dict)  # inputs that the function fixes
    numbers: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # axes by an optional number's name, or text's


_OPTIONAL = {"bias": {"bias": 1}, "ids": {"ids": 3}}
_HEAT = {"temperature": {"per_row": 1}}
_CAP = {"soft_cap": {"capped": 1}}
_BITMAP = {"allowed": {"allowed": 1}}
_WIDE = {"dtype": {"dtype": "bfloat16"}}
_LISTS = {"(m,)": {"lists": 1, "beam": 6}, "(rows, m)": {"lists": 6, "beam": 1}, "(lists, m)": {"lists": 2, "beam": 3}}
_TABLES = {"direct": {}, "cuckoo": {"table": "cuckoo", "bits": 30}}
_CUCKOO = {"direct": {}, "cuckoo": {"table": "cuckoo"}}
_LAYER: dict[str, Any] = {
    "other": {"steps": 3},
    "arguments": layer_of,
    "arrays": {
        "c0": {"cell": "lstm"},
        "hidden_bias": {"cell": "gru"},
        "lengths": {"ragged": 1},
        "resets": {"resets": 1},
    },
    "texts": {"cell": "cell"},
    "numbers": {"limit": {"cell": "clipped_relu"}},
}
CASES: dict[str, Case] = {
    "softmax": Case(
        "softmax/batch=7,vocab=61", {"batch": 4}, softmax_of,
        texts={"algorithm": "algorithm", "dtype": "result"}, settings={"log": 0}, numbers=_WIDE,
    ),
    "log_softmax": Case(
        "softmax/batch=7,vocab=61", {"batch": 4}, softmax_of,
        texts={"dtype": "result"}, settings={"log": 1}, numbers=_WIDE,
    ),
    "logsumexp": Case("logsumexp/batch=7,vocab=61", {"batch": 4}),
    "softmax_topk": Case(
        "softmax_topk/batch=7,vocab=61,k=5", {"batch": 4}, topk_of, {**_OPTIONAL, **_BITMAP, **_HEAT}, numbers=_CAP
    ),
    "head_topk": Case(
        "head_topk/batch=7,vocab=61,hidden=16,k=5", {"batch": 4}, head_of, {**_OPTIONAL, **_HEAT}, numbers=_CAP
    ),
    "candidate_topk": Case(
        "candidate_topk/lists=1,beam=6,vocab=61,hidden=16,m=10,k=3", {"beam": 4}, rows_of, {"bias": {"bias": 1}}, _LISTS
    ),
    "candidate_logits": Case(
        "candidate_logits/lists=1,beam=6,vocab=61,hidden=16,m=10", {"beam": 4}, rows_of, {"bias": {"bias": 1}}, _LISTS
    ),
    "bsr_matmul": Case(
        "bsr_matmul/m=7,k=66,n=35,block=5x3,sparsity=0.5", {"m": 4},
        lambda problem, given: {
            **given, "weight": tuple(given[name] for name in ("data", "indices", "indptr")),
            "activation": problem.activation or None, "precision": problem.precision or None,
        },
        {"bias": {"bias": 1}}, texts={"activation": "activation", "precision": "precision"},
    ),
    "csr_linear": Case(
        "csr_linear/m=7,k=50,n=33,sparsity=0.9", {"m": 4},
        lambda problem, given: {**given, "weight": tuple(given[name] for name in ("indptr", "indices", "values"))},
    ),
    "nhot_lookup": Case(
        "nhot_lookup/rows=7,vocab=50,width=33,nonzeros=5,weighted=1", {"rows": 4}, lookup_of,
        kinds={"EmbeddingTables": {"tables": 3}}, texts={"mode": "mode", "dtype": "dtype"},
        numbers={"mode": {"weighted": 0}, "padding_idx": {"padded": 1}, "dtype": {"stored": "int8"}},
    ),
    "softmax_sample": Case(
        "softmax_sample/batch=7,vocab=61,k=61", {"batch": 4}, sample_of,
        {
            **_BITMAP, "bias": {"bias": 1}, "seed": {"seeded": 1}, "offset": {"seeded": 3},
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), {"per_row": 1}),
        },
        numbers={
            **_CAP, "top_k": {"k": 8}, "seed": {"seeded": 2}, "offset": {"seeded": 2},
            "max_top_k": {"per_row": 1, "k": 8, "whole": 1},
        },
    ),
    "edit_logits": Case(
        "edit_logits/batch=7,vocab=61,words=9,penalties=0", {"batch": 4}, edits_of,
        {
            **dict.fromkeys(("bias_ids", "bias_values"), {"bias": 1}),
            **dict.fromkeys(("seen_ids", "generated"), {"penalties": 1}),
            **dict.fromkeys((f"{name}_penalty" for name in PENALTIES), {"penalties": 1, "per_row": 1}),
        },
        numbers={"soft_cap": {"capped": 1}}
        | dict.fromkeys((f"{name}_penalty" for name in PENALTIES), {"penalties": 1}),
    ),
    "wta_hash": Case("wta_hash/batch=6,hidden=40,k=8,units=2,bands=60", {"batch": 4}),
    "lsh_lookup": Case(
        "lsh_lookup/lists=2,beam=3,vocab=700,bands=60,bits=6", {"lists": 3}, tables_of, kinds=_TABLES
    ),
    "compaction": Case("compaction/lists=2,vocab=700,capacity=50", {"lists": 3}),
    "lsh_candidates": Case(
        "lsh_candidates/lists=2,beam=3,hidden=40,vocab=700,k=8,units=2,bands=60,capacity=50", {"lists": 3}, tables_of,
        kinds=_CUCKOO,
    ),
    "lsh_topk": Case(
        "lsh_topk/lists=2,beam=3,hidden=40,vocab=700,frequent=50,n=5,k=8,units=2,bands=60", {"lists": 3}, tables_of,
        {"bias": {"bias": 1}}, _CUCKOO,
    ),
    "sparse_recurrent": Case("sparse_recurrent/steps=4,batch=3,hidden=10,nonzeros=4,cell=tanh", **_LAYER),
    "block_recurrent": Case("block_recurrent/steps=4,batch=3,hidden=16,nonzeros=2,cell=tanh", **_LAYER),
}  # fmt: skip


# ---- forms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One form of one argument: what it changes of a call.

    `axes`, `structure`: of the problem. `shows`: how the argument is passed, from its canonical value. `library`: how
    all arrays are passed. `rows`: the dimensions before the last of arrays that may have any number.
    """

    argument: str
    label: str
    axes: Mapping[str, Any] = field(default_factory=dict)
    shows: Callable[[Any], Any] | None = None
    library: str = "torch"
    kind: str = ""  # of a structure
    structure: str | None = None
    rows: tuple[int, ...] = ()


BASE = Variant("", "first form of all")

# Ways in which a tensor may lie.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda a: a,
    "every second column": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "offset by an element": lambda a: torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape),
    "transposed": lambda a: a.mT.contiguous().mT if a.dim() > 1 else a,
    "negated view": lambda a: torch._neg_view(-a) if a.is_floating_point() else a,
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "Python": lambda value: value,
    "NumPy": lambda value: np.asarray(value)[()],
    "array of no dimension": np.asarray,
    "tensor of no dimension": torch.tensor,
}
LIBRARIES = ("torch", "numpy", "dlpack")
# Shards of a vocabulary: the first word, and the numbers of words of padding and of later shards.
SHARDS = {"whole": (0, 0, 0), "between others": (1000, 0, 70), "the last, with padding": (1000, 9, 0)}


def _as(dtype: str, tensor: Any) -> Any:
    """Integers in another dtype; those that it does not hold become its nearest, which is out of range as well."""
    kind = getattr(torch, dtype)
    if dtype != "bool" and kind.itemsize < tensor.itemsize:
        tensor = tensor.clamp(torch.iinfo(kind).min, torch.iinfo(kind).max)
    return tensor.to(kind)


def variants(name: str) -> Iterator[Variant]:
    """Every form of every argument of a public function."""
    case, signature = CASES[name], SIGNATURES[name]
    first = next(argument for argument in signature.arguments if argument.array)
    for library in LIBRARIES[1:]:
        if library != "dlpack" or not any(isinstance(f, Structure) for a in signature.arguments for f in a.forms):
            yield Variant(first.name, library, library=library)
    for argument in signature.arguments:
        for form in argument.forms:
            yield from _of_form(case, argument.name, form, argument is first)


def _of_form(case: Case, name: str, form: Any, first: bool) -> Iterator[Variant]:
    axes = case.arrays.get(name, {})
    if isinstance(form, Absent):
        yield Variant(name, "absent", structure="random" if name == "counts" else None)
    elif isinstance(form, Number):
        for label, shows in NUMBERS.items():
            yield Variant(name, label, case.numbers.get(name, {}), shows)
    elif isinstance(form, Shard):
        for label in SHARDS:
            yield Variant(name, label)
    elif isinstance(form, Text):
        for text in form.values:
            yield Variant(name, text, {case.texts[name]: text, **case.numbers.get(name, {})})
    elif isinstance(form, Stored):
        for dtype in form.dtypes:
            yield Variant(name, dtype, {"stored": dtype})
    elif isinstance(form, Structure):
        for kind in form.kinds:
            library = "numpy" if kind.startswith("scipy") else "torch"
            yield Variant(name, kind, case.kinds.get(kind, {}), library=library, kind=kind)
    else:
        structure = "few" if name == "counts" else None
        several = len(form.shape) > 1
        floats = not form.dtypes or form.dtypes[0] in FLOATS
        for label, shows in LAYOUTS.items():
            if (several or label != "transposed") and (floats or label != "negated view"):
                yield Variant(name, label, axes, shows, structure=structure)
        for dtype in form.dtypes[1:] if form.dtypes != FLOATS else ():
            yield Variant(name, dtype, axes, functools.partial(_as, dtype), structure=structure)
        for dtype in FLOATS[1:] if first and form.dtypes == FLOATS else ():
            yield Variant(name, dtype, {"dtype": dtype})
        if ROWS in form.shape:
            yield Variant(name, "more dimensions", axes, rows=(2, 3))
            yield Variant(name, "one dimension", axes, rows=())


# ---- calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call: its arguments as they are passed, and what its results are compared with."""

    name: str
    problem: Problem
    inputs: Sequence[Any]
    arguments: Arguments

    def __call__(self, out: Any = None) -> Any:
        given = self.arguments if out is None else {**self.arguments, "out": out}
        return getattr(tvm_sparse, self.name)(**given)

    def names(self) -> list[str]:
        """The outputs that this call returns."""

        def asked(value: Any) -> bool:
            array = bool(getattr(value, "shape", ())) or isinstance(value, Foreign)
            return value is not None and (array or bool(value))

        def returned(output: Output) -> bool:
            # A pair of numbers is no array.
            given = self.arguments[output.asked] if output.asked else True
            return given is not None if output.asked == "shard" else asked(given)

        return [one.name for one in SIGNATURES[self.name].outputs if returned(one)]

    def outputs(self, results: Any) -> tuple[Any, ...]:
        return tuple(results) if len(SIGNATURES[self.name].outputs) > 1 else (results,)

    def check(self, results: Any) -> None:
        """Compare results with the reference's; those that the call does not return count as right."""
        found = dict(zip(self.names(), self.outputs(results), strict=True))
        if self.name == "softmax_sample" and self.arguments["uniforms"] is None and self.arguments["seed"] is None:
            assert self.problem.admits(self.inputs, [to_numpy(found["tokens"].cpu())])
            return
        if self.arguments.get("shard") is not None:
            found = self._probabilities(found)
        expected = self.problem.reference(self.inputs)
        compared = []
        layouts = self.problem.output_layouts()
        for argument, wanted, (shape, dtype) in zip(self.problem.kernel_outputs, expected, layouts, strict=True):
            array = found.pop(argument.name, wanted)
            if array is not wanted:
                if isinstance(array, torch.Tensor):
                    assert array.is_contiguous() or self.name == "softmax_sample"
                    array = array.cpu()
                array = to_numpy(array)
                if self.name == "softmax_sample" and argument.name in ("values", "indices"):
                    array = array.reshape(shape[0], -1)  # the best of more, which are not shown
                    array = np.concatenate([array, wanted[:, array.shape[1] :]], 1)
                array = array.astype(dtype) if array is wanted else array.reshape(shape)
                assert array.dtype.name == dtype or array.dtype == wanted.dtype, (argument.name, array.dtype)
            compared.append(array)
        assert not found
        self.problem.check(self.inputs, expected, compared)

    def _probabilities(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The values and indices that a call without `shard` returns, of a shard's scores and normaliser."""
        offset, temperature = self.arguments["shard"][0], float(self.arguments["temperature"])
        arrays = {name: to_numpy(one.cpu()) if isinstance(one, torch.Tensor) else one for name, one in found.items()}
        values = np.exp(arrays["values"].astype(np.float64) / temperature - arrays["normaliser"][..., None])
        arrays |= {"values": values.astype(np.float32), "indices": arrays["indices"] - offset}
        if "normaliser" not in (argument.name for argument in self.problem.kernel_outputs):
            del arrays["normaliser"]
        return arrays


def in_shard(signature: Signature, given: Arguments, rng: np.random.Generator, label: str) -> None:
    """Change arguments to those of a shard: words of padding follow, whose entries count if they are read."""
    first, padding, later = SHARDS[label]
    for argument in signature.arguments:
        form, array = argument.array, given.get(argument.name)
        if form is None or "vocab" not in form.shape or array is None:
            continue
        axis = form.shape.index("vocab") - len(form.shape)
        total = first + array.shape[axis] + later
        shape = list(array.shape)
        shape[axis] = padding
        more = np.where(rng.random(shape) < 0.1, np.nan, 30).astype(array.dtype)
        given[argument.name] = np.concatenate([array, more], axis)
    given |= {"shard": (first, total), "log": False, "normaliser": True}


def draw(name: str, variant: Variant, seed: int, other: bool = False, device: str = "cpu") -> Call:
    """A call of this form with values of a seed; with `other`, at another batch."""
    case, signature = CASES[name], SIGNATURES[name]
    rng = np.random.default_rng(seed)
    axes = {**variant.axes, **(case.other if other else {})}
    if variant.rows or variant.label == "one dimension":
        axes[parse(case.key).batch_axis] = int(np.prod(variant.rows))
    if name.startswith("candidate") and other and variant.kind.startswith("("):
        axes = {**variant.axes, "lists": variant.axes["lists"] * (1 if variant.kind == "(m,)" else 2)}
    problem = problem_of(case, axes)
    structure = variant.structure or "random"
    settings = None
    if name == "softmax_sample":
        settings = {"temperature": float(rng.uniform(0.2, 3)), "top_p": float(rng.uniform(0.3, 1))}
        settings |= {"min_p": float(rng.uniform(0, 0.2)), "top_k": 0}
        if problem.axes["k"] == 8 and not problem.axes["per_row"]:
            settings["top_k"] = int(rng.integers(1, 9))
    made = problem.generate(seed, structure, settings)
    inputs = dict(zip((a.name for a in problem.kernel_inputs), made, strict=True))
    numbers: dict[str, Any] = {}
    for argument in signature.arguments:
        form = argument.forms[0]
        if not isinstance(form, Number) or (argument.name not in SETTINGS and argument.name not in FREE):
            continue
        value = bool(rng.integers(2)) if form.kind == "bool" else float(rng.uniform(form.least, form.most))
        setting, meant = SETTINGS.get(argument.name, ("", None))
        if meant is not None and setting not in inputs:
            continue
        numbers[argument.name] = value
        if meant is not None:
            inputs[setting] = meant(value)
    inputs.update(case.settings)
    if variant.argument == "shard" and variant.label in SHARDS:
        inputs["log"] = 0
    given = {**case.arguments(problem, inputs), **numbers}
    if name == "head_topk" and variant.argument == "allowed" and variant.label != "absent":
        problem = MaskedHead.drawn(problem, rng)
        spare = rng.random((problem.batch, -problem.vocab % 32)) < 0.5
        given["allowed"] = pack_bits(np.concatenate([problem.mask, spare], 1))
    if variant.label == "absent" and given.get(variant.argument) is not None:
        given[variant.argument] = None
    if variant.argument == "shard" and variant.label in SHARDS:
        in_shard(signature, given, rng, variant.label)
    if name == "softmax_sample":
        given["best"] = int(rng.integers(0, settings["top_k"] or (9 if problem.axes["k"] == 8 else 62)))
    passed = {}
    for argument in signature.arguments:
        value = given.get(argument.name)
        form = argument.array
        if form is not None and ROWS in form.shape and isinstance(value, np.ndarray):
            tail = value.shape[value.ndim - len(form.shape) + 1 :]
            leading = variant.rows if variant.rows or variant.label == "one dimension" else value.shape[:1]
            value = value.reshape((*leading, *tail))
        kind = variant.kind if variant.argument == argument.name else ""
        if not any(isinstance(form, Shard) for form in argument.forms):
            value = placed(value, variant.library, device, kind, problem)
        passed[argument.name] = value
    if variant.shows is not None and passed[variant.argument] is not None:
        passed[variant.argument] = variant.shows(passed[variant.argument])
    return Call(name, problem, list(inputs.values()), passed)


def problem_of(case: Case, axes: Mapping[str, Any]) -> Problem:
    problem = parse(case.key)
    return dataclasses.replace(problem, **axes)


# Problems of functions that other functions call: the scores of a shard's best words; those of all words, and the best
# of those that are allowed.
WITHIN = (
    "candidate_logits/lists=7,beam=1,vocab=61,hidden=16,m=5", "candidate_logits/lists=4,beam=1,vocab=61,hidden=16,m=5",
    "softmax_topk/batch=7,vocab=61,k=5,allowed=1", "softmax_topk/batch=4,vocab=61,k=5,allowed=1",
)  # fmt: skip


def keys() -> list[str]:
    """The problems that the forms ask for at the first batch."""
    found = {}
    for name in CASES:
        for variant in (BASE, *variants(name)):
            problem = problem_of(CASES[name], variant.axes)
            found[problem.as_called().key] = None
    found |= dict.fromkeys(WITHIN)
    return list(found)


def placed(value: Any, library: str, device: str, kind: str, problem: Problem) -> Any:
    """A canonical value as a call passes it: arrays of a library, on a device; structures of a kind."""
    if isinstance(value, np.ndarray):
        if library == "numpy":
            return value
        tensor = to_torch(np.array(value, order="C")).clone().to(device)
        return tensor if library == "torch" else Foreign(tensor)
    if not isinstance(value, tuple):
        return value
    parts = tuple(placed(one, library, device, "", problem) for one in value)
    if isinstance(parts[-1], list):  # the numbers of rows of several tables
        *some, sizes = parts
        return tvm_sparse.EmbeddingTables(*some, sizes) if len(some) == 1 else tvm_sparse.CsrRows(some, columns=sizes)
    if len(parts) == 2:
        return tvm_sparse.QuantizedEmbedding.of_octets(*parts, problem.stored)
    if problem.operator == "bsr_matmul":
        return _weight(parts, kind or "BsrWeight", problem)
    shape = (problem.n, problem.k) if problem.operator == "csr_linear" else (problem.rows, problem.vocab)
    return _rows(parts, kind or "CsrRows", shape)


def _weight(parts: tuple[Any, ...], kind: str, problem: Any) -> Any:
    data, indices, indptr = parts
    if kind == "BsrWeight":
        return tvm_sparse.BsrWeight(parts, columns=problem.k)
    if kind.startswith("scipy"):
        return scipy.sparse.bsr_array((data, indices, indptr), shape=(problem.n, problem.k))
    if kind == "torch.sparse_bsr":
        return torch.sparse_bsr_tensor(indptr.long(), indices.long(), data, size=(problem.n, problem.k))
    return parts


def _rows(parts: tuple[Any, ...], kind: str, shape: tuple[int, int]) -> Any:
    indptr, indices, values = parts
    if kind == "CsrRows":
        return tvm_sparse.CsrRows(parts, columns=shape[1])
    if kind.startswith("scipy"):
        return scipy.sparse.csr_array((values, indices, indptr), shape=shape)
    if kind == "torch.sparse_csr":
        return torch.sparse_csr_tensor(indptr, indices, values, size=shape)
    return parts


def parameters(name: str) -> list[str]:
    """The parameters of a public function, but `out`."""
    import inspect

    function = getattr(importlib.import_module("tvm_sparse"), name)
    return [one for one in inspect.signature(function).parameters if one != "out"]


__all__ = [
    "BASE", "CASES", "SIGNATURES", "Call", "Variant", "draw", "keys", "parameters", "shifted", "variants",
]  # fmt: skip
