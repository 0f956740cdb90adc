/* The attention kernel, for the including file's processor: it defines ATTENTION, the name, and LANES.
 *
 * A query's result depends on that query alone: tiles of keys begin at multiples of TILE, and within a tile every sum
 * runs in order of dimension or position. The running softmax adds up eight lanes, whatever a vector has.
 *
 * Keys and values of the next tile are fetched while the current one is computed: blocks lie scattered, and the
 * processor's own prefetching does not find the next one.
 */
#include "cpu_attention.h"
#include "simd.h"

enum {
    TILE = 64,                      /* keys between two rescalings of the running softmax */
    CHUNKS = TILE / LANES,          /* vectors of keys in a tile */
    MAX_HEADS = 4,                  /* query heads that share one pass over the keys */
    MAX_ROWS = 12,                  /* queries that share it, of several tokens and heads */
    HELD_SUMS = LANES == 16 ? 24 : 12, /* vectors of sums that the registers hold beside what is added */
    MAX_WIDE = 4,                   /* vectors side by side for each of few queries */
    HEAD_STRIDE = MAX_HEAD_DIM + LANES,
    CACHE_LINE = 64
};

/* Where the keys and values of a tile lie, in elements. */
typedef struct {
    int64_t key[CHUNKS];   /* the first dimension of a chunk of LANES keys */
    int64_t value[CHUNKS]; /* the first value of a chunk */
} tile_place;

/* Queries of one sequence and KV head, and the keys each of them sees. */
typedef struct {
    float scaled[MAX_ROWS * HEAD_STRIDE], sums[MAX_ROWS * HEAD_STRIDE];
    float peak[MAX_ROWS], total[MAX_ROWS];
    float weights[MAX_ROWS][TILE];
    int64_t first[MAX_ROWS], last[MAX_ROWS];
    int64_t lowest, highest; /* of all of them */
} query_rows;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int vectors_for(int rows) {
    return rows * 4 <= HELD_SUMS ? 4 : rows * 2 <= HELD_SUMS ? 2 : 1;
}

INLINE void prefetch(const void *array, int64_t index, int bf16) {
    __builtin_prefetch((const char *)array + index * (bf16 ? 2 : 4), 0, 3);
}

/* The tile from key `start` on. For chunks that no query sees it names the nearest one that is seen. */
INLINE void place_tile(tile_place *place, const query_rows *q, const paged_cache *cache, const int32_t *blocks,
                       int64_t kv_head, int64_t start) {
    int64_t size = cache->block_size, dim = cache->head_dim;
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        int64_t position = larger(smaller(start + chunk * LANES, q->highest), q->lowest);
        int64_t block = position / size, offset = position % size / LANES * LANES;
        int64_t page = ((int64_t)blocks[block] * cache->num_kv_heads + kv_head) * size;
        place->key[chunk] = page * dim + offset;
        place->value[chunk] = (page + offset) * dim;
    }
}

/* scores[row] of keys [start, start + TILE); -inf outside a row's keys. No key outside the rows' chunks is read. */
INLINE void tile_scores(const query_rows *q, int rows, const paged_cache *cache, int64_t start, const tile_place *place,
                        const tile_place *next, floats scores[][CHUNKS], int bf16) {
    int64_t dim = cache->head_dim, size = cache->block_size;
    int wide = vectors_for(rows);
    for (int chunk = 0; chunk < CHUNKS; chunk += wide) {
        int64_t base = start + chunk * LANES;
        if (base > q->highest || base + wide * LANES <= q->lowest) {
            for (int r = 0; r < rows; r++)
                for (int w = 0; w < wide; w++) scores[r][chunk + w] = splat(-INFINITY);
            continue;
        }
        floats sum[MAX_ROWS][MAX_WIDE];
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < wide; w++) sum[r][w] = splat(0.0f);
        for (int64_t d = 0; d < dim; d++) {
            floats keys[MAX_WIDE];
            for (int w = 0; w < wide; w++) {
                keys[w] = load(cache->keys, place->key[chunk + w] + d * size, bf16);
                prefetch(cache->keys, next->key[chunk + w] + d * size, bf16);
            }
            for (int r = 0; r < rows; r++) {
                float query = q->scaled[r * HEAD_STRIDE + d];
                for (int w = 0; w < wide; w++) sum[r][w] += query * keys[w];
            }
        }
        for (int w = 0; w < wide; w++) {
            ints position = LANE_IDS + (int32_t)(base + w * LANES);
            for (int r = 0; r < rows; r++) {
                ints valid = (position >= (int32_t)q->first[r]) & (position <= (int32_t)q->last[r]);
                scores[r][chunk + w] = choose(valid, sum[r][w], splat(-INFINITY));
            }
        }
    }
}

/* sums[row][d : d + wide * LANES] += sum over keys [low, high] of weight * value, for `rows` rows from `row`. */
INLINE void weigh_values(query_rows *q, int row, int rows, const paged_cache *cache, int64_t start, int64_t low,
                         int64_t high, int64_t d, int wide, const tile_place *place, const tile_place *next, int bf16) {
    int64_t dim = cache->head_dim;
    int step = bf16 ? CACHE_LINE / 2 / LANES : (CACHE_LINE / 4 + LANES - 1) / LANES; /* vectors of a cache line */
    floats sum[MAX_ROWS][MAX_WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) sum[r][w] = load(q->sums, (row + r) * HEAD_STRIDE + d + w * LANES, 0);
    for (int64_t key = low - start; key <= high - start; key++) {
        int64_t offset = key % LANES * dim + d;
        int64_t element = place->value[key / LANES] + offset, following = next->value[key / LANES] + offset;
        floats values[MAX_WIDE];
        for (int w = 0; w < wide; w++) {
            values[w] = load(cache->values, element + w * LANES, bf16);
            if (w % step == 0) prefetch(cache->values, following + w * LANES, bf16);
        }
        for (int r = 0; r < rows; r++) {
            float weight = q->weights[row + r][key];
            for (int w = 0; w < wide; w++) sum[r][w] += weight * values[w];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < wide; w++) store(q->sums, (row + r) * HEAD_STRIDE + d + w * LANES, sum[r][w], 0);
}

INLINE void weigh_all_values(query_rows *q, int row, int rows, const paged_cache *cache, int64_t start, int64_t low,
                             int64_t high, const tile_place *place, const tile_place *next, int bf16) {
    int wide = vectors_for(rows);
    int64_t d = 0;
    for (; d + wide * LANES <= cache->head_dim; d += wide * LANES)
        weigh_values(q, row, rows, cache, start, low, high, d, wide, place, next, bf16);
    for (; d < cache->head_dim; d += LANES)
        weigh_values(q, row, rows, cache, start, low, high, d, 1, place, next, bf16);
}

/* sums += sum over the tile's keys of weight * value, in order of position for every row. Keys that a row does not see
 * are not even multiplied by zero: they may be NaN. So what only some rows see is added row by row. */
INLINE void tile_values(query_rows *q, int rows, const paged_cache *cache, int64_t start, const tile_place *place,
                        const tile_place *next, int bf16) {
    int64_t lowest = larger(q->lowest, start), highest = smaller(q->highest, start + TILE - 1);
    int64_t low = lowest, high = highest; /* what all rows see */
    for (int r = 0; r < rows; r++) {
        low = larger(low, q->first[r]);
        high = smaller(high, q->last[r]);
    }
    if (low > high) low = highest + 1, high = highest;
    for (int r = 0; r < rows && lowest < low; r++)
        weigh_all_values(q, r, 1, cache, start, larger(q->first[r], lowest), smaller(q->last[r], low - 1), place, next,
                         bf16);
    weigh_all_values(q, 0, rows, cache, start, low, high, place, next, bf16);
    for (int r = 0; r < rows && high < highest; r++)
        weigh_all_values(q, r, 1, cache, start, high + 1, smaller(q->last[r], highest), place, next, bf16);
}

/* One step of the running softmax (Milakov and Gimelshein, 2018) for one row. */
INLINE void weigh_scores(query_rows *q, int row, const floats scores[CHUNKS], int64_t dim) {
    floats highest = scores[0];
    for (int chunk = 1; chunk < CHUNKS; chunk++) highest = max_of(highest, scores[chunk]);
    float tile_peak = lane_max(highest);
    float new_peak = tile_peak > q->peak[row] ? tile_peak : q->peak[row];
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        store(q->weights[row], chunk * LANES, exp_of(scores[chunk] - new_peak), 0);
    eight_floats sum = {0};
    for (int i = 0; i < TILE; i += 8) {
        eight_floats weights;
        memcpy(&weights, q->weights[row] + i, sizeof weights);
        sum += weights;
    }
    float decay = exp_of(splat(q->peak[row] - new_peak))[0], total = sum[0];
    for (int lane = 1; lane < 8; lane++) total += sum[lane];
    q->total[row] = q->total[row] * decay + total;
    q->peak[row] = new_peak;
    for (int64_t i = 0; i < dim; i += LANES)
        store(q->sums, row * HEAD_STRIDE + i, load(q->sums, row * HEAD_STRIDE + i, 0) * decay, 0);
}

INLINE void load_queries(query_rows *q, const attention_batch *batch, int64_t dim, int64_t token, int64_t head,
                         int heads, int rows, int bf16) {
    q->lowest = INT64_MAX;
    q->highest = 0;
    for (int r = 0; r < rows; r++) {
        int64_t t = token + r / heads, query = t * batch->query_stride + (head + r % heads) * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            store(q->scaled, r * HEAD_STRIDE + i,
                  load_part(batch->queries, query + i, dim - i, 0.0f, bf16) * batch->scale, 0);
            store(q->sums, r * HEAD_STRIDE + i, splat(0.0f), 0);
        }
        q->peak[r] = -INFINITY;
        q->total[r] = 0.0f;
        q->last[r] = batch->positions[t];
        q->first[r] = 0 < batch->window && batch->window <= q->last[r] ? q->last[r] - batch->window + 1 : 0;
        q->lowest = smaller(q->lowest, q->first[r]);
        q->highest = larger(q->highest, q->last[r]);
    }
}

/* Attention of `heads` query heads from `head`, of `tokens` tokens of one sequence from `token`, with one KV head. */
INLINE void attend(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token, int tokens,
                   int64_t head, int heads, int bf16) {
    int64_t dim = cache->head_dim;
    const int32_t *blocks = batch->block_table + batch->rows[token] * batch->max_blocks;
    int rows = tokens * heads;
    query_rows q;
    tile_place place, next;
    load_queries(&q, batch, dim, token, head, heads, rows, bf16);
    place_tile(&next, &q, cache, blocks, kv_head, q.lowest - q.lowest % TILE);
    for (int64_t start = q.lowest - q.lowest % TILE; start <= q.highest; start += TILE) {
        floats scores[MAX_ROWS][CHUNKS];
        place = next;
        place_tile(&next, &q, cache, blocks, kv_head, start + TILE);
        tile_scores(&q, rows, cache, start, &place, &next, scores, bf16);
        for (int r = 0; r < rows; r++)
            if (q.first[r] < start + TILE && q.last[r] >= start) weigh_scores(&q, r, scores[r], dim);
        tile_values(&q, rows, cache, start, &place, &next, bf16);
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

void ATTENTION(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token, int64_t count,
               int bf16) {
    if (bf16)
        attention_body(batch, cache, kv_head, token, count, 1);
    else
        attention_body(batch, cache, kv_head, token, count, 0);
}
