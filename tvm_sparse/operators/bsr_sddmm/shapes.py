"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "bsr_sddmm/m=1,k=1,n=1,block=1,sparsity=0",
    "bsr_sddmm/m=5,k=66,n=35,block=5x3,sparsity=0.5",
    "bsr_sddmm/m=70,k=192,n=128,block=64,sparsity=0.5,dtype=float16",
    "bsr_sddmm/m=9,k=96,n=256,block=128x16,sparsity=0.5,dtype=bfloat16,pattern=skewed",
)
REALISTIC: tuple[str, ...] = ("bsr_sddmm/m=8192,k=4096,n=4096,block=64,sparsity=0.8,dtype=bfloat16",)
