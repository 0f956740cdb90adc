// Logits with what a request does to them, for the rows that have any of it (gpu/backends/sampling.py, steps 2 to 4).
//
//   logits T [rows, vocab]; out float [processed_rows, vocab]
//   row int [processed_rows]: the row of logits that each row of out comes from, negative for padding, whose row of out
//   is not written
//   mask_index int [rows], -1 for none; mask_words 32 bits [masks, words]: bit i % 32 of word i / 32 is set where id i
//   may be drawn
//   bias_index int [rows], -1 for none; bias m adds bias_values to bias_ids [bias_offsets[m], bias_offsets[m + 1])
//   masked_ids int [rows, masked_width], num_masked int [rows]: ids that may not be drawn
//   history_index, history_offsets, history_ids: as of biases; history_counts int: how often an id is in the output
//   repetition, frequency, presence float [rows]: penalties
//
// Grid (processed_rows). Threads walk the vocabulary once, then the short lists, in which each id stands once.
#include "device.cuh"

struct List {
    const int* offsets;
    const int* ids;
};

// Call f(entry, id) for each entry of list m.
template <typename F> __device__ __forceinline__ void for_each_entry(const List& list, int m, F f) {
    if (m < 0) return;
    for (int k = list.offsets[m] + threadIdx.x; k < list.offsets[m + 1]; k += blockDim.x) f(k, list.ids[k]);
}

__device__ float penalised(float x, int count, float repetition, float frequency, float presence) {
    const double greatest = 3.4028234663852886e38;
    double y = x > 0.0f ? static_cast<double>(x) / repetition : static_cast<double>(x) * repetition;
    y -= static_cast<double>(count) * frequency;
    if (count > 0) y -= presence;
    return static_cast<float>(fmin(fmax(y, -greatest), greatest));
}

template <typename T>
__global__ void __launch_bounds__(1024)
process(const T* __restrict__ logits, const int* __restrict__ row, const int* __restrict__ mask_index,
        const unsigned* __restrict__ mask_words, const int* __restrict__ bias_index,
        const int* __restrict__ bias_offsets, const int* __restrict__ bias_ids, const float* __restrict__ bias_values,
        const int* __restrict__ masked_ids, const int* __restrict__ num_masked, const int* __restrict__ history_index,
        const int* __restrict__ history_offsets, const int* __restrict__ history_ids,
        const int* __restrict__ history_counts, const float* __restrict__ repetition,
        const float* __restrict__ frequency, const float* __restrict__ presence, float* __restrict__ out, int vocab,
        int words, int masked_width) {
    const int i = row[blockIdx.x];
    if (i < 0) return;
    const int mask = mask_index[i];
    const T* from = logits + static_cast<size_t>(i) * vocab;
    float* to = out + static_cast<size_t>(blockIdx.x) * vocab;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        const bool allowed = mask < 0 || mask_words[static_cast<size_t>(mask) * words + id / 32] >> id % 32 & 1u;
        to[id] = allowed ? to_float(from[id]) : negative_infinity();
    }
    __syncthreads();
    for_each_entry({bias_offsets, bias_ids}, bias_index[i], [&](int k, int id) { to[id] += bias_values[k]; });
    __syncthreads();
    for (int k = threadIdx.x; k < num_masked[i]; k += blockDim.x) {
        const int id = masked_ids[static_cast<size_t>(i) * masked_width + k];
        if (id >= 0 && id < vocab) to[id] = negative_infinity();
    }
    __syncthreads();
    for_each_entry({history_offsets, history_ids}, history_index[i], [&](int k, int id) {
        if (to[id] > negative_infinity())
            to[id] = penalised(to[id], history_counts[k], repetition[i], frequency[i], presence[i]);
    });
}
