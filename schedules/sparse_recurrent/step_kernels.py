"""The sparse recurrent layer on a GPU, one kernel per step: `recurrent.step_kernels` with a weight of entries."""

from __future__ import annotations

from tvm_sparse.core.template import Template

from ..recurrent.step_kernels import build, default, space

step_kernels = Template(
    name="step_kernels",
    version=2,
    operator="sparse_recurrent",
    kind="cuda",
    summary="a kernel a step; lanes of a warp share the rows of a unit",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
)
