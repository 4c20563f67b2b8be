"""`python -m golden check|update|choose [TEMPLATE ...]`, in `tests/`.

check
    Which points' emitted code differs from its fingerprint, and whether its machine code does. Points that were stored
    before their template got a decision are compared at its neutral value (see `present`).
update
    Take the fingerprints anew, and show how the source of each changed point differs from what HEAD emits. A template
    whose machine code changed is refused unless its version rose, and so is a new decision whose neutral value
    `schedules/vocabulary.py` does not declare. Points get the decisions of now; those that are none any more are
    removed; defaults of realistic problems that are not among the points are added.
choose
    Choose points anew, for a new template or new branches, and take their fingerprints.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import nearest

from . import (
    FOLDER,
    Golden,
    Point,
    assembler,
    emitted,
    fingerprints,
    machine_fingerprint,
    program_fingerprint,
    read,
    source_unchanged,
)
from .choose import LEAST, realistic
from .present import Present, present


def changed(golden: Golden, now: Present) -> list[tuple[str, bool]]:
    """Keys of the points whose emitted code is another, and whether their machine code is another too."""
    found = []
    for key, point in now.points.items():
        expected = golden.points[key]
        if not source_unchanged(point, expected):
            found.append((key, machine_fingerprint(point) != expected["machine"]))
    return found


def told(golden: Golden, now: Present) -> list[str]:
    """What is to be said of decisions that a template got or lost since its points were stored."""
    lines = [f"no point any more: {key}: {reason}" for key, reason in now.gone.items()]
    values = ", ".join(f"{name}={value}" for name, value in now.undeclared.items())
    where = f"ADDED[{golden.template!r}] of schedules/vocabulary.py"
    if now.undeclared and now.neutral:
        lines.append(f"new decisions: {values} keeps the code of all {len(now.points)} points: declare it in {where}")
    elif now.undeclared:
        names = ", ".join(now.undeclared)
        lines.append(
            f"new decisions: no value of {names} keeps the code of all points, which are compared at {values}: add one"
            f" that means the programs of before and declare it in {where}, or raise the version"
        )
    other = sum(point.key != key for key, point in now.points.items())
    if other:
        count = f"{other} of {len(golden.points)} points"
        lines.append(f"{count} have earlier decisions in their keys: python -m golden update {golden.template}")
    return lines


def check(name: str) -> bool:
    """Print which points of a template emit other code; True if none does, and every decision is declared."""
    golden = read(name)
    now = present(golden)
    found = changed(golden, now)
    for line in told(golden, now):
        print(f"{name}: {line}")
    for key, machine in found:
        print(f"{name}: {'machine code' if machine else 'names only'}: {key}")
    return not (found or now.gone or now.undeclared)


def emitted_at_head(name: str, keys: list[str]) -> dict[str, str]:
    """What HEAD's code emits for points, by a checkout of it."""
    root = FOLDER.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", "-q", folder, "HEAD"], cwd=root, check=True)
        try:
            code = (
                "import sys, json, golden; name, keys = json.loads(sys.stdin.read());"
                " known = golden.read(name);"
                " print(json.dumps({k: golden.emitted(known.point(k)) for k in keys if k in known.points}))"
            )
            result = subprocess.run(
                [sys.executable, "-c", code],
                input=json.dumps([name, keys]),
                cwd=Path(folder) / "tests",
                env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(Path(folder) / "tests")])},
                stdout=subprocess.PIPE,
                text=True,
            )
            return json.loads(result.stdout.splitlines()[-1]) if result.returncode == 0 else {}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=root, check=True)


def show_difference(name: str, points: Mapping[str, Point]) -> None:
    """Print how the emitted text of points, by the keys that HEAD has for them, differs from HEAD's."""
    before = emitted_at_head(name, list(points))
    for key, point in points.items():
        print(f"--- {name}: {key}")
        if key not in before:
            print("    (HEAD emits nothing for this point)")
            continue
        lines = difflib.unified_diff(
            before[key].splitlines(), emitted(point).splitlines(), "HEAD", "here", lineterm="", n=2
        )
        print("\n".join(lines))


def update(name: str, quiet: bool) -> bool:
    """Take a template's fingerprints anew; False, and nothing is written, if its version has to rise or a decision is
    to be declared first."""
    golden = read(name)
    template = spaces.find(name)
    now = present(golden)
    found = changed(golden, now)
    other = [key for key, machine in found if machine]
    for line in told(golden, now):
        print(f"{name}: {line}")
    if found and not quiet:
        show_difference(name, {key: now.points[key] for key, _ in found})
    if template.version <= golden.version and (other or now.undeclared):
        if other:
            count = f"the machine code of {len(other)} points changed"
            print("\n    ".join([f"{name}: {count}, and the version is still {template.version}:", *other]))
        return False
    by = assembler(template.kind)
    anew = dict(found) if by == golden.assembler else now.points
    points = {
        point.key: fingerprints(point) if key in anew else golden.points[key] | {"program": program_fingerprint(point)}
        for key, point in now.points.items()
    }
    if len(points) < LEAST:
        print(f"{name}: {len(points)} points are left of {len(golden.points)}: python -m golden choose {name}")
        return False
    # A default is the template's choice, and may be another point than it was.
    defaults = [point for point in realistic(template) if point.key not in points]
    points |= {point.key: fingerprints(point) for point in defaults}
    if points != golden.points or template.version != golden.version:
        Golden(name, template.version, by, points).write()
    print(f"{name}: {len(found)} of {len(points)} points changed, {len(other)} of them in machine code", end="")
    print(f", {len(defaults)} defaults added" if defaults else "")
    return True


def chosen(name: str) -> str:
    from .choose import choose

    template = spaces.find(name)
    points = {point.key: fingerprints(point) for point in choose(template)}
    Golden(name, template.version, assembler(template.kind), points).write()
    return f"{name}: {len(points)} points"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    parser.add_argument("command", choices=("check", "update", "choose"))
    parser.add_argument("templates", nargs="*", default=[])
    parser.add_argument("--quiet", action="store_true", help="do not show how sources differ")
    asked = parser.parse_intermixed_args(words)
    known = [template.name for template in spaces.templates()]
    for name in asked.templates:
        if name not in known:
            parser.error(f"template: got {name!r}; {nearest(name, known)}")
    names = asked.templates or known
    good = True
    if asked.command == "choose":
        with ProcessPoolExecutor(2) as pool:
            for line in pool.map(chosen, names):
                print(line, flush=True)
    for name in names if asked.command == "check" else ():
        good &= check(name)
    for name in names if asked.command == "update" else ():
        good &= update(name, asked.quiet)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
