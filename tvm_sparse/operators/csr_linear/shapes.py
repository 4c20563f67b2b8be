"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = ()
AWKWARD: tuple[str, ...] = (
    "csr_linear/m=1,k=1,n=1,sparsity=0",
    "csr_linear/m=5,k=67,n=37,sparsity=0.7",
    "csr_linear/m=17,k=130,n=50,sparsity=0.8,dtype=float16,index=int64",
    "csr_linear/m=3,k=300,n=40,sparsity=0.5,dtype=bfloat16",  # several entries a lane
    "csr_linear/m=2,k=64,n=64,sparsity=1",  # no entry at all
)
REALISTIC: tuple[str, ...] = (
    "csr_linear/m=1,k=4096,n=4096,sparsity=0.9,dtype=float16",
    "csr_linear/m=64,k=4096,n=11008,sparsity=0.8,dtype=bfloat16",
)
