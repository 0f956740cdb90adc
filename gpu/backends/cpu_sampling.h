/* Drawing one token from one row of logits; the rule is written out in sampling.py. */
#ifndef FOREWORD_CPU_SAMPLING_H
#define FOREWORD_CPU_SAMPLING_H

#include "cpu_truncation.h"

enum {
    PHILOX_WORDS = 4,
    NOISE_COUNTERS = 16, /* of one group of ids */
    NOISE_IDS = PHILOX_WORDS * NOISE_COUNTERS,
    NOISE_PARTS = NOISE_COUNTERS / LANES,
    MOST_BITS = (1 << 24) - 1, /* of a uniform number */
    SCRATCH_ROWS = 4 /* the row, what is kept of it, and twice that to search in */
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

static const float GREEDY_TEMPERATURE = 1e-5f; /* below it: the most probable token */

/* Purposes of random words; see rejection.py. */
enum { NOISE = 0, ACCEPTANCE = 1, RESIDUAL = 2 };

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

/* Odd 24-bit numbers, uniform and neither 0 nor 2^24, of every other vector of a group of ids, from vector `part` on. */
INLINE void uniform_bits(const sampling_row *row, int64_t group, int part, ints bits[NOISE_IDS / LANES]) {
    words counter[PHILOX_WORDS];
    random_words(row, (uint32_t)(group * NOISE_COUNTERS + part * LANES), row->purpose, counter);
    for (int w = 0; w < PHILOX_WORDS; w++) bits[w * NOISE_PARTS + part] = (ints)((counter[w] >> 9 << 1) | 1);
}

/* Gumbel noise; the numbers are exact in float32. */
INLINE floats gumbel_of(ints bits) {
    floats uniform = __builtin_convertvector(bits, floats) * 0x1p-24f;
    return -log_of(-log_of(uniform));
}

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

/* The bits that an id needs at least to get a score of `best` or more with a scaled logit of at most `most`.
 *
 * As -ln u >= 1 - u, the noise of u is at most -ln(1 - u). The margin is far above what rounding adds to it. */
INLINE int32_t least_bits(float most, float best) {
    const float margin = 1e-2f;
    float least = 0x1p24f * (1.0f - expf(most - best + margin));
    return least > 0.0f ? (int32_t)least - 1 : 0;
}

/* A draw by the Gumbel-max trick. Ids that are not kept, or that the best score so far leaves no chance, cost little. */
INLINE int32_t random_id(const float *x, int64_t padded, float peak, logit_range range, const sampling_row *row) {
    best_lanes best = {splat(-INFINITY), LANE_IDS};
    float best_score = -INFINITY;
    for (int64_t i = 0; i < padded; i += NOISE_IDS) {
        floats logits[NOISE_IDS / LANES], highest = splat(-INFINITY);
        ints kept[NOISE_IDS / LANES], bits[NOISE_IDS / LANES];
        for (int v = 0; v < NOISE_IDS / LANES; v++) {
            logits[v] = load(x, i + v * LANES, 0);
            kept[v] = (logits[v] >= range.least) & (logits[v] <= range.most);
            highest = max_of(choose(kept[v], logits[v], splat(-INFINITY)), highest);
        }
        float most = lane_max(highest);
        if (most == -INFINITY) continue;
        int32_t needed = least_bits((most - peak) / row->temperature, best_score);
        if (needed >= MOST_BITS) continue;
        for (int part = 0; part < NOISE_PARTS; part++) uniform_bits(row, i / NOISE_IDS, part, bits);
        ints has_chance = {0};
        for (int v = 0; v < NOISE_IDS / LANES; v++) has_chance |= kept[v] & (bits[v] >= needed);
        if (!any(has_chance)) continue;
        for (int v = 0; v < NOISE_IDS / LANES; v++) {
            if (!any(kept[v] & (bits[v] >= needed))) continue;
            floats score = (logits[v] - peak) / row->temperature + gumbel_of(bits[v]);
            take_best(&best, choose(kept[v], score, splat(-INFINITY)), LANE_IDS + (int32_t)(i + v * LANES));
            best_score = lane_max(best.value);
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
    const ints bits = ((ints){0} + 1) << LANE_IDS; /* LANES divides 32, so a vector never straddles two words */
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

#endif
