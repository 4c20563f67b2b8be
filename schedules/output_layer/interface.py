"""The arguments of the output layer's kernels, written once: of `head_topk`, `candidate_topk` and `candidate_logits`.

They compute the same for other tokens. Here every problem has *lists* of tokens with *beams* of rows: the exact head
has one list, the vocabulary, and all rows of the batch are its beam. The tokens of a list are counted by their
*positions* in it. A template gives a body, a `T.inline` of one argument, the `Arguments`.

This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.head_topk.problem import HeadTopk

from ..device.overlap import overlapping
from .words import OutputLayer


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with: buffers and scalars by the names under which the operators declare them.

    Attributes
    ----------
    problem
        The problem that the kernel is for. What it lacks is None.
    lists, beam, vocab
        Extents. Of the exact head, `lists` is 1 and `beam` the batch.
    workspaces
        The template's own buffers, by name.
    """

    problem: OutputLayer
    lists: Any
    beam: Any
    vocab: Any
    hidden: Any = None
    embedding: Any = None
    candidates: Any = None
    counts: Any = None
    scale: Any = None
    log: Any = None
    constant: Any = None
    bias: Any = None
    ids: Any = None
    values: Any = None
    indices: Any = None
    normaliser: Any = None
    given: Any = None
    logits: Any = None
    workspaces: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> Any:
        """Rows of hidden states, of all lists."""
        return self.lists * self.beam

    def place(self, index: Any, row: Any, *rest: Any) -> list[Any]:
        """Indices of an element of `hidden`, or of an output, for row `row` of list `index`."""
        return [row, *rest] if self.candidates is None else [index, row, *rest]

    @classmethod
    def match(
        cls, problem: OutputLayer, parameters: Sequence[tirx.Var], workspaces: Sequence[Workspace], packed: bool
    ) -> Arguments:
        """Buffers of the declared shapes and dtypes for the parameters, which are in the order of `PARAMETERS`.

        `packed`: arrays are known to be aligned to their elements and no more.
        """
        extent = T.int64 if packed else T.int32
        batch, vocab = extent(), extent()
        IRBuilder.name(problem.batch_axis, batch)
        IRBuilder.name("vocab", vocab)
        known = {problem.batch_axis: batch, "vocab": vocab}

        def buffer(name: str, shape: tuple[int | str, ...], dtype: str, parameter: tirx.Var) -> Any:
            extents = [known.get(e, problem.axes.get(e)) if isinstance(e, str) else e for e in shape]
            matched = T.match_buffer(
                parameter,
                tuple(tirx.const(e, batch.ty.dtype) if isinstance(e, int) else e for e in extents),
                dtype,
                align=numpy_dtype(dtype).itemsize if packed else -1,
            )
            IRBuilder.name(name, matched)
            return matched

        given = dict(zip(PARAMETERS, parameters, strict=True))
        found: dict[str, Any] = {}
        for argument in (*problem.kernel_inputs, *problem.kernel_outputs):
            dtype, parameter = argument.dtype if argument.dtype != "dtype" else problem.dtype, given[argument.name]
            shaped = bool(argument.shape)
            found[argument.name] = buffer(argument.name, argument.shape, dtype, parameter) if shaped else parameter
        own = {w.name: buffer(w.name, w.shape, w.dtype, given[f"own{i}"]) for i, w in enumerate(workspaces)}
        lists, beam = (1, batch) if isinstance(problem, HeadTopk) else (batch, problem.beam)
        return cls(problem, lists, beam, vocab, workspaces=own, **found)


def rows_shape(problem: OutputLayer, *rest: int) -> tuple[int | str, ...]:
    """The shape of a workspace that has something for each row."""
    return ("batch", *rest) if isinstance(problem, HeadTopk) else ("lists", problem.beam, *rest)


# Parameters of the functions below. A problem's program has those that are arguments of its operator or workspaces of
# its own.
PARAMETERS = (
    "hidden", "embedding", "candidates", "counts", "scale", "log", "constant", "bias", "ids",
    "values", "indices", "normaliser", "given", "logits", "own0", "own1", "own2", "own3",
)  # fmt: skip


def gpu_program(
    problem: OutputLayer,
    body: Callable[..., Any],
    workspaces: Sequence[Workspace] = (),
    overlapped: bool = False,
) -> Program:
    """The program of CUDA kernels with explicit threads, each in a region of its own (`device_region`).

    `overlapped`: they are started by programmatic dependent launch, and wait for their producer kernels.
    """

    # fmt: off
    @T.prim_func
    def main(
        hidden: T.handle, embedding: T.handle, candidates: T.handle, counts: T.handle, scale: T.float32, log: T.int32,
        constant: T.int32, bias: T.handle, ids: T.handle, values: T.handle, indices: T.handle, normaliser: T.handle,
        given: T.handle, logits: T.handle, own0: T.handle, own1: T.handle, own2: T.handle,
        own3: T.handle
    ):
        body(Arguments.match(
            problem,
            (hidden, embedding, candidates, counts, scale, log, constant, bias, ids, values, indices, normaliser, given,
             logits, own0, own1, own2, own3),
            workspaces, packed=False))
    # fmt: on
    function = _trimmed(problem, main, workspaces)
    module = tvm.IRModule({"main": overlapping(function) if overlapped else function})
    return Program(module, tuple(workspaces), pipeline="tirx")


def cpu_program(
    problem: OutputLayer,
    body: Callable[..., Any],
    workspaces: Sequence[Workspace] = (),
    instructions: tuple[str, ...] = (),
) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        hidden: T.handle, embedding: T.handle, candidates: T.handle, counts: T.handle, scale: T.float32, log: T.int32,
        constant: T.int32, bias: T.handle, ids: T.handle, values: T.handle, indices: T.handle, normaliser: T.handle,
        given: T.handle, logits: T.handle, own0: T.handle, own1: T.handle, own2: T.handle,
        own3: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        # Arrays of other libraries are aligned to their elements, no more; unaligned vector loads cost nothing.
        body(Arguments.match(
            problem,
            (hidden, embedding, candidates, counts, scale, log, constant, bias, ids, values, indices, normaliser, given,
             logits, own0, own1, own2, own3),
            workspaces, packed=True))
    # fmt: on
    module = tvm.IRModule({"main": _trimmed(problem, main, workspaces)})
    return Program(module, tuple(workspaces), instructions=instructions)


def _trimmed(problem: OutputLayer, main: tirx.PrimFunc, workspaces: Sequence[Workspace]) -> tirx.PrimFunc:
    """`main` without the parameters that the problem's kernels do not have."""
    wanted = {a.name for a in (*problem.kernel_inputs, *problem.kernel_outputs)}
    wanted |= {f"own{i}" for i in range(len(workspaces))}
    params = [p for name, p in zip(PARAMETERS, main.params, strict=True) if name in wanted]
    return tirx.PrimFunc(params, main.body, main.ret_type, main.attrs).with_attr("global_symbol", "main")
