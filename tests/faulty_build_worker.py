"""A build worker that spoils some candidates' libraries: `python faulty_build_worker.py '{"candidate": "fault"}'`.

What stands in `MACHINE_CODE` takes the kernel's place; what stands in `SPOILED` is the template's own kernel, on the
CPU or a GPU, with its program changed. The fault `compile` raises, `full` as on a full disk; `lost` ends the process;
`memory` asks for a workspace that no machine has. So what meets them is all of the real measuring path. A key `*`
stands for every candidate that is not named.
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
from tvm_sparse.workers.serving import serve

MACHINE_CODE = {
    "wrong": "return 0;",  # writes nothing: the poison stays
    "crash": "*(volatile int*)0 = 1; return 0;",
    "hang": "for (volatile int i = 0;; i = 0) {} return 0;",
    "hang with the GIL": """
        ((int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure"))();
        for (volatile int i = 0;; i = 0) {}
        return 0;""",
    "stopped": "raise(SIGSTOP); return 0;",
    "ended": "raise(SIGTERM); return 0;",
    "exit": "_exit(0); return 0;",
    # A process with a session of its own, and then its parent's end.
    "escape": """
        if (!fork()) { setsid(); if (!fork()) { execlp("sleep", "sleep", "600", (char*)0); } _exit(0); }
        usleep(100000); return 0;""",
    "escape and crash": """
        if (!fork()) { setsid(); if (!fork()) { execlp("sleep", "sleep", "600", (char*)0); } _exit(0); }
        usleep(100000); *(volatile int*)0 = 1; return 0;""",
}
INCLUDES = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <signal.h>\n#include <unistd.h>\n"
FAR = 1 << 40  # elements beyond any buffer
HUGE = {"name": "huge", "shape": [1 << 39], "dtype": "uint8", "fill": 0}


def first_rows(main):
    """The loop over a batch's rows ends after 64."""
    import tvm_ffi
    from tvm.tirx import For, min

    batch = main.params[0].ty.shape[0]

    def cut(loop):
        if not loop.extent.same_as(batch):
            return loop
        return For(loop.loop_var, loop.min, min(loop.extent, 64), loop.kind, loop.body)

    return tvm_ffi.structural_map(main.body, (For, cut))


def stores(change):
    """Every store of floats into global memory becomes `change` of it."""

    def spoiled(main):
        import tvm_ffi
        from tvm.tirx import BufferStore

        found = []

        def changed(store):
            scope = store.buffer.scope() if callable(store.buffer.scope) else store.buffer.scope
            if scope != "global" or not str(store.buffer.dtype).startswith("float"):
                return store
            found.append(store)
            return change(store)

        body = tvm_ffi.structural_map(main.body, (BufferStore, changed))
        assert found, "nothing to spoil"
        return body

    return spoiled


def plus_one(store):
    from tvm.tirx import BufferStore, const

    return BufferStore(store.buffer, store.value + const(1, store.buffer.dtype), store.indices)


def nan(store):
    from tvm.tirx import BufferStore, const

    return BufferStore(store.buffer, const(float("nan"), store.buffer.dtype), store.indices)


def illegal(store):
    from tvm.tirx import BufferStore, Cast, const

    *rows, last = store.indices
    return BufferStore(store.buffer, store.value, [*rows, Cast("int64", last) + const(FAR, "int64")])


def endless(store):
    from tvm.tirx import SeqStmt, While, const

    return SeqStmt([store, While(const(True, "bool"), store)])


SPOILED = {
    "first_rows": first_rows,
    "plus one": stores(plus_one),
    "nan": stores(nan),
    "illegal address": stores(illegal),
    "endless": stores(endless),
}


def handle(message):
    faults = json.loads(sys.argv[1])
    fault = faults.get(message["candidate"], faults.get("*"))
    if fault == "compile":
        raise RuntimeError("the compiler does not like this one")
    if fault == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), message["path"])
    if fault == "lost":
        os._exit(9)
    if fault in SPOILED:

        def build(template, problem, decisions):
            import tvm

            program = template.program(problem, decisions)
            main = program.module["main"]
            module = tvm.IRModule({"main": main.with_body(SPOILED[fault](main))}, attrs=program.module.attrs)
            return dataclasses.replace(program, module=module)

        with mock.patch.object(Template, "build", build):
            return building.handle(message)
    reply = building.handle(message)
    if fault == "memory":
        reply["workspaces"] = [*reply["workspaces"], HUGE]
    elif fault:
        code = INCLUDES
        code += f"int __tvm_ffi_main(void* self, void* args, int count, void* result) {{ {MACHINE_CODE[fault]} }}"
        command = ["cc", "-x", "c", "-shared", "-fPIC", "-o", message["path"], "-"]
        subprocess.run(command, input=code.encode(), check=True)
    return reply


if __name__ == "__main__":
    serve(handle)
