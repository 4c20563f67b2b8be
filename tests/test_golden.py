"""The emitted code of every template is what its fingerprints say, unless its version rose (see `golden`)."""

from __future__ import annotations

import pytest
from golden import MACHINES, assembler, emitted, machine_fingerprint, read, source_fingerprint

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse


@pytest.mark.parametrize("name", [template.name for template in spaces.templates()])
def test_emitted_code_is_what_it_was(name: str) -> None:
    template, golden = spaces.find(name), read(name)
    if template.version > golden.version:
        pytest.fail(f"version {template.version}: take the fingerprints anew, python -m golden update {name}")
    assert len(golden.points) >= 3
    for key, expected in golden.points.items():
        point = golden.point(key)
        assert spaces.refusal(point.candidate, parse(point.problem), MACHINES[template.kind]) is None, key
        if source_fingerprint(emitted(point)) == expected["source"]:
            continue
        # Other names, or another order of declarations, may still be the same machine code.
        assert golden.assembler == assembler(template.kind), (
            f"{key}: the source changed, and the fingerprints of machine code are by {golden.assembler}: compare with"
            " the last commit, python -m golden update"
        )
        assert machine_fingerprint(point) == expected["machine"], (
            f"{key}: the machine code changed, and the version is still {template.version}"
        )
