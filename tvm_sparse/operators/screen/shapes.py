"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "screen/rows=1,vocab=1,k=1,groups=1",
    "screen/rows=19,vocab=1333,k=40,groups=3",  # two strips of rows, and a word of the bitmap that is not full
)
REALISTIC: tuple[str, ...] = ("screen/rows=16,vocab=128256,k=20,groups=8",)
