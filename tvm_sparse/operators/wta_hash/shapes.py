"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "wta_hash/batch=1,hidden=2,k=2,units=1,bands=1",
    "wta_hash/batch=3,hidden=31,k=7,units=2,bands=13,dtype=float16",  # odd columns: no wide loads
    "wta_hash/batch=2,hidden=64,k=64,units=5,bands=37,dtype=bfloat16",  # every column, and 30 bits
    "wta_hash/batch=5,hidden=100,k=16,units=3,bands=150",
)
REALISTIC: tuple[str, ...] = (
    "wta_hash/batch=12,hidden=1000,k=16,units=3,bands=500",
    "wta_hash/batch=64,hidden=4096,k=8,units=4,bands=500,dtype=bfloat16",
)
