"""How operators are mapped to machines: one folder an operator, one file or folder a template.

Installed as `tvm_sparse.schedules`. `core.registry` finds the folder of an operator by its name; it holds `TEMPLATES`,
and in `FALLBACKS` those that run without tuning. Device code that operators share is in `device/`.
"""

# From a checkout's root it would also be found as `schedules`, whose templates and states are other objects than those
# that the package registers.
if __name__ != "tvm_sparse.schedules":
    raise ImportError(f"{__name__} is a part of the package tvm_sparse: import tvm_sparse.schedules")
