"""The generated parts of the documentation, a module a subject; each fills what `register.PARTS` names."""

from . import (
    calls,
    charts,
    declared,
    faults,
    headlines,
    laboratory,
    lookups,
    output_layer,
    papers,
    parser,
    products,
    recurrent,
    sampler,
    softmax,
    tuning,
)

__all__ = [
    "calls",
    "charts",
    "declared",
    "faults",
    "headlines",
    "laboratory",
    "lookups",
    "output_layer",
    "papers",
    "parser",
    "products",
    "recurrent",
    "sampler",
    "softmax",
    "tuning",
]
