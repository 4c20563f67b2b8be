"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = (
    "softmax_topk/batch=10,vocab=25000,k=5",
    "softmax_topk/batch=512,vocab=10240,k=5",
)
AWKWARD: tuple[str, ...] = (
    "softmax_topk/batch=1,vocab=1,k=1",
    "softmax_topk/batch=2,vocab=7,k=7",
    "softmax_topk/batch=3,vocab=61,k=4,dtype=float16",  # less than a tile; a prime
    "softmax_topk/batch=2,vocab=1009,k=1",  # a prime
    "softmax_topk/batch=1,vocab=1501,k=50,dtype=bfloat16",
    "softmax_topk/batch=1,vocab=2048,k=5",  # whole tiles
    "softmax_topk/batch=1,vocab=1000,k=100,dtype=float16",  # more survivors than are ranked by counting
    "softmax_topk/batch=3,vocab=1001,k=20,dtype=float16,bias=1,ids=3,allowed=1",  # with all extras
    "softmax_topk/batch=3,vocab=2056,k=7,dtype=bfloat16,allowed=1",  # whole vectors, and half a word of the bitmap
    "softmax_topk/batch=3,vocab=1503,k=6,dtype=bfloat16,ids=2,per_row=1,capped=1",
    "softmax_topk/batch=2,vocab=1204,k=3,capped=1",
    "softmax_topk/batch=1,vocab=1100,k=1100",  # k = vocab, more than the threads of a thread block
    "softmax_topk/batch=1,vocab=2600,k=2100",  # more than fit into shared memory
)
REALISTIC: tuple[str, ...] = (
    "softmax_topk/batch=10,vocab=25000,k=5",
    "softmax_topk/batch=64,vocab=128256,k=50,dtype=bfloat16",
    "softmax_topk/batch=4,vocab=32000,k=2048,dtype=float16",
    "softmax_topk/batch=4,vocab=50257,k=100",
)
