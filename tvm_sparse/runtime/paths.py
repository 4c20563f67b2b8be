"""Folders of records and libraries."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def shipped_logs() -> Path:
    """The tuning logs that ship with the package."""
    import tvm_sparse.tuning_logs as tuning_logs

    return Path(tuning_logs.__file__).parent


def user_logs() -> Path:
    """This user's own tuning logs: the default output of `tvm-sparse tune`."""
    import platformdirs

    return Path(platformdirs.user_data_dir("tvm_sparse", appauthor=False)) / "tuning_logs"


def user_cache() -> Path:
    """The folder of libraries compiled on demand for this user."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tvm_sparse", appauthor=False)) / "kernels"


def user_quickstart() -> Path:
    """The folder in which the quickstart tunes and exports; calls do not read it unless told to."""
    return user_cache().parent / "quickstart"


def user_keys() -> Path:
    """The file of public keys whose signed folders this user accepts; the variable TVM_SPARSE_TRUSTED_KEYS names it."""
    import platformdirs

    named = os.environ.get("TVM_SPARSE_TRUSTED_KEYS")
    return Path(named or Path(platformdirs.user_config_dir("tvm_sparse", appauthor=False)) / "trusted_keys")


def shipped_kernels() -> tuple[Path, ...]:
    """Folders of libraries in installed packages of prebuilt kernels, and in this package if it was built with them."""
    from ..artifacts.packages import kernel_packages

    return (Path(__file__).parent.parent / "kernels", *kernel_packages())
