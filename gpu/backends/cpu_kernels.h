/* The CPU device's kernels between the matrix products. One call computes one row; callers run rows in parallel.
 *
 * A row's result depends on that row alone: reductions run in an order fixed by the width, and attention visits keys
 * in tiles fixed by key position. Axes: H query heads, G KV heads, D head size.
 */
#ifndef FOREWORD_CPU_KERNELS_H
#define FOREWORD_CPU_KERNELS_H

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

/* One layer of the paged cache. Keys lie transposed inside a block, so that a vector takes
 * one dimension of several keys. */
typedef struct {
    void *keys;         /* [num_blocks, G, D, block_size] */
    void *values;       /* [num_blocks, G, block_size, D], readable for LANES elements past the end */
    int64_t block_size; /* a multiple of LANES */
    int64_t num_kv_heads;
    int64_t head_dim;
} paged_cache;

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

/* ---- attention ------------------------------------------------------------------------------------------------ */

enum {
    TILE = 64,     /* keys between two rescalings of the running softmax */
    MAX_HEADS = 4, /* query heads that share one pass over the keys */
    WIDE = 4,      /* vectors of one value row held in registers at once */
    MAX_HEAD_DIM = 256,
    HEAD_STRIDE = MAX_HEAD_DIM + LANES
};

/* scores[h] of keys [start, start + TILE) for the query heads; -inf outside [first, last]. */
INLINE void tile_scores(const float *queries, int heads, const int32_t *blocks, const paged_cache *cache,
                        int64_t kv_head, int64_t start, int64_t first, int64_t last, floats scores[][TILE / LANES],
                        int bf16) {
    int64_t dim = cache->head_dim, size = cache->block_size;
    for (int part = 0; part < TILE / LANES; part++) {
        int64_t base = start + part * LANES;
        if (base > last || base + LANES <= first) {
            for (int h = 0; h < heads; h++) scores[h][part] = splat(-INFINITY);
            continue;
        }
        int64_t block = blocks[base / size];
        int64_t key = (block * cache->num_kv_heads + kv_head) * size * dim + base % size;
        floats even[MAX_HEADS] = {{0}}, odd[MAX_HEADS] = {{0}};
        for (int64_t d = 0; d + 1 < dim; d += 2) { /* D is even: RoPE rotates pairs */
            floats k0 = load(cache->keys, key + d * size, bf16);
            floats k1 = load(cache->keys, key + (d + 1) * size, bf16);
            for (int h = 0; h < heads; h++) {
                even[h] += queries[h * HEAD_STRIDE + d] * k0;
                odd[h] += queries[h * HEAD_STRIDE + d + 1] * k1;
            }
        }
        ints position = LANE_IDS + (int32_t)base;
        ints valid = (position >= (int32_t)first) & (position <= (int32_t)last);
        for (int h = 0; h < heads; h++) scores[h][part] = choose(valid, even[h] + odd[h], splat(-INFINITY));
    }
}

/* sums[h][d : d + wide * LANES] += sum over keys [low, high] of weight * value. */
INLINE void weigh_values(const float weights[][TILE], int heads, const int32_t *blocks, const paged_cache *cache,
                         int64_t kv_head, int64_t start, int64_t low, int64_t high, float *sums, int64_t d, int wide,
                         int bf16) {
    int64_t dim = cache->head_dim, size = cache->block_size;
    floats sum[MAX_HEADS][WIDE];
    for (int h = 0; h < heads; h++)
        for (int w = 0; w < wide; w++) sum[h][w] = load(sums, h * HEAD_STRIDE + d + w * LANES, 0);
    for (int64_t position = low; position <= high; position++) {
        int64_t page = ((int64_t)blocks[position / size] * cache->num_kv_heads + kv_head) * size;
        int64_t element = (page + position % size) * dim + d;
        for (int w = 0; w < wide; w++) {
            floats value = load(cache->values, element + w * LANES, bf16);
            for (int h = 0; h < heads; h++) sum[h][w] += weights[h][position - start] * value;
        }
    }
    for (int h = 0; h < heads; h++)
        for (int w = 0; w < wide; w++) store(sums, h * HEAD_STRIDE + d + w * LANES, sum[h][w], 0);
}

/* sums[h] += sum over the tile's valid keys of weight * value. Invalid values are not even multiplied by zero: they
 * may be NaN. */
INLINE void tile_values(const float weights[][TILE], int heads, const int32_t *blocks, const paged_cache *cache,
                        int64_t kv_head, int64_t start, int64_t first, int64_t last, float *sums, int bf16) {
    int64_t low = first > start ? first : start;
    int64_t high = last < start + TILE - 1 ? last : start + TILE - 1;
    int64_t d = 0;
    for (; d + WIDE * LANES <= cache->head_dim; d += WIDE * LANES)
        weigh_values(weights, heads, blocks, cache, kv_head, start, low, high, sums, d, WIDE, bf16);
    for (; d < cache->head_dim; d += LANES)
        weigh_values(weights, heads, blocks, cache, kv_head, start, low, high, sums, d, 1, bf16);
}

/* Running softmax (Milakov and Gimelshein, 2018) over tiles of keys, for `heads` query heads of one KV head. */
INLINE void attend_heads(const void *queries, int64_t query, int heads, const int32_t *blocks, const paged_cache *cache,
                         int64_t kv_head, int64_t first, int64_t last, float scale, void *out, int bf16) {
    int64_t dim = cache->head_dim;
    float scaled[MAX_HEADS * HEAD_STRIDE], sums[MAX_HEADS * HEAD_STRIDE] = {0};
    float peak[MAX_HEADS], total[MAX_HEADS];
    for (int h = 0; h < heads; h++) {
        for (int64_t i = 0; i < dim; i += LANES) {
            floats q = load_part(queries, query + h * dim + i, dim - i, 0.0f, bf16) * scale;
            store(scaled, h * HEAD_STRIDE + i, q, 0);
        }
        peak[h] = -INFINITY;
        total[h] = 0.0f;
    }
    for (int64_t start = first - first % TILE; start <= last; start += TILE) {
        floats scores[MAX_HEADS][TILE / LANES];
        float weights[MAX_HEADS][TILE];
        tile_scores(scaled, heads, blocks, cache, kv_head, start, first, last, scores, bf16);
        for (int h = 0; h < heads; h++) {
            floats highest = scores[h][0];
            for (int part = 1; part < TILE / LANES; part++) highest = max_of(highest, scores[h][part]);
            float tile_peak = lane_max(highest);
            float new_peak = tile_peak > peak[h] ? tile_peak : peak[h];
            floats sum = {0};
            for (int part = 0; part < TILE / LANES; part++) {
                floats weight = exp_of(scores[h][part] - new_peak);
                sum += weight;
                store(weights[h], part * LANES, weight, 0);
            }
            float decay = exp_of(splat(peak[h] - new_peak))[0];
            total[h] = total[h] * decay + lane_sum(sum);
            peak[h] = new_peak;
            for (int64_t i = 0; i < dim; i += LANES)
                store(sums, h * HEAD_STRIDE + i, load(sums, h * HEAD_STRIDE + i, 0) * decay, 0);
        }
        tile_values(weights, heads, blocks, cache, kv_head, start, first, last, sums, bf16);
    }
    for (int h = 0; h < heads; h++)
        for (int64_t i = 0; i < dim; i += LANES)
            store_part(out, query + h * dim + i, dim - i, load(sums, h * HEAD_STRIDE + i, 0) / total[h], bf16);
}

INLINE void attention_body(const void *queries, const int32_t *blocks, const paged_cache *cache, int64_t kv_head,
                           int64_t group, int64_t first, int64_t last, float scale, void *out, int bf16) {
    int64_t dim = cache->head_dim, start = kv_head * group * dim;
    for (int64_t h = 0; h < group; h += MAX_HEADS, start += MAX_HEADS * dim) {
        switch (group - h) {
        case 1: attend_heads(queries, start, 1, blocks, cache, kv_head, first, last, scale, out, bf16); break;
        case 2: attend_heads(queries, start, 2, blocks, cache, kv_head, first, last, scale, out, bf16); break;
        case 3: attend_heads(queries, start, 3, blocks, cache, kv_head, first, last, scale, out, bf16); break;
        default: attend_heads(queries, start, 4, blocks, cache, kv_head, first, last, scale, out, bf16);
        }
    }
}

/* One token's query heads that share `kv_head`, over keys at positions [first, last] of its sequence.
 *
 * queries, out: [H * D] of the token. blocks: the sequence's block table. group: query heads per KV head. */
CPU_CLONES static void attention(const void *queries, const int32_t *blocks, const paged_cache *cache,
                                 int64_t kv_head, int64_t group, int64_t first, int64_t last, float scale, void *out,
                                 int bf16) {
    if (bf16)
        attention_body(queries, blocks, cache, kv_head, group, first, last, scale, out, 1);
    else
        attention_body(queries, blocks, cache, kv_head, group, first, last, scale, out, 0);
}

#endif
