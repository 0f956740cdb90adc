// Draws a token from every row of logits by the rule of gpu/backends/sampling.py.
//
//   logits T [rows, vocab]; processed float [processed_rows, vocab], see process.cu; processed_index int [rows]: the
//   processed row that is drawn from, -1 to draw from the logits themselves
//   temperature, top_p, min_p, typical_p float [rows]; top_k int [rows]; seed, position 64 bit [rows]; by_rejection,
//   want_logprob byte [rows]; draft_ids int [rows]: tried first where by_rejection, outside the vocabulary for none
//   token_ids int [rows], logprobs float [rows], failed int [rows]
//
// A row with a negative position is padding, as in a recorded step that has fewer rows than room: it gets 0, and its
// logits are not read. Everything that changes from step to step is read from device memory.
//
// Grid (rows); the whole block walks the row as often as its parameters need: twice for greedy, once more for the log
// probability, three times each for top-k and top-p, five times for typical-p, once for the draw, once more for the
// probability of a draft. A row is read from memory once and then from cache.
//
// A truncation is a threshold on the logit, found by a radix search of three levels. Masses are added as integers of 42
// bits, so no order of addition can change a result; they lie in three words of 14 bits, because shared memory adds 32
// bits at once but 64 only in a loop. That allows vocabularies up to 2^18. Ids that cannot win even with the greatest
// noise get none.
#include "device.cuh"
#include "philox.cuh"
#include "row.cuh"

constexpr float kGreedyTemperature = 1e-5f;
constexpr float kLeast = -3.402823466e38f;                    // everything but -inf
constexpr float kNoiseAtMost = 17.0f, kNoiseAtLeast = -3.0f;  // of 24-bit uniforms: 16.7 and -2.9
constexpr int kLevels = 3, kBins = 2048, kWords = 3, kWordBits = 14;
constexpr int kNoDraft = -1, kExact = -2;
constexpr float kFullMass = 0x1.fffffep41f;  // the greatest below 2^42

struct Scratch {
    Partials partials;
    unsigned bins[kWords][kBins];
    unsigned digit;
    Key above;
    double target;
    int draft;  // to be accepted by rejection, kNoDraft where there is none, or kExact; a register more would spill
};

// The logits that a token is drawn from.
struct Range {
    float least, greatest;
};

struct Parameters {
    float temperature, top_p, min_p, typical_p;
    int top_k;
    unsigned long long seed, position;
};

__device__ __forceinline__ void add_to_bin(Scratch& scratch, unsigned bin, Key weight) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const unsigned part = static_cast<unsigned>(weight >> w * kWordBits) & ((1u << kWordBits) - 1);
        if (part) atomicAdd(&scratch.bins[w][bin], part);
    }
}

__device__ __forceinline__ Key bin_weight(const Scratch& scratch, int bin) {
    Key weight = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) weight += static_cast<Key>(scratch.bins[w][bin]) << w * kWordBits;
    return weight;
}

// By the first warp: the greatest bin at which the weight from above reaches the target, else the least with any weight.
__device__ void choose_bin(Scratch& scratch, bool is_first, double count, double share) {
    constexpr int kPerLane = kBins / 32;
    const int lane = threadIdx.x, top = kBins - 1 - lane * kPerLane;
    Key own = 0;
    for (int i = 0; i < kPerLane; ++i) own += bin_weight(scratch, top - i);
    Key before = is_first ? 0 : scratch.above, reached = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const Key left = __shfl_up_sync(kFullWarp, reached, distance);
        if (lane >= distance) reached += left;
    }
    const double total = static_cast<double>(__shfl_sync(kFullWarp, reached, 31));
    const double target = is_first ? count + share * total : scratch.target;
    const bool reaches = own && static_cast<double>(before + reached) >= target;
    const unsigned some = __ballot_sync(kFullWarp, own != 0), enough = __ballot_sync(kFullWarp, reaches);
    __syncwarp();  // before one lane writes what all have read
    if (lane != (enough ? __ffs(enough) - 1 : 31 - __clz(some))) return;
    before += reached - own;
    Key above = before;
    int chosen = top;
    for (int i = 0; i < kPerLane; ++i) {
        const Key weight = bin_weight(scratch, top - i);
        if (!weight) continue;
        above = before;
        chosen = top - i;
        before += weight;
        if (static_cast<double>(before) >= target) break;
    }
    scratch.digit = chosen;
    scratch.above = above;
    scratch.target = target;
}

// The greatest v such that {value(x) >= v} has the weight count + share * (weight of all), among x >= least.
template <typename T, typename Value, typename Weigh>
__device__ float threshold(const Row<T>& row, float least, double count, double share, Value value, Weigh weigh,
                           Scratch& scratch) {
    unsigned prefix = 0;
    int shift = 32;
    for (int level = 0; level < kLevels; ++level) {
        const int bits = level < kLevels - 1 ? 11 : 10;
        shift -= bits;
        for (int i = threadIdx.x; i < kWords * kBins; i += blockDim.x) scratch.bins[i / kBins][i % kBins] = 0;
        __syncthreads();
        for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
            const float x = row(id);
            const unsigned key = order_key(value(x));
            const bool inside = level == 0 || key >> (shift + bits) == prefix;
            if (x >= least && inside) add_to_bin(scratch, key >> shift & ((1u << bits) - 1), weigh(x));
        }
        __syncthreads();
        if (threadIdx.x < 32) choose_bin(scratch, level == 0, count, share);
        __syncthreads();
        prefix = prefix << bits | scratch.digit;
    }
    return key_value(prefix);
}

// What typical-p (Meister et al., 2022) keeps of the logits from `least` on: those at most so far from the mean of the
// scaled logits, which is a range.
template <typename T>
__device__ Range typical_range(const Row<T>& row, float least, float peak, const Parameters& p, Scratch& scratch) {
    auto scaled = [&](float x) { return (x - peak) / p.temperature; };
    double mass = 0.0, moment = 0.0;
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        const float x = row(id), m = x >= least ? expf(scaled(x)) : 0.0f;
        mass += m;
        if (m > 0.0f) moment += static_cast<double>(m) * scaled(x);
    }
    mass = block_reduce(mass, scratch.partials.doubles, Sum());
    const float mean = static_cast<float>(block_reduce(moment, scratch.partials.doubles, Sum()) / mass);
    auto typicality = [&](float x) { return -fabsf(scaled(x) - mean); };
    auto weigh = [&](float x) { return static_cast<Key>(expf(scaled(x)) * kFullMass); };
    const float limit = threshold(row, least, 0.0, p.typical_p, typicality, weigh, scratch);
    float low = negative_infinity(), high = negative_infinity();  // of -x and of x
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        const float x = row(id);
        if (!(x >= least && typicality(x) >= limit)) continue;
        low = Max()(low, -x);
        high = Max()(high, x);
    }
    low = block_reduce(low, scratch.partials.floats, Max());
    return {-low, block_reduce(high, scratch.partials.floats, Max())};
}

// max(least, peak + temperature * ln(min_p)), rounded up so that no lesser logit is kept.
__device__ float min_p_bound(float least, float peak, float temperature, float min_p) {
    const double bound = peak + static_cast<double>(temperature) * log(static_cast<double>(min_p));
    float rounded = static_cast<float>(bound);
    if (rounded < bound) rounded = nextafterf(rounded, -negative_infinity());
    return rounded > least ? rounded : least;
}

// Whether a draft, which is a point, is accepted: with its share of the masses within a range.
template <typename T, typename Mass>
__device__ bool accepts(const Row<T>& row, const Range& range, const Parameters& p, Mass mass, Scratch& scratch) {
    auto kept_mass = [&](float x) { return x >= range.least && x <= range.greatest ? mass(x) : Key(0); };
    Key total = 0;
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) total += kept_mass(row(id));
    total = block_reduce(total, scratch.partials.keys, Sum());
    const double share = static_cast<double>(kept_mass(row(scratch.draft)));
    return uniform_of(p.seed, p.position, kAcceptance) * static_cast<double>(total) < share;
}

// Gumbel-max over the logits within a range, without the draft.
template <typename T>
__device__ int draw(const Row<T>& row, float peak, const Range& range, const Parameters& p, Scratch& scratch) {
    Key best = 0;
    float bound = scratch.draft < 0 ? (range.greatest - peak) / p.temperature + kNoiseAtLeast : kLeast;  // of the best
    const int counters = (row.vocab + kNoiseIds - 1) / kNoiseIds * kNoiseCounters;
    for (int index = threadIdx.x; index < counters; index += blockDim.x) {
        float scaled[kNoiseWords], noise[kNoiseWords];
        bool kept[kNoiseWords], any = false;
#pragma unroll
        for (int w = 0; w < kNoiseWords; ++w) {
            const int id = noise_id(index, w);
            const float x = id < row.vocab ? row(id) : negative_infinity();
            scaled[w] = (x - peak) / p.temperature;
            kept[w] = x >= range.least && x <= range.greatest && id != scratch.draft && scaled[w] + kNoiseAtMost >= bound;
            any |= kept[w];
        }
        if (!any) continue;
        gumbel_noise(p.seed, p.position, scratch.draft == kExact ? kSampling : kResidual, index, noise);
#pragma unroll
        for (int w = 0; w < kNoiseWords; ++w) {
            if (!kept[w]) continue;
            const float score = scaled[w] + noise[w];
            best = Max()(best, ranked(score, noise_id(index, w)));
            bound = Max()(bound, score);
        }
    }
    return ranked_id(block_reduce(best, scratch.partials.keys, Max()));
}

// Draw from a row that has at least one id above -inf.
template <typename T>
__device__ int draw_token(const Row<T>& row, Key peak, const Parameters& p, Scratch& scratch) {
    if (p.temperature < kGreedyTemperature) return ranked_id(peak);
    const float greatest = ranked_value(peak);
    auto logit = [](float x) { return x; };
    auto one = [](float) { return Key(1); };
    auto mass = [&](float x) { return static_cast<Key>(expf((x - greatest) / p.temperature) * kFullMass); };
    float least = kLeast;
    if (p.top_k > 0) least = threshold(row, least, p.top_k, 0.0, logit, one, scratch);
    if (p.top_p < 1.0f) least = threshold(row, least, 0.0, p.top_p, logit, mass, scratch);
    if (p.min_p > 0.0f) least = min_p_bound(least, greatest, p.temperature, p.min_p);
    Range range = {least, greatest};
    if (p.typical_p < 1.0f) range = typical_range(row, least, greatest, p, scratch);
    if (scratch.draft >= 0 && accepts(row, range, p, mass, scratch)) return scratch.draft;
    return draw(row, greatest, range, p, scratch);
}

template <typename T>
__global__ void __launch_bounds__(1024)
sample(const T* __restrict__ logits, const float* __restrict__ processed, const int* __restrict__ processed_index,
       const float* __restrict__ temperature, const int* __restrict__ top_k, const float* __restrict__ top_p,
       const float* __restrict__ min_p, const float* __restrict__ typical_p,
       const unsigned long long* __restrict__ seed, const long long* __restrict__ position,
       const unsigned char* __restrict__ by_rejection, const int* __restrict__ draft_ids,
       const unsigned char* __restrict__ want_logprob, int* __restrict__ token_ids, float* __restrict__ logprobs,
       int* __restrict__ failed, int vocab) {
    __shared__ Scratch scratch;
    const int i = blockIdx.x, index = processed_index[i];
    if (position[i] < 0) {
        if (threadIdx.x == 0) token_ids[i] = failed[i] = 0, logprobs[i] = 0.0f;
        return;
    }
    const Row<T> row = {logits + static_cast<size_t>(i) * vocab, vocab};
    const Row<float> changed = {processed + static_cast<size_t>(index < 0 ? 0 : index) * vocab, vocab};

    if (threadIdx.x == 0) {
        const int draft = draft_ids[i];
        scratch.draft = !by_rejection[i] ? kExact : draft >= 0 && draft < vocab ? draft : kNoDraft;
    }
    const bool is_finite = all_finite(row);
    const Key model_peak = peak_of(row, scratch.partials);
    const Key peak = index < 0 ? model_peak : peak_of(changed, scratch.partials);
    const bool can_sample = is_finite && ranked_value(peak) > negative_infinity();
    int token = 0;
    float logprob = 0.0f;
    if (can_sample) {
        const Parameters p = {temperature[i], top_p[i], min_p[i], typical_p[i], top_k[i], seed[i],
                              static_cast<unsigned long long>(position[i])};
        token = index < 0 ? draw_token(row, peak, p, scratch) : draw_token(changed, peak, p, scratch);
        if (want_logprob[i]) {
            const float greatest = ranked_value(model_peak);
            logprob = (row(token) - greatest) - log_mass(row, greatest, scratch.partials);
        }
    }
    if (threadIdx.x == 0) {
        token_ids[i] = token;
        logprobs[i] = logprob;
        failed[i] = !can_sample;
    }
}
