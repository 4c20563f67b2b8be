"""Recurrent layers called again and again beside a busy stream, in a process of its own: `python recurrent_child.py
SECONDS STEPS SIZE`, SIZE being that of the products which keep the other stream busy.

For each kind of persistent kernel it prints how many calls were answered. Fails if an output differs from the first.
"""

import sys
import time

import torch

import tvm_sparse

HIDDEN, BATCH = 1792, 4
LAYERS = {"rows": (0.1, {}), "cluster": (0.01, {}), "tiles": (1.0, {"form": "blocks", "dtype": "float16"})}


def layer(density: float, **options: str) -> tvm_sparse.SparseRNN:
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand((HIDDEN, HIDDEN), generator=generator) < density
    weight = torch.randn((HIDDEN, HIDDEN), generator=generator) * kept * (0.4 / (HIDDEN * density) ** 0.5)
    return tvm_sparse.SparseRNN(weight, nonlinearity="tanh", **options)


def main(seconds: float, steps: int, size: int) -> None:
    busy, square = torch.cuda.Stream(), torch.randn(size, size, device="cuda")
    for name, (density, options) in LAYERS.items():
        one = layer(density, **options)
        kind = getattr(torch, options.get("dtype", "float32"))
        x = torch.randn(steps, BATCH, HIDDEN, device="cuda").to(kind)
        first, calls, begin = one(x)[0].clone(), 0, time.monotonic()
        while time.monotonic() - begin < seconds:
            with torch.cuda.stream(busy):
                for _ in range(5):
                    square @ square
            for _ in range(5):
                found = one(x)[0]
                calls += 1
            torch.cuda.synchronize()
            assert torch.equal(found, first), f"{name}: the output differs from the first"
        print(name, calls, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
