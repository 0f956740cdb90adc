// Paged causal attention on tensor cores: decode, verification and prompt chunks in one kernel (bfloat16, float16).
//
//   q            [T, q_stride], a token's heads first: head h at h * D
//   k, v cache   [num_blocks, kv_heads, BLOCK, D]
//   block_table  int32 [rows, max_blocks]; entries past a sequence's tokens are never read
//   items        AttentionItem [count[0]]: tiles of WARPS * 16 rows
//   out          [T, kv_heads * group * D]
//   partial_out  float [partial rows, kv_heads, D]; partial_stats float2 [partial rows, kv_heads]: (max, sum)
//
// Grid: any number of blocks of WARPS warps; work (item, KV head) goes round. A tile has 16 rows for each warp:
//   WARPS = 1  decode and verification: few rows, bandwidth counts, and no two warps wait for each other
//   WARPS > 1  prompt chunks: all warps work on the same keys and values in shared memory
// A warp walks its tokens in steps of 32: scores (16 x 32) = q k^T, running softmax in registers, out (16 x D) += p v,
// all by mma.m16n8k16. Keys and values come by cp.async into a ring of two stages, rows padded by 16 bytes so that
// ldmatrix meets no bank conflict. At the end of each split the state is folded (attention.cuh) or written as a partial.
//
// Tried: a lane group per token on CUDA cores, as in paged_attention_fma.cu, needs 73 % of the issue slots at 4 heads of
// 64 and 129 % at 8 heads of 128 to keep up with 4.3 TB/s, this needs 17-23 %. Warps that share one split and merge in
// shared memory give bits that depend on the number of warps.
//
// Sources: Dao, "FlashAttention-2" (2023) for the loop; Dao et al., "Flash-Decoding" (2023) for splits; Ye et al.,
// "FlashInfer" (2025) for the work list.
#include "attention.cuh"

// One warp's 16 rows. Lane l holds rows l / 4 and l / 4 + 8; of the columns, pairs as the mma fragments lay them out.
// Query fragments stay in registers as long as there is room for them.
template <typename T, int D> struct RowTile {
    static constexpr bool RESIDENT = D <= 128;
    static constexpr int ROW = D + 8;
    u32 q[RESIDENT ? D / 16 : 1][4];
    const T (*q_shared)[ROW];
    float max[2], sum[2], out[D / 8][4];  // of the split at hand; `sum` of this lane's columns only
    int first_seen[2];                    // key that each row sees first
    unsigned num_seen[2];                 // and how many; 0 for rows past the end

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < 2; ++h) { max[h] = negative_infinity(); sum[h] = 0.f; }
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j][i] = 0.f;
    }

    // Take the rows first_row..first_row + 15; `scratch` is the warp's own, and the next barrier orders it.
    __device__ __forceinline__ void load(const T* queries, const AttentionItem& item, int first_row, int group, int window,
                                         int q_stride, T (*scratch)[ROW]) {
        const int lane = threadIdx.x % 32;
        q_shared = scratch;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = lane / 4 + h * 8, row = first_row + r, token = row / group;
            const bool on = token < item.query_len;
            const int position = item.context_len - item.query_len + token;
            first_seen[h] = ::max(0, position - window + 1);
            num_seen[h] = on ? position + 1 - first_seen[h] : 0;
            const T* at = queries + (size_t)(item.query_begin + token) * q_stride + row % group * D;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                const int c = n * 8 + lane % 4 * 2;
                const u32 pair = on ? *reinterpret_cast<const u32*>(at + c) : 0u;
                if constexpr (RESIDENT) q[n / 2][h + n % 2 * 2] = pair;
                else *reinterpret_cast<u32*>(&scratch[r][c]) = pair;
            }
        }
    }

    __device__ __forceinline__ void query_fragment(u32 (&a)[4], int k) const {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q[k][i];
        } else {
            const int lane = threadIdx.x % 32;
            load_matrices(a, &q_shared[lane % 16][k * 16 + lane / 16 * 8]);
        }
    }

    // Scores of the keys token..token + 31, then weights in their place; rescales what was summed before.
    __device__ __forceinline__ void weigh(float (&s)[4][4], const T (*keys)[ROW], int token, float scale_log2, float soft_cap) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            u32 a[4];
            query_fragment(a, k);
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                u32 b[4];
                load_matrices(b, &keys[j * 8 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]);
                const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
                mma<T>(s[j], a, left, s[j]);
                mma<T>(s[j + 1], a, right, s[j + 1]);
            }
        }
        if (soft_cap > 0.f)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[j][i] = capped_score(__fmul_rn(s[j][i], scale_log2), soft_cap);
        const float scale = soft_cap > 0.f ? 1.f : scale_log2;
        float peak[2] = {max[0], max[1]}, factor[2];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i >> 1, key = token + j * 8 + lane % 4 * 2 + (i & 1);
                const bool on = static_cast<unsigned>(key - first_seen[h]) < num_seen[h];
                s[j][i] = on ? __fmul_rn(s[j][i], scale) : negative_infinity();
                peak[h] = fmaxf(peak[h], s[j][i]);
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            peak[h] = fmaxf(peak[h], __shfl_xor_sync(kFullWarp, peak[h], 1));
            peak[h] = fmaxf(peak[h], __shfl_xor_sync(kFullWarp, peak[h], 2));
            factor[h] = max[h] == negative_infinity() ? 0.f : exp2_fast(max[h] - peak[h]);
            max[h] = peak[h];
            sum[h] = __fmul_rn(sum[h], factor[h]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[j][i] = s[j][i] == negative_infinity() ? 0.f : exp2_fast(s[j][i] - max[i >> 1]);
                sum[i >> 1] = __fadd_rn(sum[i >> 1], s[j][i]);
            }
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[j][i] = __fmul_rn(out[j][i], factor[i >> 1]);
    }

    // Add the values of the same keys by their weights.
    __device__ __forceinline__ void add(const float (&p)[4][4], const T (*values)[ROW]) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int t = 0; t < 4; t += 2) {
            const u32 a[4] = {pack<T>(p[t][0], p[t][1]), pack<T>(p[t][2], p[t][3]), pack<T>(p[t + 1][0], p[t + 1][1]),
                              pack<T>(p[t + 1][2], p[t + 1][3])};
#pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                u32 b[4];
                load_matrices_transposed(b, &values[t * 8 + lane / 8 % 2 * 8 + lane % 8][(j + lane / 16) * 8]);
                const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
                mma<T>(out[j], a, left, out[j]);
                mma<T>(out[j + 1], a, right, out[j + 1]);
            }
        }
    }

    // Sums over the four lanes of a row: the split is complete.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
            sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
        }
    }

    // Call f(row in the tile, column, index of the pair) for each pair of columns of the rows that exist.
    template <typename F> __device__ __forceinline__ void for_each_pair(F f) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (num_seen[h])
#pragma unroll
                for (int j = 0; j < D / 8; ++j) f(lane / 4 + h * 8, j * 8 + lane % 4 * 2, h, j);
    }
};

// A block's shared memory.
template <typename T, int D, int WARPS> struct Shared {
    static constexpr int STAGE = WARPS > 1 && D <= 128 ? 64 : 32, ROW = D + 8;
    T keys[2][STAGE][ROW], values[2][STAGE][ROW];
    T queries[RowTile<T, D>::RESIDENT ? 1 : WARPS * 16][ROW];  // scratch of RowTile
    float total[WARPS][D / 8][4][32];  // splits folded so far; each thread reads and writes its own
};

template <int WARPS> __device__ __forceinline__ void sync_block() {
    if constexpr (WARPS > 1) __syncthreads();
    else __syncwarp();
}

template <typename T, int D, int BLOCK, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1)
paged_attention(const T* __restrict__ q, const T* __restrict__ k_cache, const T* __restrict__ v_cache,
                const int* __restrict__ block_table, const AttentionItem* __restrict__ items, const int* __restrict__ count,
                T* __restrict__ out, float* __restrict__ partial_out, float2* __restrict__ partial_stats, int kv_heads,
                int group, int max_blocks, int q_stride, int window, float scale_log2, float soft_cap) {
    constexpr int STAGE = Shared<T, D, WARPS>::STAGE;
    static_assert(D % 16 == 0 && STAGE % BLOCK == 0 && kSplit % STAGE == 0, "");
    extern __shared__ __align__(16) unsigned char memory[];
    auto& shared = *reinterpret_cast<Shared<T, D, WARPS>*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile_row = warp * 16;
    auto& total = shared.total[warp];
    auto* scratch = shared.queries + (RowTile<T, D>::RESIDENT ? 0 : tile_row);

    RowTile<T, D> rows;
    for (int work = blockIdx.x; work < *count * kv_heads; work += gridDim.x) {
        const AttentionItem item = items[work / kv_heads];
        const int head = work % kv_heads, first_row = item.first_row + tile_row;
        const int* blocks = block_table + (size_t)item.table_row * max_blocks;
        const TokenRange range = visible_tokens(item, item.first_row, WARPS * 16, group, window);
        const TokenRange own = visible_tokens(item, first_row, 16, group, window);
        float total_max[2] = {negative_infinity(), negative_infinity()}, total_sum[2] = {0.f, 0.f};
        rows.load(q + (size_t)head * group * D, item, first_row, group, window, q_stride, scratch);
        rows.clear();

        auto fetch = [&](int stage, int token) {
            fetch_tokens<D, BLOCK, WARPS * 32>(shared.keys[stage], shared.values[stage], token, range, k_cache, v_cache,
                                               blocks, kv_heads, head);
        };
        const int begin = range.begin / STAGE * STAGE;
        fetch(0, begin);
        commit_copies();
        int stage = 0;
        for (int token = begin; token < range.end; token += STAGE, stage ^= 1) {
            const int next = token + STAGE;
            if (next < range.end) fetch(stage ^ 1, next);
            commit_copies();
            wait_for_copies<1>();
            sync_block<WARPS>();  // every thread's copies of this stage have landed
#pragma unroll 1
            for (int step = 0; step < STAGE; step += kStep) {
                if (token + step >= own.end || token + step + kStep <= own.begin) continue;  // for the whole warp
                float s[4][4] = {};
                rows.weigh(s, shared.keys[stage] + step, token + step, scale_log2, soft_cap);
                rows.add(s, shared.values[stage] + step);
            }
            sync_block<WARPS>();  // before the next fetch overwrites this stage
            if (next % kSplit != 0 && next < range.end) continue;

            rows.finish();
            if (item.partial >= 0) {
                rows.for_each_pair([&](int r, int c, int h, int j) {
                    const size_t at = (size_t)(item.partial + tile_row + r) * kv_heads + head;
                    *reinterpret_cast<float2*>(partial_out + at * D + c) = {rows.out[j][2 * h], rows.out[j][2 * h + 1]};
                    if (c == 0) partial_stats[at] = {rows.max[h], rows.sum[h]};
                });
                continue;
            }
            const bool first = token / kSplit == begin / kSplit, last = next >= range.end;
            FoldFactors f[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) f[h] = fold_weights(total_max[h], total_sum[h], rows.max[h], rows.sum[h]);
            auto folded = [&](int j, int i) {
                return fold(first ? 0.f : total[j][i][lane], rows.out[j][i], f[i >> 1]);
            };
            if (!last) {
#pragma unroll
                for (int j = 0; j < D / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[j][i][lane] = folded(j, i);
                rows.clear();
                continue;
            }
            const float scale[2] = {inverse_sum(total_sum[0]), inverse_sum(total_sum[1])};
            rows.for_each_pair([&](int r, int c, int h, int j) {
                const int row = first_row + r, token_of_row = item.query_begin + row / group;
                T* at = out + ((size_t)token_of_row * kv_heads * group + head * group + row % group) * D + c;
                *reinterpret_cast<u32*>(at) =
                    pack<T>(__fmul_rn(folded(j, 2 * h), scale[h]), __fmul_rn(folded(j, 2 * h + 1), scale[h]));
            });
        }
    }
}
