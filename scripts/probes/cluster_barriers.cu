// Does synccheck find divergent warps at barriers that all threads reach?
//
//   nvcc -arch=sm_90 -o cluster_barriers cluster_barriers.cu
//   for threads in 512 1024; do for cluster in 8 16; do
//     compute-sanitizer --tool synccheck ./cluster_barriers $cluster $threads 25
//   done; done
//
// Nothing in this kernel depends on data: every thread goes through the same barriers of its thread block and of its
// cluster. On an H200 with CUDA 13.0 synccheck lets clusters of 8 pass, and reports "Divergent thread(s) in warp" for
// all lanes of some warps in clusters of 16 with 1,024 threads. It prints whether the result is right.
#include <cooperative_groups.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cg = cooperative_groups;

constexpr int ROUNDS = 3;

__global__ void meet(int* sums) {
    __shared__ int held[1024];
    cg::cluster_group cluster = cg::this_cluster();
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    int t = threadIdx.x, sum = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        held[t] = t + round;
        __syncthreads();
        sum += held[t ^ 1];
        cluster.sync();
        sum += *cluster.map_shared_rank(&held[t], next);
        cluster.sync();
    }
    sums[blockIdx.x * blockDim.x + t] = sum;
}

int main(int count, char** words) {
    if (count != 4) return std::printf("usage: cluster_barriers CLUSTER THREADS CLUSTERS\n"), 2;
    int cluster = std::atoi(words[1]), threads = std::atoi(words[2]), blocks = cluster * std::atoi(words[3]);
    int* sums;
    cudaMalloc(&sums, sizeof(int) * blocks * threads);
    cudaFuncSetAttribute(meet, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute shape{};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = cluster, shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = blocks, launch.blockDim = threads, launch.attrs = &shape, launch.numAttrs = 1;
    std::vector<int> found(blocks * threads);
    cudaError_t error = cudaLaunchKernelEx(&launch, meet, sums);
    if (!error) error = cudaMemcpy(found.data(), sums, sizeof(int) * found.size(), cudaMemcpyDeviceToHost);
    if (error) return std::printf("%s\n", cudaGetErrorString(error)), 1;
    for (size_t i = 0; i < found.size(); ++i) {
        int t = i % threads, rounds = ROUNDS * (ROUNDS - 1);  // twice the sum of the rounds
        if (found[i] != ROUNDS * (t + (t ^ 1)) + rounds) return std::printf("wrong at %zu\n", i), 1;
    }
    std::printf("right\n");
}
