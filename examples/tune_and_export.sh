#!/usr/bin/env bash
# From a list of shapes to a folder of libraries that a serving process loads:
#
#     examples/tune_and_export.sh FOLDER [TRIALS]
#
# FOLDER gets `records` (what was measured) and `kernels` (what is shipped). Run again with more trials it goes on from
# what is recorded. The last line serves from the folder, in a process that never loads the compiler.
set -euo pipefail
folder=${1:?the folder to write to}
trials=${2:-64}
here=$(cd "$(dirname "$0")" && pwd)

tvm-sparse tune --shapes "$here/shapes.toml" --trials "$trials" --logs "$folder/records"
tvm-sparse export --logs "$folder/records" --output "$folder/kernels"
python "$here/decode_loop.py" "$folder/kernels"
