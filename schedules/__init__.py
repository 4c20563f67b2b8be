"""How operators are mapped to machines: one folder an operator, one file or folder a template.

Installed as `tvm_sparse.schedules`. `core.registry` finds the folder of an operator by its name; it holds `TEMPLATES`,
and in `FALLBACKS` those that run without tuning. Device code that operators share is in `device/`.
"""
