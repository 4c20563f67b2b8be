"""The CUDA emulator gives right results for right kernels, and catches wrong ones."""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from tvm_sparse.emulation import EmulationError, keep_objects, run, run_on_cpu
from tvm_sparse.schedules.device import words
from tvm_sparse.schedules.device.region import device_region

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
FULL = 0xFFFFFFFF
RNG = np.random.default_rng(0)


def run_tirx(func, args, **options):
    run_on_cpu(tvm.IRModule({"main": func}), TARGET, args, pipeline="tirx", **options)


# ---- right kernels -----------------------------------------------------------------------------


def row_sum(batch, n, threads, dtype="float32"):
    """Cross-thread sum of every row: shuffles, and shared memory beyond one warp."""
    x = te.placeholder((batch, n), name="X", dtype=dtype)
    r = te.reduce_axis((0, n), name="r")
    y = te.compute((batch,), lambda i: te.sum(x[i, r].astype("float32"), axis=r), name="Y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]).with_attr("global_symbol", "main"))
    i, k = sch.get_loops(sch.get_sblock("Y"))
    sch.bind(i, "blockIdx.x")
    sch.bind(sch.split(k, [None, threads])[1], "threadIdx.x")
    return sch.mod


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_cross_thread_sum(threads, dtype):
    x = RNG.standard_normal((5, 256)).astype(dtype)
    y = np.full(5, np.nan, "float32")
    run_on_cpu(row_sum(5, 256, threads, str(x.dtype)), TARGET, [x, y])
    np.testing.assert_allclose(y, x.astype("float64").sum(1), rtol=1e-5, atol=1e-5)


def test_symbolic_batch_and_two_kernels_with_a_workspace():
    batch = tvm.tirx.Var("batch", "int64")
    x = te.placeholder((batch, 64), name="X")
    r = te.reduce_axis((0, 64), name="r")
    y = te.compute((batch,), lambda i: te.sum(x[i, r], axis=r), name="Y")
    z = te.compute((batch,), lambda i: y[i] * 2.0, name="Z")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, z]).with_attr("global_symbol", "main"))
    i, k = sch.get_loops(sch.get_sblock("Y"))
    sch.bind(i, "blockIdx.x"), sch.bind(sch.split(k, [None, 32])[1], "threadIdx.x")
    block, thread = sch.split(sch.get_loops(sch.get_sblock("Z"))[0], [None, 128])
    sch.bind(block, "blockIdx.x"), sch.bind(thread, "threadIdx.x")
    for rows in (1, 150):
        data = RNG.standard_normal((rows, 64)).astype("float32")
        out = np.zeros(rows, "float32")
        run_on_cpu(sch.mod, TARGET, [data, out])
        np.testing.assert_allclose(out, 2 * data.astype("float64").sum(1), rtol=1e-4, atol=1e-5)


def logsumexp(batch, vocab, threads, unroll):
    step = threads * 4 * unroll

    @T.prim_func
    def lse(X: T.Buffer((batch, vocab), "float32"), Y: T.Buffer((batch, 2), "float32")):
        T.device_entry()
        row = T.cta_id([batch])
        t = T.thread_id([threads])
        x = T.alloc_local([4 * unroll], "float32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        g = T.alloc_local([1], "float32")
        s1 = T.alloc_shared([32], "float32")
        s2 = T.alloc_shared([32], "float32")
        m[0] = T.float32(-3.0e38)
        d[0] = T.float32(0)
        for i in T.serial(vocab // step):
            for u in T.unroll(unroll):
                for v in T.vectorized(4):
                    x[u * 4 + v] = X[row, i * step + (u * threads + t) * 4 + v]
            g[0] = m[0]
            for u in T.unroll(4 * unroll):
                g[0] = T.max(g[0], x[u])
            d[0] = d[0] * T.exp(m[0] - g[0])
            m[0] = g[0]
            for u in T.unroll(4 * unroll):
                d[0] = d[0] + T.exp(x[u] - m[0])
        g[0] = T.cuda.cta_max(m[0], threads // 32, s1.data)
        d[0] = T.cuda.cta_sum(d[0] * T.exp(m[0] - g[0]), threads // 32, s2.data)
        if t == 0:
            Y[row, 0] = g[0]
            Y[row, 1] = d[0]

    return lse


@pytest.mark.parametrize("threads", [64, 1024])
def test_tirx_one_pass_logsumexp(threads):
    x = RNG.standard_normal((3, threads * 16)).astype("float32") * 4
    out = np.zeros((3, 2), "float32")
    run_tirx(logsumexp(3, threads * 16, threads, 2), [x, out], seed=threads)
    np.testing.assert_array_equal(out[:, 0], x.max(1))
    expected = np.exp(x.astype("float64") - x.max(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(out[:, 1], expected, rtol=1e-5)


def compaction(n):
    """Keeps the positive entries, in any order: ballot, popc, shuffle, shared atomic."""

    @T.prim_func
    def compact(X: T.Buffer((n,), "float32"), Y: T.Buffer((n,), "float32"), N: T.Buffer((1,), "int32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([128])
        count = T.alloc_shared([1], "int32")
        at = T.alloc_local([1], "int32")
        votes = T.alloc_local([1], "uint32")
        if t == 0:
            count[0] = 0
        T.cuda.cta_sync()
        for i in T.serial(n // 128):
            x: T.float32 = X[i * 128 + t]
            votes[0] = T.cuda.ballot_sync(T.uint32(FULL), x > 0.0)
            if t % 32 == 0:
                at[0] = T.cuda.atomic_add(count.ptr_to([0]), T.cast(T.popcount(votes[0]), "int32"))
            at[0] = T.tvm_warp_shuffle(T.uint32(FULL), at[0], 0, 32, 32)
            if x > 0.0:
                below = votes[0] & ((T.uint32(1) << T.cast(t % 32, "uint32")) - T.uint32(1))
                Y[at[0] + T.cast(T.popcount(below), "int32")] = x
        T.cuda.cta_sync()
        if t == 0:
            N[0] = count[0]

    return compact


def test_stream_compaction_in_any_order():
    x = RNG.standard_normal(512).astype("float32")
    orders = set()
    for seed in range(3):
        out, n = np.zeros(512, "float32"), np.zeros(1, "int32")
        run_tirx(compaction(512), [x, out, n], seed=seed)
        assert n[0] == (x > 0).sum()
        np.testing.assert_array_equal(np.sort(out[: n[0]]), np.sort(x[x > 0]))
        orders.add(out.tobytes())
    assert len(orders) > 1  # the seed does reorder warps


def test_ptx_and_builtins():
    @T.prim_func
    def func(U: T.Buffer((64,), "uint32"), L: T.Buffer((64,), "uint64"), Y: T.Buffer((12, 64), "uint32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        u = T.alloc_local([4], "uint32")
        s = T.alloc_shared([4], "uint32")
        s64 = T.alloc_shared([1], "uint64")
        old = T.alloc_local([1], "uint64")
        if t == 0:
            s[0] = T.uint32(0)
            s[1] = T.uint32(0)
            s64[0] = T.uint64(0)
        T.cuda.cta_sync()
        T.ptx.shfl_sync.bfly.b32(u[0], U[t], T.uint32(1), T.uint32(31), T.uint32(FULL))
        Y[0, t] = u[0]
        T.ptx.popc.b32(u[0], U[t])
        Y[1, t] = u[0]
        T.ptx.atom.shared.max.u32(u[0], s.ptr_to([0]), U[t])
        T.ptx.red.shared.add.u32(s.ptr_to([1]), T.uint32(2))
        T.ptx.atom.shared.max.u64(old[0], s64.ptr_to([0]), L[t])
        T.cuda.cta_sync()
        Y[2, t] = s[0]
        Y[3, t] = s[1]
        Y[4, t] = T.cast(s64[0] >> T.uint64(32), "uint32")
        T.ptx.redux_sync.max.u32(u[0], U[t], T.uint32(FULL))
        Y[5, t] = u[0]
        T.ptx.bar.red.popc.u32(u[0], T.uint32(0), T.ptx.pred(U[t] % T.uint32(2) == T.uint32(0)))
        Y[6, t] = u[0]
        Y[7, t] = T.cast(T.call_extern("int32", "__syncthreads_count", U[t] > T.uint32(100)), "uint32")
        Y[8, t] = T.call_extern("uint32", "__match_any_sync", T.uint32(FULL), U[t] % T.uint32(4))
        T.ptx.ld.global_.v2.u32(u[0], u[1], U.ptr_to([t // 2 * 2]))
        Y[9, t] = u[0] + u[1]
        Y[10, t] = T.cuda.float_as_uint(T.cast(U[t], "float32"))
        Y[11, t] = T.cast(T.tvm_warp_shuffle_xor(T.uint32(FULL), L[t], 3, 32, 32) >> T.uint64(32), "uint32")

    u = RNG.integers(0, 1000, 64).astype("uint32")
    wide = RNG.integers(0, 2**63, 64).astype("uint64")
    out = np.zeros((12, 64), "uint32")
    run_tirx(func, [u, wide, out], seed=3)
    lanes = np.arange(64)
    warps = u.reshape(2, 32)
    same = (warps[:, :, None] % 4 == warps[:, None, :] % 4).astype("uint64")
    expected = [
        u[lanes ^ 1],
        [bin(v).count("1") for v in u],
        np.full(64, u.max()),
        np.full(64, 128),
        np.full(64, wide.max() >> np.uint64(32)),
        np.repeat(warps.max(1), 32),
        np.full(64, (u % 2 == 0).sum()),
        np.full(64, (u > 100).sum()),
        (same << np.arange(32, dtype="uint64")).sum(2).ravel(),
        np.repeat(u.reshape(32, 2).sum(1), 2),
        u.astype("float32").view("uint32"),
        wide[lanes ^ 3] >> np.uint64(32),
    ]
    for i, row in enumerate(expected):
        np.testing.assert_array_equal(out[i], row, err_msg=f"row {i}")


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_vectors_of_half(dtype):
    name = str(np.dtype(dtype))

    @T.prim_func
    def func(X: T.Buffer((256,), name), Y: T.Buffer((256,), name), Z: T.Buffer((256,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        h = T.alloc_local([8], name)
        for v in T.vectorized(8):
            h[v] = X[t * 8 + v]
        for v in T.serial(8):
            Z[t * 8 + v] = T.cast(T.max(h[v], h[v] * h[v]), "float32")
        for v in T.vectorized(4):
            Y[t * 4 + v] = X[t * 4 + v] * X[t * 4 + v] + X[t * 4 + v]
        for v in T.vectorized(4):
            Y[128 + t * 4 + v] = T.cast(Z[t * 8 + v] * 3.0, name)

    x = RNG.standard_normal(256).astype(dtype)
    y, z = np.zeros_like(x), np.zeros(256, "float32")
    run_tirx(func, [x, y, z])
    np.testing.assert_array_equal(z, np.maximum(x, x * x).astype("float32"))
    np.testing.assert_array_equal(y[:128], (x * x + x)[:128])
    np.testing.assert_array_equal(y[128:], (z.reshape(32, 8)[:, :4] * 3).ravel().astype(dtype))


def pairs_with_nan(n):
    """Every two of some special numbers, and normal ones behind them."""
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5])
    pairs = np.stack([np.repeat(special, 8), np.tile(special, 8)])
    return np.concatenate([pairs, RNG.standard_normal((2, n - 64))], axis=1)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_pairs_of_half_with_nan(dtype):
    """The larger of two is NaN if one is; and "not less" and "not less nor equal" are true of NaN."""
    pair = "__half2" if dtype == "float16" else "__nv_bfloat162"

    def of_pairs(name, result):
        source = (
            f"__device__ __forceinline__ unsigned int {name}(unsigned int v, unsigned int w)"
            f" {{ {pair} a = *({pair}*)&v, b = *({pair}*)&w; {result} }}"
        )
        return lambda v, w: T.cuda.func_call(name, v, w, source_code=source, return_type="uint32")

    largest = of_pairs("largest", f"{pair} c = __hmax2_nan(a, b); return *(unsigned int*)&c;")
    not_less = of_pairs("not_less", "return __hgeu2_mask(a, b);")
    greater = of_pairs("greater", "return __hgtu2_mask(a, b);")

    @T.prim_func
    def func(V: T.Buffer((128,), "uint32"), W: T.Buffer((128,), "uint32"), Y: T.Buffer((3, 128), "uint32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([128])
        Y[0, t] = largest(V[t], W[t])
        Y[1, t] = not_less(V[t], W[t])
        Y[2, t] = greater(V[t], W[t])

    a, b = (x.astype(dtype) for x in pairs_with_nan(256))
    out = np.zeros((3, 128), "uint32")
    run_tirx(func, [a.view("uint32"), b.view("uint32"), out])
    wide_a, wide_b = a.astype("float32"), b.astype("float32")
    np.testing.assert_array_equal(out[0].view(dtype).astype("float32"), np.maximum(wide_a, wide_b))
    np.testing.assert_array_equal(out[1].view("uint16"), np.where(wide_a < wide_b, 0, 0xFFFF))
    np.testing.assert_array_equal(out[2].view("uint16"), np.where(wide_a <= wide_b, 0, 0xFFFF))


def test_larger_of_two_with_nan():
    @T.prim_func
    def func(X: T.Buffer((2, 256), "float32"), Y: T.Buffer((256,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([256])
        y = T.alloc_local([1], "float32")
        T.ptx.max.NaN.f32(y[0], X[0, t], X[1, t])
        Y[t] = y[0]

    x, out = pairs_with_nan(256).astype("float32"), np.zeros(256, "float32")
    run_tirx(func, [x, out])
    np.testing.assert_array_equal(out, x.max(axis=0))
    # A GPU's NaN is always the same.
    assert set(out[np.isnan(out)].view("uint32")) == {0x7FFFFFFF}


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_tensor_cores(dtype):
    """A (16, 16) times B (16, 8) plus C, fragments loaded by ldmatrix and, of B, also by their documented places."""
    name = str(np.dtype(dtype))
    kind = {"float16": "f16", "bfloat16": "bf16"}[name]
    mma = getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32

    @T.prim_func
    def func(
        A: T.Buffer((16, 16), name), B: T.Buffer((16, 8), name), C: T.Buffer((16, 8), "float32"),
        D: T.Buffer((2, 16, 8), "float32"),
    ):  # fmt: skip
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        sa = T.alloc_shared([16, 16], name)
        sb = T.alloc_shared([16, 8], name)
        a = T.alloc_local([4], "uint32")
        b = T.alloc_local([2], "uint32")
        c = T.alloc_local([4], "float32")
        for i in T.serial(8):
            sa[(i * 32 + t) // 16, (i * 32 + t) % 16] = A[(i * 32 + t) // 16, (i * 32 + t) % 16]
        for i in T.serial(4):
            sb[(i * 32 + t) // 8, (i * 32 + t) % 8] = B[(i * 32 + t) // 8, (i * 32 + t) % 8]
        T.cuda.cta_sync()
        T.ptx.ldmatrix.sync.aligned.m8n8.x4.shared.b16(a[0], a[1], a[2], a[3], sa.ptr_to([t % 16, t // 16 * 8]))
        for way in T.serial(2):
            if way == 0:
                T.ptx.ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16(b[0], b[1], sb.ptr_to([t % 16, 0]))
            else:
                for i in T.serial(2):
                    b[i] = T.Cast("uint32", T.reinterpret("uint16", B[t % 4 * 2 + i * 8, t // 4])) | (
                        T.Cast("uint32", T.reinterpret("uint16", B[t % 4 * 2 + 1 + i * 8, t // 4])) << T.uint32(16)
                    )
            for i in T.serial(4):
                c[i] = C[t // 4 + i // 2 * 8, t % 4 * 2 + i % 2]
            mma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3])
            for i in T.serial(4):
                D[way, t // 4 + i // 2 * 8, t % 4 * 2 + i % 2] = c[i]

    a, b = (RNG.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    c, d = RNG.standard_normal((16, 8)).astype("float32"), np.full((2, 16, 8), np.nan, "float32")
    a[3, 5], b[9, 2] = np.inf, np.nan
    run_tirx(func, [a, b, c, d])
    with np.errstate(invalid="ignore"):
        expected = c.astype("float64") + a.astype("float64") @ b.astype("float64")
    for way in range(2):
        np.testing.assert_allclose(d[way], expected, rtol=1e-5, atol=1e-6)


def test_float8_becomes_float16():
    """Every number, subnormal ones and NaN too."""

    @T.prim_func
    def func(X: T.Buffer((256,), "uint32"), Y: T.Buffer((256,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([256])
        w = T.alloc_local([1], "uint32")
        w[0] = X[t // 4]
        Y[t] = words.stored_at("float8_e4m3fn", w, 0, t % 4, T.uint32(0))

    x, out = np.arange(256, dtype="uint8"), np.zeros(256, "float32")
    run_tirx(func, [np.pad(x.view("uint32"), (0, 192)), out])
    np.testing.assert_array_equal(out, x.view(ml_dtypes.float8_e4m3fn).astype("float32"))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_products_of_a_warpgroup(dtype):
    """A (64, 32) in registers times B (32, 24) in shared memory, plus C, and then A times B without it."""
    name = str(np.dtype(dtype))
    kind = {"float16": "f16", "bfloat16": "bf16"}[name]
    wgmma = T.ptx.wgmma
    mma = getattr(getattr(wgmma.mma_async.sync.aligned.m64n24k16.f32, kind), kind)

    def multiply(c, a, b, added):
        return mma(*(c[i] for i in range(12)), *(a[i] for i in range(4)), b, added, 1, 1, 0)

    @T.prim_func
    def func(
        A: T.Buffer((64, 32), name), B: T.Buffer((24, 32), name), C: T.Buffer((64, 24), "float32"),
        D: T.Buffer((2, 64, 24), "float32"),
    ):  # fmt: skip
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([128])
        pool = T.alloc_buffer([1024], name, scope="shared.dyn")
        a = T.alloc_local([4], "uint32")
        c = T.alloc_local([12], "float32")
        start = T.alloc_local([1], "uint64")
        # Eight columns of B by 8 of its k are a matrix; those of the next columns follow it, and those of the next k
        # are 24 * 8 elements further on.
        for i in T.serial(6):
            pool[(i * 128 + t) // 192 * 192 + (i * 128 + t) % 192] = B[
                (i * 128 + t) % 192 // 8, (i * 128 + t) // 192 * 8 + (i * 128 + t) % 8
            ]
        start[0] = (
            T.Cast("uint64", T.cuda.cvta_generic_to_shared(pool.ptr_to([0])) & T.uint32(0x3FFFF)) // T.uint64(16)
            + T.uint64(24 << 16)
            + T.uint64(8 << 32)
        )
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        for way in T.serial(2):
            for i in T.serial(12):
                c[i] = C[t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2]
            wgmma.fence.sync.aligned()
            for step in T.serial(2):
                for i in T.serial(4):
                    row = T.meta_var(t // 32 * 16 + t % 32 // 4 + i % 2 * 8)
                    k = T.meta_var(step * 16 + i // 2 * 8 + t % 4 * 2)
                    a[i] = T.Cast("uint32", T.reinterpret("uint16", A[row, k])) | (
                        T.Cast("uint32", T.reinterpret("uint16", A[row, k + 1])) << T.uint32(16)
                    )
                multiply(c, a, start[0] + T.Cast("uint64", step * 48), T.Or(way == 0, step > 0))
            wgmma.commit_group.sync.aligned()
            wgmma.wait_group.sync.aligned(0)
            for i in T.serial(12):
                D[way, t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    a, b = (RNG.standard_normal(shape).astype(dtype) for shape in ((64, 32), (24, 32)))
    c, d = RNG.standard_normal((64, 24)).astype("float32"), np.full((2, 64, 24), np.nan, "float32")
    a[3, 5], b[9, 2] = np.inf, np.nan
    run_tirx(func, [a, b, c, d])
    with np.errstate(invalid="ignore"):
        expected = a.astype("float64") @ b.astype("float64").T
    for way in range(2):
        np.testing.assert_allclose(d[way], expected + c * (way == 0), rtol=1e-5, atol=1e-5)


def boxes(rows, cols, wide, dtype):
    """A kernel that multiplies A (70, 2 wide) with B (rows, 2 wide), of which boxes are copied by tensor maps. `wide`
    columns are a row of a box; A has 64 of its rows in each of two thread blocks."""
    from tvm_sparse.schedules.device import operands
    from tvm_sparse.schedules.device.mbarriers import arrive_expecting, await_arrivals
    from tvm_sparse.schedules.device.region import device_region
    from tvm_sparse.schedules.device.tensor_maps import copy_box, describe, tensor_map

    mma, name = operands.product(dtype, rows), dtype
    a_bytes, b_bytes = 64 * wide * 2, rows * wide * 2

    def multiply(c, a, b, step):
        at = [operands.swizzled(place + T.uint32(step * operands.STEP_UNITS), wide * 2) for place in (a, b)]
        return mma(*(c[i] for i in range(rows // 2)), *at, T.bool(True), 1, 1, 0, 0)

    @T.prim_func
    def func(A: T.Buffer((70, cols), name), B: T.Buffer((rows, cols), name), C: T.Buffer((128, rows), "float32")):
        a_map = T.meta_var(tensor_map("a_map"))
        b_map = T.meta_var(tensor_map("b_map"))
        T.evaluate(describe(a_map, A.ptr_to([0, 0]), dtype, (70, cols), (64, wide)))
        T.evaluate(describe(b_map, B.ptr_to([0, 0]), dtype, (rows, cols), (rows, wide)))
        with device_region():
            block = T.cta_id([2])
            t = T.thread_id([128])
            pool = T.alloc_buffer([(a_bytes + b_bytes) // 2], name, scope="shared.dyn")
            full = T.alloc_shared([cols // wide], "uint64")
            c = T.alloc_local([rows // 2], "float32")
            for i in T.unroll(rows // 2):
                c[i] = T.float32(0)
            if t == 0:
                for i in T.unroll(cols // wide):
                    T.ptx.mbarrier.init.shared__cta.b64(full.ptr_to([i]), T.uint32(1))
                T.ptx.fence.mbarrier_init.release.cluster()
            T.cuda.cta_sync()
            start = T.meta_var(T.cuda.cvta_generic_to_shared(pool.ptr_to([0])))
            for part in T.unroll(cols // wide):
                if t == 0:
                    arrive_expecting(full.ptr_to([part]), T.uint32(a_bytes + b_bytes))
                    copy_box(pool.ptr_to([0]), T.address_of(a_map), part * wide, block * 64, full.ptr_to([part]))
                    copy_box(pool.ptr_to([a_bytes // 2]), T.address_of(b_map), part * wide, 0, full.ptr_to([part]))
                await_arrivals(full.ptr_to([part]))
                operands.fence()
                for step in T.unroll(wide // 16):
                    multiply(c, operands.place_of(start), operands.place_of(start + T.uint32(a_bytes)), step)
                operands.commit()
                operands.wait(0)
                T.cuda.cta_sync()
            for i in T.unroll(rows // 2):
                C[block * 64 + t // 32 * 16 + i // 2 % 2 * 8 + t % 32 // 4, i // 4 * 8 + t % 4 * 2 + i % 2] = c[i]

    return func


@pytest.mark.parametrize(("wide", "dtype"), [(64, "bfloat16"), (32, "float16"), (16, "bfloat16")])
def test_boxes_of_matrices_and_products_of_swizzled_operands(wide, dtype):
    """Rows beyond the matrix are zero."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    a, b = (RNG.standard_normal((rows, 2 * wide)).astype(kind) for rows in (70, 24))
    c = np.full((128, 24), np.nan, "float32")
    run_tirx(boxes(24, 2 * wide, wide, dtype), [a, b, c])
    expected = np.zeros((128, 24))
    expected[:70] = a.astype("float64") @ b.astype("float64").T
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)


def test_dynamic_shared_memory_and_scalar_argument():
    @T.prim_func
    def func(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32"), shift: T.int32):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        s = T.alloc_buffer([64], "float32", scope="shared.dyn")
        s[t] = X[t]
        T.cuda.cta_sync()
        Y[t] = s[(t + shift) % 64]

    x, y = RNG.standard_normal(64).astype("float32"), np.zeros(64, "float32")
    run_tirx(func, [x, y, 5])
    np.testing.assert_array_equal(y, np.roll(x, -5))


def test_cooperative_grid_barrier():
    @T.prim_func
    def func(A: T.Buffer((2, 128), "float32")):
        T.func_attr({"tirx.kernel_launch_params": ["tirx.use_cooperative_launch"]})
        T.device_entry()
        b = T.cta_id([4])
        t = T.thread_id([32])
        for s in T.serial(4):
            A[(s + 1) % 2, b * 32 + t] = A[s % 2, 127 - (b * 32 + t)] + 1.0
            T.cuda.grid_sync()

    a = np.zeros((2, 128), "float32")
    a[0] = np.arange(128)
    run_tirx(func, [a])
    np.testing.assert_array_equal(a[0], np.arange(128) + 4)


PEER = (
    "__device__ __forceinline__ float peer(void* p, int r)"
    " { return *(const volatile float*)__cluster_map_shared_rank(p, r); }"
)


def cluster_sum(first="split", second="asm", third="split", scope="shared", gather=False):
    """Twice, each block of a cluster of 4 adds up the same place of all blocks' shared memory.

    The barriers are before the first sums, before the second ones and before the blocks exit:
    "split" into arrive and wait, the combined "asm", or "none". `gather`: only block 0 adds up.
    """

    @T.inline
    def barrier(how):
        if how == "split":
            T.evaluate(T.call_extern("void", "__cluster_barrier_arrive"))
            T.evaluate(T.call_extern("void", "__cluster_barrier_wait"))
        elif how == "asm":
            T.cuda.cluster_sync()

    @T.prim_func
    def func(X: T.Buffer((3, 4, 64), "float32"), Y: T.Buffer((3, 4, 64, 2), "float32")):
        T.device_entry()
        c = T.cluster_id([3])
        r = T.cta_id_in_cluster([4])
        t = T.thread_id([64])
        T.alloc_shared([3], "float32")
        s = T.alloc_buffer([2, 64], "float32", scope=scope)
        s[0, 63 - t] = X[c, r, t]
        barrier(first)
        s[1, 63 - t] = X[c, r, t] * X[c, r, t]
        if not gather or r == 0:
            Y[c, r, t, 0] = T.float32(0)
            for i in T.serial(4):
                Y[c, r, t, 0] += T.cuda.func_call("peer", s.ptr_to([0, t]), i, source_code=PEER, return_type="float32")
        barrier(second)
        if not gather or r == 0:
            Y[c, r, t, 1] = T.float32(0)
            for i in T.serial(4):
                Y[c, r, t, 1] += T.cuda.func_call("peer", s.ptr_to([1, t]), i, source_code=PEER, return_type="float32")
        barrier(third)

    return func


def cluster_arrays():
    return RNG.standard_normal((3, 4, 64)).astype("float32"), np.full((3, 4, 64, 2), np.nan, "float32")


@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
def test_cluster_reads_the_shared_memory_of_its_blocks(scope):
    for seed in range(4):
        x, y = cluster_arrays()
        run_tirx(cluster_sum(scope=scope), [x, y], seed=seed)
        for i in range(2):
            expected = np.broadcast_to((x[:, :, ::-1] ** (i + 1)).sum(1, keepdims=True), x.shape)
            np.testing.assert_allclose(y[..., i], expected, rtol=1e-5, atol=1e-5)


# ---- mbarriers and bulk copies between the blocks of a cluster ----------------------------------

bulk_copy = T.ptx.cp.async_.bulk.shared__cluster.shared__cta.mbarrier__complete_tx__bytes
arrive_expecting = T.ptx.mbarrier.arrive.expect_tx.shared__cta.b64
try_wait = T.ptx.mbarrier.try_wait.parity.acquire.cluster.shared__cta.b64
map_to_peer = T.ptx.mapa.shared__cluster.u32

# How the exchange goes wrong, and what the emulator says of it.
EXCHANGE_FAULTS = {
    "none": None,
    "not initialised": "is not initialised as an mbarrier",
    "initialised twice": "mbarrier.init of the mbarrier .* is initialised already",
    "initialised for none": "mbarrier.init for 0 arrivals",
    "misaligned mbarrier": "mbarrier.init on a misaligned mbarrier",
    "ordinary access": "access to the mbarrier .* by no mbarrier instruction",
    "no barrier before": "which may not have started: no cluster barrier before|is not initialised as an mbarrier",
    "too few bytes": "phase 0 of the mbarrier .* gets 16 bytes more than it expects",
    "too many bytes": r"deadlock: (.*\n)*.*waits in mbarrier.try_wait .* awaits 0 arrivals and 16 bytes",
    "not armed": r"deadlock: (.*\n)*.*waits in mbarrier.try_wait .* awaits 1 arrivals and -128 bytes",
    "armed twice": "mbarrier.arrive at the mbarrier .* whose phase 0 awaits no arrival",
    "beyond the range": "the transaction count of the mbarrier .* beyond its range",
    "no such parity": "mbarrier.try_wait for parity 2",
    "no wait": "data race|completes without .* bulk copies in flight|more than it expects",
    "wrong parity": "data race: (a thread reads what another wrote|a bulk copy writes what another read)",
    "one copy": "data race",
    "sent unseen": "data race: a bulk copy reads what another wrote",
    "source in flight": "data race: a thread writes what another read.* a bulk copy",
    "odd size": "cp.async.bulk of 24 bytes, which is no multiple of 16",
    "misaligned": "misaligned cp.async.bulk",
    "past the destination": "cp.async.bulk of 128 bytes to what is not all shared memory|is not in shared memory",
    "onto the mbarrier": "access to the mbarrier .* by no mbarrier instruction",
    "mbarrier elsewhere": "cp.async.bulk to dynamic shared memory, which is not where the mbarrier .* is",
    "no such block": "the cluster has no block of rank 2",
    "mapped twice": "the address of a peer's shared memory where that of the own is due",
    "no barrier at exit": "exits with no cluster barrier after a peer's access|which has exited",
    "expected at exit": "the block exits while the mbarrier .* awaits 16 bytes",
}


@functools.cache
def exchange():
    """Y = the states after 4 steps that turn X and add one, of which each block of a cluster computes half.

    Blocks send each other their half in 2 copies that alternate, without any barrier between steps. `fault`: by number,
    so that one kernel has them all, because g++ takes longer than a run.
    """
    of = {fault: i for i, fault in enumerate(EXCHANGE_FAULTS)}

    @T.prim_func
    def func(X: T.Buffer((64,), "float32"), Y: T.Buffer((2, 64), "float32"), fault: T.int32):
        T.device_entry()
        T.cluster_id([1])
        r = T.cta_id_in_cluster([2])
        t = T.thread_id([32])
        states = T.alloc_buffer([2, 64], "float32", scope="shared.dyn")
        bars = T.alloc_shared([4], "uint64")
        done = T.alloc_local([1], "uint32")
        peer = T.alloc_local([2], "uint32")
        own = T.alloc_local([2], "uint32")
        for i in T.serial(2):
            states[0, i * 32 + t] = X[i * 32 + t]
        if t == 0:
            if fault != of["not initialised"]:
                T.ptx.mbarrier.init.shared__cta.b64(bars.ptr_to([0]), T.uint32(1))
            T.ptx.mbarrier.init.shared__cta.b64(
                bars.ptr_to([1]), T.if_then_else(fault == of["initialised for none"], T.uint32(0), T.uint32(1))
            )
            if fault == of["initialised twice"]:
                T.ptx.mbarrier.init.shared__cta.b64(bars.ptr_to([1]), T.uint32(1))
            if fault == of["misaligned mbarrier"]:
                T.ptx.mbarrier.init.shared__cta.b64(
                    T.cuda.cvta_generic_to_shared(bars.ptr_to([2])) + T.uint32(4), T.uint32(1)
                )
            if fault == of["ordinary access"]:
                bars[1] = T.uint64(0)
            T.ptx.fence.mbarrier_init.release.cluster()
            if fault == of["too few bytes"]:
                arrive_expecting(bars.ptr_to([1]), T.uint32(112))
            elif fault == of["too many bytes"]:
                arrive_expecting(bars.ptr_to([1]), T.uint32(144))
            elif fault == of["beyond the range"]:
                arrive_expecting(bars.ptr_to([1]), T.uint32(1 << 20))
            elif fault != of["not armed"]:
                arrive_expecting(bars.ptr_to([1]), T.uint32(128))
            if fault == of["armed twice"]:
                arrive_expecting(bars.ptr_to([1]), T.uint32(128))
            if fault != of["not initialised"]:
                arrive_expecting(bars.ptr_to([0]), T.uint32(128))
        T.cuda.cta_sync()
        if fault != of["no barrier before"]:
            T.ptx.barrier.cluster.arrive.release.aligned()
            T.ptx.barrier.cluster.wait.acquire.aligned()
        for step in T.serial(4):
            if fault == of["one copy"]:
                states[step % 2, r * 32 + t] = states[step % 2, (r * 32 + t + 17) % 64] + T.float32(1)
            states[(step + 1) % 2, r * 32 + t] = states[step % 2, (r * 32 + t + 17) % 64] + T.float32(1)
            if step < 3:
                T.ptx.fence.proxy.async_.shared__cta()
                if fault != of["sent unseen"]:
                    T.cuda.cta_sync()
                if t == 0:
                    own[0] = T.cuda.cvta_generic_to_shared(states.ptr_to([(step + 1) % 2, r * 32]))
                    own[1] = T.cuda.cvta_generic_to_shared(bars.ptr_to([(step + 1) % 2]))
                    for i in T.serial(2):
                        map_to_peer(peer[i], own[i], T.Cast("uint32", 1 - r))
                    if fault == of["no such block"]:
                        map_to_peer(peer[0], own[0], T.uint32(2))
                    if fault == of["mapped twice"]:
                        map_to_peer(peer[0], peer[0], T.Cast("uint32", r))
                    if fault == of["mbarrier elsewhere"]:
                        peer[1] = own[1]
                    if fault == of["misaligned"]:
                        bulk_copy(peer[0] + T.uint32(8), own[0], T.uint32(112), peer[1])
                    if fault == of["past the destination"]:
                        bulk_copy(peer[0] + T.uint32(192), own[0], T.uint32(128), peer[1])
                    if fault == of["odd size"]:
                        bulk_copy(peer[0], own[0], T.uint32(24), peer[1])
                    if fault == of["onto the mbarrier"]:
                        bulk_copy(peer[1] // T.uint32(16) * T.uint32(16), own[0], T.uint32(16), peer[1])
                    bulk_copy(peer[0], own[0], T.uint32(128), peer[1])
                if fault == of["source in flight"]:
                    T.cuda.cta_sync()
                    states[(step + 1) % 2, r * 32 + t] = T.float32(0)
                done[0] = T.uint32(0)
                if fault == of["no such parity"]:
                    try_wait(done[0], bars.ptr_to([1]), T.uint32(2))
                if fault == of["wrong parity"]:
                    try_wait(done[0], bars.ptr_to([1]), T.uint32(1))
                    done[0] = T.uint32(1)
                if fault == of["no wait"]:
                    done[0] = T.uint32(1)
                while done[0] == T.uint32(0):
                    try_wait(done[0], bars.ptr_to([(step + 1) % 2]), T.Cast("uint32", step // 2))
                if t == 0 and step == 0:
                    arrive_expecting(bars.ptr_to([1]), T.uint32(128))
        if t == 0 and fault == of["expected at exit"]:
            arrive_expecting(bars.ptr_to([0]), T.uint32(16))
        Y[r, r * 32 + t] = states[0, r * 32 + t]
        if fault != of["no barrier at exit"]:
            T.ptx.barrier.cluster.arrive.relaxed.aligned()
            T.ptx.barrier.cluster.wait.acquire.aligned()

    return func


def run_exchange(fault, seed, **options):
    x, y = RNG.standard_normal(64).astype("float32"), np.zeros((2, 64), "float32")
    run_tirx(exchange(), [x, y, list(EXCHANGE_FAULTS).index(fault)], seed=seed, **options)
    expected = x
    for _ in range(4):
        expected = np.roll(expected, -17) + np.float32(1)
    return y.sum(0), expected


def test_bulk_copies_between_blocks_of_a_cluster():
    for seed in range(6):
        np.testing.assert_array_equal(*run_exchange("none", seed))


@pytest.mark.parametrize("fault", [fault for fault in EXCHANGE_FAULTS if EXCHANGE_FAULTS[fault]])
def test_faulty_exchange(fault):
    for seed in range(3):
        with pytest.raises(EmulationError, match=EXCHANGE_FAULTS[fault]):
            run_exchange(fault, seed)


def test_wait_for_an_mbarrier_may_fail():
    """A wait in no loop: some threads find the copy done, others do not, by the seed, and nothing but NaN there."""

    @T.prim_func
    def func(Y: T.Buffer((2, 64), "uint32"), Z: T.Buffer((2, 64), "float32")):
        T.device_entry()
        T.cluster_id([1])
        r = T.cta_id_in_cluster([2])
        t = T.thread_id([64])
        s = T.alloc_shared([2, 4], "float32")
        bar = T.alloc_shared([1], "uint64")
        done = T.alloc_local([1], "uint32")
        peer = T.alloc_local([2], "uint32")
        s[r, t % 4] = T.float32(1)
        if t == 0:
            T.ptx.mbarrier.init.shared.b64(bar.ptr_to([0]), T.uint32(1))
            arrive_expecting(bar.ptr_to([0]), T.uint32(16))
        T.cuda.cluster_sync()
        if t == 0:
            map_to_peer(peer[0], T.cuda.cvta_generic_to_shared(s.ptr_to([r, 0])), T.Cast("uint32", 1 - r))
            map_to_peer(peer[1], T.cuda.cvta_generic_to_shared(bar.ptr_to([0])), T.Cast("uint32", 1 - r))
            bulk_copy(peer[0], s.ptr_to([r, 0]), T.uint32(16), peer[1])
        try_wait(done[0], bar.ptr_to([0]), T.uint32(0))
        Y[r, t] = done[0]
        Z[r, t] = s[1 - r, t % 4]
        while done[0] == T.uint32(0):
            try_wait(done[0], bar.ptr_to([0]), T.uint32(0))
        T.cuda.cluster_sync()

    found = set()
    for seed in range(6):
        y, z = np.full((2, 64), 9, "uint32"), np.zeros((2, 64), "float32")
        run_tirx(func, [y, z], seed=seed, check_races=False)
        found |= {*zip(y.flat, np.nan_to_num(z, nan=-1).flat, strict=True)}
    assert {(0, -1), (1, 1)} <= found <= {(0, -1), (0, 1), (1, 1)}


# ---- words that are stored to a peer asynchronously ---------------------------------------------

send_word = T.ptx.st_async.weak.shared__cluster.mbarrier__complete_tx__bytes.u64
arrive_expecting_there = T.ptx.mbarrier.arrive.expect_tx.relaxed.cluster.shared__cluster.b64

# How the blocks' words go wrong on their way to the first block, and what the emulator says of it.
SENDING_FAULTS = {
    "none": None,
    "own address": None,
    "no wait": "data race: a thread reads what another wrote.*, which the thread has not awaited",
    "written meanwhile": "data race: a (thread|bulk copy) writes what another wrote",
    "read before": "data race: a (thread reads what another wrote|bulk copy writes what another read)",
    "misaligned": "misaligned st.async",
    "past the destination": "st.async of 8 bytes to what is not all shared memory|is not in shared memory",
    "onto the mbarrier": "access to the mbarrier .* by no mbarrier instruction",
    "mbarrier elsewhere": "st.async to .*, which is not where the mbarrier .* is",
    "not initialised": "is not initialised as an mbarrier",
    "no barrier before": "which may not have started: no cluster barrier before|is not initialised as an mbarrier",
    "too few bytes": "phase 0 of the mbarrier .* (gets 8 bytes more than it expects|completes without 1 .* in flight)",
    "too many bytes": r"deadlock: (.*\n)*.*waits in mbarrier.try_wait .* awaits 0 arrivals and 8 bytes",
    "one silent": r"deadlock: (.*\n)*.*waits in mbarrier.try_wait .* awaits 1 arrivals and -\d+ bytes",
    "one twice": "phase 0 awaits no arrival|gets .* bytes more than it expects|completes without .* in flight",
    "no such block": "the cluster has no block of rank 3",
    "no wait at exit": "the block exits with .* in flight|exits with no wait for phase 0",
}


@functools.cache
def sending():
    """Y = X + 1, of which each block of a cluster sends a row to the first one. `fault` is by number."""
    of = {fault: i for i, fault in enumerate(SENDING_FAULTS)}

    @T.prim_func
    def func(X: T.Buffer((3, 32), "uint64"), Y: T.Buffer((3, 32), "uint64"), fault: T.int32):
        T.device_entry()
        T.cluster_id([1])
        r = T.cta_id_in_cluster([3])
        t = T.thread_id([32])
        words = T.alloc_shared([3, 32], "uint64")
        bars = T.alloc_shared([2], "uint64")
        done = T.alloc_local([1], "uint32")
        there = T.alloc_local([2], "uint32")
        bytes = T.alloc_local([1], "uint32")
        if t == 0:
            if fault != of["not initialised"]:
                T.ptx.mbarrier.init.shared__cta.b64(bars.ptr_to([0]), T.uint32(3))
            T.ptx.fence.mbarrier_init.release.cluster()
        if fault != of["no barrier before"]:
            T.cuda.cluster_sync()
        if fault == of["read before"] and r == 0:
            Y[2, t] = words[1, t]
        there[0] = T.cuda.cvta_generic_to_shared(words.ptr_to([r, t]))
        there[1] = T.cuda.cvta_generic_to_shared(bars.ptr_to([0]))
        # Of the block that has them, addresses of its own are those of the cluster.
        if fault != of["own address"] or r > 0:
            map_to_peer(there[0], there[0], T.uint32(0))
            if fault != of["mbarrier elsewhere"]:
                map_to_peer(there[1], there[1], T.if_then_else(fault == of["no such block"], T.uint32(3), T.uint32(0)))
        bytes[0] = T.uint32(256)
        if r == 1 and fault == of["too few bytes"]:
            bytes[0] = T.uint32(248)
        if r == 1 and fault == of["too many bytes"]:
            bytes[0] = T.uint32(264)
        if t == 5 and (r != 1 or fault != of["one silent"]):
            arrive_expecting_there(there[1], bytes[0])
        if t == 7 and r == 1 and fault == of["one twice"]:
            arrive_expecting_there(there[1], T.uint32(0))
        if r == 1 and fault == of["misaligned"]:
            there[0] = there[0] + T.uint32(4)
        if r == 1 and fault == of["past the destination"]:
            there[0] = there[0] + T.uint32(1 << 16)
        if r == 1 and fault == of["onto the mbarrier"]:
            there[0] = there[1]
        send_word(there[0], X[r, t] + T.uint64(1), there[1])
        if fault == of["written meanwhile"] and r == 0:
            words[1, t] = T.uint64(0)
        if fault == of["no wait"]:
            # That all have sent is not enough.
            T.cuda.cluster_sync()
        if r == 0 and fault != of["no wait at exit"]:
            done[0] = T.Cast("uint32", fault == of["no wait"])
            while done[0] == T.uint32(0):
                try_wait(done[0], bars.ptr_to([0]), T.uint32(0))
            for i in T.serial(3):
                Y[i, t] = words[i, 31 - t]
        if fault == of["no wait at exit"]:
            T.cuda.cluster_sync()

    return func


def run_sending(fault, seed, **options):
    x, y = RNG.integers(0, 2**63, (3, 32)).astype("uint64"), np.zeros((3, 32), "uint64")
    run_tirx(sending(), [x, y, list(SENDING_FAULTS).index(fault)], seed=seed, **options)
    return y, x[:, ::-1] + np.uint64(1)


@pytest.mark.parametrize("fault", [fault for fault in SENDING_FAULTS if not SENDING_FAULTS[fault]])
def test_words_that_are_stored_to_a_peer(fault):
    """The others exit when theirs are on their way."""
    for seed in range(6):
        np.testing.assert_array_equal(*run_sending(fault, seed))


@pytest.mark.parametrize("fault", [fault for fault in SENDING_FAULTS if SENDING_FAULTS[fault]])
def test_faulty_sending(fault):
    for seed in range(3):
        with pytest.raises(EmulationError, match=SENDING_FAULTS[fault]):
            run_sending(fault, seed)


def test_block_that_exits_with_a_word_on_its_way():
    """Not in every order: it may have come."""
    said = []
    for seed in range(12):
        with pytest.raises(EmulationError, match=SENDING_FAULTS["no wait at exit"]) as found:
            run_sending("no wait at exit", seed)
        said.append("in flight, which signal the mbarrier" in str(found.value))
    assert any(said)


# ---- bulk copies from global memory ------------------------------------------------------------

bulk_load = T.ptx.cp.async_.bulk.shared__cluster.global_.mbarrier__complete_tx__bytes
bulk_prefetch = T.ptx.cp.async_.bulk.prefetch.L2.global_

# What is done wrong, by what is to be found.
RING_FAULTS = {
    "none": "",
    "hinted": "",
    "no wait": "data race|completes without .* bulk copies in flight",
    "too few bytes": "phase 0 of the mbarrier .* completes without 1 bulk copies in flight, whose bytes",
    "in use": "data race: a bulk copy writes what another read",
    "past the source": "past the end",
    "misaligned source": "misaligned cp.async.bulk",
    "odd size": "cp.async.bulk of 24 bytes, which is no multiple of 16",
    "no wait at exit": "the block exits with .* bulk copies in flight|exits with no wait for phase",
    "prefetch of nothing": "past the end",
    "prefetch of half a vector": "no whole vectors",
}


@functools.cache
def ring():
    """Y = 2 X by a warp, whose lanes bring a row of 8 floats each: 4 tiles through 2 stages, as `tiles` has them."""
    of = {fault: i for i, fault in enumerate(RING_FAULTS)}

    @T.prim_func
    def func(X: T.Buffer((4, 32, 8), "float32"), Y: T.Buffer((4, 32, 8), "float32"), fault: T.int32):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        s = T.alloc_buffer([2, 32, 12], "float32", scope="shared.dyn")
        full = T.alloc_shared([2], "uint64")
        done = T.alloc_local([1], "uint32")
        policy = T.alloc_local([1], "uint64")
        if t == 0:
            for i in T.serial(2):
                T.ptx.mbarrier.init.shared__cta.b64(full.ptr_to([i]), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
            bulk_prefetch(
                X.ptr_to([0, 0, 0]),
                T.if_then_else(
                    fault == of["prefetch of nothing"],
                    T.uint32(4112),
                    T.if_then_else(fault == of["prefetch of half a vector"], T.uint32(24), T.uint32(4096)),
                ),
            )
        T.ptx.createpolicy.fractional.L2__evict_first.b64(policy[0])
        T.cuda.warp_sync()
        for i in T.serial(6):
            if i >= 2:
                done[0] = T.Cast("uint32", fault == of["no wait"])
                if fault == of["no wait at exit"] and i == 5:
                    done[0] = T.uint32(1)
                while done[0] == T.uint32(0):
                    try_wait(done[0], full.ptr_to([i % 2]), T.Cast("uint32", (i - 2) // 2 % 2))
                if fault != of["no wait at exit"] or i < 5:
                    # The neighbour's row.
                    for j in T.serial(8):
                        Y[i - 2, (t + 1) % 32, j] = s[i % 2, (t + 1) % 32, j] * T.float32(2)
            if i < 4:
                if t == 0:
                    arrive_expecting(
                        full.ptr_to([i % 2]),
                        T.if_then_else(fault == of["too few bytes"], T.uint32(992), T.uint32(1024)),
                    )
                if fault != of["in use"]:
                    T.cuda.warp_sync()
                if fault == of["past the source"] and i == 3:
                    bulk_load(s.ptr_to([i % 2, t, 0]), X.ptr_to([i, t, 4]), T.uint32(32), full.ptr_to([i % 2]))
                elif fault == of["misaligned source"]:
                    bulk_load(s.ptr_to([i % 2, t, 0]), X.ptr_to([i, t, 1]), T.uint32(16), full.ptr_to([i % 2]))
                elif fault == of["odd size"]:
                    bulk_load(s.ptr_to([i % 2, t, 0]), X.ptr_to([i, t, 0]), T.uint32(24), full.ptr_to([i % 2]))
                elif fault == of["hinted"]:
                    bulk_load.L2__cache_hint(
                        s.ptr_to([i % 2, t, 0]), X.ptr_to([i, t, 0]), T.uint32(32), full.ptr_to([i % 2]), policy[0]
                    )
                else:
                    bulk_load(s.ptr_to([i % 2, t, 0]), X.ptr_to([i, t, 0]), T.uint32(32), full.ptr_to([i % 2]))

    return func


def run_ring(fault, seed):
    x, y = RNG.standard_normal((4, 32, 8)).astype("float32"), np.zeros((4, 32, 8), "float32")
    run_tirx(ring(), [x, y, list(RING_FAULTS).index(fault)], seed=seed)
    return x, y


@pytest.mark.parametrize("fault", ["none", "hinted"])
def test_ring_of_bulk_copies_from_global_memory(fault):
    for seed in range(4):
        x, y = run_ring(fault, seed)
        np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize("fault", [fault for fault in RING_FAULTS if RING_FAULTS[fault]])
def test_faulty_ring(fault):
    for seed in range(3):
        with pytest.raises(EmulationError, match=RING_FAULTS[fault]):
            run_ring(fault, seed)


# ---- wrong kernels -----------------------------------------------------------------------------


def reverse(barrier, size=64, shared=64):
    """Reverses an array through shared memory; `barrier`: "all", "none", "some" or "exit"."""

    @T.prim_func
    def func(X: T.Buffer((64,), "float32"), Y: T.Buffer((size,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        s = T.alloc_shared([shared], "float32")
        s[t] = X[t]
        if barrier == "exit":
            if t == 40:
                T.thread_return()
        if barrier == "some":
            if t < 32:
                T.cuda.cta_sync()
        elif barrier != "none":
            T.cuda.cta_sync()
        Y[t] = s[63 - t]

    return func


def arrays(size=64):
    return RNG.standard_normal(64).astype("float32"), np.zeros(size, "float32")


def test_with_its_barrier_every_order_is_right():
    for seed in range(4):
        x, y = arrays()
        run_tirx(reverse("all"), [x, y], seed=seed)
        np.testing.assert_array_equal(y, x[::-1])


def test_missing_barrier_is_a_race():
    x, y = arrays()
    with pytest.raises(EmulationError, match="data race.*shared memory"):
        run_tirx(reverse("none"), [x, y])


def last_of_a_warp(barrier):
    """The values of a warp, and the last one for all; `barrier`: "warp", or "shuffle", which orders no memory."""

    @T.prim_func
    def func(X: T.Buffer((32,), "float32"), Y: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        s = T.alloc_shared([1], "float32")
        if t == 31:
            s[0] = X[t]
        if barrier == "warp":
            T.cuda.warp_sync()
        else:
            Y[t] = T.tvm_warp_shuffle_xor(T.uint32(FULL), X[t], 1, 32, 32)
        Y[t] = s[0]

    return func


def test_shuffles_order_no_memory():
    x, y = arrays()
    run_tirx(last_of_a_warp("warp"), [x[:32].copy(), y[:32].copy()])
    with pytest.raises(EmulationError, match="data race: a thread reads what another wrote, .*shared memory"):
        run_tirx(last_of_a_warp("shuffle"), [x[:32].copy(), y[:32].copy()])


def counted(barrier):
    """How many threads there are, by atomics; `barrier`: "both", or the one that is left out."""

    @T.prim_func
    def func(Y: T.Buffer((64,), "int32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        s = T.alloc_shared([1], "int32")
        if t == 0:
            s[0] = 0
        if barrier != "first":
            T.cuda.cta_sync()
        T.cuda.atomic_add(s.ptr_to([0]), T.int32(1))
        if barrier != "second":
            T.cuda.cta_sync()
        Y[t] = s[0]

    return func


def test_atomics_race_with_all_but_each_other():
    y = np.zeros(64, "int32")
    run_tirx(counted("both"), [y])
    np.testing.assert_array_equal(y, 64)
    messages = {
        "first": "an atomic changes what another wrote|a thread writes what another wrote, .* an atomic of thread",
        "second": "a thread reads what another wrote, .* an atomic of thread|an atomic changes what another read",
    }
    for left_out, message in messages.items():
        for seed in range(3):
            with pytest.raises(EmulationError, match=f"data race: ({message})"):
                run_tirx(counted(left_out), [y], seed=seed)


def test_missing_barrier_gives_wrong_results_in_shuffled_order():
    x, y = arrays()
    run_tirx(reverse("none"), [x, y], check_races=False)
    assert not np.array_equal(y, x[::-1])
    assert np.isnan(y).any()  # shared memory is poisoned


def test_scratch_of_a_block_reduction_used_twice_is_a_race():
    @T.prim_func
    def func(X: T.Buffer((128,), "float32"), Y: T.Buffer((128,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([128])
        s = T.alloc_shared([32], "float32")
        a = T.alloc_local([1], "float32")
        a[0] = T.cuda.cta_sum(X[t], 4, s.data)
        Y[t] = a[0] + T.cuda.cta_sum(X[t] * X[t], 4, s.data)

    with pytest.raises(EmulationError, match="data race.*shared memory"):
        run_tirx(func, [np.ones(128, "float32"), np.zeros(128, "float32")])


@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
@pytest.mark.parametrize(
    ("barriers", "message"),
    [
        ({"first": "none"}, "may not have started: no cluster barrier before"),
        ({"second": "none"}, "data race: .*shared memory"),
        ({"third": "none"}, "which has exited|exits with no cluster barrier after a peer's access"),
        # Only block 0 reads: it is the others that have to stay.
        ({"third": "none", "gather": True}, "which has exited|exits with no cluster barrier after a peer's access"),
    ],
)
def test_missing_cluster_barrier(barriers, message, scope):
    func = cluster_sum(scope=scope, **barriers)
    for seed in range(4):
        with pytest.raises(EmulationError, match=message):
            run_tirx(func, list(cluster_arrays()), seed=seed)


def test_missing_cluster_barrier_gives_wrong_results_in_shuffled_order():
    x, y = cluster_arrays()
    run_tirx(cluster_sum(second="none"), [x, y], check_races=False)
    assert np.isnan(y[..., 1]).any()
    assert not np.isnan(y[..., 0]).any()


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_cluster_barrier_orders_from_arrive_to_wait(place):
    """Between arriving and waiting a block may use what no other block reads."""

    @T.prim_func
    def func(X: T.Buffer((2, 32), "float32"), Y: T.Buffer((2, 32), "float32")):
        T.device_entry()
        T.cluster_id([1])
        r = T.cta_id_in_cluster([2])
        t = T.thread_id([32])
        s = T.alloc_shared([32], "float32")
        own = T.alloc_shared([32], "float32")
        T.cuda.cluster_sync()
        if place == "before":
            s[t] = X[r, t]
        T.ptx.barrier.cluster.arrive.release.aligned()
        if place == "between":
            s[t] = X[r, t]
        own[t] = X[r, t]
        T.cuda.cta_sync()
        Y[r, t] = own[31 - t]
        T.ptx.barrier.cluster.wait.acquire.aligned()
        if place == "after":
            s[t] = X[r, t]
        Y[r, t] += T.cuda.func_call("peer", s.ptr_to([t]), 1 - r, source_code=PEER, return_type="float32")
        T.cuda.cluster_sync()

    x, y = RNG.standard_normal((2, 32)).astype("float32"), np.zeros((2, 32), "float32")
    if place == "before":
        run_tirx(func, [x, y])
        np.testing.assert_array_equal(y, x[:, ::-1] + x[::-1])
    else:
        for seed in range(4):
            with pytest.raises(EmulationError, match="data race"):
                run_tirx(func, [x, y], seed=seed)


@pytest.mark.parametrize("wait", [True, False])
def test_async_copy_needs_its_wait(wait):
    @T.prim_func
    def func(X: T.Buffer((128,), "float32"), Y: T.Buffer((128,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        s = T.alloc_shared([128], "float32")
        T.ptx.cp.async_.cg.shared.global_(s.ptr_to([t * 4]), X.ptr_to([t * 4]), 16)
        T.ptx.cp.async_.commit_group()
        if wait:
            T.ptx.cp.async_.wait_group(0)
        T.cuda.cta_sync()
        for j in T.serial(4):
            Y[j * 32 + t] = s[127 - (j * 32 + t)]

    x, y = RNG.standard_normal(128).astype("float32"), np.zeros(128, "float32")
    run_tirx(func, [x, y])
    assert np.array_equal(y, x[::-1]) == wait


@pytest.mark.parametrize("place", [1023, 1024])
def test_prefetch_is_of_something(place):
    @T.prim_func
    def func(X: T.Buffer((1024,), "float32"), Y: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        T.ptx.prefetch.global_.L2(X.ptr_to([place]))
        Y[t] = X[t]

    x, y = RNG.standard_normal(1024).astype("float32"), np.zeros(32, "float32")
    if place < 1024:
        run_tirx(func, [x, y])
        np.testing.assert_array_equal(y, x[:32])
    else:
        with pytest.raises(EmulationError, match="past the end"):
            run_tirx(func, [x, y])


# ---- launches that overlap their producer kernel -----------------------------------------------


def overlapping(early, blocks=6, attributes=("tirx.use_programtic_dependent_launch",)):
    """Y = X[0] for all threads, read before `griddepcontrol.wait` or behind it, by a load or a copy."""

    @T.prim_func
    def func(X: T.Buffer((4,), "float32"), Y: T.Buffer((blocks, 64), "float32")):
        T.func_attr({"tirx.kernel_launch_params": list(attributes)})
        T.device_entry()
        b = T.cta_id([blocks])
        t = T.thread_id([64])
        s = T.alloc_shared([64, 4], "float32")
        full = T.alloc_shared([64], "uint64")
        x = T.alloc_local([1], "float32")
        done = T.alloc_local([1], "uint32")
        if early == "load":
            T.ptx.ld.global_.f32(x[0], X.ptr_to([0]))
        if early == "copy":
            T.ptx.cp.async_.cg.shared.global_(s.ptr_to([t, 0]), X.ptr_to([0]), 16)
            T.ptx.cp.async_.commit_group()
        if early == "bulk copy":
            T.ptx.mbarrier.init.shared__cta.b64(full.ptr_to([t]), T.uint32(1))
            arrive_expecting(full.ptr_to([t]), T.uint32(16))
            bulk_load(s.ptr_to([t, 0]), X.ptr_to([0]), T.uint32(16), full.ptr_to([t]))
        if early == "store":
            Y[b, t] = T.float32(1)
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        if early == "copy":
            T.ptx.cp.async_.wait_group(0)
            x[0] = s[t, 0]
        if early == "bulk copy":
            done[0] = T.uint32(0)
            while done[0] == T.uint32(0):
                try_wait(done[0], full.ptr_to([t]), T.uint32(0))
            x[0] = s[t, 0]
        if early not in ("load", "copy", "bulk copy"):
            T.ptx.ld.global_.f32(x[0], X.ptr_to([0]))
        if early != "store":
            Y[b, t] = x[0]

    return func


def run_stale(func, seed=0, blocks=6):
    x, y = np.full(4, 1, "float32"), np.full((blocks, 64), 2, "float32")
    run_tirx(func, [x, y], seed=seed, stale={0: np.full(4, 9, "float32"), 1: np.full((blocks, 64), 3, "float32")})
    assert (x == 1).all()
    return y


@pytest.mark.parametrize("early", ["load", "copy", "bulk copy"])
def test_what_is_read_before_the_wait_is_stale_for_some_threads(early):
    results = np.concatenate([run_stale(overlapping(early), seed) for seed in range(4)])
    assert {*results.flat} == {1, 9}
    stale = results == 9
    assert stale.all(1).any()  # a whole block,
    warps = stale.reshape(-1, 32)
    assert (warps.any(1) & ~warps.all(1)).any()  # some lanes of a warp,
    whole = warps.all(1).reshape(-1, 2)
    assert (whole.any(1) & ~stale.all(1)).any()  # a warp and not its neighbour


def test_what_is_written_before_the_wait_is_lost_where_the_kernel_before_writes_too():
    results = np.concatenate([run_stale(overlapping("store"), seed) for seed in range(4)])
    assert {*results.flat} == {1, 2}


def test_what_is_read_behind_the_wait_is_not_stale():
    for seed in range(4):
        assert (run_stale(overlapping(None), seed) == 1).all()


def test_nothing_is_stale_where_launches_do_not_overlap():
    """Nor where no stale contents are given; launching dependents has no effect either way."""
    assert (run_stale(overlapping("load", attributes=())) == 1).all()
    x, y = np.full(4, 1, "float32"), np.full((6, 64), 2, "float32")
    run_tirx(overlapping("load"), [x, y])
    assert (y == 1).all()


def chain(reads, between=None):
    """Y = W: the first kernel writes 1 to W, and the last one reads it into Y, `reads` "early" or "late". There may be
    another `between` them: whether it waits for the first, and whether it starts its consumer before. Each is launched
    to overlap the one before."""
    three = between is not None
    waits, starts_first = between or (False, False)

    @T.prim_func
    def func(W: T.Buffer((4,), "float32"), Z: T.Buffer((4,), "float32"), Y: T.Buffer((6, 64), "float32")):
        T.func_attr({"tirx.kernel_launch_params": ["tirx.use_programtic_dependent_launch"]})
        with device_region():
            b = T.cta_id([1])
            t = T.thread_id([4])
            T.ptx.griddepcontrol.wait()
            T.ptx.griddepcontrol.launch_dependents()
            W[t] = T.float32(1)
        if three:
            with device_region():
                b = T.cta_id([1])
                t = T.thread_id([4])
                if starts_first:
                    T.ptx.griddepcontrol.launch_dependents()
                if waits:
                    T.ptx.griddepcontrol.wait()
                if not starts_first:
                    T.ptx.griddepcontrol.launch_dependents()
                Z[t] = T.float32(1)
        with device_region():
            b = T.cta_id([6])
            t = T.thread_id([64])
            x = T.alloc_local([1], "float32")
            if reads == "early":
                T.ptx.ld.global_.f32(x[0], W.ptr_to([0]))
            T.ptx.griddepcontrol.wait()
            if reads == "late":
                T.ptx.ld.global_.f32(x[0], W.ptr_to([0]))
            Y[b, t] = x[0]

    return func


def run_chain(reads, between=None):
    found = set()
    for seed in range(4):
        w, z, y = np.full(4, 9, "float32"), np.full(4, 9, "float32"), np.full((6, 64), 2, "float32")
        run_tirx(chain(reads, between), [w, z, y], seed=seed)
        assert (w == 1).all() and (z == (1 if between else 9)).all()
        found |= {*y.flat}
    return found


def test_what_the_kernel_before_writes_is_stale_for_one_that_overlaps_it():
    assert run_chain("early") == {1, 9}
    assert run_chain("late") == {1}


def test_a_kernel_that_starts_its_consumer_before_it_has_waited_leaves_it_what_was_before_its_producer():
    assert run_chain("early", (True, False)) == {1}  # the second kernel has waited for the first
    assert run_chain("early", (True, True)) == {1, 9}
    assert run_chain("early", (False, False)) == {1, 9}
    assert run_chain("late", (True, True)) == {1}


def test_stale_contents_are_of_the_array():
    args = [np.zeros(4, "float32"), np.zeros((6, 64), "float32")]
    for stale in (np.zeros(5, "float32"), np.zeros(4, "int32")):
        with pytest.raises(ValueError, match=r"argument 0 is float32\(4,\), its stale contents are"):
            run_tirx(overlapping(None), args, stale={0: stale})


@pytest.mark.parametrize("how", ["some", "exit"])
def test_divergent_barrier(how):
    with pytest.raises(EmulationError, match=r"func_kernel: divergent barrier.*(\n.*)*thread \("):
        run_tirx(reverse(how), list(arrays()), check_races=False)


def test_out_of_bounds_global_write():
    x, y = arrays()
    size = 60  # the kernel believes it to be 64 long
    func = reverse("all", 64)
    with pytest.raises((EmulationError, ValueError), match="shape|bounds"):
        run_tirx(func, [x, np.zeros(size, "float32")])

    @T.prim_func
    def beyond(X: T.Buffer((64,), "float32"), Y: T.Buffer((60,), "float32"), at: T.int32):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        Y[t + at] = X[t]

    for at in (0, 1 << 20, -70):
        with pytest.raises(EmulationError, match="argument 1|illegal memory access"):
            run_tirx(beyond, [x, np.zeros(60, "float32"), at])


def test_out_of_bounds_global_read():
    @T.prim_func
    def beyond(X: T.Buffer((60,), "float32"), Y: T.Buffer((64,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([64])
        Y[t] = X[t]

    with pytest.raises(EmulationError, match=r"past the end of argument 0(.*\n)*.*Y_ptr\["):
        run_tirx(beyond, [np.ones(60, "float32"), np.zeros(64, "float32")])


def test_out_of_bounds_shared_write():
    with pytest.raises(EmulationError, match="index 48 is out of the bounds|index .* out of"):
        run_tirx(reverse("all", shared=48), list(arrays()))


@pytest.mark.parametrize("ptx", [True, False])
def test_misaligned_vector_load(ptx):
    @T.prim_func
    def func(X: T.Buffer((64,), "float32"), Y: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([8])
        f = T.alloc_local([4], "float32")
        if ptx:
            T.ptx.ld.global_.v4.f32(f[0], f[1], f[2], f[3], X.ptr_to([t * 4 + 1]))
        else:
            T.cuda.ldg(
                X.ptr_to([t * 4 + 1]), "float32", vec="v4",
                dst=[f.ptr_to([0]), f.ptr_to([1]), f.ptr_to([2]), f.ptr_to([3])],
            )  # fmt: skip
        Y[t] = f[3]

    with pytest.raises(EmulationError, match="misaligned"):
        run_tirx(func, [np.ones(64, "float32"), np.ones(32, "float32")])


def test_tensor_core_product_in_divergent_code():
    mma = T.ptx.mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32

    @T.prim_func
    def func(X: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        a = T.alloc_local([4], "uint32")
        c = T.alloc_local([4], "float32")
        for i in T.serial(4):
            a[i] = T.uint32(0)
            c[i] = X[t]
        if t < 16:
            mma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], a[0], a[1], c[0], c[1], c[2], c[3])
        X[t] = c[0]

    with pytest.raises(EmulationError, match="divergent.*(\n.*)*mma.sync mask 0xffffffff"):
        run_tirx(func, [np.ones(32, "float32")])


def test_shuffle_in_divergent_code():
    @T.prim_func
    def func(X: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        if t < 16:
            X[t] = T.tvm_warp_shuffle_xor(T.uint32(FULL), X[t], 1, 32, 32)

    with pytest.raises(EmulationError, match="divergent.*(\n.*)*mask 0xffffffff"):
        run_tirx(func, [np.ones(32, "float32")])


def test_endless_loop():
    @T.prim_func
    def func(X: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        while X[t] >= 0.0:
            X[t] = X[t] + 1.0

    with pytest.raises(EmulationError, match="timeout"):
        run_tirx(func, [np.ones(32, "float32")], timeout=0.5)


def test_host_checks_still_work():
    with pytest.raises((ValueError, TypeError), match="shape|dtype"):
        run_tirx(reverse("all"), [np.zeros(65, "float32"), np.zeros(64, "float32")])


def test_what_is_not_emulated_is_refused():
    @T.prim_func
    def unknown(X: T.Buffer((32,), "float32")):
        T.device_entry()
        T.cta_id([1])
        t = T.thread_id([32])
        X[t] = T.call_extern("float32", "__unheard_of", X[t])

    with pytest.raises(NotImplementedError, match="__unheard_of"):
        run_tirx(unknown, [np.ones(32, "float32")])


def test_kept_objects_are_made_once(monkeypatch, tmp_path):
    """Lowered programs, kernels, and the emulator itself; and again for another program, with other options, or after
    another header."""
    made, call, lower = [], run._gxx, run._lower

    def gxx(command):
        made.extend("compiled" for name in command if name.endswith(".o") and "-c" in command)
        call(command)

    def makes(size=512):
        made.clear()
        for kept in (run._built, run._compiled, run._machine_object):
            kept.cache_clear()
        out, n = np.zeros(size, "float32"), np.zeros(1, "int32")
        run_tirx(compaction(size), [np.ones(size, "float32"), out, n])
        assert n[0] == size and (out == 1).all()
        return made.count("lowered"), made.count("compiled")

    def compiles():
        made.clear()
        run._machine_object.cache_clear()
        assert run._kernel_object("") == run._machine_object() == b"an object"
        return len(made)

    monkeypatch.setattr(run, "_gxx", gxx)
    monkeypatch.setattr(run, "_lower", lambda key: made.append("lowered") or lower(key))
    # Optimising takes most of the time of what is compiled twice.
    monkeypatch.setattr(run, "MACHINE_FLAGS", [*run.MACHINE_FLAGS, "-O0"])
    usual = run._kept
    try:
        keep_objects(tmp_path / "kept")
        assert makes() == (1, 2) and makes() == (0, 0)
        assert makes(256) == (1, 1) and makes(256) == makes() == (0, 0)
        monkeypatch.setattr(run, "_lowered_by", lambda: ["another compiler"])
        assert makes() == (1, 0) and makes() == (0, 0)
        assert len(list((tmp_path / "kept").glob("*.o"))) == len(list((tmp_path / "kept").glob("*.zlib"))) == 3
        # What g++ would do takes long.
        call = lambda command: Path(command[command.index("-o") + 1]).write_bytes(b"an object")  # noqa: E731
        keep_objects(None)
        assert compiles() == compiles() == 2
        keep_objects(tmp_path / "others")
        assert compiles() == 2 and compiles() == 0
        monkeypatch.setattr(run, "KERNEL_FLAGS", [*run.KERNEL_FLAGS, "-DOTHER"])
        assert compiles() == 1 and compiles() == 0
        header = tmp_path / "other.h"
        header.write_text(f"{run.HEADER.read_text()}\n// another")
        monkeypatch.setattr(run, "HEADER", header)
        assert compiles() == 2
        monkeypatch.setattr(run, "_compiler", lambda: "another")
        assert compiles() == 2 and compiles() == 0
    finally:
        keep_objects(usual)
        run._machine_object.cache_clear()
