"""The space of the templates made by `tiles`, and the extents that their kernels are built from. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import REGISTER_FILE, Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, ceildiv, powers

from ..words import OutputLayer, best_of, block_of, candidates_of, lists_of, most_words

# Vectors of hidden states that a thread holds if they are float32: the compiler also holds their parts.
MAX_SPLIT = 4
# Rows of hidden states of a tile: fragments of operand B, or of A beside eight words.
TILE_M = powers(8, 64)
# Words of a tile: one or two fragments of operand A; or one of operand B, in a ring of whole tiles. So many lanes of a
# warp find a tile's largest score.
TILE_N, NARROW = (16, 32), 8
# Warps that share the columns of a word.
REDUCE_WARPS = powers(1, 16)
# Hidden states in shared memory and in registers, half of a warp's columns in each: of rows too long for either.
BOTH = 2
# Thread blocks of the first kernel for each multiprocessor, those of all lists together.
BLOCKS_EACH = (1, 2, 3, 4, 6)
# Thread blocks along the second axis of a grid.
MAX_BLOCKS_Y = 65535
# Threads of a block of the second kernel.
THREADS = (256, 512, 1024)
# Bytes of a row above which shared memory has room for one block of a multiprocessor: a barrier would stop all of it.
WIDE = 4096
# Bytes of words above which the L2 cache of no machine holds them; from which on one of 50 MB does not keep all of them
# from call to call; and from which on rings have a default of their own.
CACHE, LARGE, MEDIUM = 48 * 2**20, 40 * 2**20, 16 * 2**20
# Words of a list whose best are found faster by few threads.
SHORT = 8192
# Loads that a thread has in flight: as many as hide the latency of memory with few warps.
MAX_LOADS = 16
# Tiles that a block has in hand, each with a warp of its own. Those of rings, which fill shared memory, are not all
# powers of two.
TILES = (1, 4, 6, 8, 10, 12, 16)
# Words times steps in hand of a warp with a tile of its own and eight rows: from there on the compiler spills.
MAX_ALONE = 64
# Steps in hand, which divide those of a word; with a ring, steps of a stage. 0: stages of whole rows, one behind the
# other as they lie in memory, which the warps of a block share.
DEPTH = (0, 1, 2, 3, 4, 5, 8, 16)
MAX_DEPTH = 4  # in registers
# Stages of a ring in shared memory. 0: words go to registers. More were never faster in the ring of a warp; a block may
# have so many tiles of whole rows.
STAGES = (0, 2, 3, 4, 6)
MOST_STAGES = 3
# Registers of a thread for operands and sums, with a ring and without one, and for all else.
MAX_RINGED, MAX_HELD, BESIDES = 204, 188, 40
# Words that the second kernel finds for a row: it ranks as many maxima by counting.
MAX_K = 256
# Words of a row that the second kernel searches without looking for the best tiles first: more keep its only
# multiprocessor busy for longer than a second trip to memory takes.
MAX_DIRECT = 8192
# Maxima that the second kernel ranks at least.
LEAST_GROUPS = 64
# Up to such a k it bounds tiles by so many maxima, where it finds them by their scores alone.
FEW, FEW_GROUPS = 24, 32
# Words that it ranks at the most without a bound of their own, where k is small.
LEAST_NEAR = 256
# Words of a list from which on it has a default of its own.
SHORTEST = 512
# Loads of a thread of the second kernel in flight together; the most of one that has all that it searches in registers,
# words or tiles.
LOADS, MAX_WORDS_EACH, MAX_TILES_EACH = 4, 8, 32
# Registers of its threads, where it finds tiles by their scores alone, by the tiles up to which they do.
SEARCH_REGISTERS = {10: 32, MAX_TILES_EACH: 64}
# Bytes of shared memory of a thread block, static and dynamic, and of what the second kernel has beside its pool.
STATIC_SHARED, DYNAMIC_SHARED = 48 * 1024, 200 * 1024
# Bytes of words that all thread blocks together have brought into the L2 cache ahead: what memory brings while the
# second kernel of the call before runs.
PREFETCHED = 12 * 2**20
# MB of a vocabulary that stay in the L2 cache for the next call, as they are read as usual and all other words leave it
# first (scripts/probes/cached_words.cu), to whole rounds of all thread blocks.
CACHED = (0, 16, 24, 32, 8)
# Percent of the tiles that thread blocks take as they come to them; the others are dealt out.
DYNAMIC = (0, 12, 25, 50, 6)
# Bytes of a load, and of the part of a row that a warp multiplies in one step: a cache line.
VECTOR, STEP = 16, 128
# Floats between the rows of a tile's sums in shared memory beyond its words: keeps lanes off each other's banks.
PAD = 4


def word_bytes(problem: OutputLayer) -> int:
    """Bytes of all words of a list."""
    return most_words(problem) * problem.hidden * numpy_dtype(problem.dtype).itemsize


def is_large(problem: OutputLayer) -> bool:
    """Whether it reads a vocabulary, not candidates, of which the L2 cache keeps a part at most."""
    return not candidates_of(problem) and word_bytes(problem) > LARGE


def require_whole_vectors(problem: OutputLayer) -> None:
    """NotApplicable unless rows start where loads of 16 bytes may."""
    if problem.hidden * numpy_dtype(problem.dtype).itemsize % VECTOR:
        raise NotApplicable(f"rows of {problem.hidden} elements of {problem.dtype} do not start on {VECTOR} bytes")


def require_ranks(problem: OutputLayer) -> None:
    """NotApplicable unless the second kernel finds as many words."""
    if best_of(problem) > MAX_K:
        raise NotApplicable(f"k={best_of(problem)} exceeds {MAX_K}, the most that are ranked by counting")


def space(problem: OutputLayer, machine: Machine) -> Table:
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no tensor cores for bfloat16 and tf32")
    size = numpy_dtype(problem.dtype).itemsize
    require_whole_vectors(problem)
    require_ranks(problem)
    lists, rows = lists_of(problem)
    if lists * ceildiv(rows, min(TILE_M)) > MAX_BLOCKS_Y:
        raise NotApplicable(f"{lists} lists of {rows} rows exceed an axis of the grid")
    most = ceildiv(most_words(problem), min(TILE_N))
    blocks = {min(most, max(1, machine.cores * n // lists)) for n in BLOCKS_EACH}
    halves = machine.has_clusters and size == 2
    # For no more than eight rows a fragment has twice as many, which leaves room for more of each word.
    most_rows = max(rows, 16 if halves and is_large(problem) else 8)
    table = {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * most_rows),
        "tile_n": TILE_N + (NARROW,) * (halves and not candidates_of(problem) and most_rows > 8),
        "reduce_warps": REDUCE_WARPS,
        "tiles": TILES,
        "depth": DEPTH,
        "staged": (0, 1) + (BOTH,) * (halves and most_rows > 8),
        "blocks": tuple(sorted(blocks)),
        "threads": THREADS if best_of(problem) else THREADS[:1],
        "overlap": (0, 1) if machine.has_clusters else (0,),
        # Words that the L2 cache holds are to stay, and to take the place of what other kernels left there: lines that
        # leave first never do. Of more words than that a part stays if it is not always the oldest one that leaves.
        "evict_first": (0, 1) if is_large(problem) else (0,),
        # Which words candidates are may be for the producer kernel to say.
        "prefetch": (0,) if candidates_of(problem) or not machine.has_clusters else (0, 1),
        "stages": STAGES if machine.has_clusters else (0,),
        "direct": (0, 1) if best_of(problem) and most_words(problem) <= MAX_DIRECT else (0,),
        "dynamic": (0,) if candidates_of(problem) or not machine.has_clusters else DYNAMIC,
        "cached": CACHED if is_large(problem) and machine.has_clusters else (0,),
    }
    if next(likely_points(problem, machine, table), None) is None:
        raise NotApplicable(
            f"hidden={problem.hidden} and lists of {most_words(problem)} words exceed registers or shared memory"
        )
    return table


def allowed(problem: OutputLayer, machine: Machine, decisions: Decisions) -> str | None:
    # First what most of a million combinations fail by, and needs nothing of the problem.
    depth, tiles, reduce_warps = (decisions[name] for name in ("depth", "tiles", "reduce_warps"))
    if tiles > 1 and reduce_warps > 1:
        return f"warps that share a tile meet at a barrier of the block, which has one tile, not {tiles}"
    if decisions["prefetch"] and not decisions["overlap"]:
        return "words are brought into the L2 cache ahead while the producer kernel runs, with which this one overlaps"
    if decisions["cached"] and not (decisions["evict_first"] and decisions["stages"]):
        return "words of a ring stay in the L2 cache where all others leave it first"
    if not decisions["stages"]:
        if depth > MAX_DEPTH:
            return f"{depth} steps in hand exceed {MAX_DEPTH}"
        if tiles & (tiles - 1):
            return f"{tiles} tiles are no power of two, as where words go to registers"
    if not depth and (not decisions["stages"] or reduce_warps == 1 or candidates_of(problem)):
        return "whole rows are read by warps that share a tile of neighbouring words, to a ring"
    if decisions["tile_n"] == NARROW and (
        decisions["tile_m"] == 8 or reduce_warps == 1 or (depth and decisions["staged"] != BOTH)
    ):
        return "eight words, an operand beside 16 rows, are shared by warps, in whole rows or with states in two places"
    if decisions["staged"] == BOTH and not (decisions["stages"] and depth):
        return "hidden states are in two places beside a ring of parts of rows"
    if decisions["dynamic"] and (depth or not decisions["stages"] or decisions["direct"]):
        return "tiles that are taken as thread blocks come to them are whole rows in a ring, and searched by tiles"
    if depth and decisions["stages"] > MOST_STAGES:
        return f"{decisions['stages']} stages of parts of rows exceed {MOST_STAGES}"
    e = Extents.of(problem, decisions)
    if e.prefetch and e.prefetched * e.stride * e.tile_bytes > CACHE:
        return "the first tiles of all warps exceed the L2 cache"
    if e.stages:
        return _ring_allowed(e, machine)
    if e.reduce_warps == 1 and e.tile_m == 8 and e.depth * e.tile_n >= MAX_ALONE:
        return "the compiler spills to reach the 128 registers of a higher occupancy"
    if e.steps % e.depth:
        return f"{e.depth} steps in hand do not divide the {e.steps} of a word"
    if e.depth * (e.tile_n // 4) > MAX_LOADS:
        return f"{e.depth * (e.tile_n // 4)} loads in flight exceed {MAX_LOADS}"
    if e.held > MAX_HELD:
        return f"{e.held} operands and sums exceed {MAX_HELD} registers"
    if (e.held + BESIDES) * e.product_threads > REGISTER_FILE:
        return f"{e.held} operands and sums in each of {e.product_threads} threads exceed the registers"
    if e.reduce_warps > 1 and (e.reduce_warps - 1) * e.steps * 8 >= e.vectors:
        return f"the last of {e.reduce_warps} warps has no part of a row of {e.vectors} vectors"
    if e.parts_bytes > STATIC_SHARED:
        return f"sums of {e.parts_bytes} bytes exceed shared memory of {STATIC_SHARED}"
    if e.kept_bytes + e.parts_bytes > (limit := most_shared(machine)):
        return f"{e.tile_m} hidden states of {e.kept_bytes} bytes exceed shared memory of {limit}"
    if reason := search_allowed(e, machine):
        return reason
    if e.staged == 0 and e.dtype == "float32" and e.steps * e.row_groups > MAX_SPLIT:
        return f"{e.steps * e.row_groups} vectors of hidden states, split for tf32, exceed {MAX_SPLIT} in registers"
    return None


def _ring_allowed(e: Extents, machine: Machine) -> str | None:
    """Of the first kernel with a ring, and of the second."""
    if e.reduce_warps > 1 and (e.reduce_warps - 1) * e.steps * 8 >= e.vectors:
        return f"the last of {e.reduce_warps} warps has no part of a row of {e.vectors} vectors"
    if e.depth and e.depth >= 2 * ceildiv(e.vectors, 8 * e.reduce_warps):
        return f"a stage of {e.depth} cache lines is twice what a warp has of a row of {e.vectors} vectors, or more"
    if e.dtype == "float32" and (1 if e.staged else e.steps) * e.row_groups > MAX_SPLIT:
        return f"{e.steps} steps of {e.tile_m} hidden states, split for tf32, exceed {MAX_SPLIT} vectors in registers"
    if (e.held + BESIDES) * e.product_threads > REGISTER_FILE or e.held > MAX_RINGED:
        return f"{e.held} operands and sums in each of {e.product_threads} threads exceed the registers"
    if e.parts_bytes > STATIC_SHARED:
        return f"sums of {e.parts_bytes} bytes exceed shared memory of {STATIC_SHARED}"
    if not machine.blocks_at_once(e.product_threads, 1, e.shared_bytes):
        return f"hidden states, a ring and sums of {e.shared_bytes} bytes exceed a multiprocessor's shared memory"
    return search_allowed(e, machine)


def most_shared(machine: Machine) -> int:
    """Bytes of shared memory that a thread block takes at the most."""
    return min(DYNAMIC_SHARED, machine.block_shared_bytes)


def search_allowed(e: SearchSizes, machine: Machine) -> str | None:
    """Why there is no such second kernel."""
    if e.k and e.groups > e.threads:
        return f"{e.groups} maxima for k={e.k} exceed {e.threads} threads"
    if e.k and e.pool_bytes + e.static_bytes > most_shared(machine):
        return f"{e.searched} scores or tiles that are searched take {e.pool_bytes} bytes of shared memory"
    return None


def launch(problem: OutputLayer, decisions: Decisions) -> Launch:
    """Of the first kernel."""
    e = Extents.of(problem, decisions)
    return Launch(e.product_threads, e.kept_bytes)


def default(problem: OutputLayer, machine: Machine) -> Decisions:
    return next(likely_points(problem, machine, space(problem, machine)))


def likely_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points of a table, the best first: all rows in a tile, if there is room, and eight warps that share it. Of wide
    rows each warp has a tile of its own, unless registers hold all hidden states.
    """
    shared = [(reduce_warps, 1, staged) for staged in (1, 0) for reduce_warps in (8, 16, 4, 2)]
    alone = [(1, tiles, 1) for tiles in (16, 8, 4, 1)]
    in_registers = [(8, 1, 0)]
    row = problem.hidden * numpy_dtype(problem.dtype).itemsize
    wide = row > WIDE
    # Large tiles where there are many, with as many loads in flight.
    many = not wide and word_bytes(problem) > CACHE
    # Of one short list of candidates for a beam, large tiles, which are few, and a search by few threads.
    lists, rows = lists_of(problem)
    short = bool(candidates_of(problem)) and lists == 1 and rows <= 16 and most_words(problem) <= SHORT and not wide
    yield from special_points(problem, machine, table)
    for tile_m in sorted((tile for tile in table["tile_m"] if tile < 2 * max(rows, 8)), reverse=True):
        teams = in_registers[tile_m > 8 :] + alone + shared if wide else shared + alone
        for tile_n, (reduce_warps, tiles, staged), depth, threads in itertools.product(
            table["tile_n"][:: -1 if many or short else 1],
            teams,
            (1, 2, 3, 4) if many or short else (2, 4, 1, 3) if wide else (2, 1, 3, 4),
            table["threads"][:: 1 if short else -1],
        ):
            point = {
                "tile_m": tile_m,
                "tile_n": tile_n,
                "reduce_warps": reduce_warps,
                "tiles": tiles,
                "depth": depth,
                "staged": staged,
                "blocks": table["blocks"][0 if tiles > 1 or short else min(1, len(table["blocks"]) - 1)],
                "threads": threads,
                "overlap": max(table["overlap"]),
                "evict_first": max(table["evict_first"]),
                # Narrow words of 16 bits: blocks ask for no more ahead than the second kernel leaves time for.
                "prefetch": max(table["prefetch"]) if many and row == 2 * problem.hidden else 0,
                "stages": 0,
                "direct": 0,
                "dynamic": 0,
                "cached": 0,
            }
            if allowed(problem, machine, point) is None:
                yield point


def special_points(problem: OutputLayer, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points that are the best where they are allowed, most with rings; most of them are of 16 bits."""
    (lists, rows), words = lists_of(problem), most_words(problem)
    size = numpy_dtype(problem.dtype).itemsize
    row = problem.hidden * size
    wide = row > WIDE
    direct = max(table["direct"]) if candidates_of(problem) else 0
    common = {"tile_n": 16, "overlap": max(table["overlap"]), "prefetch": 0, "direct": direct, "dynamic": 0}
    common["blocks"] = min(table["blocks"], key=lambda blocks: abs(blocks - machine.cores // lists))
    dynamic = table["dynamic"][min(1, len(table["dynamic"]) - 1)]
    large = is_large(problem)
    if not candidates_of(problem) and (rows > 16 or not large and (wide or word_bytes(problem) < MEDIUM)):
        return
    if not candidates_of(problem) and not wide:
        # Registers are as fast where rows end as cache lines do, unless a part of a large vocabulary stays cached.
        aligned, floats = row % STEP == 0, size > 2
        if (aligned and floats) or (not large and (aligned or floats)):
            return
        point = {"tile_m": 8 if rows <= 8 else 16, "reduce_warps": 8, "tiles": 1, "depth": 0, "stages": 2}
        # With few tiles a thread, few threads find room beside the first kernel's.
        many = words > TILE_N[0] * THREADS[1] * min(SEARCH_REGISTERS)
        point |= {"evict_first": max(table["evict_first"]), "threads": THREADS[2] if large and many else THREADS[1]}
        twice = min(table["blocks"], key=lambda blocks: abs(blocks - 2 * machine.cores))
        halves = {"staged": 0, "prefetch": max(table["prefetch"]), "dynamic": dynamic * large, "blocks": twice}
        points = [point | (halves if size == 2 else {"staged": 1})]
    elif size > 2:
        return
    elif not candidates_of(problem):
        # A large vocabulary of wide rows. Hidden states are in registers, and whole rows in a ring, of which there is
        # room for two tiles: of eight words, if need be, where a fragment has more rows than there are.
        whole = {"tile_m": 16, "reduce_warps": 8, "tiles": 1, "depth": 0, "staged": 0, "stages": 2}
        whole |= {"evict_first": 1, "threads": 1024, "dynamic": dynamic, "prefetch": max(table["prefetch"])}
        if rows > 8:
            steps = ceildiv(row // VECTOR, 64)
            points = [whole, whole | {"tile_n": NARROW}] + [
                {"tile_m": 16, "reduce_warps": 8, "tiles": 1, "depth": depth, "staged": 0, "stages": stages}
                | {"evict_first": 0, "threads": 512}
                for depth, stages in ((steps, 2), (2, 3), (2, 2))
                if depth in table["depth"] and steps % depth == 0
            ]
            parts = whole | {"staged": BOTH, "dynamic": 0}
            points += [parts | {"tile_n": NARROW, "depth": 4}, parts | {"depth": 2}]
        else:
            # Else parts of them, if these divide a row well, or large tiles by way of registers. Of the widest rows a
            # part of the hidden states is in shared memory, and their tiles are more than are brought ahead.
            points = [whole | {"tile_m": 8}, whole | {"tile_n": NARROW}]
            eight = whole | {"tile_m": 8, "dynamic": 0}
            points += [eight | {"depth": depth, "stages": 3} for depth in (4, 3)]
            if max(table["stages"]):
                points += [eight | {"tile_n": 32, "depth": 1, "stages": 0, "evict_first": 0, "prefetch": 0}]
            both = eight | {"staged": BOTH, "depth": 2, "prefetch": 0}
            points += [both | {"stages": 3}, both]
    elif rows > 1 or words < SHORTEST:
        return
    else:
        # A list a row, longer than those of `streams`: one block a multiprocessor, with stages of a kilobyte a word, or
        # of half as much.
        rings = ((6, 8, 2), (6, 4, 3), (6, 4, 2))
        points = [
            {"tile_m": 8, "reduce_warps": 1, "tiles": tiles, "depth": depth, "staged": 1, "stages": stages}
            | {"evict_first": 0, "threads": 1024}
            for tiles, depth, stages in (rings if wide else rings[::-1])
        ]
    for point in points:
        point = common | point
        point["cached"] = likely_cached(problem) if point["evict_first"] else 0
        if not best_of(problem):
            point["threads"] = table["threads"][0]
        if (
            point["stages"] in table["stages"]
            and allowed(problem, machine, point := {n: point[n] for n in table}) is None
        ):
            yield point


def likely_cached(problem: OutputLayer) -> int:
    """What the L2 cache of a machine with rings, of 50 MB and more, keeps of a large vocabulary: less of one that sends
    more through it."""
    times = word_bytes(problem) / CACHE
    return 32 if times < 1.25 else 24 if times < 2 else 16


class SearchSizes:
    """What the kernel that finds the best words (`best`) asks of a template's sizes."""

    k: int
    ids: int
    m: int
    block: int
    tile_n: int
    threads: int  # of a thread block of that kernel
    overlap: int
    direct: int

    @property
    def whole_sums(self) -> bool:
        """Whether sums of exponentials come in units of whole powers of two (see `device.powers`), and not in those of
        the largest one."""
        return False

    @property
    def sum_dtype(self) -> str:
        """Of sums of exponentials."""
        return "float64" if self.whole_sums else "float32"

    @property
    def by_bits(self) -> bool:
        """Whether each thread has the scores of all its tiles in registers, and tiles are found by these alone."""
        return False

    @property
    def searched_words(self) -> int:
        """Words that it searches at a time: all, or those of the best tiles."""
        raise NotImplementedError

    @property
    def searched(self) -> int:
        """The most that it searches at a time: these, or tiles."""
        return self.searched_words

    @property
    def tells_largest(self) -> bool:
        """Whether its search for tiles puts down the row's largest score."""
        return self.whole_sums and not self.by_bits

    @property
    def groups(self) -> int:
        """Groups of its threads whose maxima are ranked."""
        return max(LEAST_GROUPS, 1 << (2 * self.k - 1).bit_length())

    @property
    def most_near(self) -> int:
        """Words of the best tiles that it ranks without a bound of their own."""
        return max(LEAST_NEAR, 2 * self.k)

    @property
    def loads(self) -> int:
        """Loads of one of its threads that are in flight together."""
        return max(LOADS, min(MAX_WORDS_EACH if self.direct else LOADS, ceildiv(self.searched, self.threads)))

    @property
    def pool_bytes(self) -> int:
        """Its dynamic shared memory: a key and an ordered score for all that is searched."""
        return dynamic_shared(12 * self.searched + 8, self.static_bytes)

    @property
    def static_bytes(self) -> int:
        """What it has beside that, or a little less."""
        near = 0 if self.direct else 8 * self.most_near
        more = 4 * self.groups * self.by_bits + 256 * self.whole_sums
        return self.groups * 8 + self.k * 12 + near + more + 512


class TileSearchSizes(SearchSizes):
    """What that kernel asks of a template's sizes where the first one tells the largest scores of tiles."""

    list_tiles: int
    blocks: int  # thread blocks of the first kernel, each of which tells a sum of exponentials of a row
    dynamic: int  # whether its tiles are taken as thread blocks come to them

    @property
    def whole_sums(self) -> bool:
        """Which thread block adds up what differs from run to run if tiles are taken as they come; results do not."""
        return self.dynamic > 0

    @property
    def tiles_each(self) -> int:
        """Tiles of a thread of the second kernel."""
        return ceildiv(self.list_tiles, self.threads)

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

    @property
    def tile_groups(self) -> int:
        """Groups of threads by whose best tiles a bound is found, `by_bits`. Of the least, half as many tiles more
        reach it."""
        return FEW_GROUPS if self.k <= FEW else self.groups

    @property
    def at_once(self) -> int:
        """Words of the best tiles that are ranked in one step: most often there are no more. 0: in several."""
        return 2 * FEW_GROUPS if self.by_bits and self.k <= FEW else 0

    @property
    def rankers(self) -> int:
        """Threads that then rank a word."""
        return min(8, self.threads // self.at_once)

    @property
    def row_pitch(self) -> int:
        """Scores of a row in the workspace."""
        return self.list_tiles * self.tile_n

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

    @property
    def near_loads(self) -> int:
        """Loads of a thread for these words that are in flight together."""
        return min(self.loads, ceildiv(self.most_tiles * self.tile_n, self.threads))


class TileSizes(TileSearchSizes):
    """What the first kernels of `tiles` and `warpgroups` know of their tiles: `tile_n` words by `tile_m` rows."""

    tile_m: int
    tiles: int  # of a thread block at a time

    @property
    def product_threads(self) -> int:
        """Threads of a block that multiply."""
        raise NotImplementedError

    @property
    def stride(self) -> int:
        """Tiles that all blocks have in hand together: from one tile of a warp or block to its next."""
        return self.blocks * self.tiles

    @property
    def word_groups(self) -> int:
        """Eights of words of a tile."""
        return self.tile_n // 8

    @property
    def row_groups(self) -> int:
        """Eights of its rows of hidden states."""
        return self.tile_m // 8

    @property
    def sums_each(self) -> int:
        """Sums of a tile that a lane has."""
        return self.tile_m * self.tile_n // 32

    @property
    def pitch(self) -> int:
        """Floats from one row of a tile's sums to the next."""
        return self.tile_n + PAD


@dataclass(frozen=True)
class Extents(TileSizes):
    """What the kernels know before they run.

    Attributes
    ----------
    dtype, hidden
        Of hidden states and words.
    k, ids
        Words to be found in a row, and words that were asked for. 0 of `candidate_logits`, which finds none.
    m
        Candidates of a list; 0 of the exact head.
    block
        Words of a candidate.
    beam
        Rows of a list; 0 of the exact head, whose batch may be any.
    tile_m, tile_n, reduce_warps, tiles, depth, staged, blocks, threads, overlap, evict_first, prefetch, stages, direct,
    dynamic, cached
        The decisions of these names.
    vectors
        16-byte vectors of a row.
    steps
        Steps of a warp along a row; with a ring those of whole stages.
    list_tiles
        Tiles of a list that is full.
    """

    dtype: str
    hidden: int
    k: int
    ids: int
    m: int
    block: int
    beam: int
    tile_m: int
    tile_n: int
    reduce_warps: int
    tiles: int
    depth: int
    staged: int
    blocks: int
    threads: int
    overlap: int
    evict_first: int
    prefetch: int
    stages: int
    direct: int
    dynamic: int
    cached: int
    vectors: int
    steps: int
    list_tiles: int

    @classmethod
    def of(cls, problem: OutputLayer, decisions: Decisions) -> Extents:
        vectors = problem.hidden * numpy_dtype(problem.dtype).itemsize // VECTOR
        return cls(
            problem.dtype,
            problem.hidden,
            best_of(problem),
            problem.axes.get("ids", 0),
            candidates_of(problem),
            block_of(problem),
            lists_of(problem)[1] if candidates_of(problem) else 0,
            **decisions,
            vectors=vectors,
            steps=_steps(vectors, decisions),
            list_tiles=ceildiv(most_words(problem), decisions["tile_n"]),
        )

    @property
    def product_threads(self) -> int:
        """Threads of a block of the first kernel."""
        return 32 * self.reduce_warps * self.tiles

    @property
    def words_second(self) -> bool:
        """Whether words are operand B of the product, and hidden states operand A; otherwise it is the other way. What
        a lane loads of a word is a fragment of B as it is, and half of two of A: so words of a ring are B where A has
        rows enough."""
        return self.tile_n == NARROW or (self.whole and self.dtype != "float32" and self.tile_m >= 16)

    @property
    def a_groups(self) -> int:
        """Eights of operand A's rows: two are a fragment."""
        return self.row_groups if self.words_second else self.word_groups

    @property
    def b_groups(self) -> int:
        """Eights of operand B's: each is a fragment."""
        return self.word_groups if self.words_second else self.row_groups

    @property
    def in_hand(self) -> int:
        """Steps of words in registers."""
        return 1 if self.stages else self.depth

    @property
    def whole(self) -> bool:
        """Whether a stage has whole rows."""
        return self.stages > 0 and not self.depth

    @property
    def rings(self) -> int:
        """Rings of a thread block: one, or one a warp."""
        return 1 if self.whole else self.product_threads // 32

    @property
    def stage_steps(self) -> int:
        """Steps of a warp in a stage."""
        return self.steps if self.whole else self.depth

    @property
    def parts(self) -> int:
        """Stages of a tile."""
        return self.steps // self.stage_steps

    @property
    def tile_bytes(self) -> int:
        return self.tile_n * self.vectors * VECTOR

    @property
    def prefetched(self) -> int:
        """Tiles that a warp, or those that share one, have brought into the L2 cache ahead."""
        return max(1, PREFETCHED // (self.stride * self.tile_bytes))

    @property
    def dealt_turns(self) -> int:
        """Tiles that each block or warp is given: all but the last of them, and those that are taken (`dynamic`)."""
        return max(self.dealt(self.list_tiles), 1)

    def dealt(self, tiles: Any) -> Any:
        """Whole rounds of so many tiles that are dealt out."""
        return tiles * (100 - self.dynamic) // (100 * self.stride)

    @property
    def cached_turns(self) -> int:
        """How many of these stay in the L2 cache, of all blocks: as many as come nearest to `cached`."""
        return min(round(self.cached * 2**20 / (self.stride * self.tile_bytes)), self.dealt_turns - 1)

    @property
    def early(self) -> bool:
        """Whether words that are constant are read before the producer kernel has ended: those of a vocabulary, where
        they go to registers. A ring that is filled so early gains nothing on an H200: the wait takes longer by as much.
        """
        return self.overlap > 0 and not self.m and not self.stages

    @property
    def held(self) -> int:
        """Registers of a thread for words and hidden states in hand, and for sums."""
        states = self.held_steps * self.row_groups * 8
        split = 6 * self.row_groups + 12 if self.dtype == "float32" else 0
        operands = self.in_hand * self.tile_n + states + split
        return operands + self.sums_each + self.word_groups * 10 + 3 * self.pairs_each

    @property
    def pairs_each(self) -> int:
        """Scores of a tile that a thread of the first kernel finishes."""
        return ceildiv(self.tile_m * self.tile_n, self.product_threads) if self.reduce_warps > 1 else 1

    @property
    def parts_bytes(self) -> int:
        """Static shared memory of the first kernel: sums of all warps, twice, as one tile is finished while the next
        one's are written; or what each warp knows of its rows."""
        if self.reduce_warps == 1:
            return self.tiles * self.tile_m * 8
        return 2 * self.reduce_warps * self.tile_m * self.pitch * 4

    @property
    def register_steps(self) -> int:
        """Steps of a warp whose hidden states stay in registers: the first ones."""
        return ceildiv(self.steps, 2) if self.staged == BOTH else 0 if self.staged else self.steps

    @property
    def kept_steps(self) -> int:
        """Those whose hidden states are in shared memory."""
        return self.steps - self.register_steps

    @property
    def held_steps(self) -> int:
        """Those whose hidden states are in registers at a time."""
        return self.register_steps + (self.kept_steps > 0)

    @property
    def kept_vectors(self) -> int:
        """Vectors of a hidden state in shared memory."""
        return self.kept_steps * 8 * self.reduce_warps

    @property
    def padded_vectors(self) -> int:
        """Vectors of a row up to the last warp's last step."""
        return self.steps * 8 * self.reduce_warps

    @property
    def uneven(self) -> bool:
        """Whether that is beyond a row's end."""
        return self.padded_vectors != self.vectors

    @property
    def kept_pitch(self) -> int:
        """Vectors from one hidden state in shared memory to the next: 4 beyond a multiple of 8, so that the two rows
        that eight lanes read lie in different banks."""
        return (self.kept_vectors + 3) // 8 * 8 + 4

    @property
    def kept_rows(self) -> int:
        """Hidden states in shared memory. Beside a ring no row is there twice."""
        return min(self.tile_m, self.beam) if self.stages and self.beam else self.tile_m

    @property
    def ring_at(self) -> int:
        """Bytes of hidden states, behind which a ring is."""
        return self.kept_rows * self.kept_pitch * VECTOR if self.staged else 0

    @property
    def ring_pitch(self) -> int:
        """Bytes from one row of a stage to the next: half a cache line beyond whole ones, as `kept_pitch` is. Whole
        rows lie as they do in memory."""
        return self.vectors * VECTOR if self.whole else self.depth * STEP + STEP // 2

    @property
    def rows_apart(self) -> int:
        """How far apart rows of a stage are that eight lanes read together: 1, 2 or 4, so that they lie in different
        banks of shared memory, if any two do."""
        return next((rows for rows in (1, 2, 4) if self.ring_pitch * rows % STEP == STEP // 2), 1)

    @property
    def ring_bytes(self) -> int:
        return self.rings * self.stages * self.tile_n * self.ring_pitch

    @property
    def kept_bytes(self) -> int:
        """Dynamic shared memory of the first kernel: of hidden states, and of a ring."""
        return dynamic_shared(self.ring_at + (self.ring_bytes if self.stages else 0), self.parts_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the first kernel with a ring."""
        return self.kept_bytes + self.parts_bytes + (12 if self.dynamic else 8) * self.stages * self.rings


def _steps(vectors: int, decisions: Decisions) -> int:
    if decisions["stages"] and decisions["depth"]:
        return ceildiv(vectors, 8 * decisions["reduce_warps"] * decisions["depth"]) * decisions["depth"]
    return ceildiv(vectors, 8 * decisions["reduce_warps"])


def dynamic_shared(wanted: int, static: int) -> int:
    """Dynamic shared memory to ask for: TVM lets a kernel have more than 48 KB only if this part alone exceeds that."""
    return max(wanted, STATIC_SHARED + VECTOR) if wanted and wanted + static > STATIC_SHARED else wanted
