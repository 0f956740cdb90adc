// Rotary position embedding (Su et al., 2021; pairs i and i + half) of queries and keys, and the step's keys and values
// into the paged cache.
//
//   qkv T [tokens, (num_heads + 2 * num_kv_heads) * 2 * half]: query heads, key heads, value heads
//   cos, sin float [max_model_len, half]; positions, slots [tokens]
//   queries T [tokens, num_heads * 2 * half]
//   keys, values T [num_blocks, num_kv_heads, block_size, 2 * half]; a slot is block * block_size + offset
//
// Grid (tokens). Threads walk pairs, head by head, so neighbours touch neighbouring addresses. A negative slot is
// padding: nothing is stored for it.
#include "device.cuh"

template <typename T>
__global__ void __launch_bounds__(128)
rotate_and_store(const T* __restrict__ qkv, const float* __restrict__ cos, const float* __restrict__ sin,
                 const int* __restrict__ positions, const int* __restrict__ slots, T* __restrict__ queries,
                 T* __restrict__ keys, T* __restrict__ values, int num_heads, int num_kv_heads, int half,
                 int block_size) {
    const int token = blockIdx.x, slot = slots[token], dim = 2 * half;
    const float* cos_row = cos + static_cast<size_t>(positions[token]) * half;
    const float* sin_row = sin + static_cast<size_t>(positions[token]) * half;
    const T* heads = qkv + static_cast<size_t>(token) * (num_heads + 2 * num_kv_heads) * dim;

    for (int pair = threadIdx.x; pair < (num_heads + 2 * num_kv_heads) * half; pair += blockDim.x) {
        const int head = pair / half, i = pair % half;
        float a = to_float(heads[head * dim + i]), b = to_float(heads[head * dim + half + i]);
        if (head < num_heads + num_kv_heads) {
            const float c = cos_row[i], s = sin_row[i], first = a;
            a = first * c - b * s;
            b = b * c + first * s;
        }
        T* to;
        if (head < num_heads) {
            to = queries + (static_cast<size_t>(token) * num_heads + head) * dim;
        } else if (slot < 0) {
            continue;
        } else {
            const bool is_key = head < num_heads + num_kv_heads;
            const int kv_head = head - num_heads - (is_key ? 0 : num_kv_heads);
            const size_t row = (static_cast<size_t>(slot / block_size) * num_kv_heads + kv_head) * block_size;
            to = (is_key ? keys : values) + (row + slot % block_size) * dim;
        }
        to[i] = from_float<T>(a);
        to[half + i] = from_float<T>(b);
    }
}
