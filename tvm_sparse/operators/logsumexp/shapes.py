"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = ("logsumexp/batch=3,vocab=1501,dtype=float16",)
REALISTIC: tuple[str, ...] = ("logsumexp/batch=10,vocab=25000",)
