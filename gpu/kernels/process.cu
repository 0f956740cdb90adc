// Logits with what a request does to them, for the rows that have any of it (gpu/backends/sampling.py, steps 2 to 4).
//
//   logits T [rows, vocab]; out float [processed_rows, vocab]
//   row int [processed_rows]: the row of logits that each row of out comes from
//   mask_index int [rows], -1 for none; mask_words 32 bits [masks, words]: bit i % 32 of word i / 32 is set where id i
//   may be drawn
//   masked_ids int [rows, masked_width], num_masked int [rows]: ids that may not be drawn
//
// Grid (processed_rows). Threads walk the vocabulary once, then the short lists.
#include "device.cuh"

template <typename T>
__global__ void __launch_bounds__(1024)
process(const T* __restrict__ logits, const int* __restrict__ row, const int* __restrict__ mask_index,
        const unsigned* __restrict__ mask_words, const int* __restrict__ masked_ids,
        const int* __restrict__ num_masked, float* __restrict__ out, int vocab, int words, int masked_width) {
    const int i = row[blockIdx.x], mask = mask_index[i];
    const T* from = logits + static_cast<size_t>(i) * vocab;
    float* to = out + static_cast<size_t>(blockIdx.x) * vocab;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        const bool allowed = mask < 0 || mask_words[static_cast<size_t>(mask) * words + id / 32] >> id % 32 & 1u;
        to[id] = allowed ? to_float(from[id]) : negative_infinity();
    }
    __syncthreads();
    for (int k = threadIdx.x; k < num_masked[i]; k += blockDim.x) {
        const int id = masked_ids[static_cast<size_t>(i) * masked_width + k];
        if (id >= 0 && id < vocab) to[id] = negative_infinity();
    }
}
