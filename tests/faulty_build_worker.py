"""A build worker that spoils some candidates' libraries: `python faulty_build_worker.py '{"candidate": "fault"}'`.

The fault `compile` raises; `lost` ends the process; the others are machine code in the place of the kernel, so that
what meets them is all of the real measuring path. A key `*` stands for every candidate that is not named.
"""

import json
import os
import subprocess
import sys

from tvm_sparse.workers import building
from tvm_sparse.workers.processes import serve

KERNELS = {
    "wrong": "return 0;",  # writes nothing: the poison stays
    "crash": "*(volatile int*)0 = 1; return 0;",
    "hang": "for (volatile int i = 0;; i = 0) {} return 0;",
}


def handle(message):
    faults = json.loads(sys.argv[1])
    fault = faults.get(message["candidate"], faults.get("*"))
    if fault == "compile":
        raise RuntimeError("the compiler does not like this one")
    if fault == "lost":
        os._exit(9)
    reply = building.handle(message)
    if fault:
        code = f"int __tvm_ffi_main(void* self, void* args, int count, void* result) {{ {KERNELS[fault]} }}"
        command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", message["path"], "-"]
        subprocess.run(command, input=code.encode(), check=True)
    return reply


if __name__ == "__main__":
    serve(handle)
