"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "softmax_sample/batch=5,vocab=61,k=7,dtype=float16,bias=1,per_row=1",
    "softmax_sample/batch=2,vocab=2051,k=40,seeded=1,whole=1",  # two words a lane; without a bias there are equals
    "softmax_sample/batch=3,vocab=1037,k=1,dtype=bfloat16,seeded=2,whole=1",  # rows that begin within a vector
    "softmax_sample/batch=3,vocab=1036,k=1,bias=1,whole=1,allowed=1",  # whole vectors, and a part of a word of a bitmap
    "softmax_sample/batch=2,vocab=1037,k=1,per_row=1,whole=1,allowed=1,capped=1",
)
REALISTIC: tuple[str, ...] = (
    "softmax_sample/batch=64,vocab=128256,k=128,dtype=bfloat16,per_row=1,whole=1",
    "softmax_sample/batch=64,vocab=128256,k=1,whole=1",
)
