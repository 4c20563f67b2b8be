"""Builds kernels for many architectures ahead, and packs them into wheels; needs no GPU.

python scripts/prebuild.py --output dist                                  # all architectures, from tuning_logs/
python scripts/prebuild.py --arch sm_90a --arch compute_80 --output dist  # these; compute_80 is PTX
python scripts/prebuild.py --arch sm_90a --shapes shapes.toml --output dist   # and shapes that nobody tuned

Into `dist/kernels/<arch>` go few libraries an operator, a manifest, and TVM's runtime libraries; into `dist` a wheel an
architecture, or with --one-wheel a single one. `pip install dist/tvm_sparse_kernels_sm90a-*.whl` on a machine with such
a GPU: calls find the kernels by themselves, and run without a compiler, whether apache-tvm is installed or not.
"""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tvm_sparse.cli.common import duration, errors, fail, size
from tvm_sparse.core import machine, registry, shape_files
from tvm_sparse.shipping import hub, prebuild, wheel

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_80", "x86-64-v3", "x86-64-v4")
LOGS = Path(__file__).parent.parent / "tuning_logs"


def main(
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    arch: Annotated[
        list[str] | None, typer.Option(help=f"May be given again.  \\[default: {', '.join(ARCHS)}]")
    ] = None,
    logs: Annotated[list[Path] | None, typer.Option(help="Folder of records; of several the last wins.")] = None,
    shapes: Annotated[Path | None, typer.Option(help="Shapes to build beside those tuned; TOML as for tune.")] = None,
    only_shapes: Annotated[bool, typer.Option(help="Nothing but the shapes.")] = False,
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator; may be given again.")] = None,
    builders: Annotated[int | None, typer.Option(min=1, help="Processes that compile.")] = None,
    one_wheel: Annotated[bool, typer.Option(help="All architectures in one wheel.")] = False,
    repository: Annotated[bool, typer.Option(help="Also as a repository of Hugging Face's library kernels.")] = False,
) -> None:
    with errors():
        for name in operator or ():
            registry.find(name)
        started = time.monotonic()
        try:
            found = prebuild.prebuild(
                arch or ARCHS,
                output / "kernels",
                logs or [LOGS],
                shape_files.read(shapes) if shapes else (),
                operators=operator,
                records=not only_shapes,
                builders=builders or machine.default_builders(),
                show=lambda library, done, count: typer.echo(f"{done}/{count}: {library}", err=True),
            )
        except LookupError as error:
            fail(str(error))
        for built in found:
            _report(built)
        folders = [built.folder for built in found]
        name = "tvm-sparse-kernels" if one_wheel else None
        for group in [folders] if one_wheel else [[folder] for folder in folders]:
            path = wheel.pack(group, output, name)
            typer.echo(f"{path}: {size(path.stat().st_size)}")
        for path in hub.arrange(folders, output / "repository") if repository else ():
            typer.echo(f"{path}: {size(sum(file.stat().st_size for file in path.rglob('*') if file.is_file()))}")
        typer.echo(f"{duration(time.monotonic() - started)}")


def _report(built: prebuild.Built) -> None:
    chosen = collections.Counter(entry.chosen for entry in built.entries)
    weight = sum(path.stat().st_size for path in built.libraries)
    spilled = sum(bool((entry.resources or {}).get("spill_instructions")) for entry in built.entries)
    typer.echo(
        f"{built.machine.arch}: {len(built.entries)} kernels in {len(built.libraries)} libraries, {size(weight)}:"
        f" {', '.join(f'{count} {how}' for how, count in chosen.most_common())}"
        + (f"; {spilled} spill registers" if spilled else "")
    )
    for line in built.dropped:
        typer.echo(f"  not as recorded: {line.splitlines()[0][:300]}")


if __name__ == "__main__":
    sys.exit(typer.run(main))
