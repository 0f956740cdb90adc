/* Float lanes in GCC vector extensions, and what the CPU kernels build from them: eight lanes, unless the including
 * file defines LANES as 4 or 16.
 *
 * A kernel marked CPU_CLONES is compiled for AVX-512, for AVX2 and for any x86-64, and chosen when the module loads, so
 * one build runs on every machine. AVX-512 is there for its conversions and masks: the bits are those of AVX2.
 *
 * Elements are float32 or bfloat16 in memory, always float32 in registers; `bf16` tells which and is a constant
 * wherever these functions are inlined. Every tail goes through `load_part`, never through scalar code: a value must
 * not depend on where in a row it stands.
 */
#ifndef FOREWORD_SIMD_H
#define FOREWORD_SIMD_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(__clang__)
#define CPU_CLONES
#elif __GNUC__ >= 12
#define CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CPU_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#define INLINE static inline __attribute__((always_inline))

#ifndef LANES
#define LANES 8
#endif

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef float eight_floats __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(LANES * 8)));

#if LANES == 16
static const ints LANE_IDS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
static const ints LANE_IDS = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const ints LANE_IDS = {0, 1, 2, 3};
#endif

INLINE floats splat(float value) { return value - (floats){0}; }

INLINE floats choose(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

INLINE floats max_of(floats a, floats b) { return choose(a > b, a, b); }

INLINE int any(ints condition) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= condition[i];
    return found != 0;
}

INLINE float lane_max(floats v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}

INLINE float lane_sum(floats v) {
    float sum = v[0];
    for (int i = 1; i < LANES; i++) sum += v[i];
    return sum;
}

/* Where the target is known, one instruction instead of the four that GCC makes of the generic form. */
INLINE floats bf16_to_float(halves h) {
#if LANES == 16 && defined(__AVX512F__)
    return (floats)((words)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif LANES == 8 && defined(__AVX2__)
    return (floats)((words)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
    return (floats)(__builtin_convertvector(h, words) << 16);
#endif
}

/* Round to nearest even; NaN stays NaN. */
INLINE halves float_to_bf16(floats v) {
    words bits = (words)v;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)(v != v);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
}

INLINE floats load(const void *array, int64_t index, int bf16) {
    if (bf16) {
        halves h;
        memcpy(&h, (const uint16_t *)array + index, sizeof h);
        return bf16_to_float(h);
    }
    floats v;
    memcpy(&v, (const float *)array + index, sizeof v);
    return v;
}

INLINE void store(void *array, int64_t index, floats v, int bf16) {
    if (bf16) {
        halves h = float_to_bf16(v);
        memcpy((uint16_t *)array + index, &h, sizeof h);
    } else {
        memcpy((float *)array + index, &v, sizeof v);
    }
}

/* The first `count` lanes from memory, the others `fill`. */
INLINE floats load_part(const void *array, int64_t index, int64_t count, float fill, int bf16) {
    if (count >= LANES) return load(array, index, bf16);
    floats v = splat(fill);
    if (bf16) {
        halves h = float_to_bf16(v);
        memcpy(&h, (const uint16_t *)array + index, (size_t)count * 2);
        return bf16_to_float(h);
    }
    memcpy(&v, (const float *)array + index, (size_t)count * 4);
    return v;
}

INLINE void store_part(void *array, int64_t index, int64_t count, floats v, int bf16) {
    if (count >= LANES) {
        store(array, index, v, bf16);
    } else if (bf16) {
        halves h = float_to_bf16(v);
        memcpy((uint16_t *)array + index, &h, (size_t)count * 2);
    } else {
        memcpy((float *)array + index, &v, (size_t)count * 4);
    }
}

/* e^x to 2 ulp; 0 below -87.3 and e^88.7 above 88.7. Cody-Waite reduction and the polynomial of Cephes expf. */
INLINE floats exp_of(floats x) {
    ints underflow = x < -87.3f;
    x = choose(underflow, splat(-87.3f), x);
    x = choose(x > 88.7f, splat(88.7f), x);
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    floats n = (x * 1.44269504088896341f + round) - round;
    floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
    floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    floats y = p * r * r + r + 1.0f;
    y = (floats)((ints)y + (__builtin_convertvector(n, ints) << 23));
    return choose(underflow, splat(0.0f), y);
}

/* ln x to 2 ulp for normal x > 0. The polynomial of Cephes logf. */
INLINE floats log_of(floats x) {
    ints bits = (ints)x;
    ints exponent = (bits >> 23) - 126;
    floats m = (floats)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    ints low = m < 0.707106781186547524f;
    exponent = exponent + low; /* a true lane is -1 */
    m = m + choose(low, m, splat(0.0f)) - 1.0f;
    floats p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    floats e = __builtin_convertvector(exponent, floats);
    floats square = m * m;
    floats y = p * m * square + e * -2.12194440e-4f - 0.5f * square;
    return m + y + e * 0.693359375f;
}

#endif
