"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "head_topk/batch=1,vocab=1,hidden=1,k=1",
    "head_topk/batch=3,vocab=301,hidden=40,k=5,dtype=float16,bias=1,ids=2",
    "head_topk/batch=9,vocab=150,hidden=72,k=40,dtype=bfloat16",
    "head_topk/batch=19,vocab=173,hidden=136,k=5,dtype=bfloat16,bias=1",  # more rows than a fragment has
    "head_topk/batch=2,vocab=97,hidden=35,k=97,dtype=float16,ids=1",  # rows not aligned to 16 bytes; all words
    "head_topk/batch=5,vocab=400,hidden=60,k=4,bias=1",
    # a part for eight warps
    "head_topk/batch=5,vocab=101,hidden=456,k=7,dtype=bfloat16,bias=1,ids=2,per_row=1,capped=1",
    "head_topk/batch=2,vocab=37,hidden=2696,k=3,dtype=float16",  # a part for six steps of eight warps
    "head_topk/batch=3,vocab=301,hidden=976,k=5,dtype=bfloat16,bias=1,ids=2,stored=int8",  # not all of a step
    "head_topk/batch=12,vocab=96,hidden=1024,k=40,dtype=float16,stored=float8_e4m3fn,logits=1",
    "head_topk/batch=2,vocab=97,hidden=35,k=97,stored=float8_e4m3fn",
    "head_topk/batch=3,vocab=96,hidden=576,k=5,dtype=bfloat16,bias=1,ids=2,stored=int8,groups=3,logits=1",
    "head_topk/batch=2,vocab=97,hidden=36,k=7,stored=float8_e4m3fn,groups=12",
)
REALISTIC: tuple[str, ...] = (
    "head_topk/batch=12,vocab=40000,hidden=1000,k=12,dtype=float16",
    "head_topk/batch=64,vocab=100352,hidden=1024,k=20,dtype=bfloat16",
    "head_topk/batch=10,vocab=151936,hidden=2560,k=20,dtype=bfloat16,bias=1",
)
