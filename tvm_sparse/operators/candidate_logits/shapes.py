"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "candidate_logits/lists=1,beam=1,vocab=1,hidden=1,m=1",
    "candidate_logits/lists=2,beam=9,vocab=301,hidden=40,m=70,dtype=float16,bias=1",
    "candidate_logits/lists=3,beam=1,vocab=97,hidden=35,m=50,dtype=bfloat16",  # rows not aligned to 16 bytes
    "candidate_logits/lists=3,beam=1,vocab=97,hidden=72,m=50,dtype=bfloat16",  # lists of one row each
    "candidate_logits/lists=1,beam=3,vocab=400,hidden=60,m=37",
)
REALISTIC: tuple[str, ...] = ("candidate_logits/lists=1,beam=12,vocab=40000,hidden=1000,m=6144,dtype=float16",)
