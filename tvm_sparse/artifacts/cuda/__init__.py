"""CUDA without a toolkit: compiler and runtime library from packages (`toolchain`), and reading machine
code (`cubin`).
"""

from .cubin import KernelResources, code_sections, cubin_arch, cubins, ptx_texts, resource_usage
from .toolchain import Runtime, Toolchain, ToolchainError, activate, as_ptx, disassembled, load_runtime

__all__ = [
    "KernelResources",
    "Runtime",
    "Toolchain",
    "ToolchainError",
    "activate",
    "as_ptx",
    "code_sections",
    "cubin_arch",
    "cubins",
    "disassembled",
    "load_runtime",
    "ptx_texts",
    "resource_usage",
]
