// Accepts drafts while they equal the tokens drawn in their place, and puts what comes out of all sequences side by side,
// by the rule of gpu/backends/acceptance.py.
//
//   token_ids int, logprobs float, failed int [rows]: drawn from every row of logits; input_ids int [rows]: the token
//   that the row follows, so the draft checked by row i is input_ids[i + 1]
//   logits_offsets int [sequences + 1]: rows of sequence b are logits_offsets[b]:logits_offsets[b + 1]
//   token_offsets int [sequences + 1]: tokens that come out of b are token_offsets[b]:token_offsets[b + 1] of
//   logits_rows int, accepted_ids int, accepted_logprobs float [rows]; what lies behind the last is not written
//   sequence_failed int [sequences]: the first row cannot be sampled
//   batch_rows int [sequences], last_tokens int [num_rows], or both null: the last token that comes out of b becomes
//   last_tokens[batch_rows[b]], for a step that was planned before anybody has seen it
//
// One block, a warp for each sequence and a lane for each row. Where a sequence's tokens go depends on all before it, so
// the warps meet once for every kMaxWarps sequences. Tried: nothing else; several blocks would have to wait for each
// other, and the whole input is a few kilobytes.
#include "reduce.cuh"

// Rows that come out of a sequence: up to the first whose token is not the next row's input, which comes out itself
// unless it failed.
__device__ int run_length(const int* __restrict__ token_ids, const int* __restrict__ failed,
                          const int* __restrict__ input_ids, int first, int end) {
    const int lane = threadIdx.x % 32;
    for (int start = first; start < end; start += 32) {
        const int i = start + lane;
        const bool fails = i < end && failed[i];
        const bool stops = i >= end - 1 || fails || token_ids[i] != input_ids[i + 1];
        const unsigned stopped = __ballot_sync(kFullWarp, stops), failing = __ballot_sync(kFullWarp, fails);
        if (!stopped) continue;
        const int last = __ffs(stopped) - 1;
        return start + last - first + !(failing >> last & 1);
    }
    return 0;
}

__global__ void __launch_bounds__(1024)
accept(const int* __restrict__ token_ids, const float* __restrict__ logprobs, const int* __restrict__ failed,
       const int* __restrict__ input_ids, const int* __restrict__ logits_offsets, int* __restrict__ token_offsets,
       int* __restrict__ logits_rows, int* __restrict__ accepted_ids, float* __restrict__ accepted_logprobs,
       int* __restrict__ sequence_failed, const int* __restrict__ batch_rows, int* __restrict__ last_tokens,
       int sequences) {
    __shared__ int counts[kMaxWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (threadIdx.x == 0) token_offsets[0] = 0;
    int before = 0;  // tokens of the sequences of earlier rounds
    for (int round = 0; round < sequences; round += warps) {
        const int b = round + warp;
        const int first = b < sequences ? logits_offsets[b] : 0, end = b < sequences ? logits_offsets[b + 1] : 0;
        const int count = run_length(token_ids, failed, input_ids, first, end);
        if (lane == 0) counts[warp] = count;
        __syncthreads();
        int reached = lane < warps ? counts[lane] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int left = __shfl_up_sync(kFullWarp, reached, distance);
            if (lane >= distance) reached += left;
        }
        const int at = before + __shfl_sync(kFullWarp, reached, warp) - count;
        before += __shfl_sync(kFullWarp, reached, 31);
        for (int i = lane; i < count; i += 32) {
            logits_rows[at + i] = first + i;
            accepted_ids[at + i] = token_ids[first + i];
            accepted_logprobs[at + i] = logprobs[first + i];
        }
        if (lane == 0 && b < sequences) {
            token_offsets[b + 1] = at + count;
            sequence_failed[b] = first < end && failed[first];
            if (last_tokens && count) last_tokens[batch_rows[b]] = token_ids[first + count - 1];
        }
        __syncthreads();
    }
}
