"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "compaction/lists=1,vocab=1,capacity=1",
    "compaction/lists=3,vocab=33,capacity=50",  # capacity beyond the vocabulary
    "compaction/lists=2,vocab=2049,capacity=301",
    "compaction/lists=5,vocab=9000,capacity=2000",
)
REALISTIC: tuple[str, ...] = (
    "compaction/lists=1,vocab=40000,capacity=8192",
    "compaction/lists=64,vocab=152000,capacity=16384",
)
