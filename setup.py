"""Tells an older Python which one is needed, before pip looks for packages that suit it; else see pyproject.toml."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"tvm_sparse needs Python 3.11 or later; this is Python {sys.version_info[0]}.{sys.version_info[1]}")

from setuptools import setup

setup()
