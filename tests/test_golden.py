"""The emitted code of every template is what its fingerprints say, unless its version rose (see `golden`); and what it
takes of a GPU is there."""

from __future__ import annotations

import pytest
from cases import PARKED_BYTES, needs_cuda, thorough
from golden import assembler, fingerprints, machine_fingerprint, read, source_unchanged
from golden.choose import realistic

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse


@pytest.mark.parametrize("older", [False, thorough(True)], ids=["newer", "older"])
@pytest.mark.parametrize("name", [template.name for template in spaces.templates()])
def test_emitted_code_is_what_it_was(name: str, older: bool) -> None:
    """For a new GPU, and for an older one."""
    template, golden = spaces.find(name), read(name)
    if template.version > golden.version:
        pytest.fail(f"version {template.version}: take the fingerprints anew, python -m golden update {name}")
    assert len(golden.points) >= 3
    for key, expected in golden.points.items():
        point = golden.point(key)
        if point.older != older:
            continue
        assert point.key == key, f"stored under earlier decisions: python -m golden update {name}"
        assert spaces.refusal(point.candidate, parse(point.problem), point.machine) is None, key
        if source_unchanged(point, expected):
            continue
        # Other names, or another order of declarations, may still be the same machine code.
        assert golden.assembler == assembler(template.kind), (
            f"{key}: the source changed, and the fingerprints of machine code are by {golden.assembler}: compare with"
            " the last commit, python -m golden update"
        )
        assert machine_fingerprint(point) == expected["machine"], (
            f"{key}: the machine code changed, and the version is still {template.version}"
        )


@needs_cuda
@pytest.mark.parametrize("name", [template.name for template in spaces.templates() if template.kind == "cuda"])
def test_kernels_keep_to_registers_and_shared_memory(name: str) -> None:
    """As was noted with the fingerprints; by another assembler, the defaults of realistic problems are compiled."""
    template, golden = spaces.find(name), read(name)
    defaults = realistic(template)
    missing = [point.key for point in defaults if point.key not in golden.points]
    assert not missing, f"other defaults than before: python -m golden update {name}"
    if golden.assembler == assembler("cuda"):
        taken = [(golden.point(key), known["resources"]) for key, known in golden.points.items()]
    else:
        taken = [(point, fingerprints(point)["resources"]) for point in defaults]
    for point, resources in taken:
        where = f"{point.key}: {resources}"
        assert resources["registers"] > 0
        assert resources["local_bytes"] <= PARKED_BYTES, where
        assert resources["shared_bytes"] <= point.machine.shared_bytes, where
        # What tables of trials take for the threads of a block (`records.database`).
        values = point.candidate.values
        told = template.launch(parse(point.problem), values).threads if template.launch else values.get("threads")
        assert told is None or told in resources["threads"], where
