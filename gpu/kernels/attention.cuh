// What the attention kernels share: the work list, and the rule by which the parts of a row's context are put together.
//
// The context of a query row is cut into splits of kSplit tokens, always at multiples of kSplit. A split is computed from
// scratch, and a row's splits are folded in ascending order, whoever folds them: the kernel that computed them, or
// merge_splits. So the bits of a row depend neither on the batch nor on how the work was divided.
#pragma once
#include "device.cuh"

constexpr int kSplit = 256;
constexpr int kStep = 32;  // tokens that the running softmax takes at once

// Rows of one sequence: query tokens x heads of one group, token-major. An item is a tile of them, for every KV head,
// over the splits split_begin..split_end - 1. Same fields as gpu/backends/attention_plan.py.
struct AttentionItem {
    int query_begin;  // first token of the sequence in the step
    int query_len;    // its tokens in the step
    int context_len;  // its tokens in the cache, these included
    int table_row;    // its row of the block table
    int first_row;    // of the tile
    int split_begin, split_end;
    int partial;  // -1: write the output. Else one split is computed, and row r goes to partial row `partial` + r
};

struct MergeItem {
    int token;       // in the step
    int group_head;  // head within its group
    int partial;     // partial row of the first split
    int stride;      // partial rows from one split to the next
    int num_splits;
};

// Keys that rows first_row..first_row + rows - 1 see within the item's splits: from `begin`, before `end`.
struct TokenRange { int begin, end; };

__device__ __forceinline__ TokenRange visible_tokens(const AttentionItem& item, int first_row, int rows, int group,
                                                     int window) {
    const int num_rows = item.query_len * group;
    if (first_row >= num_rows) return {0, 0};
    const int start = item.context_len - item.query_len;  // position of the first query token
    const int first_seen = max(0, start + first_row / group - window + 1);
    const int last = start + (min(first_row + rows, num_rows) - 1) / group;
    return {max(first_seen, item.split_begin * kSplit), min(last + 1, item.split_end * kSplit)};
}

// Start copying the keys and values of token..token + STAGE - 1 of one KV head into shared memory; zeros outside `range`,
// whose table entries are not read. All THREADS of the block take part.
template <int D, int BLOCK, int THREADS, typename T, int STAGE, int ROW>
__device__ __forceinline__ void fetch_tokens(T (&keys)[STAGE][ROW], T (&values)[STAGE][ROW], int token, TokenRange range,
                                             const T* k_cache, const T* v_cache, const int* blocks, int kv_heads, int head) {
    constexpr int VECTOR = 16 / sizeof(T), CHUNKS = D / VECTOR, ROUNDS = (BLOCK * CHUNKS + THREADS - 1) / THREADS;
    constexpr int UNROLL = ROUNDS <= 16 ? ROUNDS : 8;
    const int thread = threadIdx.x;
#pragma unroll
    for (int b = 0; b < STAGE; b += BLOCK) {
        const int first = token + b;
        const bool used = first < range.end && first + BLOCK > range.begin;
        const int block = used ? __ldg(blocks + first / BLOCK) : 0;
        const size_t from = ((size_t)block * kv_heads + head) * BLOCK * D + thread * VECTOR;
#pragma unroll UNROLL
        for (int i = 0; i < ROUNDS; ++i) {
            const int c = i * THREADS + thread;
            if (BLOCK * CHUNKS % THREADS != 0 && c >= BLOCK * CHUNKS) break;
            // where a row is a whole fraction of the threads, a round adds a constant to every address
            const int t = THREADS % CHUNKS == 0 ? thread / CHUNKS + i * (THREADS / CHUNKS) : c / CHUNKS;
            const int d = THREADS % CHUNKS == 0 ? thread % CHUNKS * VECTOR : c % CHUNKS * VECTOR;
            const bool on = first + t >= range.begin && first + t < range.end;
            copy_async(&keys[b + t][d], k_cache + from + i * THREADS * VECTOR, on);
            copy_async(&values[b + t][d], v_cache + from + i * THREADS * VECTOR, on);
        }
    }
}

// cap * tanh(score / cap), score and result in units of log2: tanh x = 1 - 2 / (exp(2 x) + 1). The fast division is
// exact enough: its error is relative to a term of at most 2, and it gives 0 for what is too large.
__device__ __forceinline__ float capped_score(float score, float soft_cap) {
    const float growth = exp2_fast(__fmul_rn(score, __fdividef(2.f, soft_cap)));
    return __fmul_rn(soft_cap * 1.4426950408889634f, __fsub_rn(1.f, __fdividef(2.f, __fadd_rn(growth, 1.f))));
}

// Fold a split (max, sum of weights) into the splits before it; returns the factors of their weighted sums.
struct FoldFactors { float before, split; };

__device__ __forceinline__ FoldFactors fold_weights(float& max, float& sum, float split_max, float split_sum) {
    const float joint = fmaxf(max, split_max);
    const FoldFactors f = {max == negative_infinity() ? 0.f : exp2_fast(max - joint),
                           split_max == negative_infinity() ? 0.f : exp2_fast(split_max - joint)};
    max = joint;
    sum = __fmaf_rn(sum, f.before, __fmul_rn(split_sum, f.split));
    return f;
}

__device__ __forceinline__ float fold(float before, float split, FoldFactors f) {
    return __fmaf_rn(before, f.before, __fmul_rn(split, f.split));
}

// What the weighted sum is multiplied by in the end. A row that saw nothing becomes 0; NaN stays NaN.
__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.f ? 0.f : __fdividef(1.f, sum); }
