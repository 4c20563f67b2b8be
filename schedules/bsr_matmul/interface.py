"""What programs of the block-sparse product have in common: their arguments' names, and how an output is stored.

Loads the compiler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx

from tvm_sparse.core.arguments import Body, function
from tvm_sparse.operators.bsr_matmul.epilogue import finish
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from .. import interface
from ..device.words import load_element

# What `data` is called in the code of a kernel with explicit threads. TVM puts a kernel's parameters in the order of
# their names: under this one they stay in the order in which kernels were measured.
gpu_program = partial(interface.gpu_program, names={"data": "weight"})


def output(io: Any, column: Any, value: Any, plain: bool = False) -> tirx.PrimExpr:
    """What is stored in `column` of y for a float32 sum: bias added, activation applied, in y's dtype.

    The bias may be what a producer kernel has written, and is read by a load that sees such writes, unless `plain` is
    set.
    """
    problem, bias = io.problem, None
    if problem.bias:
        bias = io.bias[column] if plain else load_element(problem.dtype, io.bias.ptr_to([column]))
    return finish(value, bias, problem.activation, problem.dtype)


def scheduled(problem: BsrMatmul, body: Body, packed: bool = False) -> tirx.PrimFunc:
    """A function whose body consists of SBlocks (`T.sblock`), for schedule primitives or for the CPU.

    It takes the block rows as they come and does not read `order`. `packed`: arrays are aligned to their elements and
    no more, which costs a CPU nothing.
    """
    return function(problem, body, blocks=True, packed=packed, unread=("order",))
