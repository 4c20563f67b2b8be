"""Shapes of this operator, as problem keys: what the quickstart tunes, and what generic tests run templates on."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "row_norm/rows=1,width=1",
    "row_norm/rows=3,width=61,dtype=float16",  # prime
    "row_norm/rows=2,width=520,dtype=bfloat16",  # whole vectors, but not of every size
    "row_norm/rows=5,width=1024",
)
REALISTIC: tuple[str, ...] = (
    "row_norm/rows=64,width=4096,dtype=bfloat16",
)  # fmt: skip
