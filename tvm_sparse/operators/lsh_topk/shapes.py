"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "lsh_topk/lists=1,beam=1,hidden=4,vocab=1,frequent=1,n=1,k=2,units=1,bands=1",
    "lsh_topk/lists=2,beam=3,hidden=40,vocab=517,frequent=13,n=5,k=7,units=2,bands=13,dtype=float16,bias=1",
    "lsh_topk/lists=3,beam=1,hidden=64,vocab=200,frequent=90,n=12,k=8,units=2,bands=91,dtype=bfloat16",
    "lsh_topk/lists=2,beam=17,hidden=20,vocab=97,frequent=40,n=3,k=3,units=2,bands=19",
    "lsh_topk/lists=1,beam=4,hidden=36,vocab=900,frequent=1,n=40,k=16,units=5,bands=40,table=cuckoo",  # few words
)
REALISTIC: tuple[str, ...] = (
    "lsh_topk/lists=1,beam=12,hidden=1000,vocab=40000,frequent=5500,n=12,dtype=float16",
    "lsh_topk/lists=1,beam=12,hidden=1000,vocab=40000,frequent=5500,n=12",
    "lsh_topk/lists=1,beam=48,hidden=1000,vocab=66000,frequent=5000,n=48,dtype=float16",
)
