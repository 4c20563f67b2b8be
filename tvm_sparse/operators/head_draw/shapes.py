"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "head_draw/batch=1,vocab=1,hidden=1,dtype=float32",
    "head_draw/batch=19,vocab=173,hidden=136,dtype=float16,seeded=1,capped=1",  # more rows than a fragment has
    "head_draw/batch=5,vocab=97,hidden=35,dtype=float32,bias=1,seeded=3",  # rows not aligned to 16 bytes
    # a part for eight warps
    "head_draw/batch=5,vocab=301,hidden=456,dtype=bfloat16,bias=1,per_row=1,seeded=2",
    "head_draw/batch=2,vocab=37,hidden=2696,dtype=float16",  # a part for six steps of eight warps
)
REALISTIC: tuple[str, ...] = (
    "head_draw/batch=1,vocab=128256,hidden=4096,dtype=bfloat16",
    "head_draw/batch=64,vocab=151936,hidden=4096,dtype=bfloat16,seeded=2",
)
