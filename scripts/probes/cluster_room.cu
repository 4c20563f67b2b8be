// How many clusters run at the same time, of thread blocks that take a multiprocessor each?
//
//   nvcc -arch=sm_90 -o cluster_room cluster_room.cu && ./cluster_room
//
// All thread blocks of a cluster are in one part of the GPU (a GPC), whose multiprocessors a size need not divide. On
// H200s with 132 multiprocessors, of 1 to 16 thread blocks (`tvm_sparse.core.machine.CLUSTERS_AT_ONCE`):
// 132 66 39 30 22 17 15 15 9 7 7 7 7 7 7 7.
#include <cstdio>

constexpr int LARGEST = 16, SHARED = 200 * 1024;

__global__ void nothing() {}

int main() {
    cudaFuncSetAttribute(nothing, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    for (int blocks = 1; blocks <= LARGEST; ++blocks) {
        cudaLaunchAttribute cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
        cudaLaunchConfig_t launch = {};
        launch.gridDim = dim3(blocks);
        launch.blockDim = dim3(512);
        launch.dynamicSmemBytes = SHARED;
        launch.attrs = &cluster;
        launch.numAttrs = 1;
        int clusters = 0;
        cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, nothing, &launch);
        if (error != cudaSuccess) {
            std::fprintf(stderr, "%d: %s\n", blocks, cudaGetErrorString(error));
            return 1;
        }
        std::printf("%d%c", clusters, blocks < LARGEST ? ' ' : '\n');
    }
}
