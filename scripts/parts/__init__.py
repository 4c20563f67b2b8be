"""The generated parts of the documentation, one module for each subject; each registers its parts
in `register.PARTS`.
"""

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
    present,
    products,
    recurrent,
    sampler,
    softmax,
    translation,
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
    "present",
    "products",
    "recurrent",
    "sampler",
    "softmax",
    "translation",
    "tuning",
]
