"""How operators are mapped to machines: one folder per operator, and in it one file or folder per template.

Installed as `tvm_sparse.schedules`. `core.registry` finds the folder of an operator by its name; it holds `TEMPLATES`,
and in `FALLBACKS` those that run without tuning. Device code that operators share is in `device/`.
"""

# In a checkout this package could also be imported as `schedules`. Its templates and states would then be other objects
# than those that the package `tvm_sparse` registers.
if __name__ != "tvm_sparse.schedules":
    raise ImportError(f"{__name__} is a part of the package tvm_sparse: import tvm_sparse.schedules")
