"""Block-sparse matmul by products of warpgroups (`wgmma`, compute capability 9.0), for small blocks and many rows of x.

With blocks of 16 or 32 rows a thread block has many block rows, and some of them have a block in nearly every panel of
columns. So x is brought whole: a thread block has 64 rows of x and `tiles * tile_n` rows of the weight, a tile for each
of its warpgroups, and walks the columns in panels of `panel` columns. For density d a product of two elements takes
1 / (tiles * tile_n) + d / 64 elements from the L2 cache.

**A producer warp for each warpgroup** has the warpgroup's block rows. Lanes hold the columns of a row's next 32 blocks;
a ballot says how many come one after another in the panel, and their elements are copied (`cp.async`) one after
another, each block of 16 columns in the layout that tensor cores read. A panel begins at the least column that any
block row has next. Nothing is sorted or prepared: columns in any order, repeated blocks, and more blocks than a stage
has room for only bring a panel again. x comes by a tensor map.

**A warpgroup** multiplies the blocks of one block row after another, x being operand A and the block operand B, so that
sums stay in the same registers while a loop goes through a row's blocks. An instruction reads 64 rows of x by 16
columns from shared memory: blocks of 16 rows reach 40 % of the tensor cores' rate, those of 32 rows 67 %.

The rest is as in `warpgroups`: a ring of `stages`, a tile of y that passes through shared memory, `overlap`. The stages
share all shared memory that a thread block may take.

The kernel, phase by phase, is `kernel`.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from .space import Extents, allowed, declines, default, features, launch, space


def build(problem: BsrMatmul, decisions: Decisions) -> Program:
    from .kernel import kernel

    return kernel(problem, Extents.of(problem, decisions))


windows = Template(
    name="block_windows",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="panels of x and small 16-bit blocks in shared memory, products of warpgroups row by row",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    features=features,
    launch=launch,
    explicit_threads=True,
    declines=declines,
)
