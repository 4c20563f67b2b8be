"""Draw a word from a whole row, where the k best are not enough: weighted radix selection.

Words have *masses*: their exponentials, relative to the row's largest, as whole numbers in units of 2^-`unit_bits`.
Sums of these are exact in any order, so that atomics may add them, and a row gives the same word whatever the threads.
A word below one unit is never drawn.

The first word of the order up to which there is a mass of `need` is found by histograms of masses (`locate`): one over
*slices*, equal parts of the logarithmic scale of probability, so that atomics seldom meet, which is made once; and then
histograms of the words in a slice, over digits of their order bits, counted from the lowest that the slice may have.
For most slices one or two digits tell all words apart. That is done once for top-p, where `need` is its share of the
row's mass, and once for the word, where it is the uniform number's share of what is left. A search ends with a group of
equal words, of which one more pass finds the right one by its column.

Each histogram takes a pass over the row, from the L2 cache. The blocks of a cluster share it (`block`): each has the
bins of its own part of the row, and after a barrier of the cluster every block adds up those of all of them and draws
the same conclusions, so that a pass takes one barrier.

Phases are called with (io, row, t, s): as `Ending.finish`, with the state of the search. They are made for a *crew*:
the threads of a block or of a cluster, or the one of a CPU.
"""

from ..blocks import Blocks
from .blocks import search_by_blocks
from .thread import search_by_thread

__all__ = ["Blocks", "search_by_blocks", "search_by_thread"]
