"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "softmax/batch=2,vocab=1",
    "softmax/batch=3,vocab=61,algorithm=safe,dtype=float16",
    "softmax/batch=1,vocab=1009,algorithm=naive,dtype=bfloat16",
    "softmax/batch=2,vocab=2051",  # rows begin between two vectors
    "softmax/batch=1,vocab=2048,dtype=bfloat16",  # whole vectors
)
REALISTIC: tuple[str, ...] = ("softmax/batch=512,vocab=50257,dtype=bfloat16",)
