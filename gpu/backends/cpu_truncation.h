/* Which logits of a row are kept by top-k, top-p, min-p and typical-p; the rule is written out in sampling.py.
 *
 * Truncation is a threshold on the raw logit, found exactly by a radix search, so equal logits are kept or dropped
 * together and no order of summation can separate them.
 */
#ifndef FOREWORD_CPU_TRUNCATION_H
#define FOREWORD_CPU_TRUNCATION_H

#include "simd.h"

enum {
    RADIX_BITS = 11,
    RADIX_LEVELS = 3,
    BIN_COUNT = 512,
    BINS_PER_UNIT = 16,
    BIN_LANES = 4 /* lanes add up apart, so that an addition need not wait for the one before */
};

typedef struct {
    float temperature, top_p, min_p, typical_p;
    int32_t top_k;
    uint64_t seed, position;
    uint32_t purpose; /* of the noise */
} sampling_row;

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

/* e^((x - peak) / temperature) of each value. */
INLINE void masses_of(const float *values, int64_t count, float peak, float temperature, float *masses) {
    for (int64_t i = 0; i < count; i += LANES) {
        floats mass = exp_of((load_part(values, i, count - i, -INFINITY, 0) - peak) / temperature);
        store_part(masses, i, count - i, mass, 0);
    }
}

/* Ranges of values by their scaled distance from the peak: BIN_COUNT - 1 of width 1, one for the rest. */
typedef struct {
    double mass[BIN_LANES][BIN_COUNT];
    float peak, scale;
} value_bins;

INLINE ints bin_of(floats v, const value_bins *bins) {
    floats distance = (bins->peak - v) * bins->scale;
    distance = choose(distance < BIN_COUNT - 1, distance, splat(BIN_COUNT - 1)); /* -inf too */
    return __builtin_convertvector(distance, ints);
}

/* Add up the masses of values in their bins; masses NULL: 1 for each. -inf has none. */
INLINE void fill_bins(const float *values, const float *masses, int64_t count, value_bins *bins) {
    memset(bins->mass, 0, sizeof bins->mass);
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, -INFINITY, 0);
        floats mass = masses ? load_part(masses, i, count - i, 0.0f, 0) : splat(1.0f);
        mass = choose(v > -INFINITY, mass, splat(0.0f));
        ints bin = bin_of(v, bins);
        for (int lane = 0; lane < LANES; lane++) bins->mass[lane % BIN_LANES][bin[lane]] += mass[lane];
    }
}

/* Copy the values of a bin, and their masses unless NULL, to the front of arrays that may be the same. */
INLINE int64_t keep_bin(const float *values, const float *masses, int64_t count, const value_bins *bins, int chosen,
                        float *members, float *member_masses) {
    int64_t num_members = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, -INFINITY, 0);
        ints inside = (bin_of(v, bins) == chosen) & (v > -INFINITY);
        if (!any(inside)) continue;
        floats mass = masses ? load_part(masses, i, count - i, 0.0f, 0) : splat(0.0f);
        for (int lane = 0; lane < LANES; lane++) {
            members[num_members] = v[lane];
            if (masses) member_masses[num_members] = mass[lane];
            num_members -= inside[lane];
        }
    }
    return num_members;
}

/* Bins of which BINS_PER_UNIT have the width of `unit`, or more when that spreads the values over all of them. */
INLINE float bin_scale(const float *values, int64_t count, float peak, float unit) {
    floats farthest = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, peak, 0);
        farthest = max_of(choose(v > -INFINITY, peak - v, splat(0.0f)), farthest);
    }
    float scale = BINS_PER_UNIT / unit, spread = (BIN_COUNT - 2) / lane_max(farthest);
    return spread > scale && spread < FLT_MAX ? spread : scale;
}

/* The greatest value v such that the mass of {x >= v} reaches `target`, which is a share of the whole mass unless
 * masses are NULL and values are counted; the least value if none does. A histogram tells the bin, a radix search
 * among the bin's few values the rest.
 *
 * peak: the greatest value. unit: what of it is a natural width. members, member_masses: [count], may be the inputs. */
INLINE float select_value(const float *values, const float *masses, int64_t count, float peak, float unit,
                          double target, float *members, float *member_masses) {
    value_bins bins;
    bins.peak = peak;
    bins.scale = bin_scale(values, count, peak, unit);
    fill_bins(values, masses, count, &bins);
    double mass[BIN_COUNT], total = 0.0, above = 0.0;
    for (int b = 0; b < BIN_COUNT; b++) {
        mass[b] = 0.0;
        for (int lane = 0; lane < BIN_LANES; lane++) mass[b] += bins.mass[lane][b];
        total += mass[b];
    }
    if (masses) target *= total;
    int chosen = 0;
    for (int b = 0; b < BIN_COUNT; b++) {
        if (mass[b] == 0.0) continue;
        chosen = b;
        if (above + mass[b] >= target) break;
        above += mass[b];
    }
    int64_t num_members = keep_bin(values, masses, count, &bins, chosen, members, member_masses);
    return threshold(members, masses ? member_masses : NULL, num_members, target - above);
}

/* Minus the distance of scaled logits from their mean; information is as far from the entropy, which is its mean. */
INLINE floats typicality(floats x, float peak, float temperature, float mean) {
    floats distance = (x - peak) / temperature - mean;
    return choose(distance < 0.0f, distance, -distance);
}

/* Mean of scaled logits, weighted with their masses. */
INLINE float mean_of(const float *values, const float *masses, int64_t count, float peak, float temperature) {
    doubles total = {0}, sum = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        floats mass = load_part(masses, i, count - i, 0.0f, 0);
        floats scaled = (load_part(values, i, count - i, peak, 0) - peak) / temperature;
        scaled = choose(mass > 0.0f, scaled, splat(0.0f)); /* which may be -inf */
        total += __builtin_convertvector(mass, doubles);
        sum += __builtin_convertvector(mass, doubles) * __builtin_convertvector(scaled, doubles);
    }
    double all = 0.0, weighted = 0.0;
    for (int lane = 0; lane < LANES; lane++) {
        all += total[lane];
        weighted += sum[lane];
    }
    return (float)(weighted / all);
}

/* What typical-p keeps of some logits: those at most so far from the mean, which is a range of logits.
 *
 * masses, distances: [count], overwritten. */
INLINE logit_range typical_range(const float *values, int64_t count, float peak, const sampling_row *row,
                                 float *masses, float *distances) {
    masses_of(values, count, peak, row->temperature, masses);
    float mean = mean_of(values, masses, count, peak, row->temperature);
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(values, i, count - i, 0.0f, 0);
        store_part(distances, i, count - i, typicality(v, peak, row->temperature, mean), 0);
    }
    float least = select_value(distances, masses, count, 0.0f, 1.0f, row->typical_p, distances, masses);
    floats limit = splat(least), low = splat(INFINITY), high = splat(-INFINITY);
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
        least = select_value(values, NULL, count, peak, 1.0f, row->top_k, rest, NULL);
        count = keep_at_least(values, count, least, kept);
        values = kept;
    }
    if (row->top_p < 1.0f) {
        masses_of(values, count, peak, row->temperature, rest);
        least = select_value(values, rest, count, peak, row->temperature, row->top_p, rest + padded, rest);
    }
    if (row->min_p > 0.0f) {
        double bound = peak + (double)row->temperature * log((double)row->min_p);
        float rounded = (float)bound;
        if (rounded < bound) rounded = nextafterf(rounded, INFINITY);
        least = rounded > least ? rounded : least;
    }
    if (!(row->typical_p < 1.0f)) return (logit_range){least, INFINITY};
    count = keep_at_least(values, count, least, kept);
    return typical_range(kept, count, peak, row, rest, rest + padded);
}

#endif
