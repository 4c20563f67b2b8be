"""Elements in registers as 32-bit words: how they are loaded from global memory, and read as float32, in any dtype.

A word holds one float32, or two float16 or bfloat16, the first in its low half. Loads are PTX instructions of 2 to 16
bytes at any address that is a multiple of their size. TVM's own vector loads ask for more: an index that it can prove
to be a multiple of the vector, and a vector type of the dtype; and casts of 8 halves to 8 floats miscompile.

All loads are `ld.global`, and none is marked as read-only (`ld.global.nc`): a kernel whose launch overlaps its producer
kernel reads what that writes meanwhile (see `overlap`). They are volatile, so the compiler leaves them in the order in
which they are written; the assembler may still move a load that depends on less before another one.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

HALF = (
    "__device__ __forceinline__ float half_of_word(unsigned int w)"
    " { return __half2float(__ushort_as_half((unsigned short)w)); }"
)
# The volatile move hides from the compiler how the address was computed.
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
# Two bytes of a 32-bit word as two elements of 16 bits, by the dtypes of both: few instructions, and exact. int8 as
# bfloat16: 128 + its lower seven bits, less 128 or, of a negative number, 256. int8 as float16: 1024 + (the number +
# 128), less 1152. Bits of float8_e4m3fn, put where those of the other dtype are, are the number over the power of two
# by which the dtypes' exponents are biased apart.
PAIRS = {
    ("int8", "bfloat16"): """
  unsigned int a = __byte_perm(w & 0x7F7F7F7F, filler, second ? 0x4342 : 0x4140);
  unsigned int b = __byte_perm(w & 0x80808080, filler, second ? 0x4342 : 0x4140);
  __nv_bfloat162 pair = __hsub2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);""",
    ("int8", "float16"): """
  unsigned int a = __byte_perm(w ^ 0x80808080, filler, second ? 0x4342 : 0x4140), b = 0x64806480;
  __half2 pair = __hsub2(*(__half2*)&a, *(__half2*)&b);""",
    ("float8_e4m3fn", "bfloat16"): """
  unsigned int high = __byte_perm(w, 0, second ? 0x3424 : 0x1404);
  unsigned int a = (high & 0x80008000) | ((high & 0x7F007F00) >> 4), b = 0x7B807B80;
  __nv_bfloat162 pair = __hmul2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);""",
    ("float8_e4m3fn", "float16"): """
  unsigned int high = __byte_perm(w, 0, second ? 0x3424 : 0x1404);
  unsigned int a = (high & 0x80008000) | ((high & 0x7F007F00) >> 1), b = 0x5C005C00;
  __half2 pair = __hmul2(*(__half2*)&a, *(__half2*)&b);""",
}
# One instruction from compute capability 8.9 on.
HALVES_OF_E4M3 = f"""
__device__ __forceinline__ unsigned int halves_of_e4m3(unsigned int w) {{
#if __CUDA_ARCH__ >= 890
  unsigned int halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)w));
  return halves;
#else
  const bool second = false;{PAIRS["float8_e4m3fn", "float16"]}
  return *(unsigned int*)&pair;
#endif
}}
"""
# What fills the upper bytes, where they are not those of the number. It comes from a register, because the compiler
# would otherwise move the constant to one for each pair.
FILLERS = {("int8", "bfloat16"): 0x43434343, ("int8", "float16"): 0x64646464}
# PTX's types of the dtypes that indices have.
PTX_INDEX = {"int32": "s32", "int64": "s64"}


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
    """The float32 of the `e`-th element of a vector whose first word is `words[at]`."""
    return value_in(dtype, words[at + e // per_word(dtype)], e % per_word(dtype))


def stored_at(
    stored: str, words: tirx.Buffer, at: tirx.PrimExpr | int, e: tirx.PrimExpr | int, filler: tirx.PrimExpr | int
) -> tirx.PrimExpr:
    """The float32 of the `e`-th element, of the dtype `stored` of eight bits, of a vector whose first word is
    `words[at]`. `filler`: as for `pair_of_bytes` and float16.
    """
    if stored == "float8_e4m3fn":
        which = T.Cast("uint32", e % 4 // 2 * 16)
        pair = T.cuda.func_call(
            "halves_of_e4m3", words[at + e // 4] >> which, source_code=HALVES_OF_E4M3, return_type="uint32"
        )
    else:
        pair = pair_of_bytes(stored, "float16", words[at + e // 4], e % 4 // 2, filler)
    # A float16 in the program, without which its code has no header of such numbers.
    half = T.reinterpret("float16", T.Cast("uint16", pair >> (T.Cast("uint32", e % 2) * T.uint32(16))))
    return T.Cast("float32", half)


def pair_of_bytes(
    stored: str, dtype: str, word: tirx.PrimExpr, second: tirx.PrimExpr | int, filler: tirx.PrimExpr | int
) -> tirx.PrimExpr:
    """A 32-bit word of two elements of a dtype of 16 bits: the first two bytes of `word`, or, if `second`, the other
    two, which are of the dtype `stored`. `filler`: that of `FILLERS`, or any 32-bit word where there is none.
    """
    name = f"pair_of_{stored}_{dtype}"
    source = (
        f"__device__ __forceinline__ unsigned int {name}(unsigned int w, bool second, unsigned int filler)"
        f" {{{PAIRS[stored, dtype]}\n"
        "  return *(unsigned int*)&pair;\n}\n"
    )
    later = T.Cast("bool", second) if isinstance(second, tirx.Expr) else T.bool(bool(second))
    return T.cuda.func_call(name, word, later, filler, source_code=source, return_type="uint32")


@T.inline
def load_words(size, w, at, small, place):
    """Load `size` bytes (1, 2, 4, 8 or 16) from the address `place` of global memory into the words from `w[at]` on.

    `small`: a buffer of one uint16, through which a load of 1 or 2 bytes goes.
    """
    if size == 16:
        T.ptx.ld.global_.v4.u32(w[at], w[at + 1], w[at + 2], w[at + 3], place)
    elif size == 8:
        T.ptx.ld.global_.v2.u32(w[at], w[at + 1], place)
    elif size == 4:
        T.ptx.ld.global_.u32(w[at], place)
    elif size == 1:
        T.ptx.ld.global_.u8(small[0], place)
        w[at] = T.Cast("uint32", small[0])
    else:
        T.ptx.ld.global_.u16(small[0], place)
        w[at] = T.Cast("uint32", small[0])


def load_element(dtype: str, place: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 of the element at the address `place` of global memory, loaded as `load_words` does."""
    return value_in(dtype, load_word(place) if dtype == "float32" else _load("half_word_at", "u16", place), 0)


def load_word(place: tirx.PrimExpr) -> tirx.PrimExpr:
    """The 32-bit word at the address `place` of global memory, as an expression."""
    return _load("word_at", "u32", place)


def _load(name: str, kind: str, place: tirx.PrimExpr) -> tirx.PrimExpr:
    held, register = {"u32": ("unsigned int", "=r"), "u16": ("unsigned short", "=h")}[kind]
    source = (
        f"__device__ __forceinline__ unsigned int {name}(const void* p) {{ {held} w;"
        f' asm volatile("ld.global.{kind} %0, [%1];" : "{register}"(w) : "l"(p) : "memory"); return w; }}'
    )
    return T.cuda.func_call(name, place, source_code=source, return_type="uint32")


def held_address(kind: str, place: tirx.PrimExpr) -> tirx.PrimExpr:
    """An address as an integer that is computed once and held: of global memory ("u64") or shared memory ("u32").

    Left to itself the compiler computes an address anew at each use, from what it is made of, to save a register.
    """
    held_in = {"u32": "uint32", "u64": "uint64"}[kind]
    return T.cuda.func_call("fixed_" + kind, place, source_code=FIXED[kind], return_type=held_in)
