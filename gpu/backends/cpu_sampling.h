/* Drawing one token from one row of logits; the rule is written out in sampling.py.
 *
 * Truncation is a threshold on the raw logit, found exactly by a radix search, so equal logits are kept or dropped
 * together and no order of summation can separate them.
 */
#ifndef FOREWORD_CPU_SAMPLING_H
#define FOREWORD_CPU_SAMPLING_H

#include "simd.h"

enum {
    PHILOX_WORDS = 4,
    NOISE_COUNTERS = 16, /* of one group of ids */
    NOISE_IDS = PHILOX_WORDS * NOISE_COUNTERS,
    NOISE_PARTS = NOISE_COUNTERS / LANES,
    SCRATCH_ROWS = 4, /* the row, what is kept of it, and twice that to search in */
    RADIX_BITS = 11,
    RADIX_LEVELS = 3,
    BIN_COUNT = 512,
    BINS_PER_UNIT = 16,
    BIN_LANES = 4 /* lanes add up apart, so that an addition need not wait for the one before */
};

/* Parameters of every row; see SamplingBatch in sampling.py. */
typedef struct {
    const float *temperature;
    const int32_t *top_k;
    const float *top_p;
    const float *min_p;
    const float *typical_p;
    const float *repetition_penalty;
    const float *frequency_penalty;
    const float *presence_penalty;
    const uint64_t *seed;
    const int64_t *position;
    const int32_t *bias_offsets;
    const int32_t *bias_ids;
    const float *bias_values;
    const int32_t *bias_index;
    const int32_t *history_offsets;
    const int32_t *history_ids;
    const int32_t *history_counts;
    const int32_t *history_index;
    const uint32_t *mask_words; /* [masks, mask_width] */
    int64_t mask_width;
    const int32_t *mask_index;
    const int32_t *masked_ids; /* [rows, masked_width] */
    int64_t masked_width;
    const int32_t *num_masked;
    const uint8_t *by_rejection;
    const int32_t *draft_ids;
    const uint8_t *want_logprob;
} sampling_batch;

typedef struct {
    float temperature, top_p, min_p, typical_p;
    int32_t top_k;
    uint64_t seed, position;
    uint32_t purpose; /* of the noise */
} sampling_row;

static const float GREEDY_TEMPERATURE = 1e-5f; /* below it: the most probable token */

/* Purposes of random words; see rejection.py. */
enum { NOISE = 0, ACCEPTANCE = 1, RESIDUAL = 2 };

/* ---- noise ---------------------------------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., 2011) on LANES counters at once. */
INLINE void philox(words counter[PHILOX_WORDS], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        words low0, low1, high0, high1;
        for (int i = 0; i < LANES; i++) {
            uint64_t product0 = (uint64_t)0xD2511F53u * counter[0][i];
            uint64_t product1 = (uint64_t)0xCD9E8D57u * counter[2][i];
            low0[i] = (uint32_t)product0;
            high0[i] = (uint32_t)(product0 >> 32);
            low1[i] = (uint32_t)product1;
            high1[i] = (uint32_t)(product1 >> 32);
        }
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[1] = low1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

/* Words of LANES counters from `first` on, at the row's position. */
INLINE void random_words(const sampling_row *row, uint32_t first, uint32_t purpose, words counter[PHILOX_WORDS]) {
    words zero = {0};
    counter[0] = (words)LANE_IDS + first;
    counter[1] = zero + (uint32_t)row->position;
    counter[2] = zero + (uint32_t)(row->position >> 32);
    counter[3] = zero + purpose;
    philox(counter, (uint32_t)row->seed, (uint32_t)(row->seed >> 32));
}

/* Gumbel noise of every other vector of a group of ids, from vector `part` on. */
INLINE void gumbel_noise(const sampling_row *row, int64_t group, int part, floats noise[NOISE_IDS / LANES]) {
    words counter[PHILOX_WORDS];
    random_words(row, (uint32_t)(group * NOISE_COUNTERS + part * LANES), row->purpose, counter);
    for (int w = 0; w < PHILOX_WORDS; w++) {
        ints odd = (ints)((counter[w] >> 9 << 1) | 1); /* 24 bits, exact in float32, neither 0 nor 2^24 */
        floats uniform = __builtin_convertvector(odd, floats) * 0x1p-24f;
        noise[w * NOISE_PARTS + part] = -log_of(-log_of(uniform));
    }
}

/* ---- truncation ----------------------------------------------------------------------------------------------- */

/* Unsigned keys in the order of the floats. */
INLINE uint32_t order_key(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
}

INLINE float key_value(uint32_t key) {
    uint32_t bits = key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The greatest value v of `values` such that the mass of {x >= v} reaches `target`; the least value if none does.
 *
 * masses: of each value, or NULL to count values. values and masses are overwritten. */
INLINE float threshold(float *values, float *masses, int64_t count, double target) {
    double above = 0.0;
    uint32_t prefix = 0;
    int shift = 32;
    for (int level = 0; level < RADIX_LEVELS; level++) {
        int bits = shift < RADIX_BITS ? shift : RADIX_BITS;
        shift -= bits;
        uint32_t digit_mask = (1u << bits) - 1;
        double mass[1 << RADIX_BITS] = {0};
        int32_t members[1 << RADIX_BITS] = {0};
        for (int64_t i = 0; i < count; i++) {
            uint32_t digit = order_key(values[i]) >> shift & digit_mask;
            members[digit]++;
            mass[digit] += masses ? masses[i] : 1.0f;
        }
        uint32_t chosen = 0;
        double reached = above;
        for (int64_t digit = digit_mask; digit >= 0; digit--) {
            if (!members[digit]) continue;
            above = reached;
            chosen = (uint32_t)digit;
            reached += mass[digit];
            if (reached >= target) break;
        }
        prefix |= chosen << shift;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            if ((order_key(values[i]) >> shift & digit_mask) != chosen) continue;
            values[kept] = values[i];
            if (masses) masses[kept] = masses[i];
            kept++;
        }
        count = kept;
    }
    return key_value(prefix);
}

INLINE int any(ints condition) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= condition[i];
    return found != 0;
}

/* Copy the values that are at least `least` to the front of `kept`, which may be `values`; returns how many. */
INLINE int64_t keep_at_least(const float *values, int64_t count, float least, float *kept) {
    int64_t num_kept = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, -INFINITY, 0);
        ints inside = v >= least;
        if (!any(inside)) continue;
        for (int lane = 0; lane < LANES; lane++) {
            kept[num_kept] = v[lane];
            num_kept -= inside[lane];
        }
    }
    return num_kept;
}

/* Logits that are kept. */
typedef struct {
    float least, most;
} logit_range;

/* e^((x - peak) / temperature) of each value; returns their sum. */
INLINE double masses_of(const float *values, int64_t count, float peak, float temperature, float *masses) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i += LANES) {
        floats mass = exp_of((load_part(values, i, count - i, -INFINITY, 0) - peak) / temperature);
        store_part(masses, i, count - i, mass, 0);
    }
    for (int64_t i = 0; i < count; i++) total += masses[i];
    return total;
}

/* Ranges of values by their scaled distance from the peak: BIN_COUNT - 1 of width 1 / BINS_PER_UNIT, one for the rest. */
typedef struct {
    double mass[BIN_LANES][BIN_COUNT];
    float peak, scale;
} value_bins;

INLINE ints bin_of(floats v, const value_bins *bins) {
    floats distance = (bins->peak - v) * bins->scale;
    distance = choose(distance < BIN_COUNT - 1, distance, splat(BIN_COUNT - 1)); /* -inf too */
    return __builtin_convertvector(distance, ints);
}

/* Add up the masses of values in their bins: e^((v - peak) / temperature), or 1 when `counted`. -inf has none. */
INLINE void fill_bins(const float *values, int64_t count, float temperature, int counted, value_bins *bins) {
    memset(bins->mass, 0, sizeof bins->mass);
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, -INFINITY, 0);
        floats one = choose(v > -INFINITY, splat(1.0f), splat(0.0f));
        floats mass = counted ? one : exp_of((v - bins->peak) / temperature);
        ints bin = bin_of(v, bins);
        for (int lane = 0; lane < LANES; lane++) bins->mass[lane % BIN_LANES][bin[lane]] += mass[lane];
    }
}

/* The greatest value v such that the mass of {x >= v} reaches `target`, or `target` of the whole mass unless `counted`;
 * the least value if none does. A histogram tells the bin, a radix search among the bin's few values the rest.
 *
 * scratch: [2 * count]. */
INLINE float select_value(const float *values, int64_t count, float peak, float temperature, double target, int counted,
                          float *scratch) {
    value_bins bins;
    bins.peak = peak;
    bins.scale = BINS_PER_UNIT / (counted ? 1.0f : temperature);
    fill_bins(values, count, temperature, counted, &bins);
    double mass[BIN_COUNT], total = 0.0, above = 0.0;
    for (int b = 0; b < BIN_COUNT; b++) {
        mass[b] = 0.0;
        for (int lane = 0; lane < BIN_LANES; lane++) mass[b] += bins.mass[lane][b];
        total += mass[b];
    }
    if (!counted) target *= total;
    int chosen = 0;
    for (int b = 0; b < BIN_COUNT; b++) {
        if (mass[b] == 0.0) continue;
        chosen = b;
        if (above + mass[b] >= target) break;
        above += mass[b];
    }
    int64_t num_chosen = 0;
    float *members = scratch, *masses = scratch + count;
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, -INFINITY, 0);
        ints inside = (bin_of(v, &bins) == chosen) & (v > -INFINITY);
        if (!any(inside)) continue;
        for (int lane = 0; lane < LANES; lane++) {
            members[num_chosen] = v[lane];
            num_chosen -= inside[lane];
        }
    }
    if (!counted) masses_of(members, num_chosen, peak, temperature, masses);
    return threshold(members, counted ? NULL : masses, num_chosen, target - above);
}

/* Minus the distance of scaled logits from their mean; information is as far from the entropy, which is its mean. */
INLINE floats typicality(floats x, float peak, float temperature, float mean) {
    floats distance = (x - peak) / temperature - mean;
    return choose(distance < 0.0f, distance, -distance);
}

/* What typical-p keeps of some logits: those at most so far from the mean, which is a range of logits.
 *
 * values: [count], overwritten. masses: [count]. */
INLINE logit_range typical_range(float *values, int64_t count, float peak, const sampling_row *row, float *masses) {
    double total = masses_of(values, count, peak, row->temperature, masses), sum = 0.0;
    for (int64_t i = 0; i < count; i++)
        if (masses[i] > 0.0f) sum += (double)masses[i] * ((values[i] - peak) / row->temperature);
    float mean = (float)(sum / total);
    float *distances = masses + count;
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, 0.0f, 0);
        store_part(distances, i, count - i, typicality(v, peak, row->temperature, mean), 0);
    }
    floats limit = splat(threshold(distances, masses, count, row->typical_p * total));
    floats low = splat(INFINITY), high = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, NAN, 0);
        ints kept = typicality(v, peak, row->temperature, mean) >= limit;
        low = choose(kept & (v < low), v, low);
        high = choose(kept & (v > high), v, high);
    }
    return (logit_range){-lane_max(-low), lane_max(high)};
}

/* The logits that top-k, then top-p, min-p and typical-p keep. scratch: [3 * padded vocabulary]. */
INLINE logit_range truncation(const float *x, int64_t padded, float peak, const sampling_row *row, float *scratch) {
    const float *values = x;
    float *kept = scratch, *rest = scratch + padded;
    int64_t count = padded;
    float least = -FLT_MAX;
    if (row->top_k > 0 && row->top_k < count) {
        least = select_value(values, count, peak, 1.0f, row->top_k, 1, rest);
        count = keep_at_least(values, count, least, kept);
        values = kept;
    }
    if (row->top_p < 1.0f) least = select_value(values, count, peak, row->temperature, row->top_p, 0, rest);
    if (row->min_p > 0.0f) {
        double bound = peak + (double)row->temperature * log((double)row->min_p);
        float rounded = (float)bound;
        if (rounded < bound) rounded = nextafterf(rounded, INFINITY);
        least = rounded > least ? rounded : least;
    }
    if (!(row->typical_p < 1.0f)) return (logit_range){least, INFINITY};
    count = keep_at_least(values, count, least, kept);
    return typical_range(kept, count, peak, row, rest);
}

/* ---- one row -------------------------------------------------------------------------------------------------- */

/* Running argmax over vectors in ascending id order; the lowest id of equals wins. */
typedef struct {
    floats value;
    ints id;
} best_lanes;

INLINE void take_best(best_lanes *best, floats value, ints id) {
    ints better = value > best->value;
    best->value = choose(better, value, best->value);
    best->id = (better & id) | (~better & best->id);
}

INLINE int32_t best_id(const best_lanes *best) {
    int chosen = 0;
    for (int i = 1; i < LANES; i++) {
        float a = best->value[i], b = best->value[chosen];
        if (a > b || (a == b && best->id[i] < best->id[chosen])) chosen = i;
    }
    return best->id[chosen];
}

INLINE int32_t greedy_id(const float *x, int64_t padded) {
    best_lanes best = {splat(-INFINITY), LANE_IDS};
    for (int64_t i = 0; i < padded; i += LANES) take_best(&best, load(x, i, 0), LANE_IDS + (int32_t)i);
    return best_id(&best);
}

/* A draw by the Gumbel-max trick. Ids of which none near is kept get no noise. */
INLINE int32_t random_id(const float *x, int64_t padded, float peak, logit_range range, const sampling_row *row) {
    best_lanes best = {splat(-INFINITY), LANE_IDS};
    for (int64_t i = 0; i < padded; i += NOISE_IDS) {
        floats logits[NOISE_IDS / LANES], noise[NOISE_IDS / LANES] = {{0}};
        ints kept[NOISE_IDS / LANES], kept_of_part[NOISE_PARTS] = {{0}};
        for (int v = 0; v < NOISE_IDS / LANES; v++) {
            logits[v] = load(x, i + v * LANES, 0);
            kept[v] = (logits[v] >= range.least) & (logits[v] <= range.most);
            kept_of_part[v % NOISE_PARTS] |= kept[v];
        }
        int is_kept = 0;
        for (int part = 0; part < NOISE_PARTS; part++) {
            if (!any(kept_of_part[part])) continue;
            gumbel_noise(row, i / NOISE_IDS, part, noise);
            is_kept = 1;
        }
        if (!is_kept) continue;
        for (int v = 0; v < NOISE_IDS / LANES; v++) {
            floats score = (logits[v] - peak) / row->temperature + noise[v];
            take_best(&best, choose(kept[v], score, splat(-INFINITY)), LANE_IDS + (int32_t)(i + v * LANES));
        }
    }
    return best_id(&best);
}

/* How probable an id is among the logits within a range, by its share of their masses. */
INLINE double probability(const float *x, int64_t padded, float peak, logit_range range, float temperature,
                          int32_t id) {
    double total = 0.0;
    for (int64_t i = 0; i < padded; i += NOISE_IDS) {
        floats sum = {0};
        for (int64_t k = i; k < i + NOISE_IDS; k += LANES) {
            floats v = load(x, k, 0);
            ints kept = (v >= range.least) & (v <= range.most);
            if (any(kept)) sum += choose(kept, exp_of((v - peak) / temperature), splat(0.0f));
        }
        total += lane_sum(sum);
    }
    if (!(x[id] >= range.least && x[id] <= range.most)) return 0.0;
    return exp_of((splat(x[id]) - peak) / temperature)[0] / total;
}

/* A draw that tries a draft first, which is a point: accepted with its own probability, else another id is drawn. Where
 * there is no draft, an id is drawn. */
INLINE int32_t rejection_id(float *x, int64_t padded, float peak, logit_range range, sampling_row *row, int32_t draft,
                            int64_t vocab) {
    row->purpose = RESIDUAL;
    if (draft >= 0 && draft < vocab) {
        words counter[PHILOX_WORDS];
        random_words(row, 0, ACCEPTANCE, counter);
        double uniform = (counter[0][0] >> 8) * 0x1p-24; /* in [0, 1) */
        if (uniform < probability(x, padded, peak, range, row->temperature, draft)) return draft;
        x[draft] = -INFINITY;
    }
    return random_id(x, padded, peak, range, row);
}

/* Copy a row as float32, padded with -inf. False when a logit is NaN or +inf. */
INLINE int copy_finite(const void *logits, int64_t start, int64_t vocab, int64_t padded, float *x, int bf16) {
    ints bad = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        floats v = i < vocab ? load_part(logits, start + i, vocab - i, -INFINITY, bf16) : splat(-INFINITY);
        bad |= ~(v < INFINITY);
        store(x, i, v, 0);
    }
    return !any(bad);
}

/* x += bias. */
INLINE void apply_bias(float *x, const sampling_batch *batch, int64_t i) {
    const int32_t *range = batch->bias_offsets + batch->bias_index[i];
    for (int32_t k = range[0]; k < range[1]; k++) x[batch->bias_ids[k]] += batch->bias_values[k];
}

/* Penalise the tokens before the position, unless they are masked. Products are exact in float64. */
INLINE void apply_penalties(float *x, const sampling_batch *batch, int64_t i) {
    const int32_t *range = batch->history_offsets + batch->history_index[i];
    double repetition = batch->repetition_penalty[i];
    double frequency = batch->frequency_penalty[i], presence = batch->presence_penalty[i];
    for (int32_t k = range[0]; k < range[1]; k++) {
        float *logit = x + batch->history_ids[k];
        int32_t count = batch->history_counts[k];
        if (*logit == -INFINITY) continue;
        double y = *logit > 0.0f ? *logit / repetition : *logit * repetition;
        y -= frequency * count;
        if (count > 0) y -= presence;
        *logit = (float)(y > FLT_MAX ? FLT_MAX : y < -FLT_MAX ? -FLT_MAX : y);
    }
}

/* x = -inf where a bit of the mask is clear. */
INLINE void apply_mask(float *x, int64_t vocab, const uint32_t *mask) {
    const ints bits = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int64_t i = 0; i < vocab; i += LANES) {
        ints allowed = ((ints){0} + (int32_t)(mask[i / 32] >> i % 32) & bits) != 0;
        store(x, i, choose(allowed, load(x, i, 0), splat(-INFINITY)), 0);
    }
}

/* ln sum e^(x - peak). */
INLINE float log_mass(const float *x, int64_t padded, float peak) {
    floats sum = {0};
    for (int64_t i = 0; i < padded; i += LANES) sum += exp_of(load(x, i, 0) - peak);
    return logf(lane_sum(sum));
}

INLINE int sample_body(const void *logits, int64_t vocab, const sampling_batch *batch, int64_t i, float *scratch,
                       int32_t *token, float *logprob, int bf16) {
    int64_t padded = (vocab + NOISE_IDS - 1) / NOISE_IDS * NOISE_IDS;
    float *x = scratch;
    sampling_row row = {batch->temperature[i], batch->top_p[i], batch->min_p[i],
                        batch->typical_p[i],   batch->top_k[i], batch->seed[i],
                        (uint64_t)batch->position[i], NOISE};
    if (!copy_finite(logits, i * vocab, vocab, padded, x, bf16)) return 0;
    float model_peak = 0.0f, model_mass = 0.0f;
    if (batch->want_logprob[i]) {
        model_peak = x[greedy_id(x, padded)];
        model_mass = log_mass(x, padded, model_peak);
    }
    if (batch->bias_index[i] >= 0) apply_bias(x, batch, i);
    if (batch->mask_index[i] >= 0) apply_mask(x, vocab, batch->mask_words + batch->mask_index[i] * batch->mask_width);
    for (int32_t k = 0; k < batch->num_masked[i]; k++) {
        int32_t id = batch->masked_ids[i * batch->masked_width + k];
        if (id >= 0 && id < vocab) x[id] = -INFINITY;
    }
    if (batch->history_index[i] >= 0) apply_penalties(x, batch, i);
    int32_t chosen = greedy_id(x, padded);
    float peak = x[chosen];
    if (peak == -INFINITY) return 0;
    if (!(row.temperature < GREEDY_TEMPERATURE)) {
        logit_range range = truncation(x, padded, peak, &row, scratch + padded);
        chosen = batch->by_rejection[i] ? rejection_id(x, padded, peak, range, &row, batch->draft_ids[i], vocab)
                                        : random_id(x, padded, peak, range, &row);
    }
    *token = chosen;
    float model_logit = load_part(logits, i * vocab + chosen, 1, 0.0f, bf16)[0];
    *logprob = batch->want_logprob[i] ? (model_logit - model_peak) - model_mass : 0.0f;
    return 1;
}

/* Draw a token from row i of logits [rows, vocab]. False, and nothing written, when the row cannot be sampled.
 *
 * scratch: [SCRATCH_ROWS * vocab rounded up to NOISE_IDS]. */
CPU_CLONES static int sample_token(const void *logits, int64_t vocab, const sampling_batch *batch, int64_t i,
                                   float *scratch, int32_t *token, float *logprob, int bf16) {
    if (bf16) return sample_body(logits, vocab, batch, i, scratch, token, logprob, 1);
    return sample_body(logits, vocab, batch, i, scratch, token, logprob, 0);
}

/* ---- scores --------------------------------------------------------------------------------------------------- */

/* Put id with value x among the `num` greatest, which are in order; returns how many there are now, at most `limit`. */
INLINE int32_t insert(float x, int32_t id, float *values, int32_t *ids, int32_t num, int32_t limit) {
    int32_t place = num < limit ? num : limit - 1;
    for (; place > 0 && values[place - 1] < x; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
    }
    values[place] = x;
    ids[place] = id;
    return num < limit ? num + 1 : limit;
}

/* The `limit` greatest of a row, at most `vocab`; the lowest ids of equals; NaN is the least. */
INLINE void top_ids_of(const void *logits, int64_t start, int64_t vocab, int32_t limit, float *values, int32_t *ids,
                       int bf16) {
    int32_t num = 0;
    for (int64_t i = 0; limit > 0 && i < vocab; i += LANES) {
        floats v = load_part(logits, start + i, vocab - i, -INFINITY, bf16);
        if (num == limit && !any(v > values[limit - 1])) continue;
        for (int64_t lane = 0; lane < LANES && i + lane < vocab; lane++) {
            float x = v[lane] == v[lane] ? v[lane] : -INFINITY;
            if (num < limit || x > values[limit - 1])
                num = insert(x, (int32_t)(i + lane), values, ids, num, limit);
        }
    }
}

INLINE void score_body(const void *logits, int64_t vocab, int64_t row, int32_t token, int32_t num_top, float *logprob,
                       int32_t *rank, int32_t *top_ids, float *top_logprobs, int bf16) {
    int64_t start = row * vocab;
    floats highest = splat(-INFINITY), sum = {0};
    ints above = {0}, bad = {0};
    float logit = load_part(logits, start + token, 1, 0.0f, bf16)[0];
    for (int64_t i = 0; i < vocab; i += LANES)
        highest = max_of(load_part(logits, start + i, vocab - i, -INFINITY, bf16), highest);
    float peak = lane_max(highest);
    for (int64_t i = 0; i < vocab; i += LANES) {
        floats v = load_part(logits, start + i, vocab - i, -INFINITY, bf16);
        sum += exp_of(v - peak);
        above -= v > logit;
        bad |= v != v;
    }
    float mass = any(bad) ? NAN : logf(lane_sum(sum));
    int32_t num_above = 0;
    for (int i = 0; i < LANES; i++) num_above += above[i];
    *logprob = (logit - peak) - mass;
    *rank = 1 + num_above;
    top_ids_of(logits, start, vocab, num_top, top_logprobs, top_ids, bf16);
    for (int32_t i = 0; i < num_top; i++) top_logprobs[i] = (top_logprobs[i] - peak) - mass;
}

/* Log probability and rank of a token of a row of logits, and the most probable tokens. */
CPU_CLONES static void score_token(const void *logits, int64_t vocab, int64_t row, int32_t token, int32_t num_top,
                                   float *logprob, int32_t *rank, int32_t *top_ids, float *top_logprobs, int bf16) {
    if (bf16)
        score_body(logits, vocab, row, token, num_top, logprob, rank, top_ids, top_logprobs, 1);
    else
        score_body(logits, vocab, row, token, num_top, logprob, rank, top_ids, top_logprobs, 0);
}

#endif
