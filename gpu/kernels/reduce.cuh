// Reductions over a warp and over a block, in an order that depends on the number of threads alone.
#pragma once
#include "device.cuh"

constexpr int kMaxWarps = 32;

struct Sum {
    template <typename V> __device__ __forceinline__ V operator()(V a, V b) const { return a + b; }
};
struct Max {
    template <typename V> __device__ __forceinline__ V operator()(V a, V b) const { return a > b ? a : b; }
};

template <typename V, typename Combine> __device__ __forceinline__ V warp_reduce(V value, Combine combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
    return value;
}

// Every thread of the block calls it with whole warps and gets the result. partial: [kMaxWarps], shared; it may be used
// again at once.
template <typename V, typename Combine> __device__ __forceinline__ V block_reduce(V value, V* partial, Combine combine) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = warp_reduce(value, combine);
    if (lane == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[0];
    for (int warp = 1; warp < warps; ++warp) value = combine(value, partial[warp]);
    __syncthreads();
    return value;
}
