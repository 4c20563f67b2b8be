"""Scripts in forks of a process that has imported PyTorch and the compiler, which takes longer than most of them run.

`python forking.py` reads a line of JSON for each: its `argv`, and the files for its `stdout` and `stderr`. It answers
with the exit code.
"""

import atexit
import json
import os
import runpy
import sys
import traceback


def run(argv: list[str], stdout: str, stderr: str) -> None:
    """As `python ARGV...` does."""
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv, sys.path[0] = argv, os.path.dirname(argv[0])
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    import torch  # noqa: F401
    import tvm  # noqa: F401

    import tvm_sparse.bench.timing  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
