// How much of a matrix that the L2 cache cannot hold does it keep from one pass to the next?
//
//   nvcc -O3 -arch=sm_90a -o cached_words cached_words.cu && ./cached_words
//
// Two thread blocks a multiprocessor read rows of 2,000 bytes in tiles of 16 by bulk copies, through rings of two stages
// as `head_tiles` does. Of the rounds in which blocks take tiles some, so many MB in all, are copied without a policy, the
// others with `evict_first`. Before each line another kernel fills the cache. Microseconds of a pass, of 40 in a graph.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int STAGES = 2, TILE = 16 * 2000, THREADS = 256;

void check(cudaError_t status) {
    if (status != cudaSuccess) {
        std::printf("%s\n", cudaGetErrorString(status));
        std::exit(1);
    }
}

__device__ uint32_t place(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ void copy(char* stage, const char* tile, uint64_t* full, bool stays) {
    uint64_t first;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(first));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place(full)), "r"(TILE) : "memory");
    if (stays)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         place(stage)),
                     "l"(tile), "r"(TILE), "r"(place(full))
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
            "%4;" ::"r"(place(stage)),
            "l"(tile), "r"(TILE), "r"(place(full)), "l"(first)
            : "memory");
}

// Of 1,000 rounds `share` stay, as far apart as can be.
__global__ void __launch_bounds__(THREADS) pass(const char* matrix, int tiles, int share, float* sums) {
    extern __shared__ __align__(128) char ring[];
    __shared__ uint64_t full[STAGES];
    if (threadIdx.x < STAGES)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place(full + threadIdx.x)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    auto ask = [&](int round) {
        int tile = blockIdx.x + round * gridDim.x;
        if (threadIdx.x == 0 && tile < tiles)
            copy(ring + round % STAGES * TILE, matrix + size_t(tile) * TILE, full + round % STAGES,
                 (round + 1) * share / 1000 > round * share / 1000);
    };
    for (int round = 0; round < STAGES; ++round) ask(round);
    float sum = 0;
    for (int round = 0; blockIdx.x + round * gridDim.x < tiles; ++round) {
        for (uint32_t done = 0; !done;)
            asm volatile(
                "{ .reg .pred p;"
                " mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;"
                " selp.u32 %0, 1, 0, p; }"
                : "=r"(done)
                : "r"(place(full + round % STAGES)), "r"(round / STAGES % 2)
                : "memory");
        auto words = reinterpret_cast<const float4*>(ring + round % STAGES * TILE);
        for (int i = threadIdx.x; i < TILE / 16; i += THREADS) sum += words[i].x + words[i].y + words[i].z + words[i].w;
        __syncthreads();
        ask(round + STAGES);
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

int main() {
    int device, cores, cache;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, device));
    check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device));
    const int sizes[] = {25000, 40000, 66000, 100000}, kept[] = {0, 8, 16, 24, 32, 40, 48};
    char *matrix, *other;
    float* sums;
    check(cudaMalloc(&matrix, size_t(100000) * 2000));
    check(cudaMemset(matrix, 0, size_t(100000) * 2000));
    check(cudaMalloc(&other, size_t(4) * cache));
    check(cudaMalloc(&sums, size_t(2) * cores * THREADS * sizeof(float)));
    check(cudaFuncSetAttribute(pass, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * TILE));
    std::printf("L2 cache of %d MB; microseconds a pass\nMB that stay", cache >> 20);
    for (int megabytes : kept) std::printf("%8d", megabytes);
    for (int words : sizes) {
        std::printf("\nof %4d MB  ", words * 2000 >> 20);
        for (int megabytes : kept) {
            int share = int(std::min(1000.0, megabytes * 1048576.0 * 1000 / (words * 2000.0)));
            cudaStream_t stream;
            cudaGraph_t graph;
            cudaGraphExec_t calls;
            cudaEvent_t begin, end;
            check(cudaStreamCreate(&stream));
            check(cudaEventCreate(&begin));
            check(cudaEventCreate(&end));
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
            for (int call = 0; call < 40; ++call)
                pass<<<2 * cores, THREADS, STAGES * TILE, stream>>>(matrix, words * 2000 / TILE, share, sums);
            check(cudaStreamEndCapture(stream, &graph));
            check(cudaGraphInstantiate(&calls, graph, 0));
            check(cudaMemsetAsync(other, megabytes, size_t(4) * cache, stream));
            std::vector<float> times;
            for (int replay = 0; replay < 12; ++replay) {
                float milliseconds;
                check(cudaEventRecord(begin, stream));
                check(cudaGraphLaunch(calls, stream));
                check(cudaEventRecord(end, stream));
                check(cudaStreamSynchronize(stream));
                check(cudaEventElapsedTime(&milliseconds, begin, end));
                times.push_back(milliseconds * 1000 / 40);
            }
            std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
            std::printf("%8.1f", times[times.size() / 2]);
        }
    }
    std::printf("\n");
}
