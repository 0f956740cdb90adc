// Draws a token for every row, drafts being accepted one by one or as a block, by the rules of gpu/backends/rejection.py.
//
//   p float [rows, vocab]: what the model draws from; q float [rows, vocab]: what each draft was drawn from, null for
//   drafts that are points
//   draft_ids int [rows]: -1 for a row without a draft; seed, position 64 bit [rows]
//   token_ids int, failed int [rows]: the draft where it is accepted, otherwise another token
//   offsets int [sequences + 1]: rows of sequence b are offsets[b]:offsets[b + 1], a block
//   stands int [rows]: the run of the drafts before the row may be accepted; can_draw int [rows]
//
// reject: grid (rows). The thread block walks the row once to check it, and once more where the draft is rejected or
// there is none.
// weigh_blocks, then draw_blocks: grid (rows that a sequence has at most, sequences). The first walks every row once, the
// second one row of each sequence. The longest run is known when all rows of the sequence are weighed, so it takes two
// launches. Masses are summed in double, in an order that the size of the thread block fixes.
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

// The joint ratio of the drafts before the row `end` of a sequence: J = min(J p(x) / q(x), 1), draft by draft, from 1. By
// whole warps; lanes load what one after the other multiplies.
__device__ double joint_ratio(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
                              int first, int end, int vocab) {
    double joint = 1.0;
    for (int start = first; start < end; start += 32) {
        float model = 0.0f, proposed = 0.0f;
        if (start + static_cast<int>(threadIdx.x % 32) < end) {
            const Proposal row(p, q, draft_ids, start + threadIdx.x % 32, vocab);
            if (row.draft >= 0) model = row.p[row.draft], proposed = row.proposed(row.draft);
        }
        for (int lane = 0; lane < 32 && start + lane < end; ++lane) {
            const double reached = joint * __shfl_sync(kFullWarp, model, lane);
            const double bound = __shfl_sync(kFullWarp, proposed, lane);
            joint = reached < bound ? reached / bound : reached > 0.0;
        }
    }
    return joint;
}

__global__ void __launch_bounds__(1024, 1)
weigh_blocks(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
             const int* __restrict__ offsets, const unsigned long long* __restrict__ seeds,
             const long long* __restrict__ positions, int* __restrict__ stands, int* __restrict__ can_draw, int vocab) {
    __shared__ double partial[kMaxWarps];
    const int first = offsets[blockIdx.y], i = first + blockIdx.x;
    if (i >= offsets[blockIdx.y + 1]) return;
    const Proposal row(p, q, draft_ids, i, vocab);
    const double joint = joint_ratio(p, q, draft_ids, first, i, vocab);

    bool bad = false, some = false;
    double mass = 0.0;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        const float own = row.p[id];
        bad |= !(own >= 0.0f && own < -negative_infinity());
        some |= own > 0.0f;
        if (row.draft >= 0) mass += fmax(joint * own - row.proposed(id), 0.0);
    }
    const bool is_bad = __syncthreads_or(bad), has_mass = __syncthreads_or(some);
    mass = block_reduce(mass, partial, Sum());
    if (threadIdx.x) return;
    can_draw[i] = !is_bad && has_mass;
    const bool is_last = !can_draw[i] || row.draft < 0;
    const double share = is_last ? joint : mass, whole = is_last ? 1.0 : mass + (1.0 - joint);
    stands[i] = i == first || joint == 1.0 ||
                uniform_of(seeds[first], positions[first], kBlockAcceptance, i - first - 1) * whole < share;
}

// By whole warps: the row behind the longest run that stands, among those up to the first row that ends the block.
__device__ int end_of_run(const int* __restrict__ stands, const int* __restrict__ can_draw,
                          const int* __restrict__ draft_ids, int first, int end, int vocab) {
    int found = first;
    for (int start = first; start < end; start += 32) {
        const int i = start + threadIdx.x % 32;
        const bool is_last = i >= end || !can_draw[i] || draft_ids[i] < 0 || draft_ids[i] >= vocab;
        const unsigned last = __ballot_sync(kFullWarp, is_last);
        const unsigned looked_at = last ? (last & -last) * 2 - 1 : kFullWarp;
        const unsigned standing = __ballot_sync(kFullWarp, i < end && stands[i]) & looked_at;
        if (standing) found = start + 31 - __clz(standing);
        if (last) break;
    }
    return found;
}

__global__ void __launch_bounds__(1024, 1)
draw_blocks(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
            const int* __restrict__ offsets, const unsigned long long* __restrict__ seeds,
            const long long* __restrict__ positions, const int* __restrict__ stands, const int* __restrict__ can_draw,
            int* __restrict__ token_ids, int* __restrict__ failed, int vocab) {
    __shared__ Key partial[kMaxWarps];
    const int first = offsets[blockIdx.y], end = offsets[blockIdx.y + 1], i = first + blockIdx.x;
    if (i >= end) return;
    const Proposal row(p, q, draft_ids, i, vocab);
    const int last = end_of_run(stands, can_draw, draft_ids, first, end, vocab);
    const bool draws = i == last && can_draw[i];
    int token = i < last ? row.draft : 0;
    if (draws) {
        const unsigned long long seed = seeds[i], position = static_cast<unsigned long long>(positions[i]);
        Key best = 0;
        if (row.draft >= 0) {
            const double joint = joint_ratio(p, q, draft_ids, first, i, vocab);
            auto residual = [&](int id) {  // what is left of the rejected draft is rounding
                return id == row.draft ? 0.0f : static_cast<float>(joint * row.p[id] - row.proposed(id));
            };
            best = race(vocab, seed, position, residual, partial);
        }
        if (best == 0) best = race(vocab, seed, position, [&](int id) { return row.p[id]; }, partial);
        token = ranked_id(best);
    }
    if (threadIdx.x == 0) {
        token_ids[i] = token;
        failed[i] = i > last || (i == last && !draws);
    }
}
