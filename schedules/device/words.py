"""Rows as 16-byte vectors of 32-bit words: how elements lie in them, whatever the dtype.

Loads by words need no alignment of the row to a vector, and no vector type of the dtype.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

HALF = (
    "__device__ __forceinline__ float half_of_word(unsigned int w)"
    " { return __half2float(__ushort_as_half((unsigned short)w)); }"
)
# An address that is computed once: the compiler would compute it anew at each use, from what it is made of.
FIXED = {
    kind: f"""
__device__ __forceinline__ {held} fixed_{kind}({given} place) {{
  {held} address;
  asm volatile("mov.{kind} %0, %1;" : "={register}"(address) : "{register}"(place));
  return address;
}}
"""
    for kind, held, given, register in (
        ("u32", "unsigned int", "unsigned int", "r"),
        ("u64", "unsigned long long", "const void*", "l"),
    )
}
# What instructions call the dtypes of indices.
INDEX_KINDS = {"int32": "s32", "int64": "s64"}


def per_word(dtype: str) -> int:
    """Elements of a word."""
    return 1 if dtype == "float32" else 2


def value_in(dtype: str, word: tirx.PrimExpr, part: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """The float32 of the `part`-th element of a word."""
    if dtype == "float32":
        return T.reinterpret("float32", word)
    shift = T.Cast("uint32", part) * T.uint32(16)
    if dtype == "bfloat16":
        return T.reinterpret("float32", (word << (T.uint32(16) - shift)) & T.uint32(0xFFFF0000))
    return T.cuda.func_call("half_of_word", word >> shift, source_code=HALF, return_type="float32")


def value_at(dtype: str, words: tirx.Buffer, at: tirx.PrimExpr | int, e: tirx.PrimExpr | int) -> tirx.PrimExpr:
    """The float32 of the `e`-th element of a vector that begins at word `at`."""
    return value_in(dtype, words[at + e // per_word(dtype)], e % per_word(dtype))


@T.inline
def load_words(size, w, at, small, place):
    """`size` bytes of global memory, 2 to 16, into words; `small` is room for an uint16.

    Not declared read-only: a kernel whose launch overlapped the one before may read what that has written, and the
    assembler does not move one of these loads behind another.
    """
    if size == 16:
        T.ptx.ld.global_.v4.u32(w[at], w[at + 1], w[at + 2], w[at + 3], place)
    elif size == 8:
        T.ptx.ld.global_.v2.u32(w[at], w[at + 1], place)
    elif size == 4:
        T.ptx.ld.global_.u32(w[at], place)
    else:
        T.ptx.ld.global_.u16(small[0], place)
        w[at] = T.Cast("uint32", small[0])


def read_element(dtype: str, place: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 of the element at an address of global memory, not declared read-only, as `load_words`."""
    name, kind, register = ("word_at", "u32", "=r") if dtype == "float32" else ("half_word_at", "u16", "=h")
    held = {"u32": "unsigned int", "u16": "unsigned short"}[kind]
    source = (
        f"__device__ __forceinline__ unsigned int {name}(const void* p) {{ {held} w;"
        f' asm volatile("ld.global.{kind} %0, [%1];" : "{register}"(w) : "l"(p) : "memory"); return w; }}'
    )
    return value_in(dtype, T.cuda.func_call(name, place, source_code=source, return_type="uint32"), 0)


def fixed(kind: str, place: tirx.PrimExpr) -> tirx.PrimExpr:
    """An address as an integer that is not computed anew at each use: of global memory ("u64") or shared ("u32")."""
    held_in = {"u32": "uint32", "u64": "uint64"}[kind]
    return T.cuda.func_call("fixed_" + kind, place, source_code=FIXED[kind], return_type=held_in)
