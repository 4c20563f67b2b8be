"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "sparse_recurrent/steps=1,batch=1,hidden=1,nonzeros=1",
    "sparse_recurrent/steps=4,batch=3,hidden=37,nonzeros=5,ragged=1",
    "sparse_recurrent/steps=3,batch=5,hidden=50,nonzeros=20,cell=relu,dtype=float16,resets=1",
    "sparse_recurrent/steps=5,batch=2,hidden=33,nonzeros=4,cell=lstm,dtype=bfloat16,ragged=1,resets=1",
    "sparse_recurrent/steps=3,batch=4,hidden=70,nonzeros=70,cell=lstm",  # as dense as can be
    "sparse_recurrent/steps=6,batch=1,hidden=64,nonzeros=6,cell=gru,resets=1",
    "sparse_recurrent/steps=2,batch=9,hidden=19,nonzeros=3,cell=gru,dtype=float16,ragged=1",
    "sparse_recurrent/steps=3,batch=5,hidden=41,nonzeros=6,cell=gru_reset_before,dtype=bfloat16,ragged=1,resets=1",
    "sparse_recurrent/steps=4,batch=2,hidden=26,nonzeros=5,cell=clipped_relu,dtype=float16,ragged=1",
)
REALISTIC: tuple[str, ...] = (
    "sparse_recurrent/steps=256,batch=4,hidden=1792,nonzeros=179",
    "sparse_recurrent/steps=64,batch=8,hidden=1024,nonzeros=128,cell=lstm,dtype=float16",
    "sparse_recurrent/steps=64,batch=16,hidden=1024,nonzeros=48,cell=gru,dtype=bfloat16,ragged=1,resets=1",
)
