"""Where the uniform numbers of a call come from: given, or made in the kernel of seeds and offsets."""

from __future__ import annotations

import operator
import os
import sys
import threading
from typing import Any

from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.arrays import Facts

from . import philox

# What `SoftmaxSample.seeded` says of a kernel's random numbers.
GIVEN, OF_ROWS, OF_CALL, OFFSETS = range(4)
# By how much a draw moves the offset of a CUDA generator of PyTorch, which counts numbers: those of a Philox counter.
STEP = 4
_lock = threading.Lock()  # between reading a generator's offset and moving it


def told(uniforms: Any, seed: Any, offset: Any) -> tuple[int, tuple[Any, ...]] | None:
    """One of the kinds above and what a kernel is given for it: arrays, not yet checked, and int64 numbers.

    None if the caller has said nothing, and numbers are to be `fresh`.

    Raises
    ------
    TypeError, ValueError
        For what is no seed or offset, and for more than one way to say the numbers.
    """
    if uniforms is None and seed is None and type(offset) is int and not offset:
        return None
    if uniforms is not None:
        if seed is not None:
            raise ValueError("uniforms: expected these or a seed, got both")
        if type(offset) is not int or offset:
            raise ValueError("offset: comes with a seed, and uniforms are given; pass seed= in their place")
        return GIVEN, (uniforms,)
    own_offset = bool(getattr(offset, "shape", ()))
    if seed is None:
        if own_offset or arrays.unread(offset) or integer("offset", offset):
            raise ValueError("offset: comes with a seed, and there is none; pass seed= with it")
        return None
    if getattr(seed, "shape", ()):
        if own_offset or arrays.is_symbol(offset) or arrays.unread(offset) or integer("offset", offset):
            return OF_ROWS, (_moved(seed, offset if own_offset else integer("offset", offset)),)
        return OF_ROWS, (seed,)
    if own_offset:
        return OFFSETS, (integer("seed", seed), offset)
    return OF_CALL, (integer("seed", seed), integer("offset", offset))


def fresh(like: Any) -> tuple[int, tuple[Any, ...]]:
    """As `told`, where the caller leaves it to a generator.

    On a GPU these are seed and offset of PyTorch's generator of that device, which is moved on; a graph that is being
    captured gets numbers that it draws anew. On a CPU PyTorch's generator draws the seed. Other libraries' arrays get
    one of the operating system.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(like, torch.Tensor):
        return OF_CALL, (int.from_bytes(os.urandom(8), "little", signed=True), 0)
    if not like.is_cuda:
        return OF_CALL, (int(torch.empty((), dtype=torch.int64).random_()), 0)
    if torch._C._cuda_isCurrentStreamCapturing():  # without the wrapper, which takes as long as the check
        return GIVEN, (torch.rand(like.shape[:-1], device=like.device),)
    generator = torch.cuda.default_generators[like.get_device()]
    with _lock:
        at = generator.get_offset()
        generator.set_offset(at + STEP)
    # PyTorch's own kernels have counters of the same seed, and at a quarter of the offset.
    return OF_CALL, (_signed(generator.initial_seed()), at // STEP)


def integer(name: str, value: Any) -> int:
    """An integer as an int64: of larger ones the lower 64 bits. A symbol of a graph stays one, and a tensor whose value
    must not be read (`arrays.unread`).
    """
    if arrays.is_symbol(value) or arrays.unread(value):
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return _signed(operator.index(value))
    except (TypeError, RuntimeError):
        array = "an int64 array (batch, 2)" if name == "seed" else "an int64 array (batch,)"
        raise TypeError(f"{name}: expected an integer or {array}, got {type(value).__name__}") from None


def uniforms(kind: int, numbers: tuple[Any, ...], rows: tuple[int, ...], like: Any, known: Facts) -> Any:
    """The uniform numbers that a kernel makes of one seed, made on the host, for a kernel that takes them."""
    import math

    import numpy as np

    seed, offset = numbers
    if kind == OFFSETS:
        offset = np.asarray(offset.cpu() if arrays.is_torch(offset) else offset).reshape(-1)
    key, at = (np.asarray(one, np.int64).astype(np.uint64) for one in (seed, offset))
    places = np.arange(math.prod(rows))
    made = philox.uniforms(key + np.zeros_like(places, np.uint64), at + np.zeros_like(places, np.uint64), places)
    made = made.reshape(rows)
    if arrays.is_torch(like):
        return sys.modules["torch"].from_numpy(made).to(like.device)
    if known.device == "cuda":
        namespace = getattr(like, "__array_namespace__", lambda: None)()
        if namespace is None:
            raise TypeError(f"uniforms: {type(like).__name__} offers no way to make arrays on a GPU; pass them")
        return namespace.asarray(made, device=like.device)
    return made


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _moved(seeds: Any, offset: Any) -> Any:
    """Seeds and offsets `(..., 2)`, with an offset, or one of each row, added to theirs."""
    if arrays.is_torch(seeds):
        torch = sys.modules["torch"]
        if not torch.is_tensor(offset) and not isinstance(offset, int):
            raise TypeError(
                f"offset: expected an integer or a torch tensor, as the seed is, got {type(offset).__name__}"
            )
        return torch.stack([seeds[..., 0], seeds[..., 1] + offset], dim=-1)
    if arrays.is_numpy(seeds):
        import numpy as np

        with np.errstate(over="ignore"):
            return np.stack([seeds[..., 0], seeds[..., 1] + offset], axis=-1)
    namespace = getattr(seeds, "__array_namespace__", lambda: None)()
    if namespace is None:
        raise TypeError(f"offset: {type(seeds).__name__} offers no way to add it to a seed array; add it there")
    return namespace.stack([seeds[..., 0], seeds[..., 1] + offset], axis=-1)
