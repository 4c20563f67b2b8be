"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "edit_logits/batch=1,vocab=1,words=1,bias=1",
    "edit_logits/batch=5,vocab=301,words=40,dtype=float16",
    "edit_logits/batch=3,vocab=1504,words=70,dtype=bfloat16,bias=1,per_row=1",
    "edit_logits/batch=4,vocab=96,words=130,bias=1,penalties=0",
    "edit_logits/batch=3,vocab=515,words=40,dtype=float16,bias=1,per_row=1,capped=1",
    "edit_logits/batch=2,vocab=1504,words=33,penalties=0,capped=1",
)
REALISTIC: tuple[str, ...] = ("edit_logits/batch=64,vocab=128256,words=512,bias=1,per_row=1",)
