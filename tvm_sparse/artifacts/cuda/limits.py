"""Limits of a GPU, queried from the driver, without running a kernel or loading a compiler.

The driver computes how many thread blocks or clusters run at the same time for a loaded kernel and a launch. An empty
kernel, loaded as a line of PTX, is used for the query.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...core.machine import MOST_CLUSTER, Machine

_PTX = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"
_CLUSTER_PTX = _PTX.replace(b"7.0", b"7.8").replace(b"sm_80", b"sm_90")
# Constants of the driver's interface: attributes of functions, of launches and of devices.
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER, _CLUSTER_DIMENSION = 8, 14, 4
_DEVICE = {
    "multiprocessors": 16,
    "l2_bytes": 38,
    "block_shared_bytes": 97,
    "shared_bytes": 81,
    "registers": 82,
    "max_threads": 1,
    "threads": 39,
    "cooperative": 95,
}


class LimitsError(RuntimeError):
    """The driver is missing, or its query failed."""


@dataclass(frozen=True)
class Limits:
    """A GPU's limits, as its driver reports them.

    Attributes
    ----------
    multiprocessors, l2_bytes
        Totals for the GPU.
    block_shared_bytes
        Largest shared memory of a thread block, with opt-in.
    shared_bytes, registers, threads
        Totals for a multiprocessor.
    max_threads
        Most threads of a thread block.
    largest_cluster
        Thread blocks in the largest cluster that the GPU launches; 1 without clusters.
    clusters_at_once
        For cluster sizes from 1 on, the number of clusters that run at the same time if each thread block takes a whole
        multiprocessor.
    cooperative_blocks
        Number of thread blocks with `max_threads` threads that run at the same time in a cooperative launch; 0 if the
        GPU has none.
    """

    multiprocessors: int
    l2_bytes: int
    block_shared_bytes: int
    shared_bytes: int
    registers: int
    threads: int
    max_threads: int
    largest_cluster: int
    clusters_at_once: tuple[int, ...]
    cooperative_blocks: int


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def limits(machine: Machine, number: int = 0) -> Limits:
    """Query the limits of the GPU with this number, whose architecture is that of `machine`.

    Raises
    ------
    LimitsError
        If there is no driver, or the query fails.
    """
    with _kernel(machine.has_clusters, number) as (driver, function):
        told = {name: _attribute(driver, which, number) for name, which in _DEVICE.items()}
        cooperative = told.pop("cooperative")
        each = ctypes.c_int()
        _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(each), function, told["max_threads"], ctypes.c_size_t(0)
            ),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        at_once: list[int] = []
        if machine.has_clusters:
            shared = told["block_shared_bytes"] - 4096
            sizes = range(1, MOST_CLUSTER + 1)
            at_once = [_clusters(driver, function, blocks, 512, shared) for blocks in sizes]
        largest = max((blocks for blocks, count in enumerate(at_once, 1) if count), default=1)
        return Limits(
            **told,
            largest_cluster=largest,
            clusters_at_once=tuple(at_once[:largest]),
            cooperative_blocks=each.value * told["multiprocessors"] if cooperative else 0,
        )


@functools.lru_cache(maxsize=256)
def clusters_at_once(number: int, blocks: int, threads: int, shared_bytes: int) -> int | None:
    """Number of clusters of `blocks` thread blocks that a GPU runs at the same time; 0 if it does not launch such
    clusters.

    None if the driver is missing or the query fails. `shared_bytes` is the dynamic shared memory of a thread block.
    """
    try:
        with _kernel(True, number) as (driver, function):
            return _clusters(driver, function, blocks, threads, shared_bytes)
    except LimitsError:
        return None


def _clusters(driver: ctypes.CDLL, function: ctypes.c_void_p, blocks: int, threads: int, shared_bytes: int) -> int:
    """As `clusters_at_once`; a launch that the driver considers invalid counts as 0."""
    if driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes):
        return 0
    attribute = _Attribute(_CLUSTER_DIMENSION, b"", (ctypes.c_uint * 16)(blocks, 1, 1))
    config = _Config((blocks, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    if driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config)):
        return 0
    return found.value


def _attribute(driver: ctypes.CDLL, which: int, number: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    _checked(driver.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    _checked(driver.cuDeviceGetAttribute(ctypes.byref(value), which, device), "cuDeviceGetAttribute")
    return value.value


def _checked(status: int, what: str) -> None:
    if status:
        raise LimitsError(f"the driver: {what} ended with error {status}")


@contextlib.contextmanager
def _kernel(clusters: bool, number: int) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    """The driver and an empty kernel, in the device's primary context, during the block."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LimitsError(f"there is no NVIDIA driver: {error}") from error
    if not hasattr(driver, "cuOccupancyMaxActiveClusters"):  # the stub of a process that builds, or an old driver
        raise LimitsError("the driver does not tell how many clusters run at the same time")
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _checked(driver.cuInit(0), "cuInit")
    _checked(driver.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    with contextlib.ExitStack() as stack:
        stack.callback(driver.cuDevicePrimaryCtxRelease_v2, device)
        _checked(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        stack.callback(driver.cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))
        text = _CLUSTER_PTX if clusters else _PTX
        _checked(driver.cuModuleLoadData(ctypes.byref(module), text), "cuModuleLoadData")
        stack.callback(driver.cuModuleUnload, module)
        _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, b"nothing"), "cuModuleGetFunction")
        if clusters:
            _checked(driver.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1), "cuFuncSetAttribute")
        yield driver, function
