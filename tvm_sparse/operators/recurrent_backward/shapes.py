"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "recurrent_backward/steps=1,batch=1,hidden=1,nonzeros=1",
    "recurrent_backward/steps=4,batch=3,hidden=37,nonzeros=5,ragged=1",
    "recurrent_backward/steps=3,batch=5,hidden=50,nonzeros=20,cell=relu,dtype=float16,resets=1",
    "recurrent_backward/steps=5,batch=2,hidden=33,nonzeros=16,cell=lstm,dtype=bfloat16,ragged=1,resets=1",
    "recurrent_backward/steps=3,batch=4,hidden=30,nonzeros=120,cell=lstm",  # as dense as can be
    "recurrent_backward/steps=6,batch=1,hidden=64,nonzeros=18,cell=gru,resets=1",
    "recurrent_backward/steps=2,batch=9,hidden=19,nonzeros=9,cell=gru,dtype=float16,ragged=1",
    "recurrent_backward/steps=3,batch=5,hidden=23,nonzeros=9,cell=gru_reset_before,dtype=float16,ragged=1,resets=1",
)
REALISTIC: tuple[str, ...] = (
    "recurrent_backward/steps=256,batch=4,hidden=1792,nonzeros=180",
    "recurrent_backward/steps=64,batch=8,hidden=1024,nonzeros=560,cell=lstm,dtype=float16",
    "recurrent_backward/steps=64,batch=16,hidden=1024,nonzeros=140,cell=gru,dtype=bfloat16,ragged=1,resets=1",
)
