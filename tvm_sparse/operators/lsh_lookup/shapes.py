"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "lsh_lookup/lists=1,beam=1,vocab=1,bands=1,bits=1",
    "lsh_lookup/lists=3,beam=2,vocab=131,bands=13,bits=3",
    "lsh_lookup/lists=2,beam=1,vocab=200,bands=291,bits=5",  # more bands than a byte counts
    "lsh_lookup/lists=2,beam=3,vocab=517,bands=37,table=cuckoo,bits=30",
)
REALISTIC: tuple[str, ...] = (
    "lsh_lookup/lists=1,beam=12,vocab=40000,bands=500,bits=12",
    "lsh_lookup/lists=4,beam=12,vocab=152000,bands=100,table=cuckoo,bits=18",
)
