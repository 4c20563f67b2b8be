"""Whether a GPU has room for all thread blocks of a cooperative kernel at the same time (`core.template.Resident`)."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.machine import Machine


def too_large(resident: Mapping[str, int] | None, resources: Mapping[str, int] | None, machine: Machine) -> str | None:
    """Why a library's kernel cannot be launched on a machine, or None; `resident` is None where it is not cooperative.

    What other processes run is left out: a launch that finds no room waits for them or fails, see
    `runtime.loading.or_else`.
    """
    if resident is None:
        return None
    taken = resources or {}
    shared = resident["shared_bytes"] + taken.get("shared_bytes", 0)
    room = machine.blocks_at_once(resident["threads"], taken.get("registers", 0), shared)
    if resident["blocks"] <= room:
        return None
    return (
        f"its {resident['blocks']} thread blocks wait for each other, and {machine.cores} multiprocessors run {room} of"
        " them at the same time"
    )
