"""Which tokens a list has, for kernels that may start before the producer kernel has ended.

A producer kernel may have made the lists, so these may be read only after the wait for it, by loads that see its
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .best.sizes import SearchSizes

load_int = T.ptx.ld.global_.s32


def count_words(e: SearchSizes) -> Callable[..., Any]:
    """The phase is (io, index, words). Writes: `words[0]`, how many tokens list `index` has."""

    # fmt: off
    @T.inline
    def phase(io, index, words):
        if e.m == 0:
            words[0] = io.vocab
        else:
            load_int(words[0], io.counts.ptr_to([index]))
            words[0] = T.max(T.min(words[0], e.m), 0) * e.block
    # fmt: on
    return phase


def load_name(e: SearchSizes) -> Callable[..., Any]:
    """The phase is (io, index, position, name).

    Writes: `name[0]`, the candidate at a position of list `index`, as it is there.
    """

    # fmt: off
    @T.inline
    def phase(io, index, position, name):
        if e.m == 0:
            name[0] = position
        else:
            load_int(name[0], io.candidates.ptr_to([index, position // e.block]))
    # fmt: on
    return phase


def named_word(e: SearchSizes, io: Any, position: Any, name: Any) -> Any:
    """The token at a position whose candidate is `name`; one that is none gives the nearest token."""
    if e.m == 0:
        return name
    return T.max(T.min(name, io.vocab // e.block - 1), 0) * e.block + position % e.block


def find_word(e: SearchSizes) -> Callable[..., Any]:
    """The phase is (io, index, position, word). Writes: `word[0]`, the token at a position of list `index`."""
    load = load_name(e)

    # fmt: off
    @T.inline
    def phase(io, index, position, word):
        load(io, index, position, word)
        if e.m > 0:
            word[0] = named_word(e, io, position, word[0])
    # fmt: on
    return phase
