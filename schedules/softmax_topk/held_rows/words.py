"""A row's elements in 32-bit registers: two in each of the 16-bit dtypes, on which some instructions work at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

# By dtype: the word whose elements are minus infinity, and the order (`selection.order_bits`) of the next larger
# number.
NOTHING = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}
LEAST = {"float32": 0x00800000, "float16": 0x38801FFF, "bfloat16": 0x0080FFFF}
# In a word of marks, one half has the marks of words' first elements, the other half those of their second elements.
HALF = 16
PAIR = {"float16": "__half2", "bfloat16": "__nv_bfloat162"}
LARGEST_FLOAT = """
__device__ __forceinline__ unsigned int largest_of_float32(unsigned int a, unsigned int b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  return __float_as_uint(c);
}
"""
TWICE = (
    "__device__ __forceinline__ unsigned int half_twice(float x)"
    " { return (unsigned int)__half_as_ushort(__float2half_rn(x)) * 0x10001u; }"
)


def _of_two(name: str, dtype: str, expression: str) -> Callable[[Any, Any], Any]:
    """A function of two words of a 16-bit dtype: C++ of a and b as pairs of it."""
    pair, called = PAIR[dtype], f"{name}_of_{dtype}"
    source = (
        f"__device__ __forceinline__ unsigned int {called}(unsigned int v, unsigned int w) {{"
        f" {pair} a = *({pair}*)&v, b = *({pair}*)&w; {expression} }}"
    )
    return lambda v, w: T.cuda.func_call(called, v, w, source_code=source, return_type="uint32")


def larger(dtype: str, v: Any, w: Any) -> Any:
    """The larger of the elements of two 32-bit words, one by one; NaN is larger than all."""
    if dtype == "float32":
        return T.cuda.func_call("largest_of_float32", v, w, source_code=LARGEST_FLOAT, return_type="uint32")
    expression = f"{PAIR[dtype]} c = __hmax2_nan(a, b); return *(unsigned int*)&c;"
    return _of_two("largest", dtype, expression)(v, w)


def largest(dtype: str, words: list[Any]) -> Any:
    """As `larger`, of some words, as a tree."""
    if len(words) == 1:
        return words[0]
    half = len(words) // 2
    return larger(dtype, largest(dtype, words[:half]), largest(dtype, words[half:]))


def twice(dtype: str, x: Any) -> Any:
    """The word whose elements are all x, a float32 that the dtype has exactly."""
    if dtype == "float32":
        return T.reinterpret("uint32", x)
    if dtype == "bfloat16":
        bits = T.reinterpret("uint32", x)
        return (bits & T.uint32(0xFFFF0000)) | (bits >> T.uint32(16))
    return T.cuda.func_call("half_twice", x, source_code=TWICE, return_type="uint32")


def reach(dtype: str, word: Any, threshold: Any, i: Any, beyond: bool = False) -> Any:
    """Which elements of a word are not below those of the threshold, as no NaN is: bit i, of the second HALF + i.

    `beyond`: nor equal.
    """
    bit = T.uint32(1) << T.Cast("uint32", i)
    if dtype == "float32":
        x, least = T.reinterpret("float32", word), T.reinterpret("float32", threshold)
        return T.Select(x <= least if beyond else x < least, T.uint32(0), bit)
    name, compare = ("exceed", "__hgtu2_mask") if beyond else ("reach", "__hgeu2_mask")
    return _of_two(name, dtype, f"return {compare}(a, b);")(word, threshold) & (bit | (bit << T.uint32(HALF)))


def either(marks: Any) -> Any:
    """Marks that are set for the first element, for the second, or for both."""
    return (marks | (marks >> T.uint32(HALF))) & T.uint32((1 << HALF) - 1)


def picked(words: Any, i: Any, extent: int, width: int = 1, offset: int = 0, first: int = 0) -> Any:
    """words[i * width + offset], for i in `extent` numbers from `first` on; a chain of selections, because registers
    cannot be indexed.
    """
    if extent == 1:
        return words[first * width + offset]
    half = 1 << ((extent - 1).bit_length() - 1)
    return T.Select(
        i >= first + half,
        picked(words, i, extent - half, width, offset, first + half),
        picked(words, i, half, width, offset, first),
    )
