"""Shapes of this operator, as problem keys: what the quickstart tunes, and what generic tests run templates on."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "row_argmax_logsumexp/batch=3,vocab=1",  # no whole vector
    "row_argmax_logsumexp/batch=5,vocab=61,dtype=float16",  # prime: rows begin anywhere in a vector
    "row_argmax_logsumexp/batch=2,vocab=1030,dtype=bfloat16",  # several warps, and a ragged end
    "row_argmax_logsumexp/batch=4,vocab=4096",
)
REALISTIC: tuple[str, ...] = ("row_argmax_logsumexp/batch=64,vocab=32000,dtype=bfloat16",)
