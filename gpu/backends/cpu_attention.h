/* Paged attention of the CPU device, and the cache it reads: what `cpu_attention_kernel.h` computes, compiled for
 * three kinds of processor. All of them visit keys and add up in the same order, so they differ at most by what fused
 * multiplications do not round: those for AVX2 and AVX-512 are bit-equal.
 *
 * Axes: T tokens, H query heads, G KV heads, D head size.
 */
#ifndef FOREWORD_CPU_ATTENTION_H
#define FOREWORD_CPU_ATTENTION_H

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAVE_WIDE_ATTENTION 1
#else
#define HAVE_WIDE_ATTENTION 0
#endif

enum {
    QUERY_TOKENS = 4, /* of one sequence, computed together */
    MAX_HEAD_DIM = 256,
    WIDEST = 16 /* lanes of the widest kernel */
};

/* One layer of the paged cache. Keys lie transposed inside a block, so that a vector takes
 * one dimension of several keys. */
typedef struct {
    void *keys;         /* [num_blocks, G, D, block_size] */
    void *values;       /* [num_blocks, G, block_size, D], readable for WIDEST elements past the end */
    int64_t block_size; /* a multiple of the kernel's lanes */
    int64_t num_kv_heads;
    int64_t head_dim;
} paged_cache;

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

/* The query heads that share `kv_head`, of `count` tokens of one sequence from `token`, over the keys they see. */
typedef void (*attention_kernel)(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                                 int64_t count, int bf16);

void attention_plain(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                     int64_t count, int bf16);
#if HAVE_WIDE_ATTENTION
void attention_avx2(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                    int64_t count, int bf16);
void attention_avx512(const attention_batch *batch, const paged_cache *cache, int64_t kv_head, int64_t token,
                      int64_t count, int bf16);
static inline int has_avx2_attention(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static inline int has_avx512_attention(void) {
    return has_avx2_attention() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#else
#define attention_avx2 attention_plain
#define attention_avx512 attention_plain
static inline int has_avx2_attention(void) { return 0; }
static inline int has_avx512_attention(void) { return 0; }
#endif

#endif
