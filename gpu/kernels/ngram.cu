// Token histories in device memory, and drafts from them: the tokens that stood behind the last place where the end of
// the history stood before (prompt lookup; Saxena, 2023), by the rule of gpu/speculative/ngram_drafter.pyx.
//
//   history int [num_rows, max_model_len], lengths int [num_rows]: tokens of each row, kUnseen where none was observed.
//   A length of 0 makes a row new
//   rows int [sequences]: where each sequence stands, no two in the same row
//
//   ngram_observe  token_ids int, offsets int [sequences + 1], positions int [sequences]: sequence b goes on with the tokens
//             offsets[b]:offsets[b + 1] from positions[b] on. What is known already stays as it is
//   ngram_propose  limits int [sequences]; draft_ids int [sequences, max_draft_tokens], num_drafts, confidences int
//             [sequences]: at most limits[b] drafts, and how many tokens the match has. Behind the last draft nothing is
//             written
//
// Grid (sequences). The search walks the history once, from its end, a tile at a time, and ends with the first tile that
// holds a match as long as there can be: what lies before is older. Tried: nothing else; a hash table of every n-gram,
// which the host has, would be 4 times the memory of the history and a chain of dependent loads for every new token.
#include "order.cuh"
#include "reduce.cuh"

constexpr int kShortest = 2, kLongest = 5;  // tokens of a match
constexpr int kUnseen = -1;
constexpr int kTileOfThread = 4;  // ends of possible matches that a thread looks at between two barriers

__global__ void __launch_bounds__(1024)
ngram_observe(const int* __restrict__ rows, const int* __restrict__ positions, const int* __restrict__ offsets,
        const int* __restrict__ token_ids, int* __restrict__ history, int* __restrict__ lengths, int max_model_len,
        int vocab) {
    const int b = blockIdx.x, row = rows[b], start = positions[b], first = offsets[b], count = offsets[b + 1] - first;
    const int known = lengths[row], end = count > 0 ? min(start + count, max_model_len) : 0;
    int* own = history + static_cast<size_t>(row) * max_model_len;
    for (int i = known + threadIdx.x; i < end; i += blockDim.x) {
        const int token = i < start ? kUnseen : token_ids[first + i - start];
        own[i] = token >= 0 && token < vocab ? token : kUnseen;
    }
    __syncthreads();  // all have read the length
    if (threadIdx.x == 0 && end > known) lengths[row] = end;
}

// The last tokens of a history, the newest first, as far as all of them were seen.
struct Suffix {
    int token_ids[kLongest], length;

    __device__ __forceinline__ Suffix(const int* __restrict__ own, int num_tokens) : length(0) {
        bool seen = true;
#pragma unroll
        for (int i = 0; i < kLongest; ++i) {
            token_ids[i] = i < num_tokens ? own[num_tokens - 1 - i] : kUnseen;
            seen = seen && token_ids[i] != kUnseen;
            length += seen;
        }
    }

    // How much of it stands before position `end`.
    __device__ __forceinline__ int match_length(const int* __restrict__ own, int end) const {
        int matched = 0;
#pragma unroll
        for (int i = 0; i < kLongest; ++i)
            if (matched == i && i < length && i < end && own[end - 1 - i] == token_ids[i]) ++matched;
        return matched;
    }
};

// (length, end) of the longest match, the last of equals; 0 for none. For the whole block.
__device__ Key find_match(const int* __restrict__ own, int num_tokens, const Suffix& suffix, Key* partial) {
    Key best = 0;
    const int tile = kTileOfThread * blockDim.x;
    for (int last = num_tokens - 1; last >= kShortest; last -= tile) {
#pragma unroll
        for (int i = 0; i < kTileOfThread; ++i) {
            const int end = last - static_cast<int>(i * blockDim.x + threadIdx.x);
            const int length = end >= kShortest ? suffix.match_length(own, end) : 0;
            if (length >= kShortest) best = Max()(best, static_cast<Key>(length) << 32 | end);
        }
        if (__syncthreads_or(static_cast<int>(best >> 32) == suffix.length)) break;
    }
    return block_reduce(best, partial, Max());
}

// By one warp: write what stands from `end` on, again and again where the history ends; returns how many tokens, at
// most `limit`, which is positive.
__device__ int copy_drafts(const int* __restrict__ own, int num_tokens, int end, int limit, int* __restrict__ drafts) {
    const int lane = threadIdx.x % 32;
    for (int start = 0; start < limit; start += 32) {
        const int i = start + lane;
        const int token = i < limit ? own[end + i % (num_tokens - end)] : kUnseen;
        const unsigned unseen = __ballot_sync(kFullWarp, token == kUnseen);
        const int count = unseen ? __ffs(unseen) - 1 : 32;
        if (lane < count) drafts[i] = token;
        if (count < 32) return start + count;
    }
    return limit;
}

__global__ void __launch_bounds__(1024)
ngram_propose(const int* __restrict__ history, const int* __restrict__ lengths, const int* __restrict__ rows,
        const int* __restrict__ limits, int* __restrict__ draft_ids, int* __restrict__ num_drafts,
        int* __restrict__ confidences, int max_model_len, int max_draft_tokens) {
    __shared__ Key partial[kMaxWarps];
    const int b = blockIdx.x, num_tokens = lengths[rows[b]], limit = min(limits[b], max_draft_tokens);
    const int* own = history + static_cast<size_t>(rows[b]) * max_model_len;
    const Suffix suffix(own, num_tokens);
    const Key match = suffix.length >= kShortest && limit > 0 ? find_match(own, num_tokens, suffix, partial) : 0;
    if (threadIdx.x >= 32) return;
    int* drafts = draft_ids + static_cast<size_t>(b) * max_draft_tokens;
    const int count = match ? copy_drafts(own, num_tokens, static_cast<int>(match), limit, drafts) : 0;
    if (threadIdx.x) return;
    num_drafts[b] = count;
    confidences[b] = count ? static_cast<int>(match >> 32) : 0;
}
