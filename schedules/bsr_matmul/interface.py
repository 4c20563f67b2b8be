"""The arguments of every block-sparse product, written once: a template gives the body, this the function around it.

A body is a `T.inline` of one argument, the `Arguments`:

    @T.inline
    def body(io):
        T.device_entry()
        ...
        io.y[row, column] = output(io, column, total)

    return gpu_program(problem, body)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Program
from tvm_sparse.operators.bsr_matmul.epilogue import finish
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ..device.overlap import overlapping
from ..device.words import load_element

# What `data` is called in the code of a kernel with explicit threads. TVM puts a kernel's parameters in the order of
# their names: under this one they stay in the order in which kernels were measured.
KERNEL_DATA = "weight"


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with: buffers and scalars, by the names under which the operator declares them.

    Attributes
    ----------
    problem
        The problem that the kernel is for. Without a bias, `bias` must not be touched.
    m, nnzb
        Rows of x and stored blocks, known only at run time: one kernel serves every number of them.
    x, data, indices, indptr, order, long, constant, bias, y
        See `BsrMatmul.inputs` and `BsrMatmul.outputs`. Where nobody asks for `order`, it is None.
    """

    problem: BsrMatmul
    m: Any
    nnzb: Any
    x: Any
    data: Any
    indices: Any
    indptr: Any
    order: Any
    long: Any
    constant: Any
    bias: Any
    y: Any

    @classmethod
    def match(
        cls,
        problem: BsrMatmul,
        extents: tuple[tirx.Var, tirx.Var],
        parameters: tuple[tirx.Var, ...],
        ordered: bool = True,
        packed: bool = False,
        data_name: str = "data",
    ) -> Arguments:
        """Buffers of the declared shapes and dtypes, for `extents` (m, nnzb) and the parameters in calling order.

        `ordered`: the kernel asks for `order`. `packed`: arrays are known to be aligned to their elements and no more.
        `data_name`: what `data` is called in the generated code.
        """
        m, nnzb = extents
        rows, cols = problem.block_shape
        block_rows, _ = problem.grid
        shapes: dict[str, tuple[Any, ...]] = {
            "x": (m, problem.k),
            "data": (nnzb, rows, cols),
            "indices": (nnzb,),
            "indptr": (block_rows + 1,),
            "order": (block_rows, 3),
            "bias": (problem.n,),
            "y": (m, problem.n),
        }
        found: dict[str, Any] = {}
        for argument, parameter in zip((*problem.inputs, *problem.outputs), parameters, strict=True):
            name, dtype = argument.name, problem.dtype if argument.dtype == "dtype" else argument.dtype
            if name not in shapes:
                found[name] = parameter
            elif name == "order" and not ordered:
                found[name] = None
            else:
                align = numpy_dtype(dtype).itemsize if packed else -1
                found[name] = T.match_buffer(parameter, shapes[name], dtype, align=align)
                IRBuilder.name(data_name if name == "data" else name, found[name])
        return cls(problem, m, nnzb, **found)


def output(io: Arguments, column: Any, value: Any, plain: bool = False) -> tirx.PrimExpr:
    """What is stored in `column` of y for a float32 sum: bias added, activation applied, in y's dtype.

    The bias may be what a producer kernel has written, and is read by a load that sees it, unless it is read `plain`.
    """
    problem, bias = io.problem, None
    if problem.bias:
        bias = io.bias[column] if plain else load_element(problem.dtype, io.bias.ptr_to([column]))
    return finish(value, bias, problem.activation, problem.dtype)


def gpu_program(problem: BsrMatmul, body: Callable[..., Any], overlapped: bool = False) -> Program:
    """The program of a CUDA kernel with explicit threads.

    `overlapped`: it is started by programmatic dependent launch, and `body` waits for its producer kernel before it
    touches what that may write.
    """

    # fmt: off
    @T.prim_func
    def main(
        x: T.handle, data: T.handle, indices: T.handle, indptr: T.handle, order: T.handle, long: T.int32,
        constant: T.int32, bias: T.handle, y: T.handle
    ):
        m = T.int32()
        nnzb = T.int32()
        body(Arguments.match(
            problem, (m, nnzb), (x, data, indices, indptr, order, long, constant, bias, y), data_name=KERNEL_DATA))
    # fmt: on
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": overlapping(main) if overlapped else main}), pipeline="tirx")


def scheduled(problem: BsrMatmul, body: Callable[..., Any], packed: bool = False) -> tirx.PrimFunc:
    """A function whose body is made of blocks (`T.sblock`), for schedule primitives or for the CPU.

    It takes the block rows as they come and leaves `order` alone. `packed`: arrays of other libraries are aligned to
    their elements, no more, which costs a CPU nothing.
    """

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        x: T.handle, data: T.handle, indices: T.handle, indptr: T.handle, order: T.handle, long: T.int32,
        constant: T.int32, bias: T.handle, y: T.handle
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        m = T.int32()
        nnzb = T.int32()
        body(Arguments.match(
            problem, (m, nnzb), (x, data, indices, indptr, order, long, constant, bias, y),
            ordered=False, packed=packed))
    # fmt: on
    return problem.trimmed(main)
