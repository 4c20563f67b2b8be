"""A build worker that spoils some candidates' libraries: `python faulty_build_worker.py '{"candidate": "fault"}'`.

The fault `compile` raises; `lost` ends the process; the others are machine code in the place of the kernel, so that
what meets them is all of the real measuring path. `first_rows` computes 64 rows and leaves the others: it calls the
right kernel, which lies beside it by then, with tensors that are cut off. A key `*` stands for every candidate that is
not named.
"""

import json
import os
import subprocess
import sys

import tvm_ffi.libinfo

from tvm_sparse.workers import building
from tvm_sparse.workers.processes import serve

KERNELS = {
    "wrong": "return 0;",  # writes nothing: the poison stays
    "crash": "*(volatile int*)0 = 1; return 0;",
    "hang": "for (volatile int i = 0;; i = 0) {} return 0;",
    "first_rows": """
        static Kernel right = 0;
        if (!right) right = (Kernel)dlsym(dlopen(RIGHT, RTLD_NOW), "__tvm_ffi_main");
        int64_t rows[16];
        for (int i = 0; i < count; ++i) {
            if (args[i].type_index != kTVMFFITensor) continue;
            DLTensor* tensor = TVMFFITensorGetDLTensorPtr(args[i].v_obj);
            rows[i] = tensor->shape[0];
            if (rows[i] > 64) tensor->shape[0] = 64;
        }
        int code = right(self, args, count, result);
        for (int i = 0; i < count; ++i)
            if (args[i].type_index == kTVMFFITensor) TVMFFITensorGetDLTensorPtr(args[i].v_obj)->shape[0] = rows[i];
        return code;
    """,
}
CODE = """
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>
typedef int (*Kernel)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
int __tvm_ffi_main(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { %s }
"""


def handle(message):
    faults = json.loads(sys.argv[1])
    fault = faults.get(message["candidate"], faults.get("*"))
    if fault == "compile":
        raise RuntimeError("the compiler does not like this one")
    if fault == "lost":
        os._exit(9)
    reply = building.handle(message)
    if fault:
        right = message["path"] + ".right"
        os.replace(message["path"], right)
        command = ["cc", "-x", "c", "-shared", "-fPIC", f'-DRIGHT="{right}"', "-o", message["path"], "-"]
        for folder in (tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()):
            command += ["-I", folder]
        subprocess.run(command, input=(CODE % KERNELS[fault]).encode(), check=True)
    return reply


if __name__ == "__main__":
    serve(handle)
