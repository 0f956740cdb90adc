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
    TILE = 64,        /* keys between two rescalings of the running softmax */
    MAX_HEADS = 4,    /* query heads that share one pass over the keys */
    QUERY_TOKENS = 4, /* tokens that share it */
    MAX_ROWS = 12,    /* queries that share it, of several tokens and heads: as many as the registers hold sums */
    WIDE = 4,         /* vectors held in registers for each of few queries */
    MAX_HEAD_DIM = 256,
    HEAD_STRIDE = MAX_HEAD_DIM + LANES
};

typedef struct {
    const void *queries;      /* [T, H * D] */
    int64_t query_stride;     /* elements between tokens */
    const int32_t *positions; /* [T] */
    const int32_t *rows;      /* [T] of the block table */
    const int32_t *block_table;
    int64_t max_blocks; /* of a row of the block table */
    int64_t num_heads;
    int64_t window; /* keys a token sees, or 0 for all */
    float scale;
    void *out; /* [T, H * D] */
} attention_batch;

/* Queries of one sequence and KV head, and the keys each of them sees. */
typedef struct {
    float scaled[MAX_ROWS * HEAD_STRIDE], sums[MAX_ROWS * HEAD_STRIDE];
    float peak[MAX_ROWS], total[MAX_ROWS];
    float weights[MAX_ROWS][TILE];
    int64_t first[MAX_ROWS], last[MAX_ROWS];
    int64_t page[TILE]; /* of each key of a tile: which of the rows of D values in the cache, whatever the layer */
} query_rows;

/* scores[row] of keys [start, start + TILE); -inf outside a row's keys. No key outside [lowest, highest] is read. */
INLINE void tile_scores(const query_rows *q, int rows, const paged_cache *cache, int64_t start, int64_t lowest,
                        int64_t highest, floats scores[][TILE / LANES], int bf16) {
    int64_t dim = cache->head_dim, size = cache->block_size;
    int wide = rows <= MAX_ROWS / 2 ? 2 : 1; /* vectors at once, enough sums to keep the multipliers busy */
    for (int part = 0; part < TILE / LANES; part += wide) {
        int64_t base = start + part * LANES;
        if (base > highest || base + wide * LANES <= lowest) {
            for (int r = 0; r < rows; r++)
                for (int w = 0; w < wide; w++) scores[r][part + w] = splat(-INFINITY);
            continue;
        }
        int64_t key[2];
        for (int w = 0; w < wide; w++) {
            int64_t position = base + w * LANES;
            int readable = position <= highest && position + LANES > lowest;
            int64_t from = readable ? position : w ? base : base + LANES;
            int64_t page = q->page[from - start], offset = from % size;
            key[w] = (page - offset) * dim + offset;
        }
        floats sum[MAX_ROWS][2] = {{{0}}};
        for (int64_t d = 0; d < dim; d++)
            for (int w = 0; w < wide; w++) {
                floats k = load(cache->keys, key[w] + d * size, bf16);
                for (int r = 0; r < rows; r++) sum[r][w] += q->scaled[r * HEAD_STRIDE + d] * k;
            }
        for (int w = 0; w < wide; w++) {
            ints position = LANE_IDS + (int32_t)(base + w * LANES);
            for (int r = 0; r < rows; r++) {
                ints valid = (position >= (int32_t)q->first[r]) & (position <= (int32_t)q->last[r]);
                scores[r][part + w] = choose(valid, sum[r][w], splat(-INFINITY));
            }
        }
    }
}

/* sums[row][d : d + wide * LANES] += sum over keys [low, high] of weight * value, for `rows` rows from `row`. */
INLINE void weigh_values(query_rows *q, int row, int rows, const paged_cache *cache, int64_t start, int64_t low,
                         int64_t high, int64_t d, int wide, int bf16) {
    floats sum[MAX_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) sum[r][w] = load(q->sums, (row + r) * HEAD_STRIDE + d + w * LANES, 0);
    for (int64_t position = low; position <= high; position++) {
        int64_t element = q->page[position - start] * cache->head_dim + d;
        for (int w = 0; w < wide; w++) {
            floats value = load(cache->values, element + w * LANES, bf16);
            for (int r = 0; r < rows; r++) sum[r][w] += q->weights[row + r][position - start] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) store(q->sums, (row + r) * HEAD_STRIDE + d + w * LANES, sum[r][w], 0);
}

INLINE void weigh_all_values(query_rows *q, int row, int rows, const paged_cache *cache, int64_t start, int64_t low,
                             int64_t high, int bf16) {
    int64_t d = 0;
    if (rows <= MAX_HEADS)
        for (; d + WIDE * LANES <= cache->head_dim; d += WIDE * LANES)
            weigh_values(q, row, rows, cache, start, low, high, d, WIDE, bf16);
    for (; d < cache->head_dim; d += LANES) weigh_values(q, row, rows, cache, start, low, high, d, 1, bf16);
}

/* sums += sum over the tile's keys of weight * value, in order of position for every row. Keys that a row does not see
 * are not even multiplied by zero: they may be NaN. So what only some rows see is added row by row. */
INLINE void tile_values(query_rows *q, int rows, const paged_cache *cache, int64_t start, int64_t lowest,
                        int64_t highest, int bf16) {
    int64_t low = lowest, high = highest; /* what all rows see */
    for (int r = 0; r < rows; r++) {
        low = q->first[r] > low ? q->first[r] : low;
        high = q->last[r] < high ? q->last[r] : high;
    }
    if (low > high) low = highest + 1, high = highest;
    for (int r = 0; r < rows && lowest < low; r++) {
        int64_t from = q->first[r] > lowest ? q->first[r] : lowest, to = q->last[r] < low - 1 ? q->last[r] : low - 1;
        weigh_all_values(q, r, 1, cache, start, from, to, bf16);
    }
    weigh_all_values(q, 0, rows, cache, start, low, high, bf16);
    for (int r = 0; r < rows && high < highest; r++)
        weigh_all_values(q, r, 1, cache, start, high + 1, q->last[r] < highest ? q->last[r] : highest, bf16);
}

/* One step of the running softmax (Milakov and Gimelshein, 2018) for one row. */
INLINE void weigh_scores(query_rows *q, int row, const floats scores[TILE / LANES], int64_t dim) {
    floats highest = scores[0];
    for (int part = 1; part < TILE / LANES; part++) highest = max_of(highest, scores[part]);
    float tile_peak = lane_max(highest);
    float new_peak = tile_peak > q->peak[row] ? tile_peak : q->peak[row];
    floats sum = {0};
    for (int part = 0; part < TILE / LANES; part++) {
        floats weight = exp_of(scores[part] - new_peak);
        sum += weight;
        store(q->weights[row], part * LANES, weight, 0);
    }
    float decay = exp_of(splat(q->peak[row] - new_peak))[0];
    q->total[row] = q->total[row] * decay + lane_sum(sum);
    q->peak[row] = new_peak;
    for (int64_t i = 0; i < dim; i += LANES)
        store(q->sums, row * HEAD_STRIDE + i, load(q->sums, row * HEAD_STRIDE + i, 0) * decay, 0);
}

/* Attention of `heads` query heads from `head`, of `tokens` tokens of one sequence from `token`, with one KV head. Tiles
 * of keys begin at multiples of TILE, so that a row meets the same tiles whatever other rows there are. */
INLINE void attend(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token, int tokens,
                   int64_t head, int heads, int bf16) {
    int64_t dim = cache->head_dim, size = cache->block_size, lowest = INT64_MAX, highest = 0;
    const int32_t *blocks = batch->block_table + batch->rows[token] * batch->max_blocks;
    int rows = tokens * heads;
    query_rows q;
    for (int r = 0; r < rows; r++) {
        int64_t t = token + r / heads, query = t * batch->query_stride + (head + r % heads) * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            store(q.scaled, r * HEAD_STRIDE + i,
                  load_part(batch->queries, query + i, dim - i, 0.0f, bf16) * batch->scale, 0);
            store(q.sums, r * HEAD_STRIDE + i, splat(0.0f), 0);
        }
        q.peak[r] = -INFINITY;
        q.total[r] = 0.0f;
        q.last[r] = batch->positions[t];
        q.first[r] = 0 < batch->window && batch->window <= q.last[r] ? q.last[r] - batch->window + 1 : 0;
        lowest = q.first[r] < lowest ? q.first[r] : lowest;
        highest = q.last[r] > highest ? q.last[r] : highest;
    }
    for (int64_t start = lowest - lowest % TILE; start <= highest; start += TILE) {
        int64_t low = lowest > start ? lowest : start, high = highest < start + TILE - 1 ? highest : start + TILE - 1;
        floats scores[MAX_ROWS][TILE / LANES];
        for (int64_t position = low - low % LANES; position <= high; position++)
            q.page[position - start] =
                ((int64_t)blocks[position / size] * cache->num_kv_heads + kv_head) * size + position % size;
        tile_scores(&q, rows, cache, start, low, high, scores, bf16);
        for (int r = 0; r < rows; r++)
            if (q.first[r] < start + TILE && q.last[r] >= start) weigh_scores(&q, r, scores[r], dim);
        tile_values(&q, rows, cache, start, low, high, bf16);
    }
    for (int r = 0; r < rows; r++) {
        int64_t to = (token + r / heads) * batch->num_heads * dim + (head + r % heads) * dim;
        for (int64_t i = 0; i < dim; i += LANES)
            store_part(batch->out, to + i, dim - i, load(q.sums, r * HEAD_STRIDE + i, 0) / q.total[r], bf16);
    }
}

INLINE void attend_tokens(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                          int64_t count, int64_t head, int heads, int bf16) {
    int step = QUERY_TOKENS * heads <= MAX_ROWS ? QUERY_TOKENS : QUERY_TOKENS / 2;
    int64_t end = token + count;
    for (; token + step <= end; token += step) attend(batch, cache, kv_head, token, step, head, heads, bf16);
    for (; token < end; token++) attend(batch, cache, kv_head, token, 1, head, heads, bf16);
}

INLINE void attention_body(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                           int64_t count, int bf16) {
    int64_t group = batch->num_heads / cache->num_kv_heads, head = kv_head * group, end = head + group;
    for (; head < end; head += MAX_HEADS) {
        switch (end - head) {
        case 1: attend_tokens(batch, cache, kv_head, token, count, head, 1, bf16); break;
        case 2: attend_tokens(batch, cache, kv_head, token, count, head, 2, bf16); break;
        case 3: attend_tokens(batch, cache, kv_head, token, count, head, 3, bf16); break;
        default: attend_tokens(batch, cache, kv_head, token, count, head, 4, bf16);
        }
    }
}

/* The query heads that share `kv_head`, of `count` tokens of one sequence from `token`, over the keys they see. */
CPU_CLONES static void attention(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                                 int64_t count, int bf16) {
    if (bf16)
        attention_body(batch, cache, kv_head, token, count, 1);
    else
        attention_body(batch, cache, kv_head, token, count, 0);
}

#endif
