"""Shapes of this operator, as problem keys; `core.registry` says what each list is for."""

QUICKSTART: tuple[str, ...] = (
    "bsr_matmul/m=8,k=1024,n=1024,block=16,sparsity=0.9",
    "bsr_matmul/m=1,k=128,n=768,block=32,sparsity=0.8",
)
AWKWARD: tuple[str, ...] = (
    "bsr_matmul/m=1,k=1,n=1,block=1,sparsity=0",
    "bsr_matmul/m=3,k=66,n=35,block=5x3,sparsity=0.5,bias=1,activation=gelu",  # nothing is a power of two
    "bsr_matmul/m=17,k=128,n=64,block=32x16,sparsity=0.5,dtype=float16",
    "bsr_matmul/m=4,k=192,n=64,block=2x32,sparsity=0.7,dtype=bfloat16,bias=1,activation=relu",
    "bsr_matmul/m=9,k=576,n=48,block=8,sparsity=0.5,dtype=float16,activation=silu",  # tensor cores, several steps
    "bsr_matmul/m=10,k=64,n=128,block=64x8,sparsity=0.3,dtype=bfloat16,bias=1",
    "bsr_matmul/m=2,k=64,n=64,block=8,sparsity=1",  # no block at all
    "bsr_matmul/m=2,k=128,n=32,block=1,sparsity=0.95,pattern=skewed",
    "bsr_matmul/m=9,k=512,n=16,block=4x64,sparsity=0.25",  # long rows: every lane takes several steps
    "bsr_matmul/m=70,k=192,n=120,block=24x32,sparsity=0.5,dtype=float16,bias=1",  # warpgroups, and a second strip of x
    "bsr_matmul/m=70,k=192,n=96,block=48x32,sparsity=0.5,dtype=bfloat16,turned=1",  # by them, three boxes of a block
    "bsr_matmul/m=3,k=66,n=35,block=5x3,sparsity=0.5,bias=1,turned=1",
    "bsr_matmul/m=70,k=96,n=48,block=24x16,sparsity=0.5,bias=1,precision=tf32",
)
REALISTIC: tuple[str, ...] = (
    "bsr_matmul/m=1,k=1024,n=4096,block=16,sparsity=0.9",
    "bsr_matmul/m=64,k=4096,n=4096,block=32,sparsity=0.9,dtype=float16",
    "bsr_matmul/m=128,k=768,n=768,block=64x8,sparsity=0.5",
)
