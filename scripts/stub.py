"""Writes `tvm_sparse/__init__.pyi`, so that editors and type checkers know the names that operators bring.

python scripts/stub.py            # write
python scripts/stub.py --check    # exit with 1 if it is not what the registry says
"""

from __future__ import annotations

import sys
from pathlib import Path

from tvm_sparse.core import registry

STUB = Path(__file__).parent.parent / "tvm_sparse" / "__init__.pyi"
GENERAL = (
    (".runtime.dispatch", ("Explanation", "configure", "explain", "load", "warmup")),
    (".runtime.loading", ("Miss",)),
    (".layers.lsh_head", ("LshHead",)),
    (".layers.beam", ("beam_search",)),
    (".layers.lm_head", ("LmHead",)),
    (".layers.shards", ("merge_topk",)),
    (".layers.sampling", ("SampleDetails", "merge_sample", "sample_details")),
    (".layers.recurrent", ("SparseGRU", "SparseLSTM", "SparseRNN", "project_inputs")),
    (".layers.recurrent_stack", ("RecurrentStack", "from_torch")),
    (".layers.pruning", ("GradualPruning", "constant_schedule", "cubic_schedule", "prune", "pruning_mask")),
)


def stub() -> str:
    """The stub's text: one import for each operator of the package."""
    lines = [
        "# Written by scripts/stub.py from core/registry.py.",
        "",
        "from . import distributed as distributed",
        "from . import nn as nn",
    ]
    found = [(f".operators.{operator.name}.call", operator.public) for operator in registry.BUILTIN]
    for module, names in sorted([*found, *GENERAL]):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names)]
    return "\n".join([*lines, "", "__version__: str"]) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        same = STUB.exists() and STUB.read_text() == stub()
        print(f"{STUB.name} is {'what' if same else 'not what'} the registry says")
        return 0 if same else 1
    STUB.write_text(stub())
    return 0


if __name__ == "__main__":
    sys.exit(main())
