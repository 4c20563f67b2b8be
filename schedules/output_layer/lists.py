"""Which tokens a list has, for kernels that may start before the producer kernel has ended.

A producer kernel may have made the lists, so these may be read only after the wait for it, by loads that see its
writes.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .best.sizes import SearchSizes

load_int = T.ptx.ld.global_.s32


# fmt: off
@phase
def count_words(e, /, io, index, words):
    """The phase is (io, index, words). Writes: `words[0]`, how many tokens list `index` has."""
    if e.m == 0:
        words[0] = io.vocab
    else:
        load_int(words[0], io.counts.ptr_to([index]))
        words[0] = T.max(T.min(words[0], e.m), 0) * e.block


@phase
def load_name(e, /, io, index, position, name):
    """The phase is (io, index, position, name).

    Writes: `name[0]`, the candidate at a position of list `index`, as it is there.
    """
    if e.m == 0:
        name[0] = position
    else:
        load_int(name[0], io.candidates.ptr_to([index, position // e.block]))


def named_word(e: SearchSizes, io: Any, position: Any, name: Any) -> Any:
    """The token at a position whose candidate is `name`; one that is none gives the nearest token."""
    if e.m == 0:
        return name
    return T.max(T.min(name, io.vocab // e.block - 1), 0) * e.block + position % e.block


@phase
def find_word(e, /, io, index, position, word):
    """The phase is (io, index, position, word). Writes: `word[0]`, the token at a position of list `index`."""
    load_name(e)(io, index, position, word)
    if e.m > 0:
        word[0] = named_word(e, io, position, word[0])
# fmt: on
