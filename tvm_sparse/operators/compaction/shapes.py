"""Shapes of this operator, as problem keys.

QUICKSTART: what `tvm-sparse quickstart` tunes; may be empty. AWKWARD: what generic tests run every template on, small
and irregular. REALISTIC: at which people run it, for what only shows there: registers and shared memory.
"""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "compaction/lists=1,vocab=1,capacity=1",
    "compaction/lists=3,vocab=33,capacity=50",  # more room than words
    "compaction/lists=2,vocab=2049,capacity=301",
    "compaction/lists=5,vocab=9000,capacity=2000",
)
REALISTIC: tuple[str, ...] = (
    "compaction/lists=1,vocab=40000,capacity=8192",
    "compaction/lists=64,vocab=152000,capacity=16384",
)
