"""How much dynamic shared memory a block asks for. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine

# Up to 48 KB every kernel gets unasked. The most that buffers outside of the dynamic ones take of them.
STATIC_LIMIT, STATIC = 48 * 1024, 2 * 1024 + 512
# Bytes of shared memory of a Hopper multiprocessor, and what the system takes of them for each block.
SHARED, RESERVED = 228 * 1024, 1024


def most_asked(machine: Machine, most: int) -> int:
    """Bytes that a block may ask for, `most` at the most."""
    return min(most, machine.block_shared_bytes - STATIC)


def asked(taken: int) -> int:
    """Bytes to ask for where dynamic buffers take so many.

    TVM asks for more than 48 KB where the dynamic buffers alone exceed them: a little less would then exceed them
    unasked, together with the static ones.
    """
    return STATIC_LIMIT + 16 if STATIC_LIMIT - STATIC < taken <= STATIC_LIMIT else taken
