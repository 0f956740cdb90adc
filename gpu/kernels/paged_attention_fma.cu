// Paged causal attention on CUDA cores: float32, which tensor cores only have at 10 bits, and any other element type.
//
// Arguments as of paged_attention.cu; items are tiles of ROWS rows. Grid: any number of blocks of one warp; work
// (item, KV head) goes round. The warp takes 32 tokens at a time from a ring of two cp.async stages:
//   scores     lane t has token t: the product of its key with each query, which lies in shared memory
//   softmax    running, per row, over the lanes
//   values     lane l has columns l, l + 32, ...; the weights of the 32 tokens lie in shared memory
// Key rows are padded by 16 bytes, so that eight lanes read eight different groups of banks. Arithmetic is float32.
//
// Tried: a lane group per token, as many decode kernels do, needs head sizes that are powers of two.
//
// Source: the loop is that of paged_attention.cu; splits and their fold: attention.cuh.
#include "attention.cuh"

template <typename T, int D, int ROWS> struct Shared {
    static constexpr int ROW = D + 16 / sizeof(T);
    T keys[2][kStep][ROW], values[2][kStep][ROW];
    float queries[ROWS][D], weights[ROWS][kStep];
};

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, o));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(kFullWarp, v, o);
    return v;
}

// The ROWS rows of a tile: which keys each sees, and its running softmax; columns lane, lane + 32, ... of its output.
template <typename T, int D, int ROWS> struct RowTile {
    static constexpr int COLUMNS = (D + 31) / 32;
    int first_seen[ROWS];
    unsigned num_seen[ROWS];
    float max[ROWS], sum[ROWS], out[ROWS][COLUMNS];  // `sum` of this lane's tokens only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            max[r] = negative_infinity();
            sum[r] = 0.f;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) out[r][j] = 0.f;
        }
    }

    __device__ __forceinline__ void load(const T* queries, const AttentionItem& item, int group, int window, int q_stride,
                                         float (*to)[D]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = item.first_row + r, token = row / group;
            const bool on = token < item.query_len;
            const int position = item.context_len - item.query_len + token;
            first_seen[r] = ::max(0, position - window + 1);
            num_seen[r] = on ? position + 1 - first_seen[r] : 0;
            const T* at = queries + (size_t)(item.query_begin + token) * q_stride + row % group * D;
            for (int d = threadIdx.x; d < D; d += 32) to[r][d] = on ? to_float(at[d]) : 0.f;
        }
    }

    // One step: the tokens token..token + 31.
    __device__ __forceinline__ void step(Shared<T, D, ROWS>& shared, int stage, int token, float scale_log2, float soft_cap) {
        constexpr int N = Vector16<T>::N;
        const int lane = threadIdx.x;
        float s[ROWS] = {};
#pragma unroll 4
        for (int d = 0; d < D; d += N) {
            float key[N];
            Vector16<T>::load(&shared.keys[stage][lane][d], key);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int i = 0; i < N; ++i) s[r] = __fmaf_rn(shared.queries[r][d + i], key[i], s[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r] = __fmul_rn(s[r], scale_log2);
            if (soft_cap > 0.f) s[r] = capped_score(s[r], soft_cap);
            if (static_cast<unsigned>(token + lane - first_seen[r]) >= num_seen[r]) s[r] = negative_infinity();
            const float peak = fmaxf(max[r], warp_max(s[r]));
            const float factor = max[r] == negative_infinity() ? 0.f : exp2_fast(max[r] - peak);
            const float weight = s[r] == negative_infinity() ? 0.f : exp2_fast(s[r] - peak);
            max[r] = peak;
            sum[r] = __fmaf_rn(sum[r], factor, weight);
            shared.weights[r][lane] = weight;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) out[r][j] = __fmul_rn(out[r][j], factor);
        }
        __syncwarp();  // the weights are there
#pragma unroll 4
        for (int t = 0; t < kStep; ++t)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int d = j * 32 + lane;
                const float value = d < D ? to_float(shared.values[stage][t][d]) : 0.f;
#pragma unroll
                for (int r = 0; r < ROWS; ++r) out[r][j] = __fmaf_rn(shared.weights[r][t], value, out[r][j]);
            }
    }

    // Call f(row, column, index of the column) for each element of the rows that exist.
    template <typename F> __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (num_seen[r] && j * 32 + threadIdx.x < D) f(r, j * 32 + static_cast<int>(threadIdx.x), j);
    }
};

template <typename T, int D, int BLOCK, int ROWS>
__global__ void __launch_bounds__(32, 1)
paged_attention_fma(const T* __restrict__ q, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
                    const int* __restrict__ block_table, const AttentionItem* __restrict__ items,
                    const int* __restrict__ count, T* __restrict__ out, float* __restrict__ partial_out,
                    float2* __restrict__ partial_stats, int kv_heads, int group, int max_blocks, int q_stride, int window,
                    float scale_log2, float soft_cap) {
    extern __shared__ __align__(16) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<T, D, ROWS>*>(memory);
    RowTile<T, D, ROWS> rows;
    for (int work = blockIdx.x; work < *count * kv_heads; work += gridDim.x) {
        const AttentionItem item = items[work / kv_heads];
        const int head = work % kv_heads;
        const int* blocks = block_table + (size_t)item.table_row * max_blocks;
        const TokenRange range = visible_tokens(item, item.first_row, ROWS, group, window);
        float total_max[ROWS], total_sum[ROWS], total[ROWS][RowTile<T, D, ROWS>::COLUMNS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) { total_max[r] = negative_infinity(); total_sum[r] = 0.f; }
        rows.load(q + (size_t)head * group * D, item, group, window, q_stride, shared.queries);
        rows.clear();

        auto fetch = [&](int stage, int token) {
            fetch_tokens<D, BLOCK, 32>(shared.keys[stage], shared.values[stage], token, range, k_cache, v_cache, blocks,
                                       kv_heads, head);
        };
        const int begin = range.begin / kStep * kStep;
        fetch(0, begin);
        commit_copies();
        int stage = 0;
        for (int token = begin; token < range.end; token += kStep, stage ^= 1) {
            const int next = token + kStep;
            if (next < range.end) fetch(stage ^ 1, next);
            commit_copies();
            wait_for_copies<1>();
            __syncwarp();  // every lane's copies of this stage, and the queries, are there
            rows.step(shared, stage, token, scale_log2, soft_cap);
            __syncwarp();  // before the next step overwrites stage and weights
            if (next % kSplit != 0 && next < range.end) continue;

#pragma unroll
            for (int r = 0; r < ROWS; ++r) rows.sum[r] = warp_sum(rows.sum[r]);
            if (item.partial >= 0) {
                rows.for_each([&](int r, int d, int j) {
                    const size_t at = (size_t)(item.partial + r) * kv_heads + head;
                    partial_out[at * D + d] = rows.out[r][j];
                    if (d == 0) partial_stats[at] = {rows.max[r], rows.sum[r]};
                });
                continue;
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const FoldFactors f = fold_weights(total_max[r], total_sum[r], rows.max[r], rows.sum[r]);
#pragma unroll
                for (int j = 0; j < RowTile<T, D, ROWS>::COLUMNS; ++j) total[r][j] = fold(total[r][j], rows.out[r][j], f);
            }
            rows.clear();
        }
        if (item.partial >= 0) continue;
        rows.for_each([&](int r, int d, int j) {
            const int row = item.first_row + r, token_of_row = item.query_begin + row / group;
            T* at = out + ((size_t)token_of_row * kv_heads * group + head * group + row % group) * D;
            at[d] = from_float<T>(__fmul_rn(total[r][j], inverse_sum(total_sum[r])));
        });
    }
}
