"""N-hot lookup on a GPU: the output is dealt out evenly, and every thread reads its own entries.

With many entries a row the table's rows come from the L2 cache, and the multiprocessor that has most of them to read
decides the time: 200 equal blocks of threads on 132 multiprocessors take as long as 264 would. Here the output is one
list of vectors of 16 bytes, cut into sectors of 32; `blocks` blocks of threads get as many sectors each, or one less,
wherever rows begin and end. For each vector there are `groups` threads, each with a share of the row's entries, which
it asks for all at once, up to MOST_LOADS. They read ids and values by themselves, several with a load, because threads
of a warp belong to different groups: a load serves all lanes of a group, and no shuffle lies between ids and rows. What
the groups have is summed through shared memory in a fixed order, by all threads.

Ids are loaded where they are if all rows have as many entries, beside the row starts that tell whether they are there;
rows that they stand for are asked for without waiting for the answer. Where it is no, or where calls have another
number of entries than the problem says, the share is read anew, entry by entry of the true row.

`early` lets a launch overlap the end of the kernel before (programmatic dependent launch): with 1 the kernel behind may
start when that one is done, with 2 as soon as this one has started. Nothing is read before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv

from .warp_gather import widths

# Blocks of threads a multiprocessor, at the problem's number of rows.
WAVES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Threads that share the entries of a vector: what divides round numbers of entries evenly.
GROUPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32)
# Loads of a table's row that a thread has in flight: 20 of 16 bytes are 80 registers.
MOST_LOADS = 20
MAX_THREADS = 1024
SECTOR = 32  # bytes
MAX_SHARED = 48 * 1024
# Registers of a multiprocessor, and what a thread needs beside loads, values and sums (addresses, counts).
REGISTERS, BESIDES = 65536, 24


class Dealt:
    """How the output's vectors lie, and how many of them and of their entries fall to a block and a thread."""

    def __init__(self, problem: Problem, blocks: int, groups: int):
        self.vec, self.columns, self.unit = vectors(problem)
        self.words = ceildiv(self.vec * numpy_dtype(problem.dtype).itemsize, 4)  # of a vector
        self.slots = self.unit * ceildiv(units(problem), blocks)  # vectors of a block at most
        self.threads = ceildiv(self.slots * groups, 32) * 32
        self.loads = min(ceildiv(problem.nonzeros, groups), MOST_LOADS)  # entries of a thread at once
        self.wide = min(self.vec, 4)  # floats of one access to shared memory
        self.quads = self.vec // self.wide
        # Vectors between the quads of partial sums: 64 bytes off, so that neither stores nor sums meet a bank twice.
        self.pitch = self.slots if self.quads == 1 else (self.slots + 3) // 8 * 8 + 4
        self.shared = groups * self.quads * self.pitch * self.wide


def vectors(problem: Problem) -> tuple[int, int, int]:
    """Elements of a vector, vectors of a row, and vectors that stay together: a sector, if a row has whole ones."""
    vec = widths(problem)[0]
    columns, sector = problem.width // vec, SECTOR // (vec * numpy_dtype(problem.dtype).itemsize)
    return vec, columns, sector if columns % sector == 0 else 1


def units(problem: Problem) -> int:
    """What is dealt out: the output's sectors, or its vectors."""
    _, columns, unit = vectors(problem)
    return problem.rows * (columns // unit)


def space(problem: Problem, machine: Machine) -> Table:
    table = {
        "blocks": tuple(sorted({min(machine.cores * waves, units(problem)) for waves in WAVES})),
        "reduce_threads": GROUPS,
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }
    # The least that a block can be asked for.
    if allowed(problem, machine, {"blocks": table["blocks"][-1], "reduce_threads": 1}) is not None:
        raise NotApplicable(f"{units(problem)} sectors of output are too many for {table['blocks'][-1]} blocks")
    return table


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    groups = decisions["reduce_threads"]
    dealt = Dealt(problem, decisions["blocks"], groups)
    if dealt.threads > MAX_THREADS:
        return f"{dealt.slots} vectors of {groups} threads each exceed {MAX_THREADS} threads a block"
    held = dealt.loads * (dealt.words + bool(problem.weighted)) + dealt.vec
    if (held + BESIDES) * dealt.threads > REGISTERS:
        return f"{held} loads, values and sums in each of {dealt.threads} threads exceed the registers"
    if dealt.shared * 4 > MAX_SHARED:
        return f"partial sums of {dealt.shared * 4} bytes exceed shared memory of {MAX_SHARED}"
    if (groups - 1) * dealt.loads >= problem.nonzeros:
        return f"{groups} groups of {dealt.loads} entries leave one without any of nonzeros={problem.nonzeros}"
    return None


def default(problem: Problem, machine: Machine) -> Decisions:
    """As few blocks, and then as many groups, as there may be."""
    table = space(problem, machine)
    points = (
        {"blocks": blocks, "reduce_threads": groups, "overlap": 0}
        for blocks in table["blocks"]
        for groups in GROUPS[::-1]
    )
    return next(point for point in points if allowed(problem, machine, point) is None)


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from ..device.overlap import await_previous, overlapping
    from ..device.words import INDEX_KINDS, load_words, read_element, value_at

    width, dtype, index, weighted = problem.width, problem.dtype, problem.index, bool(problem.weighted)
    nonzeros, tuned_rows, blocks = problem.nonzeros, problem.rows, decisions["blocks"]
    groups, early = decisions["reduce_threads"], decisions["overlap"]
    dealt = Dealt(problem, blocks, groups)
    vec, columns, unit, slots, threads = dealt.vec, dealt.columns, dealt.unit, dealt.slots, dealt.threads
    words, loads, wide, quads, pitch = dealt.words, dealt.loads, dealt.wide, dealt.quads, dealt.pitch
    size, index_size = numpy_dtype(dtype).itemsize, numpy_dtype(index).itemsize
    # Ids of one load: as many as lie aligned wherever a thread's share begins.
    together = next(v for v in (4, 2, 1) if v * index_size <= 16 and nonzeros % v == 0 and loads % v == 0)
    value_words = ceildiv(together * size, 4)  # of the values of one load
    whole = loads * groups == nonzeros  # else some threads have fewer entries
    idle = slots * groups != threads  # whether threads are left over
    each_sum = min(vec, 2)  # elements that a thread sums over the groups at a time
    items = slots * vec // each_sum
    kind = INDEX_KINDS[index]
    read_index = getattr(T.ptx.ld.global_, kind)
    read_indices = read_index if together == 1 else getattr(getattr(T.ptx.ld.global_, f"v{together}"), kind)

    # fmt: off
    @T.inline
    def guess_entries(indices, values, begin, group, id, raw_values, small):
        """Ids and values of the share that this thread has if all rows have as many entries."""
        for u in T.unroll(loads // together):
            place = group * loads + u * together
            at = begin + T.Cast(index, place if whole else T.min(place, nonzeros - together))
            read_indices(*[id[u * together + v] for v in range(together)], indices.ptr_to([at]))
            if weighted:
                load_words(together * size, raw_values, u * value_words, small, values.ptr_to([at]))

    @T.inline
    def guess_weights(raw_values, weight):
        for u in T.unroll(loads):
            weight[u] = value_at(dtype, raw_values, u // together * value_words, u % together)

    @T.inline
    def load_ends(indptr, row, ends):
        read_index(ends[0], indptr.ptr_to([row]))
        read_index(ends[1], indptr.ptr_to([row + 1]))

    @T.inline
    def load_entry(u, indices, values, at, id, weight):
        read_index(id[u], indices.ptr_to([at]))
        if weighted:
            weight[u] = read_element(dtype, values.ptr_to([at]))

    @T.inline
    def load_rows(table, id, column, raw, small):
        for u in T.unroll(loads):
            load_words(vec * size, raw, u * words, small, table.ptr_to([T.Cast("int64", id[u]), column]))

    @T.inline
    def add(raw, weight, count, every, term, acc):
        for u in T.unroll(loads):
            if every or u < count:
                for v in T.unroll(vec):
                    term[0] = value_at(dtype, raw, u * words, v)
                    if weighted:
                        term[0] = weight[u] * term[0]
                    acc[v] = acc[v] + term[0]

    @T.prim_func
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        rows = T.int64()
        nnz = T.int64()
        vocab = T.int64()
        indptr = T.match_buffer(indptr_h, (rows + 1,), index)
        indices = T.match_buffer(indices_h, (nnz,), index)
        values = T.match_buffer(values_h, (nnz,), dtype)
        table = T.match_buffer(table_h, (vocab, width), dtype)
        out = T.match_buffer(out_h, (rows, width), dtype)
        # On the host: of other numbers of rows a block gets no more than of this problem's.
        even: T.let = T.Cast("int32", nnz // rows)
        grid: T.let = T.Cast("int32", (rows * blocks + (tuned_rows - 1)) // tuned_rows)
        share: T.let = T.Cast("int32", rows * (columns // unit) // T.Cast("int64", grid))
        more: T.let = T.Cast("int32", rows * (columns // unit) % T.Cast("int64", grid))
        T.device_entry()
        if early == 2:
            T.ptx.griddepcontrol.launch_dependents()
        block = T.cta_id([grid])
        t = T.thread_id([threads])
        flat = T.decl_buffer((rows * width,), dtype, data=out.data)
        parts = T.alloc_shared([dealt.shared], "float32")
        id = T.alloc_local([loads], index)
        raw_values = T.alloc_local([loads // together * value_words], "uint32")
        weight = T.alloc_local([loads], "float32")
        raw = T.alloc_local([loads * words], "uint32")
        small = T.alloc_local([1], "uint16")
        ends = T.alloc_local([2], index)
        at = T.alloc_local([1], index)
        count = T.alloc_local([1], "int32")
        begun = T.alloc_local([1], "int32")
        term = T.alloc_local([1], "float32")
        acc = T.alloc_local([vec], "float32")
        result = T.alloc_local([each_sum], dtype)
        total = T.alloc_local([each_sum], "float32")
        first: T.int64 = (T.Cast("int64", block) * T.Cast("int64", share) + T.Cast("int64", T.min(block, more))) * unit
        have: T.int32 = (share + T.Cast("int32", block < more)) * unit  # vectors of this block
        slot: T.int32 = t % slots
        group: T.int32 = t // slots
        local: T.int32 = T.Cast("int32", first % columns) + slot
        row: T.int64 = first // columns + T.Cast("int64", local // columns)
        column: T.int32 = local % columns * vec
        for v in T.unroll(vec):
            acc[v] = T.float32(0)
        if early == 1:
            await_previous()
        if early == 2:
            T.ptx.griddepcontrol.wait()
        if slot < have and (not idle or group < groups):
            begun[0] = 0  # batches that were added
            if even == nonzeros:
                begin: T.let = T.Cast(index, row * nonzeros)
                guess_entries(indices, values, begin, group, id, raw_values, small)
                load_ends(indptr, row, ends)
                load_rows(table, id, column, raw, small)
                if (ends[0] ^ begin) | (ends[1] ^ (begin + T.Cast(index, nonzeros))) == T.Cast(index, 0):
                    if weighted:
                        guess_weights(raw_values, weight)
                    count[0] = nonzeros - group * loads
                    add(raw, weight, count[0], whole, term, acc)
                    begun[0] = 1
            else:
                load_ends(indptr, row, ends)
            at[0] = ends[0] + T.Cast(index, (begun[0] * groups + group) * loads)
            while at[0] < ends[1]:
                for u in T.unroll(loads):
                    # Where there are fewer the last one is loaded in their place: a branch would delay the loads.
                    load_entry(
                        u, indices, values, T.min(at[0] + T.Cast(index, u), ends[1] - T.Cast(index, 1)), id, weight)
                load_rows(table, id, column, raw, small)
                count[0] = T.Cast("int32", T.min(ends[1] - at[0], T.Cast(index, loads)))
                add(raw, weight, count[0], False, term, acc)
                at[0] = at[0] + T.Cast(index, groups * loads)
        if not idle or group < groups:
            for q in T.unroll(quads):
                for v in T.vectorized(wide):
                    parts[((group * quads + q) * pitch + slot) * wide + v] = acc[q * wide + v]
        T.cuda.cta_sync()
        for i in T.unroll(ceildiv(items, threads)):
            item: T.let = (i * threads + t) * each_sum  # the first of these elements of the block
            if item < have * vec:
                for v in T.unroll(each_sum):
                    total[v] = T.float32(0)
                for g in T.unroll(groups):
                    for v in T.unroll(each_sum):
                        total[v] = total[v] + parts[
                            ((g * quads + item % vec // wide) * pitch + item // vec) * wide + item % wide + v]
                for v in T.unroll(each_sum):
                    result[v] = T.Cast(dtype, total[v])
                for v in T.vectorized(each_sum):
                    flat[first * vec + T.Cast("int64", item) + v] = result[v]
    # fmt: on
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    if early:
        main = overlapping(main)
    return Program(tvm.IRModule({"main": main}), pipeline="tirx")


dealt_gather = Template(
    name="dealt_gather",
    version=1,
    operator="nhot_lookup",
    kind="cuda",
    summary="the output dealt out evenly, threads read their own entries, all of a share in flight",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
