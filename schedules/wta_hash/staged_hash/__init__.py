"""Winner-take-all hashing on a GPU: the row in shared memory, one thread per unit.

A thread block takes a row, and as many bands as it has threads for their units. Threads load the columns of their unit,
in 16-byte loads where k allows, while the row is copied to shared memory. One of its threads combines the places of
a band's units into the band's code.

**overlap** is programmatic dependent launch. With 1 the kernel waits for its producer kernel, and then lets its
consumer kernel start; with 2 it lets the consumer start before it waits. In both it reads nothing before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

staged_hash = in_phases(
    space,
    name="staged_hash",
    version=1,
    operator="wta_hash",
    summary="rows in shared memory, a thread a unit",
)
