// Does racecheck know when the stage of a ring may be filled again?
//
//   nvcc -arch=sm_90a -o refilled_stage refilled_stage.cu
//   for way in 0 1 2; do compute-sanitizer --tool racecheck ./refilled_stage $way; done
//
// Bulk copies bring eight tiles to two stages in turn, and all threads read each. A stage is given back by
//   0: a barrier of the thread block,
//   1: the same, and a proxy fence of the thread that copies,
//   2: an mbarrier at which all readers arrive, as the pipelines of CUTLASS do.
// Version 2026.4 reports the copies that fill a stage again, each time: "missing fence.proxy.async.shared".
#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int STAGES = 2, TILES = 8, THREADS = 128, FLOATS = 1024;

__device__ uint32_t place(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ void init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(place(barrier)), "r"(arrivals) : "memory");
}

__device__ void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
    for (uint32_t done = 0; !done;)
        asm volatile(
            "{ .reg .pred p;"
            " mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(place(barrier)), "r"(parity)
            : "memory");
}

__device__ void fill(float* stage, const float* tile, uint64_t* full) {
    constexpr int bytes = FLOATS * sizeof(float);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place(full)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     place(stage)),
                 "l"(tile), "r"(bytes), "r"(place(full))
                 : "memory");
}

template <int WAY>
__global__ void ring(const float* tiles, float* sums) {
    __shared__ __align__(128) float stages[STAGES][FLOATS];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < STAGES; ++i) init(&full[i], 1), init(&empty[i], THREADS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (t == 0)
        for (int i = 0; i < STAGES; ++i) fill(stages[i], tiles + i * FLOATS, &full[i]);
    float sum = 0;
    for (int tile = 0; tile < TILES; ++tile) {
        const int slot = tile % STAGES, parity = tile / STAGES % 2;
        wait(&full[slot], parity);
        for (int i = t; i < FLOATS; i += THREADS) sum += stages[slot][i];
        if (WAY == 2)
            arrive(&empty[slot]);
        else
            __syncthreads();
        if (t == 0 && tile + STAGES < TILES) {
            if (WAY == 2) wait(&empty[slot], parity);
            if (WAY == 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            fill(stages[slot], tiles + (tile + STAGES) * FLOATS, &full[slot]);
        }
    }
    sums[t] = sum;
}

int main(int, char** arguments) {
    float *tiles, *sums;
    cudaMalloc(&tiles, TILES * FLOATS * sizeof(float));
    cudaMalloc(&sums, THREADS * sizeof(float));
    cudaMemset(tiles, 0, TILES * FLOATS * sizeof(float));
    const int way = std::atoi(arguments[1]);
    (way == 0 ? ring<0> : way == 1 ? ring<1> : ring<2>)<<<1, THREADS>>>(tiles, sums);
    std::printf("way %d: %s\n", way, cudaGetErrorString(cudaDeviceSynchronize()));
}
