"""Shapes of this operator, as problem keys.

QUICKSTART: what `tvm-sparse quickstart` tunes; may be empty. AWKWARD: what generic tests run every template on, small
and irregular. REALISTIC: at which people run it, for what only shows there: registers and shared memory.
"""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = ("logsumexp/batch=3,vocab=1501,dtype=float16",)
REALISTIC: tuple[str, ...] = ("logsumexp/batch=10,vocab=25000",)
