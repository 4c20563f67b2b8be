"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "nhot_lookup/rows=1,vocab=1,width=1,nonzeros=1",
    "nhot_lookup/rows=7,vocab=53,width=33,nonzeros=3,weighted=1,index=int64",  # no wide loads
    "nhot_lookup/rows=9,vocab=300,width=136,nonzeros=10,dtype=float16",  # a tile and a part of one
    "nhot_lookup/rows=4,vocab=61,width=260,nonzeros=40,dtype=bfloat16,weighted=1",  # more entries than a warp has lanes
    "nhot_lookup/rows=5,vocab=40,width=6,nonzeros=20,weighted=1",  # fewer columns than a warp has lanes
    "nhot_lookup/rows=6,vocab=53,width=48,nonzeros=12,dtype=bfloat16,weighted=1,value=float32",
    "nhot_lookup/rows=33,vocab=17,width=128,nonzeros=1,index=int64",
    "nhot_lookup/rows=8,vocab=53,width=34,nonzeros=6,weighted=1,padded=1",
    "nhot_lookup/rows=6,vocab=61,width=130,nonzeros=40,dtype=float16,index=int64,mode=mean,padded=1",
    "nhot_lookup/rows=9,vocab=40,width=20,nonzeros=3,dtype=bfloat16,mode=mean",
    "nhot_lookup/rows=5,vocab=40,width=8,nonzeros=20,mode=max,padded=1",
    "nhot_lookup/rows=7,vocab=53,width=33,nonzeros=3,dtype=float16,index=int64,stored=int8",
    "nhot_lookup/rows=5,vocab=61,width=272,nonzeros=20,weighted=1,padded=1,stored=float8_e4m3fn",
    "nhot_lookup/rows=9,vocab=40,width=48,nonzeros=12,dtype=bfloat16,mode=max,stored=int8",
    "nhot_lookup/rows=5,vocab=61,width=36,nonzeros=6,dtype=bfloat16,weighted=1,tables=3",
    "nhot_lookup/rows=3,vocab=70,width=64,nonzeros=20,index=int64,mode=mean,padded=1,stored=int8,tables=4",
)
REALISTIC: tuple[str, ...] = (
    "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=1",
    "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=100,weighted=1",
    "nhot_lookup/rows=64,vocab=131072,width=4096,nonzeros=64,weighted=1,index=int64,dtype=float16",
    "nhot_lookup/rows=8192,vocab=1000,width=50,nonzeros=20,dtype=bfloat16",
)
