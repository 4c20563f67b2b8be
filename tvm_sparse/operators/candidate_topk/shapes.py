"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "candidate_topk/lists=1,beam=1,vocab=1,hidden=1,m=1,k=1",
    "candidate_topk/lists=2,beam=3,vocab=301,hidden=40,m=70,k=5,dtype=float16,bias=1",
    "candidate_topk/lists=3,beam=1,vocab=500,hidden=64,m=33,k=33,dtype=bfloat16",
    "candidate_topk/lists=2,beam=9,vocab=240,hidden=72,m=20,k=7,dtype=float16,block=8",
    "candidate_topk/lists=2,beam=2,vocab=97,hidden=35,m=50,k=3,dtype=bfloat16,bias=1",  # rows not aligned to 16 bytes
    "candidate_topk/lists=1,beam=5,vocab=400,hidden=60,m=130,k=4",
)
REALISTIC: tuple[str, ...] = (
    "candidate_topk/lists=1,beam=12,vocab=40000,hidden=1000,m=6144,k=12,dtype=float16",
    "candidate_topk/lists=1,beam=48,vocab=40000,hidden=1000,m=6144,k=48",
    "candidate_topk/lists=10,beam=1,vocab=100352,hidden=1024,m=2048,k=20,dtype=bfloat16",
)
