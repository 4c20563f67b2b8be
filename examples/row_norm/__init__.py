"""RMS norm of rows, as an operator of a package outside of tvm_sparse.

Every command takes it by ``tvm-sparse --plugin examples/row_norm``, Python by `tvm_sparse.core.registry.add_plugin`. A
package that is installed declares it as an entry point of the group ``tvm_sparse.operators`` instead.
"""

from tvm_sparse.core.registry import Operator

OPERATOR = Operator("row_norm", home="row_norm", schedules="row_norm.schedules", public=("row_norm",))
