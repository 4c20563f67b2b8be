"""Whether a machine can run a library's kernel.

A GPU must support its cluster size and shared memory, and run all thread blocks of a cooperative kernel at the same
time (`core.template.Resident`). A CPU needs the instructions that the kernel uses beyond those of its level.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.machine import Machine


def unfit(resident: Mapping[str, int] | None, resources: Mapping[str, int] | None, machine: Machine) -> str | None:
    """Why a library's kernel cannot run on a machine; None if it can. `resident` is None for kernels that are not
    cooperative.

    `resources` are as in `manifest.Entry`; missing ones are not checked. Other processes on the GPU are not considered:
    a refused launch is handled by `runtime.loading.Retreating`.
    """
    taken = resources or {}
    if machine.kind == "llvm":
        lacks = sorted(taken.keys() - machine.instructions.split())
        return f"it uses {', '.join(lacks)}, which this CPU does not have" if lacks else None
    if (cluster := taken.get("cluster", 1)) > (most := machine.most_cluster):
        return f"its clusters of {cluster} thread blocks are larger than {most}, the most that {machine.arch} launches"
    # Without the static part, which may be that of another kernel of the library.
    if (shared := taken.get("dynamic_shared_bytes", 0)) > machine.block_shared_bytes:
        return f"its thread blocks ask for {shared} bytes of shared memory, more than {machine.block_shared_bytes}"
    if resident is None:
        return None
    shared = resident["shared_bytes"] + taken.get("shared_bytes", 0)
    room = machine.blocks_at_once(resident["threads"], taken.get("registers", 0), shared)
    if resident["blocks"] <= room:
        return None
    return (
        f"its {resident['blocks']} thread blocks wait for each other, and {machine.cores} multiprocessors run {room} of"
        " them at the same time"
    )
