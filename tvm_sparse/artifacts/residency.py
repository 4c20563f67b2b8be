"""Whether a machine can run a library's kernel.

A GPU needs room for all thread blocks of a cooperative one at the same time (`core.template.Resident`), a CPU the
instructions that the kernel uses beyond those of its level.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..core.machine import Machine


def unfit(resident: Mapping[str, int] | None, resources: Mapping[str, int] | None, machine: Machine) -> str | None:
    """Why a library's kernel cannot run on a machine, or None; `resident` is None where it is not cooperative.

    `resources` are as in `manifest.Entry`. What other processes run is left out: a launch that finds no room waits for
    them or fails, see `runtime.loading.or_else`.
    """
    taken = resources or {}
    if machine.kind == "llvm":
        lacks = sorted(taken.keys() - machine.instructions.split())
        return f"it uses {', '.join(lacks)}, which this CPU does not have" if lacks else None
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
