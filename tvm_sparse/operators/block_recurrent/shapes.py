"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "block_recurrent/steps=1,batch=1,hidden=1,nonzeros=1",
    "block_recurrent/steps=1,batch=1,hidden=1,nonzeros=1,dtype=float16",
    "block_recurrent/steps=4,batch=3,hidden=37,nonzeros=3,dtype=float16,ragged=1",
    "block_recurrent/steps=3,batch=5,hidden=50,nonzeros=7,cell=relu,dtype=bfloat16,resets=1",  # dense
    "block_recurrent/steps=5,batch=2,hidden=33,nonzeros=2,cell=lstm,dtype=bfloat16,ragged=1,resets=1",
    "block_recurrent/steps=3,batch=16,hidden=72,nonzeros=5,cell=lstm,dtype=float16",
    "block_recurrent/steps=6,batch=1,hidden=64,nonzeros=3,cell=gru,resets=1",
    "block_recurrent/steps=3,batch=9,hidden=19,nonzeros=2,cell=gru,dtype=float16,ragged=1",
    "block_recurrent/steps=2,batch=17,hidden=16,nonzeros=2,dtype=bfloat16",
    "block_recurrent/steps=3,batch=35,hidden=20,nonzeros=2,cell=lstm,dtype=bfloat16,ragged=1,resets=1",
    "block_recurrent/steps=3,batch=3,hidden=21,nonzeros=2,cell=gru_reset_before,dtype=float16,resets=1",
    "block_recurrent/steps=3,batch=9,hidden=24,nonzeros=2,cell=clipped_relu,dtype=bfloat16",
)
REALISTIC: tuple[str, ...] = (
    "block_recurrent/steps=256,batch=4,hidden=1792,nonzeros=224,dtype=float16",
    "block_recurrent/steps=64,batch=8,hidden=1024,nonzeros=128,cell=lstm,dtype=float16",
    "block_recurrent/steps=64,batch=16,hidden=1024,nonzeros=20,cell=gru,dtype=bfloat16,ragged=1,resets=1",
)
