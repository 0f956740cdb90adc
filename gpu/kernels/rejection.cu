// Draws a token for every row, drafts being accepted one by one or as a block, by the rules of gpu/backends/rejection.py.
//
//   p float [rows, vocab]: what the model draws from; q float [rows, vocab]: what each draft was drawn from, null for
//   drafts that are points
//   draft_ids int [rows]: -1 for a row without a draft; seed, position 64 bit [rows]
//   token_ids int, failed int [rows]: the draft where it is accepted, otherwise another token
//   offsets int [sequences + 1]: rows of sequence b are offsets[b]:offsets[b + 1]
//   is_end int [rows]: the drafts before the row may be accepted as a block that ends here
//
// reject: grid (rows). A thread block walks the row once to check it, and once more where the draft is rejected or there
// is none.
// weigh_blocks, then draw_blocks: grid (rows that a sequence has at most, sequences). The first walks every row once; the
// second again, but for accepted drafts. Which row ends the block is known when all rows of the sequence are weighed, so
// it takes two launches.
//
// A rejected draft is not drawn again, so the kernel `accept` finds the end of the run by comparing. Tried: nothing else.
#include "order.cuh"
#include "philox.cuh"
#include "reduce.cuh"

// The id drawn in proportion to weight(id), as a race of exponential variables; 0 where no weight is positive.
template <typename Weight>
__device__ Key race(int vocab, unsigned long long seed, unsigned long long position, Weight weight, Key* partial) {
    Key best = 0;
    const int counters = (vocab + kNoiseIds - 1) / kNoiseIds * kNoiseCounters;
    for (int index = threadIdx.x; index < counters; index += blockDim.x) {
        unsigned words[kNoiseWords] = {static_cast<unsigned>(index), static_cast<unsigned>(position),
                                       static_cast<unsigned>(position >> 32), kResidual};
        philox(words, static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
#pragma unroll
        for (int w = 0; w < kNoiseWords; ++w) {
            const int id = noise_id(index, w);
            const float mass = id < vocab ? weight(id) : 0.0f;
            const float uniform = static_cast<float>(words[w] >> 9 << 1 | 1u) * 0x1p-24f;  // exact, neither 0 nor 1
            if (mass > 0.0f) best = Max()(best, ranked(mass / -logf(uniform), id));
        }
    }
    return block_reduce(best, partial, Max());
}

// One row's distributions.
struct Proposal {
    const float *p, *q;
    int draft;

    __device__ __forceinline__ Proposal(const float* p, const float* q, const int* draft_ids, int row, int vocab)
        : p(p + static_cast<size_t>(row) * vocab),
          q(q ? q + static_cast<size_t>(row) * vocab : nullptr),
          draft(draft_ids[row] >= 0 && draft_ids[row] < vocab ? draft_ids[row] : -1) {}
    __device__ __forceinline__ float proposed(int id) const { return q ? q[id] : id == draft ? 1.0f : 0.0f; }
};

__global__ void __launch_bounds__(1024, 1)
reject(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
       const unsigned long long* __restrict__ seeds, const long long* __restrict__ positions,
       int* __restrict__ token_ids, int* __restrict__ failed, int vocab) {
    __shared__ Key partial[kMaxWarps];
    const int i = blockIdx.x;
    const unsigned long long seed = seeds[i], position = static_cast<unsigned long long>(positions[i]);
    const Proposal row(p, q, draft_ids, i, vocab);

    bool bad = false, some = false;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        bad |= !(row.p[id] >= 0.0f && row.p[id] < -negative_infinity());
        some |= row.p[id] > 0.0f;
    }
    const bool is_bad = __syncthreads_or(bad), has_mass = __syncthreads_or(some);
    const bool has_draft = row.draft >= 0, can_draw = !is_bad && has_mass;
    int token = 0;
    if (can_draw && has_draft && uniform_of(seed, position, kAcceptance) * row.proposed(row.draft) < row.p[row.draft]) {
        token = row.draft;
    } else if (can_draw) {
        Key best = 0;
        if (has_draft) best = race(vocab, seed, position, [&](int id) { return row.p[id] - row.proposed(id); }, partial);
        if (best == 0) best = race(vocab, seed, position, [&](int id) { return row.p[id]; }, partial);
        token = ranked_id(best);
    }
    if (threadIdx.x == 0) {
        token_ids[i] = token;
        failed[i] = !can_draw;
    }
}

// The weight of the block of drafts before the row `end` of a sequence: w = min(w p(x) / q(x), 1), draft by draft, from 1.
// By whole warps; lanes load what one after the other multiplies.
__device__ double block_weight(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
                               int first, int end, int vocab) {
    double weight = 1.0;
    for (int start = first; start < end; start += 32) {
        float model = 0.0f, proposed = 0.0f;
        if (start + static_cast<int>(threadIdx.x % 32) < end) {
            const Proposal row(p, q, draft_ids, start + threadIdx.x % 32, vocab);
            if (row.draft >= 0) model = row.p[row.draft], proposed = row.proposed(row.draft);
        }
        for (int lane = 0; lane < 32 && start + lane < end; ++lane) {
            const double mass = weight * __shfl_sync(kFullWarp, model, lane);
            const double bound = __shfl_sync(kFullWarp, proposed, lane);
            weight = mass < bound ? mass / bound : mass > 0.0;
        }
    }
    return weight;
}

__global__ void __launch_bounds__(1024, 1)
weigh_blocks(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
             const unsigned long long* __restrict__ seeds, const long long* __restrict__ positions,
             const int* __restrict__ offsets, int* __restrict__ is_end, int* __restrict__ failed, int vocab) {
    __shared__ double partial[kMaxWarps];
    const int first = offsets[blockIdx.y], i = first + blockIdx.x;
    if (i >= offsets[blockIdx.y + 1]) return;
    const Proposal row(p, q, draft_ids, i, vocab);
    const double weight = block_weight(p, q, draft_ids, first, i, vocab);

    bool bad = false, some = false;
    double residual = 0.0;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        const float own = row.p[id];
        bad |= !(own >= 0.0f && own < -negative_infinity());
        some |= own > 0.0f;
        if (row.draft >= 0) residual += fmax(weight * own - row.proposed(id), 0.0);
    }
    const bool can_draw = !__syncthreads_or(bad) & __syncthreads_or(some);
    residual = block_reduce(residual, partial, Sum());
    if (threadIdx.x) return;
    failed[i] = !can_draw;
    const bool goes_on = can_draw && row.draft >= 0;  // another draft might be accepted with those before it
    const double share = goes_on ? residual : weight, all = goes_on ? residual + (1.0 - weight) : 1.0;
    is_end[i] = i == first || uniform_of(seeds[i - 1], positions[i - 1], kAcceptance) * all < share;
}

// By whole warps: the row at which the block of accepted drafts ends, the last one that may be before a row that failed
// or has no draft, or that row.
__device__ int end_of_block(const int* __restrict__ is_end, const int* __restrict__ failed,
                            const int* __restrict__ draft_ids, int first, int end, int vocab) {
    int found = first;
    for (int start = first; start < end; start += 32) {
        const int i = start + threadIdx.x % 32;
        const bool stops = i >= end || failed[i] || draft_ids[i] < 0 || draft_ids[i] >= vocab;
        const unsigned stopped = __ballot_sync(kFullWarp, stops);
        const unsigned looked_at = stopped ? (stopped & -stopped) * 2 - 1 : kFullWarp;
        const unsigned may_end = __ballot_sync(kFullWarp, i < end && is_end[i]) & looked_at;
        if (may_end) found = start + 31 - __clz(may_end);
        if (stopped) break;
    }
    return found;
}

__global__ void __launch_bounds__(1024, 1)
draw_blocks(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
            const unsigned long long* __restrict__ seeds, const long long* __restrict__ positions,
            const int* __restrict__ offsets, const int* __restrict__ is_end, const int* __restrict__ failed,
            int* __restrict__ token_ids, int vocab) {
    __shared__ Key partial[kMaxWarps];
    const int first = offsets[blockIdx.y], end = offsets[blockIdx.y + 1], i = first + blockIdx.x;
    if (i >= end) return;
    const Proposal row(p, q, draft_ids, i, vocab);
    const int last = end_of_block(is_end, failed, draft_ids, first, end, vocab);
    int token = 0;
    if (i < last) {
        token = row.draft;
    } else if (!failed[i]) {
        const unsigned long long seed = seeds[i], position = static_cast<unsigned long long>(positions[i]);
        Key best = 0;
        if (i == last && row.draft >= 0) {
            const double weight = block_weight(p, q, draft_ids, first, i, vocab);
            auto residual = [&](int id) { return static_cast<float>(weight * row.p[id] - row.proposed(id)); };
            best = race(vocab, seed, position, residual, partial);
        }
        if (best == 0) best = race(vocab, seed, position, [&](int id) { return row.p[id]; }, partial);
        token = ranked_id(best);
    }
    if (threadIdx.x == 0) token_ids[i] = token;
}
