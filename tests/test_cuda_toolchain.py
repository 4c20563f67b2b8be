"""CUDA machine code from pip packages alone: built, found in the library, read."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cases import needs_cuda

from tvm_sparse.artifacts import cuda
from tvm_sparse.artifacts.cuda import toolchain

BUILD = """
import json, sys
from tvm_sparse.artifacts import cuda
if {late}:
    import tvm
toolchain = cuda.activate()
assert cuda.activate() is toolchain
import tvm
from tvm import te
a, b = (te.placeholder((1024,), name=n) for n in "AB")
c = te.compute((1024,), lambda i: a[i] + b[i], name="C")
schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, c]).with_attr("global_symbol", "main"))
(i,) = schedule.get_loops(schedule.get_sblock("C"))
outer, inner = schedule.split(i, [None, 256])
schedule.bind(outer, "blockIdx.x")
schedule.bind(inner, "threadIdx.x")
target = tvm.target.Target(dict(kind="cuda", arch={arch!r}), host="llvm")
with target:
    tvm.compile(schedule.mod, target=target).export_library({out!r})
print(json.dumps([toolchain.nvrtc_version[0], toolchain.runtime.driver_is_stub]))
"""

LOAD = """
import sys
from tvm_sparse.artifacts import cuda
cuda.load_runtime(allow_stub=True)
import tvm_ffi
module = tvm_ffi.load_module({out!r})
assert module["main"] is not None
assert "tvm" not in sys.modules
print("loaded")
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, which has loaded nothing yet."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def build(out: Path, arch: str, late: bool = False) -> bytes:
    done = run(BUILD.format(out=str(out), arch=arch, late=late))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0] == toolchain.CUDA_MAJOR
    (cubin,) = cuda.cubins(out)
    assert b"__global__" not in out.read_bytes()
    return cubin


def compile_cuda(source: str, arch: str) -> bytes:
    """Compile with NVRTC itself."""
    from cuda.bindings import nvrtc

    def call(result: tuple) -> object:
        assert int(result[0]) == 0
        return result[1] if len(result) > 1 else None

    program = call(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None))
    options = [f"--gpu-architecture={arch}".encode()]
    call(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize(program)))
    call(nvrtc.nvrtcGetCUBIN(program, cubin))
    return bytes(cubin)


@needs_cuda
@pytest.mark.parametrize(("arch", "number", "late"), [("sm_90a", 90, False), ("sm_80", 80, True)])
@pytest.mark.usefixtures("children_without_torch")
def test_tvm_exports_machine_code(tmp_path: Path, arch: str, number: int, late: bool) -> None:
    cubin = build(tmp_path / "add.so", arch, late)
    if not late:
        done = run(LOAD.format(out=str(tmp_path / "add.so")))  # loads without TVM
        assert done.returncode == 0 and done.stdout.split() == ["loaded"], done.stderr
    assert cuda.cubin_arch(cubin) == number
    ((name, usage),) = cuda.resource_usage(cubin).items()
    assert name == "main_kernel"
    assert 0 < usage.registers < 64
    assert usage.max_threads == 256
    assert usage.shared_bytes == usage.local_bytes == usage.spill_instructions == 0


@needs_cuda
def test_what_generated_code_uses_compiles_without_the_large_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every kernel is compiled twice, the second time with a second of headers."""
    cuda.activate()
    import tvm
    from tvm.support import nvcc

    used: list[object] = []
    whole = nvcc.compile_cuda
    monkeypatch.setattr(nvcc, "compile_cuda", lambda *words, **named: used.append(named) or whole(*words, **named))
    code = '#include <cuda_fp16.h>\nextern "C" __global__ void k(float* y, half x) { y[0] = (float)x > -INFINITY; }'
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
        tvm.get_global_func("tvm_callback_cuda_compile")(code)
    assert len(used) == 1 and "--pre-include" in str(used), used


@needs_cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_resource_usage(arch: str) -> None:
    values = range(80)
    body = "".join(f"float x{i} = a[threadIdx.x + {i} * 1024];" for i in values)
    body += "for (int r = 0; r < n; ++r) {"
    body += "".join(f"x{i} = x{i} * x{(i * 7 + 3) % 80} + x{(i * 3 + 1) % 80};" for i in values)
    body += "}" + "".join(f"a[threadIdx.x + {i} * 1024] = x{i};" for i in values)
    source = f"""
    extern "C" __global__ void __launch_bounds__(1024, 2) spills(float *a, int n) {{ {body} }}
    extern "C" __global__ void clean(float *a, int n) {{ {body} }}
    extern "C" __global__ void local(float *a, int n) {{
      float x[64];
      for (int i = 0; i < 64; ++i) x[i] = a[i * n];
      for (int i = 0; i < n; ++i) x[(i * n) & 63] += a[i];
      a[0] = x[n & 63];
    }}
    extern "C" __global__ void shared(float *a, int n) {{
      __shared__ float s[300];
      extern __shared__ float more[];
      s[threadIdx.x] = more[threadIdx.x] = a[threadIdx.x];
      __syncthreads();
      a[threadIdx.x] = s[n - threadIdx.x] + more[n];
    }}
    """
    usage = cuda.resource_usage(compile_cuda(source, arch))
    assert set(usage) == {"spills", "clean", "local", "shared"}
    assert usage["spills"].registers == 32
    assert usage["spills"].max_threads == 1024
    assert usage["spills"].local_bytes > 0
    assert usage["spills"].spill_instructions > 100
    assert usage["clean"].registers > 64
    assert usage["clean"].local_bytes == usage["clean"].spill_instructions == 0
    assert usage["clean"].max_threads is None
    assert usage["local"].local_bytes == 256
    assert usage["local"].spill_instructions == 0
    assert usage["shared"].shared_bytes == 1200


def test_cubins_of_anything_else(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF\x02\x01" + bytes(100) + b"\x7fELF\x02\x01" + b"\xff" * 20)
    assert cuda.cubins(library) == []
    with pytest.raises(ValueError, match="not a cubin"):
        cuda.resource_usage(bytes(128))


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is built on Linux only")
def test_missing_compiler_is_named(tmp_path: Path, children_without_torch: None) -> None:
    if (
        "libcuda.so.1"
        in subprocess.run([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    ):
        pytest.skip("this machine has a driver, so no stub is built")
    code = "from tvm_sparse.artifacts import cuda as c; c.load_runtime(allow_stub=True)"
    done = run(code, XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path), CC="")
    assert "ToolchainError" in done.stderr
    assert "no C compiler" in done.stderr
