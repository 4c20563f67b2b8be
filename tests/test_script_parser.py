"""The quickened parser of TVMScript makes the TIR that TVM's own makes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import golden

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse

# Points of templates that are drawn anew in each run; each is parsed by TVM's parser once, which takes seconds.
DRAWN = 3


def compare(drawn: list[tuple[str, str]]) -> dict[str, bool]:
    """Whether both parsers make the same module of each point; in a process whose parser is TVM's own at first."""
    import tvm_ffi

    from tvm_sparse.core.script import quicken_parser

    def built(name: str, key: str) -> object:
        point = golden.read(name).point(key)
        return spaces.find(name).program(parse(point.problem), point.candidate.values).module

    own = [built(*one) for one in drawn]
    quicken_parser()
    # Twice: the second time texts come from what was kept.
    quick = [[built(*one) for one in drawn] for _ in range(2)]
    return {
        f"{name}: {key}": all(tvm_ffi.structural_equal(modules[number], own[number]) for modules in quick)
        for number, (name, key) in enumerate(drawn)
    }


def test_tir_is_the_same() -> None:
    generator = random.Random()
    written = [template.name for template in spaces.templates() if template.explicit_threads]
    names = generator.sample(written, DRAWN)
    drawn = [(name, generator.choice(sorted(golden.read(name).points))) for name in names]
    found = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(drawn),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    same = json.loads(found.stdout.splitlines()[-1])
    assert len(same) == DRAWN and all(same.values()), same


if __name__ == "__main__":
    print(json.dumps(compare([(name, key) for name, key in json.load(sys.stdin)])))
