// Folds the partial results of a row's splits, in ascending order, into the attention output.
//
//   partial_out    float [partial rows, kv_heads, D]: weighted sums of values
//   partial_stats  float2 [partial rows, kv_heads]: (max, sum of weights), max in units of log2
//   items          MergeItem [count[0]]: one per query row of a group, for every KV head
//   out            [T, kv_heads * group * D]
//
// Grid: any number of blocks of WARPS warps; a warp folds one (row, KV head), lane l its columns l, l + 32, ...
// The loop over splits is a chain of one fused multiply-add a column; loads run ahead of it.
//
// Source: Dao et al., "Flash-Decoding" (2023); the order of the fold is ours, see attention.cuh.
#include "attention.cuh"

template <typename T, int D, int WARPS>
__global__ void __launch_bounds__(WARPS * 32)
merge_splits(const float* __restrict__ partial_out, const float2* __restrict__ partial_stats,
             const MergeItem* __restrict__ items, const int* __restrict__ count, T* __restrict__ out, int kv_heads, int group) {
    constexpr int COLUMNS = (D + 31) / 32;
    const int lane = threadIdx.x % 32, worker = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    for (int work = worker; work < *count * kv_heads; work += gridDim.x * WARPS) {
        const MergeItem item = items[work / kv_heads];
        const int head = work % kv_heads;
        float max = negative_infinity(), sum = 0.f, total[COLUMNS] = {};
#pragma unroll 4
        for (int s = 0; s < item.num_splits; ++s) {
            const size_t at = (size_t)(item.partial + s * item.stride) * kv_heads + head;
            const float2 stats = __ldg(partial_stats + at);
            const FoldFactors f = fold_weights(max, sum, stats.x, stats.y);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int d = j * 32 + lane;
                if (d < D) total[j] = fold(total[j], __ldg(partial_out + at * D + d), f);
            }
        }
        T* to = out + ((size_t)item.token * kv_heads * group + head * group + item.group_head) * D;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int d = j * 32 + lane;
            if (d < D) to[d] = from_float<T>(__fmul_rn(total[j], inverse_sum(sum)));
        }
    }
}
