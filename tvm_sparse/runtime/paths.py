"""Where records and libraries are looked for and kept."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def shipped_logs() -> Path:
    """The tuning logs that come with the package."""
    import tvm_sparse.tuning_logs as tuning_logs

    return Path(tuning_logs.__file__).parent


def user_logs() -> Path:
    """This user's own tuning logs: where `tvm-sparse tune` writes unless told otherwise."""
    import platformdirs

    return Path(platformdirs.user_data_dir("tvm_sparse", appauthor=False)) / "tuning_logs"


def user_cache() -> Path:
    """Libraries compiled on demand for this user."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tvm_sparse", appauthor=False)) / "kernels"


def user_quickstart() -> Path:
    """What the quickstart has tuned and exported for this user; no call reads it unless it is told to."""
    return user_cache().parent / "quickstart"


def user_keys() -> Path:
    """The file of public keys whose signed folders this user loads; the variable TVM_SPARSE_TRUSTED_KEYS names it."""
    import platformdirs

    named = os.environ.get("TVM_SPARSE_TRUSTED_KEYS")
    return Path(named or Path(platformdirs.user_config_dir("tvm_sparse", appauthor=False)) / "trusted_keys")


def shipped_kernels() -> tuple[Path, ...]:
    """Libraries that come with packages of prebuilt kernels, or with this one where it was built with them."""
    from ..artifacts.packages import kernel_packages

    return (Path(__file__).parent.parent / "kernels", *kernel_packages())
