// Embedding lookup: stream[row] = table[token_ids[row]].
//
//   token_ids [rows], table T [vocab, width], stream float [rows, width]
//
// Grid (rows). Threads walk the row.
#include "device.cuh"

template <typename T>
__global__ void __launch_bounds__(256)
embedding(const int* __restrict__ token_ids, const T* __restrict__ table, float* __restrict__ stream, int width) {
    const T* from = table + static_cast<size_t>(token_ids[blockIdx.x]) * width;
    float* to = stream + static_cast<size_t>(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = to_float(from[i]);
}
