// One row of logits, walked by a whole block.
#pragma once
#include "order.cuh"
#include "reduce.cuh"

template <typename T> struct Row {
    const T* logits;
    int vocab;
    __device__ __forceinline__ float operator()(int id) const { return to_float(logits[id]); }
};

// Shared memory of reductions.
struct Partials {
    Key keys[kMaxWarps];
    double doubles[kMaxWarps];
    float floats[kMaxWarps];
};

// False, for the whole block, when a logit is NaN or +inf.
template <typename T> __device__ bool all_finite(const Row<T>& row) {
    bool bad = false;
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) bad |= !(row(id) < -negative_infinity());
    return !__syncthreads_or(bad);
}

// Greatest (logit, lowest id) of those ranked below `bound`.
template <typename T> __device__ Key peak_of(const Row<T>& row, Partials& partials, Key bound = ~Key(0)) {
    Key best = 0;
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        const Key key = ranked(row(id), id);
        if (key < bound) best = Max()(best, key);
    }
    return block_reduce(best, partials.keys, Max());
}

// ln of the sum of e^(x - peak).
template <typename T> __device__ float log_mass(const Row<T>& row, float peak, Partials& partials) {
    float sum = 0.0f;
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) sum += expf(row(id) - peak);
    return logf(block_reduce(sum, partials.floats, Sum()));
}
