"""What TIR cannot express for a CPU, in LLVM IR: an intrinsic, and a function that a program imports and LLVM inlines.

`tirx.call_llvm_pure_intrin` cannot call an instruction on bfloat16: TVM takes such arguments to float32 before.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

# Bytes of a cache line.
LINE = 64
# x86's VDPBF16PS (AVX512_BF16) adds two products to each of 16 float32 sums; subnormal numbers count as zero.
BFLOAT16_DOTS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @tvm_sparse_bfloat16_dots(<16 x float> %sums, <32 x i16> %a, <32 x i16> %b)
    alwaysinline {
  %x = bitcast <32 x i16> %a to <32 x bfloat>
  %y = bitcast <32 x i16> %b to <32 x bfloat>
  %found = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %found
}
"""
# The columns that one such instruction multiplies.
PAIRED = 32


def fetch(address: Any, into: int) -> tirx.PrimExpr:
    """Prefetch the cache line of an address, which need not be readable. `into`: 3 for the L1 cache, 1 for the L2
    cache, to which more lines can be in flight.
    """
    hints = (tirx.const(hint, "int32") for hint in (0, into, 1))
    return tirx.call_llvm_intrin("void", "llvm.prefetch.p0", address, *hints)


def bfloat16_dots(sums: Any, one: Any, other: Any) -> tirx.PrimExpr:
    """To each of 16 sums, the products of two neighbouring bfloat16 numbers, given as vectors of 32 integers."""
    return tirx.call_extern("float32x16", "tvm_sparse_bfloat16_dots", sums, one, other)
