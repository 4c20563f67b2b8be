"""A build worker that spoils some candidates' libraries: `python faulty_build_worker.py '{"candidate": "fault"}'`.

The fault `compile` raises, `full` as on a full disk; `lost` ends the process; of `first_rows` the
loop over a batch's rows ends after 64; the others are machine code in the place of the kernel. So what meets them is
all of the real measuring path. A key `*` stands for every candidate that is not named.
"""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from unittest import mock

from tvm_sparse.core.template import Template
from tvm_sparse.workers import building
from tvm_sparse.workers.processes import serve

KERNELS = {
    "wrong": "return 0;",  # writes nothing: the poison stays
    "crash": "*(volatile int*)0 = 1; return 0;",
    "hang": "for (volatile int i = 0;; i = 0) {} return 0;",
    "ended": "raise(SIGTERM); return 0;",
}


def first_rows(template, problem, decisions):
    """As `Template.build`."""
    import tvm
    import tvm_ffi
    from tvm.tirx import For, min

    program = template.program(problem, decisions)
    main = program.module["main"]
    batch = main.params[0].ty.shape[0]

    def cut(loop):
        if not loop.extent.same_as(batch):
            return loop
        return For(loop.loop_var, loop.min, min(loop.extent, 64), loop.kind, loop.body)

    body = tvm_ffi.structural_map(main.body, (For, cut))
    return dataclasses.replace(program, module=tvm.IRModule({"main": main.with_body(body)}))


def handle(message):
    faults = json.loads(sys.argv[1])
    fault = faults.get(message["candidate"], faults.get("*"))
    if fault == "compile":
        raise RuntimeError("the compiler does not like this one")
    if fault == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), message["path"])
    if fault == "lost":
        os._exit(9)
    if fault == "first_rows":
        with mock.patch.object(Template, "build", first_rows):
            return building.handle(message)
    reply = building.handle(message)
    if fault:
        code = "#include <signal.h>\n"
        code += f"int __tvm_ffi_main(void* self, void* args, int count, void* result) {{ {KERNELS[fault]} }}"
        command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", message["path"], "-"]
        subprocess.run(command, input=code.encode(), check=True)
    return reply


if __name__ == "__main__":
    serve(handle)
