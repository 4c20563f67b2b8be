// Does compute-sanitizer take a partial cp.async for a read out of bounds?
//
//   nvcc -arch=sm_90 -o partial_copy partial_copy.cu && compute-sanitizer ./partial_copy
//
// One thread copies the last 4 bytes of an array into shared memory, by a 16-byte cp.async with a source size of 4:
// PTX reads no byte past that size, and fills the rest with zeros. The array ends where the allocation ends. It
// prints what arrived, "7 0 0 0".
#include <cstdio>

__global__ void copy(const int* from, int size, int* to) {
    __shared__ __align__(16) int held[4];
    for (int& value : held) value = -1;
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(held));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(size) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int i = 0; i < 4; ++i) to[i] = held[i];
}

int main() {
    constexpr int count = 14357;  // 57,428 bytes: the last 4 begin a vector of 16
    int *from, *to, found[4], last = 7;
    cudaMalloc(&from, count * sizeof(int));
    cudaMalloc(&to, sizeof found);
    cudaMemcpy(from + count - 1, &last, sizeof last, cudaMemcpyHostToDevice);
    copy<<<1, 1>>>(from + count - 1, sizeof(int), to);
    cudaError_t error = cudaMemcpy(found, to, sizeof found, cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
    std::printf("%d %d %d %d\n", found[0], found[1], found[2], found[3]);
}
