/* What the model's own distribution says of tokens: log probability, rank, and the most probable tokens. */
#ifndef FOREWORD_CPU_SCORES_H
#define FOREWORD_CPU_SCORES_H

#include "simd.h"

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
