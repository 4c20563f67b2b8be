"""How much dynamic shared memory a thread block asks for. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine

# Bytes of shared memory, static and dynamic, that every kernel may use without asking for more. Static buffers of the
# kernels that use these functions take 1.5 to 3.1 KB: STATIC for estimates of what is resident, MOST_STATIC for limits.
LIMIT, STATIC, MOST_STATIC = 48 * 1024, 2 * 1024 + 512, 3 * 1024 + 256
# Bytes of shared memory of a Hopper multiprocessor, and what the system takes of them for each thread block.
SHARED, RESERVED = 228 * 1024, 1024


def most_asked(machine: Machine, most: int) -> int:
    """Bytes that a thread block may ask for, at most `most`."""
    return min(most, machine.block_shared_bytes - MOST_STATIC)


def asked(taken: int) -> int:
    """Bytes to ask for where dynamic buffers take `taken`.

    TVM asks for more than 48 KB only if the dynamic buffers alone exceed them. A little less exceeds them together with
    the static buffers, and the launch is then refused (CUDA_ERROR_INVALID_VALUE).
    """
    return LIMIT + 16 if LIMIT - MOST_STATIC < taken <= LIMIT else taken
