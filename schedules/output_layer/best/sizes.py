"""Sizes of the kernel that finds the best tokens, and which of them fit. Loads no compiler."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.template import NotApplicable, ceildiv

from ..words import OutputLayer, best_of

# Threads of a block.
THREADS = (256, 512, 1024)
# Tokens that it finds for a row: it ranks as many maxima by counting.
MAX_K = 256
# Tokens of a row that it searches without looking for the best tiles first: more keep its only multiprocessor busy for
# longer than a second trip to memory takes.
MAX_DIRECT = 8192
# Maxima that it ranks at least.
LEAST_GROUPS = 64
# The largest k for which tiles are bounded by `FEW_GROUPS` maxima, where they are found by their scores alone.
FEW, FEW_GROUPS = 24, 32
# Tokens that it ranks at the most without a bound of their own, where k is small.
LEAST_NEAR = 256
# Loads of a thread in flight together; the most of one that has all that it searches in registers, tokens or tiles.
LOADS, MAX_WORDS_EACH, MAX_TILES_EACH = 4, 8, 32
# Registers of a thread, where it finds tiles by their scores alone, by the tiles up to which they do.
SEARCH_REGISTERS = {10: 32, MAX_TILES_EACH: 64}
# Bytes of shared memory of a thread block, static and dynamic.
STATIC_SHARED, DYNAMIC_SHARED = 48 * 1024, 200 * 1024
# Bytes of a load.
VECTOR = 16


def require_ranks(problem: OutputLayer) -> None:
    """NotApplicable unless the kernel finds as many tokens."""
    if best_of(problem) > MAX_K:
        raise NotApplicable(f"k={best_of(problem)} exceeds {MAX_K}, the most that are ranked by counting")


def most_shared(machine: Machine) -> int:
    """Bytes of shared memory that a thread block takes at the most."""
    return min(DYNAMIC_SHARED, machine.block_shared_bytes)


def search_allowed(e: SearchSizes, machine: Machine) -> str | None:
    """Why the kernel that finds the best tokens cannot have these sizes; None if it can."""
    if e.draws:
        return None
    if e.k and e.groups > e.threads:
        return f"{e.groups} maxima for k={e.k} exceed {e.threads} threads"
    if e.k and e.pool_bytes + e.static_bytes > most_shared(machine):
        return f"{e.searched} scores or tiles that are searched take {e.pool_bytes} bytes of shared memory"
    return None


def dynamic_shared(wanted: int, static: int) -> int:
    """Dynamic shared memory to ask for: TVM lets a kernel have more than 48 KB only if this part alone exceeds that."""
    return max(wanted, STATIC_SHARED + VECTOR) if wanted and wanted + static > STATIC_SHARED else wanted


search_extent = Derived["SearchSizes", int]
search_whether = Derived["SearchSizes", bool]


class SearchSizes:
    """What the kernel that finds the best tokens (`best`) asks of a template's sizes."""

    k: int
    ids: int
    m: int
    block: int
    tile_n: int
    threads: int  # of a thread block of that kernel
    overlap: int
    direct: int
    draws: bool = False  # whether the second kernel draws a token, and finds no best ones

    @property
    def whole_sums(self) -> bool:
        """Whether sums of exponentials come in units of whole powers of two (see `device.powers`), and not in those of
        the largest one."""
        return False

    @property
    def sum_dtype(self) -> str:
        """The dtype of sums of exponentials."""
        return "float64" if self.whole_sums else "float32"

    @property
    def by_bits(self) -> bool:
        """Whether each thread has the scores of all its tiles in registers, and tiles are found by these alone."""
        return False

    @property
    def searched_words(self) -> int:
        """Tokens that it searches at a time: all, or those of the best tiles."""
        raise NotImplementedError

    @property
    def searched(self) -> int:
        """The most that it searches at a time: these, or tiles."""
        return self.searched_words

    # Whether its search for tiles puts down the row's largest score.
    tells_largest = search_whether(lambda e: e.whole_sums and not e.by_bits)
    # Groups of its threads whose maxima are ranked.
    groups = search_extent(lambda e: max(LEAST_GROUPS, 1 << (2 * e.k - 1).bit_length()))
    # The most tokens that it ranks at once: of more, it first finds their k-th best as a bound.
    most_near = search_extent(lambda e: max(LEAST_NEAR, 2 * e.k))

    @property
    def loads(self) -> int:
        """Loads of one of its threads that are in flight together."""
        return max(LOADS, min(MAX_WORDS_EACH if self.direct else LOADS, ceildiv(self.searched, self.threads)))

    # Its dynamic shared memory: a key and an ordered score for all that is searched.
    pool_bytes = search_extent(lambda e: dynamic_shared(12 * e.searched + 8, e.static_bytes))

    @property
    def static_bytes(self) -> int:
        """What it has beside that, or a little less."""
        near = 0 if self.direct else 8 * self.most_near
        more = 4 * self.groups * self.by_bits + 256 * self.whole_sums
        return self.groups * 8 + self.k * 12 + near + more + 512


tile_extent = Derived["TileSearchSizes", int]


class TileSearchSizes(SearchSizes):
    """What that kernel asks of a template's sizes where the first one tells the largest scores of tiles."""

    list_tiles: int
    blocks: int  # thread blocks of the first kernel, each of which tells a sum of exponentials of a row
    dynamic: int  # whether its tiles are taken as thread blocks come to them

    @property
    def whole_sums(self) -> bool:
        """Which thread block adds up what differs from run to run if tiles are taken as they come; results do not."""
        return self.dynamic > 0 and not self.draws

    # Tiles of a thread of the second kernel.
    tiles_each = tile_extent(lambda e: ceildiv(e.list_tiles, e.threads))

    @property
    def by_bits(self) -> bool:
        return not self.m and self.summed and self.tiles_each <= MAX_TILES_EACH

    @property
    def loads(self) -> int:
        return max(LOADS, self.tiles_each) if self.by_bits else super().loads

    @property
    def search_registers(self) -> Mapping[int, int]:
        """Registers of a thread of the second kernel, by the most tiles of a thread for which they are enough."""
        return SEARCH_REGISTERS

    @property
    def search_resident(self) -> int:
        """Blocks of the second kernel that a multiprocessor is to hold, which bounds the registers of a thread. So a
        block of few tiles most often finds room beside those of the first kernel, and is ready when these have ended:
        if it has to be started then, a call of 13 us takes 0.8 more."""
        registers = next(registers for most, registers in self.search_registers.items() if self.tiles_each <= most)
        return max(1, REGISTER_FILE // (registers * self.threads))

    # Groups of threads by whose best tiles a bound is found, `by_bits`. With the fewest groups half as many tiles more
    # reach it.
    tile_groups = tile_extent(lambda e: FEW_GROUPS if e.k <= FEW else e.groups)
    # Tokens of the best tiles that are ranked in one step: most often there are no more. 0: in several.
    at_once = tile_extent(lambda e: 2 * FEW_GROUPS if e.by_bits and e.k <= FEW else 0)
    # Threads that then rank a token.
    rankers = tile_extent(lambda e: min(8, e.threads // e.at_once))
    # Scores of a row in the workspace.
    row_pitch = tile_extent(lambda e: e.list_tiles * e.tile_n)

    @property
    def summed(self) -> bool:
        """Whether the first kernel tells the largest scores of tiles, and sums of exponentials."""
        return self.k > 0 and not self.direct

    @property
    def searched_words(self) -> int:
        return self.row_pitch if self.direct else min(self.k, self.list_tiles) * self.tile_n

    @property
    def searched(self) -> int:
        if self.direct:
            return self.searched_words
        return max(self.most_tiles if self.by_bits else self.list_tiles, self.searched_words)

    @property
    def most_tiles(self) -> int:
        """Tiles that the second kernel looks through without ranking them."""
        return max(2 * self.k, self.at_once)

    # Loads of a thread for these tokens that are in flight together.
    near_loads = tile_extent(lambda e: min(e.loads, ceildiv(e.most_tiles * e.tile_n, e.threads)))
