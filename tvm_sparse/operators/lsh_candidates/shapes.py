"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "lsh_candidates/lists=1,beam=1,hidden=2,vocab=1,k=2,units=1,bands=1,capacity=1",
    "lsh_candidates/lists=2,beam=3,hidden=31,vocab=517,k=7,units=2,bands=13,capacity=100,dtype=float16",
    "lsh_candidates/lists=2,beam=1,hidden=64,vocab=200,k=8,units=2,bands=291,capacity=300,dtype=bfloat16",
    "lsh_candidates/lists=2,beam=17,hidden=21,vocab=97,k=3,units=2,bands=19,capacity=60",
    "lsh_candidates/lists=1,beam=4,hidden=40,vocab=2100,k=16,units=5,bands=40,table=cuckoo,capacity=999",
)
REALISTIC: tuple[str, ...] = (
    "lsh_candidates/lists=1,beam=12,hidden=1000,vocab=40000,k=16,units=3,bands=500,dtype=float16",
    "lsh_candidates/lists=1,beam=48,hidden=1000,vocab=66000,k=8,units=3,bands=500",
    "lsh_candidates/lists=8,beam=1,hidden=4096,vocab=152000,k=16,units=4,bands=300,table=cuckoo,dtype=bfloat16",
)
