"""What pyproject.toml cannot say: which Python is needed, to an older one; and an extension that may be missing.

The extension makes repeated calls cheaper (`tvm_sparse.runtime.repeat`). It is built for the stable ABI, once for every
Python, and left out, with a warning, where there is no C compiler.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"tvm_sparse needs Python 3.11 or later; this is Python {sys.version_info[0]}.{sys.version_info[1]}")

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "tvm_sparse.runtime.native",
            ["tvm_sparse/runtime/native.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
