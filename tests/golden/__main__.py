"""`python -m golden check|update|choose [TEMPLATE ...]`, in `tests/`.

check
    Which points' emitted code differs from its fingerprint, and whether its machine code does.
update
    Take the fingerprints anew, and show how the source of each changed point differs from what HEAD emits. A template
    whose machine code changed is refused unless its version rose. Defaults of realistic problems that are not among the
    points are added.
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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tvm_sparse.core import spaces

from . import FOLDER, Golden, assembler, emitted, fingerprints, machine_fingerprint, read, source_fingerprint
from .choose import realistic


def changed(name: str) -> list[tuple[str, bool]]:
    """The points of a template whose emitted code is another, and whether their machine code is another too."""
    golden = read(name)
    found = []
    for key, expected in golden.points.items():
        point = golden.point(key)
        if source_fingerprint(emitted(point)) != expected["source"]:
            found.append((key, machine_fingerprint(point) != expected["machine"]))
    return found


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


def show_difference(name: str, keys: list[str]) -> None:
    """Print how the emitted text of points differs from HEAD's."""
    golden = read(name)
    before = emitted_at_head(name, keys)
    for key in keys:
        print(f"--- {name}: {key}")
        if key not in before:
            print("    (HEAD emits nothing for this point)")
            continue
        lines = difflib.unified_diff(
            before[key].splitlines(), emitted(golden.point(key)).splitlines(), "HEAD", "here", lineterm="", n=2
        )
        print("\n".join(lines))


def update(name: str, quiet: bool) -> bool:
    """Take a template's fingerprints anew; False if its machine code changed and its version did not rise."""
    golden = read(name)
    version = spaces.find(name).version
    found = changed(name)
    other = [key for key, machine in found if machine]
    if found and not quiet:
        show_difference(name, [key for key, _ in found])
    if other and version <= golden.version:
        print(f"{name}: the machine code of {len(other)} points changed, and the version is still {version}:")
        print("\n".join(f"    {key}" for key in other))
        return False
    for key, _ in found:
        golden.points[key] = fingerprints(golden.point(key))
    # A default is the template's choice, and may be another point than it was.
    defaults = [point for point in realistic(spaces.find(name)) if point.key not in golden.points]
    golden.points |= {point.key: fingerprints(point) for point in defaults}
    if found or defaults or version != golden.version:
        Golden(name, version, assembler(spaces.find(name).kind), golden.points).write()
    print(f"{name}: {len(found)} of {len(golden.points)} points changed, {len(other)} of them in machine code", end="")
    print(f", {len(defaults)} defaults added" if defaults else "")
    return True


def chosen(name: str) -> str:
    from .choose import choose

    template = spaces.find(name)
    points = {point.key: fingerprints(point) for point in choose(template)}
    Golden(name, template.version, assembler(template.kind), points).write()
    return f"{name}: {len(points)} points"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    parser.add_argument("command", choices=("check", "update", "choose"))
    parser.add_argument("templates", nargs="*", default=[])
    parser.add_argument("--quiet", action="store_true", help="do not show how sources differ")
    asked = parser.parse_intermixed_args()
    names = asked.templates or [template.name for template in spaces.templates()]
    good = True
    if asked.command == "choose":
        with ProcessPoolExecutor(2) as pool:
            for line in pool.map(chosen, names):
                print(line, flush=True)
    for name in names if asked.command == "check" else ():
        found = changed(name)
        good &= not found
        for key, machine in found:
            print(f"{name}: {'machine code' if machine else 'names only'}: {key}")
    for name in names if asked.command == "update" else ():
        good &= update(name, asked.quiet)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
