"""The call of the draw of `head_sample`: it is no public function."""

from __future__ import annotations

from tvm_sparse.runtime.signature import Signature

SIGNATURES: dict[str, Signature] = {}
