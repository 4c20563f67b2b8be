"""A dense matrix times a block-sparse (BSR) one."""
