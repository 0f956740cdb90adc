/* The CPU device's kernels between the matrix products. One call computes one row; callers run rows in parallel.
 *
 * A row's result depends on that row alone: reductions run in an order fixed by the width. Axes: H query heads,
 * G KV heads, D head size.
 */
#ifndef FOREWORD_CPU_KERNELS_H
#define FOREWORD_CPU_KERNELS_H

#include "cpu_attention.h"
#include "simd.h"

/* ---- RMS norm ------------------------------------------------------------------------------------------------- */

INLINE void rms_norm_body(float *stream, const void *delta, const float *weight, void *out, int64_t width, float eps,
                          int bf16) {
    floats sum = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        floats x = load_part(stream, i, width - i, 0.0f, 0);
        if (delta) {
            x += load_part(delta, i, width - i, 0.0f, bf16);
            store_part(stream, i, width - i, x, 0);
        }
        sum += x * x;
    }
    float scale = 1.0f / sqrtf(lane_sum(sum) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        floats x = load_part(stream, i, width - i, 0.0f, 0) * scale * load_part(weight, i, width - i, 0.0f, 0);
        store_part(out, i, width - i, x, bf16);
    }
}

/* stream += delta (when there is one); out = stream / rms(stream) * weight. All [width]. */
CPU_CLONES static void rms_norm(float *stream, const void *delta, const float *weight, void *out, int64_t width,
                                float eps, int bf16) {
    if (bf16)
        rms_norm_body(stream, delta, weight, out, width, eps, 1);
    else
        rms_norm_body(stream, delta, weight, out, width, eps, 0);
}

/* ---- SwiGLU --------------------------------------------------------------------------------------------------- */

INLINE void silu_and_mul_body(const void *gate_up, void *out, int64_t width, int bf16) {
    for (int64_t i = 0; i < width; i += LANES) {
        floats gate = load_part(gate_up, i, width - i, 0.0f, bf16);
        floats up = load_part(gate_up, width + i, width - i, 0.0f, bf16);
        store_part(out, i, width - i, gate / (1.0f + exp_of(-gate)) * up, bf16);
    }
}

/* gate_up [2 * width] -> out [width] = silu(gate) * up. */
CPU_CLONES static void silu_and_mul(const void *gate_up, void *out, int64_t width, int bf16) {
    if (bf16)
        silu_and_mul_body(gate_up, out, width, 1);
    else
        silu_and_mul_body(gate_up, out, width, 0);
}

/* ---- KV cache ------------------------------------------------------------------------------------------------- */

/* Rotate pairs (i, i + D / 2) of one head in place. */
INLINE void rotate(void *qkv, int64_t start, const float *cos, const float *sin, int64_t half, int bf16) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        floats c = load_part(cos, i, count, 0.0f, 0), s = load_part(sin, i, count, 0.0f, 0);
        floats a = load_part(qkv, start + i, count, 0.0f, bf16);
        floats b = load_part(qkv, start + half + i, count, 0.0f, bf16);
        store_part(qkv, start + i, count, a * c - b * s, bf16);
        store_part(qkv, start + half + i, count, b * c + a * s, bf16);
    }
}

/* Copy element by element what is already in the cache's type. */
INLINE void copy_strided(void *to, int64_t to_start, int64_t stride, const void *from, int64_t from_start,
                         int64_t count, int bf16) {
    for (int64_t i = 0; i < count; i++) {
        if (bf16)
            ((uint16_t *)to)[to_start + i * stride] = ((const uint16_t *)from)[from_start + i];
        else
            ((float *)to)[to_start + i * stride] = ((const float *)from)[from_start + i];
    }
}

INLINE void rotate_and_store_body(void *qkv, const float *cos, const float *sin, const paged_cache *cache, int64_t slot,
                                  int64_t num_heads, int bf16) {
    int64_t groups = cache->num_kv_heads, dim = cache->head_dim, size = cache->block_size;
    for (int64_t head = 0; head < num_heads + groups; head++) rotate(qkv, head * dim, cos, sin, dim / 2, bf16);
    int64_t block = slot / size, offset = slot % size;
    for (int64_t g = 0; g < groups; g++) {
        int64_t page = (block * groups + g) * size * dim;
        copy_strided(cache->keys, page + offset, size, qkv, (num_heads + g) * dim, dim, bf16);
        copy_strided(cache->values, page + offset * dim, 1, qkv, (num_heads + groups + g) * dim, dim, bf16);
    }
}

/* Rotate the query and key heads of one token's qkv [(H + 2 G) * D] in place; put key and value into their slot. */
CPU_CLONES static void rotate_and_store(void *qkv, const float *cos, const float *sin, const paged_cache *cache,
                                        int64_t slot, int64_t num_heads, int bf16) {
    if (bf16)
        rotate_and_store_body(qkv, cos, sin, cache, slot, num_heads, 1);
    else
        rotate_and_store_body(qkv, cos, sin, cache, slot, num_heads, 0);
}

#endif
