"""Thread bindings as plain loops, so that LLVM can run a CUDA schedule's blocks one thread after another.

A schedule must preserve the meaning of its definition, which this checks at the speed of a CPU kernel. It does not
apply to kernels with explicit threads (barriers, shuffles), for which there is `run_on_cpu`.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx


def serialise(module: tvm.IRModule) -> tvm.IRModule:
    """The module with each loop that is bound to a thread block or thread index run serially."""

    def serial(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, loop.annotations)

    def rewrite(func: tirx.PrimFunc) -> tirx.PrimFunc:
        return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, serial)))

    return tvm.IRModule({name: rewrite(func) for name, func in module.functions.items()})
