"""A tiny operator of somebody else's package, written into a folder: `double`, on the CPU."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": """
from tvm_sparse.core.registry import Operator

OPERATOR = Operator("double", home=__name__, schedules=f"{__name__}.schedules", public=("double",))
""",
    "problem.py": '''
from dataclasses import dataclass

import numpy as np

from tvm_sparse.core.problem import Argument, Cost, Problem, require_positive


@dataclass(frozen=True)
class Double(Problem):
    """y = 2 x, for x of shape (n,)."""

    n: int
    dtype: str = "float32"

    operator = "double"
    batch_axis = "n"
    inputs = (Argument("x", ("n",), "dtype", "What is doubled."),)
    outputs = (Argument("y", ("n",), "dtype", "Twice x."),)
    structures = ("random", "zeros")
    tuned = "random"
    verified = structures
    example = {"n": 8}
    source = "arithmetic"

    def __post_init__(self):
        require_positive(self, "n")

    def definition(self):
        from tvm import te

        n = te.var("n", "int64")
        x = te.placeholder((n,), self.dtype, "x")
        y = te.compute((n,), lambda i: x[i] * te.const(2, self.dtype), "y")
        return te.create_prim_func([x, y]).with_attr("global_symbol", "main")

    def generate(self, seed, structure=None, settings=None):
        x = np.random.default_rng(seed).standard_normal(self.n)
        return [(x if structure != "zeros" else 0 * x).astype(self.dtype)]

    def reference(self, inputs):
        return [2 * inputs[0].astype(np.float64)]

    def tolerance(self, inputs, expected):
        return [np.zeros_like(expected[0])]

    def cost(self, inputs=None):
        return Cost(8 * self.n, self.n)


PROBLEM = Double
''',
    "call.py": """
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.calls import machine_of, outputs_for
from tvm_sparse.runtime.dispatch import dispatcher

from .problem import Double


def double(x):
    known = arrays.facts("x", x)
    [y] = outputs_for(None, (("y", known.shape, known.dtype),), x, known)
    kernel = dispatcher.kernel(Double(known.shape[0], known.dtype), machine_of("x", known))
    kernel.function(arrays.argument(arrays.ready("x", x, known)), arrays.argument(y))
    return arrays.returned(y, x)
""",
    "peers.py": """
from tvm_sparse.bench.contenders import CPU, Peer

from .call import double


def ours(problem, inputs, convert):
    return lambda: double(inputs[0]), problem


PEERS = (Peer("NumPy", "numpy", CPU, lambda problem, inputs, device: lambda: inputs[0] * 2),)
""",
    "shapes.py": """
QUICKSTART = ("double/n=1000",)
AWKWARD = ("double/n=1",)
REALISTIC = ("double/n=100000",)
""",
    "schedules.py": """
from tvm_sparse.core.template import Program, Template


def build(problem, decisions):
    import tvm
    from tvm.script import tirx as T

    lanes, dtype = decisions["lanes"], problem.dtype

    @T.prim_func(s_tir=True)
    def main(x_h: T.handle, y_h: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        n = T.int64()
        # Arrays of other libraries are aligned to their elements, no more.
        x = T.match_buffer(x_h, (n,), dtype, align=2)
        y = T.match_buffer(y_h, (n,), dtype, align=2)
        for i in range((n + lanes - 1) // lanes):
            for v in T.vectorized(lanes):
                if i * lanes + v < n:
                    y[i * lanes + v] = x[i * lanes + v] * T.Cast(dtype, 2)

    return Program(tvm.IRModule({"main": main}))


TEMPLATES = (
    Template(
        name="double_lanes",
        version=1,
        operator="double",
        kind="llvm",
        summary="A loop over vectors.",
        space=lambda problem, machine: {"lanes": (1, 4, 8)},
        default=lambda problem, machine: {"lanes": 4},
        program=build,
    ),
)
FALLBACKS = {"llvm": TEMPLATES, "cuda": ()}
""",
}


def write(folder: Path, name: str = "double_plugin", **changed: str) -> Path:
    """Write the plugin as the package `name` in `folder`; `changed` gives other content of a file by its stem."""
    place = folder / name
    place.mkdir()
    for file, text in FILES.items():
        (place / file).write_text(changed.get(file.removesuffix(".py"), text))
    return place
