// Draws a token for every row by rejection sampling of its draft, by the rule of gpu/backends/rejection.py.
//
//   p float [rows, vocab]: what the model draws from; q float [rows, vocab]: what each draft was drawn from, null for
//   drafts that are points
//   draft_ids int [rows]: -1 for a row without a draft; seed, position 64 bit [rows]
//   token_ids int, failed int [rows]: the draft where it is accepted, otherwise another token
//
// Grid (rows). The block walks the row once to check it, and once more where the draft is rejected or there is none. A
// rejected draft is never drawn again, so the kernel `accept` finds the end of the run by comparing. Tried: nothing else.
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

__global__ void __launch_bounds__(1024)
reject(const float* __restrict__ p, const float* __restrict__ q, const int* __restrict__ draft_ids,
       const unsigned long long* __restrict__ seeds, const long long* __restrict__ positions,
       int* __restrict__ token_ids, int* __restrict__ failed, int vocab) {
    __shared__ Key partial[kMaxWarps];
    const int i = blockIdx.x, draft = draft_ids[i];
    const unsigned long long seed = seeds[i], position = static_cast<unsigned long long>(positions[i]);
    const float* own = p + static_cast<size_t>(i) * vocab;
    const float* proposal = q ? q + static_cast<size_t>(i) * vocab : nullptr;
    auto proposed = [&](int id) { return proposal ? proposal[id] : id == draft ? 1.0f : 0.0f; };

    bool bad = false, some = false;
    for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
        bad |= !(own[id] >= 0.0f && own[id] < -negative_infinity());
        some |= own[id] > 0.0f;
    }
    const bool is_bad = __syncthreads_or(bad), has_mass = __syncthreads_or(some);
    const bool has_draft = draft >= 0 && draft < vocab, can_draw = !is_bad && has_mass;
    int token = 0;
    if (can_draw && has_draft && uniform_of(seed, position, kAcceptance) * proposed(draft) < own[draft]) {
        token = draft;
    } else if (can_draw) {
        Key best = 0;
        if (has_draft) best = race(vocab, seed, position, [&](int id) { return own[id] - proposed(id); }, partial);
        if (best == 0) best = race(vocab, seed, position, [&](int id) { return own[id]; }, partial);
        token = ranked_id(best);
    }
    if (threadIdx.x == 0) {
        token_ids[i] = token;
        failed[i] = !can_draw;
    }
}
