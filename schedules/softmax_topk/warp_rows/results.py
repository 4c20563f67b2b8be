"""What the kernel writes: values and indices by their rank, and the probabilities of given columns."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.references import exponent
from ...device.selection import key_index, key_value
from ...device.words import held_address
from ..elements import write_given, written_element


# fmt: off
@T.inline
def locate_outputs(io, at, s):
    """Writes: `outputs_at`, the addresses of the row's first value and first index."""
    s.outputs_at[0] = held_address("u64", io.values.ptr_to([at.row, 0]))
    s.outputs_at[1] = held_address("u64", io.indices.ptr_to([at.row, 0]))


@T.inline
def write_key(io, s, rank, key):
    """Write a key's value and index, by its rank.

    Reads: what `sum_exponentials` wrote. Writes: the value and the index of this rank.
    """
    T.ptx.st.global_.s64(s.outputs_at[1] + T.Cast("uint64", rank * 8), T.Cast("int64", key_index(key)))
    T.ptx.fma.rn.f32(s.power[0], key_value(key), s.factor[0], T.float32(0) - s.reference[0])
    T.ptx.ex2.approx.ftz.f32(s.value[0], s.power[0])
    T.ptx.st.global_.f32(
        s.outputs_at[0] + T.Cast("uint64", rank * 4),
        T.Select(io.log != 0, s.power[0] * s.unit[0] - s.logarithm[0], s.value[0] * s.inverse[0]))


@phase
def write_asked(layout, /, io, at, s, ids):
    """Write the probabilities of the first `ids` given columns.

    Reads: `ids`, the logits in these columns, and what `sum_exponentials` wrote. Writes: `given`. Barriers: none.
    """
    lanes = T.meta_var(layout.lanes)
    for i in T.serial((ids - at.lane + (lanes - 1)) // lanes):
        T.ptx.ld.global_.s64(s.wanted[0], io.ids.ptr_to([at.row, i * lanes + at.lane]))
        s.column[0] = T.Cast("int32", T.max(T.min(s.wanted[0], T.int64(layout.vocab - 1)), T.int64(0)))
        write_given(
            io.given, at.row, i * lanes + at.lane, s.wanted[0], layout.vocab,
            exponent(written_element(io, at.row, s.column[0]), s.factor[0], s.reference[0]) * s.unit[0],
            s.inverse[0], s.logarithm[0], io.log)
# fmt: on
