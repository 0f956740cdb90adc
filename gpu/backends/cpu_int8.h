/* Integer products of the CPU device: activations in 8 bits, weights in 4 or 8, both in groups of 32 inputs.
 *
 * A group of an activation row is `base + scale * code` with codes in [-128, 127], a group of a weight row is
 * `offset + scale * code` with codes from zero, so that x . w is the sum over groups of
 *
 *     x.scale * w.scale * (x.codes . w.codes) + x.base * w.scale * (sum of w.codes) + (sum of x) * w.offset
 *
 * The dot products of codes are exact in int32; the sum over groups is float32, in order, for each row and output by
 * itself, so a result depends on its own row alone. Weights are ggml's Q4_1 or Q8_0, regrouped for the vector unit.
 *
 * Weights lie in panels of 16 outputs, so that a vector takes four inputs of each. A panel is the codes of all groups,
 * then their `panel_scales`. Codes of 8 bits are one vector for every 4 inputs; codes of 4 bits one for every 8, the
 * first four in the low halves of its bytes.
 */
#ifndef FOREWORD_CPU_INT8_H
#define FOREWORD_CPU_INT8_H

#include "simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

enum {
    GROUP = 32, /* inputs that share a scale */
    PANEL = 16, /* outputs side by side */
    QUAD = 4,   /* inputs that one integer instruction multiplies and adds */
    PAIR = 2,   /* panels computed together */
    BLOCK_ROWS = 6,
    CACHE_LINE = 64,
};

typedef struct {
    int8_t codes[GROUP];
    float scale, base, sum; /* sum: of the group's values */
} int8_group;

typedef struct {
    uint16_t scale[PANEL], offset[PANEL]; /* IEEE half precision */
    uint16_t sum[PANEL];                  /* of the codes */
} panel_scales;

/* One linear layer. */
typedef struct {
    const uint8_t *panels;
    const float *bias; /* [out_features] or NULL */
    int64_t out_features;
    int64_t groups;
    int bits;
} int8_weight;

INLINE int64_t code_bytes(int bits) { return GROUP * PANEL * bits / 8; } /* of a group */

INLINE int64_t panel_bytes(int64_t groups, int bits) {
    return (groups * (code_bytes(bits) + (int64_t)sizeof(panel_scales)) + 63) / 64 * 64;
}

INLINE panel_scales *scales_of(const uint8_t *panel, int64_t groups, int bits) {
    return (panel_scales *)(panel + groups * code_bytes(bits));
}

/* ---- half precision -------------------------------------------------------------------------------------------- */

INLINE float half_to_float(uint16_t half) {
    if ((half & 0x7fff) >= 0x7c00) return NAN;
    uint32_t bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f; /* moves the exponent; subnormal halves become normal */
}

/* The nearest half; NaN when there is none, so that what cannot be represented shows in every result. */
INLINE uint16_t float_to_half(float value) {
    float magnitude = fabsf(value) * 0x1p-112f; /* what is subnormal as a half becomes a subnormal float */
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    bits = (bits + 0xfff + ((bits >> 13) & 1)) >> 13;
    if (bits > 0x7bff) bits = 0x7e00;
    return (uint16_t)(bits | (value < 0.0f ? 0x8000 : 0));
}

/* ---- activations ----------------------------------------------------------------------------------------------- */

typedef int8_t bytes __attribute__((vector_size(8)));
typedef float four_floats __attribute__((vector_size(16)));
typedef int32_t four_ints __attribute__((vector_size(16)));

/* Reductions whose order does not matter, in halves. */
INLINE float largest(floats v) {
    four_floats a, b;
    memcpy(&a, &v, sizeof a);
    memcpy(&b, (const char *)&v + sizeof a, sizeof b);
    four_ints greater = a > b;
    a = (four_floats)((greater & (four_ints)a) | (~greater & (four_ints)b));
    float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}

INLINE int32_t sum_of(ints v) {
    four_ints a, b;
    memcpy(&a, &v, sizeof a);
    memcpy(&b, (const char *)&v + sizeof a, sizeof b);
    a += b;
    return a[0] + a[1] + (a[2] + a[3]);
}

/* Quantise the first `count` of 32 values. Where one is not finite, nothing of the group is, nor any result. */
INLINE void store_int8_group(int8_group *group, const floats values[GROUP / LANES], int64_t count) {
    floats low = splat(values[0][0]), high = low;
    ints broken = {0};
    for (int i = 0; i < GROUP / LANES; i++) {
        ints valid = LANE_IDS + i * LANES < (int32_t)count;
        low = choose(valid & (values[i] < low), values[i], low);
        high = choose(valid & (values[i] > high), values[i], high);
        broken |= valid & (((ints)values[i] & 0x7fffffff) >= 0x7f800000);
    }
    float first = -largest(-low), scale = (largest(high) - first) / 255.0f;
    float inverse = scale > FLT_MIN ? 1.0f / scale : 0.0f;
    const float round = 12582912.0f; /* as in exp_of */
    ints sums = {0};
    for (int i = 0; i < GROUP / LANES; i++) {
        ints code = __builtin_convertvector(((values[i] - first) * inverse + round) - round, ints) - 128;
        code &= LANE_IDS + i * LANES < (int32_t)count;
        sums += code;
        bytes narrow = __builtin_convertvector(code, bytes);
        memcpy(group->codes + i * LANES, &narrow, sizeof narrow);
    }
    group->scale = sum_of(broken) ? NAN : scale;
    group->base = first + 128.0f * scale;
    group->sum = scale * (float)sum_of(sums) + group->base * (float)count;
}

/* x [width], bfloat16 -> groups [width / 32, rounded up]. */
CPU_CLONES static void quantise_row(const void *x, int64_t width, int8_group *groups) {
    for (int64_t start = 0; start < width; start += GROUP, groups++) {
        floats values[GROUP / LANES];
        for (int i = 0; i < GROUP / LANES; i++) {
            int64_t left = width - start - i * LANES;
            values[i] = left > 0 ? load_part(x, start + i * LANES, left, 0.0f, 1) : splat(0.0f);
        }
        store_int8_group(groups, values, width - start < GROUP ? width - start : GROUP);
    }
}

/* ---- weights --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint16_t scale, offset;
    uint8_t codes[GROUP];
} weight_group;

INLINE float extreme_of(const float *w, int64_t count) {
    float extreme = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        if (w[i] != w[i]) return w[i];
        if (fabsf(w[i]) > fabsf(extreme)) extreme = w[i];
    }
    return extreme;
}

/* Put values on the grid offset + scale * [0, top]; returns the largest error. */
INLINE float on_grid(const float *w, int64_t count, float scale, float offset, int top, weight_group *group) {
    group->scale = float_to_half(scale);
    group->offset = float_to_half(offset);
    scale = half_to_float(group->scale);
    offset = half_to_float(group->offset);
    float inverse = scale != 0.0f ? 1.0f / scale : 0.0f, worst = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        float code = rintf((w[i] - offset) * inverse);
        code = code > 0.0f ? code < (float)top ? code : (float)top : 0.0f;
        group->codes[i] = (uint8_t)code;
        float error = fabsf(offset + scale * code - w[i]);
        if (error > worst || error != error) worst = error;
    }
    for (int64_t i = count; i < GROUP; i++) group->codes[i] = 0;
    return worst;
}

/* Whether the values lie on a grid of 16: as Q4_1 spaces them from the smallest to the largest, or as Q4_0 does from the
 * one of largest magnitude. */
INLINE int quantise_to_4_bits(const float *w, int64_t count, weight_group *group) {
    float low = w[0], high = w[0], extreme = extreme_of(w, count);
    for (int64_t i = 1; i < count; i++) {
        if (w[i] < low) low = w[i];
        if (w[i] > high) high = w[i];
    }
    float tolerance = 1e-5f * (high - low);
    return on_grid(w, count, (high - low) / 15.0f, low, 15, group) <= tolerance ||
           on_grid(w, count, extreme / -8.0f, extreme, 15, group) <= tolerance;
}

/* Codes around 128, which loses nothing of Q8_0 and little of anything else. */
INLINE void quantise_to_8_bits(const float *w, int64_t count, weight_group *group) {
    float extreme = fabsf(extreme_of(w, count));
    uint16_t half = float_to_half(extreme / 127.0f);
    half += half_to_float(half) * 127.00001f < extreme; /* so that the extreme has a code, however small the scale */
    on_grid(w, count, half_to_float(half), -128.0f * half_to_float(half), 255, group);
}

/* Fill panel `panel` from weight [out_features, in_features]; returns 0 where 4 bits would lose something. */
CPU_CLONES static int pack_int8_panel(const float *weight, int64_t out_features, int64_t in_features, int64_t panel,
                                      int bits, uint8_t *panels) {
    int64_t groups = (in_features + GROUP - 1) / GROUP;
    uint8_t *codes = panels + panel * panel_bytes(groups, bits);
    panel_scales *scales = scales_of(codes, groups, bits);
    memset(codes, 0, (size_t)panel_bytes(groups, bits));
    for (int64_t g = 0; g < groups; g++, codes += code_bytes(bits)) {
        int64_t count = in_features - g * GROUP < GROUP ? in_features - g * GROUP : GROUP;
        for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < out_features; lane++) {
            const float *w = weight + (panel * PANEL + lane) * in_features + g * GROUP;
            weight_group group;
            if (bits == 8)
                quantise_to_8_bits(w, count, &group);
            else if (!quantise_to_4_bits(w, count, &group))
                return 0;
            scales[g].scale[lane] = group.scale;
            scales[g].offset[lane] = group.offset;
            for (int64_t i = 0; i < GROUP; i++) {
                int64_t vector = i / QUAD, byte = lane * QUAD + i % QUAD;
                scales[g].sum[lane] += group.codes[i];
                if (bits == 8)
                    codes[vector * PANEL * QUAD + byte] = group.codes[i];
                else
                    codes[vector / 2 * PANEL * QUAD + byte] |= (uint8_t)(group.codes[i] << vector % 2 * 4);
            }
        }
    }
    return 1;
}

/* ---- products --------------------------------------------------------------------------------------------------
 *
 * A tile is `rows` rows times `wide` panels: sums[row][wide * PANEL]. x is the first row's first group. */

INLINE void prefetch(const void *array, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += CACHE_LINE) __builtin_prefetch((const char *)array + i, 0, 2);
}

/* Fetch a group of `wide` panels into the second level of the cache. Tiles do so for the panels after their own, since
 * the processor's own prefetching stops at every page, and not at all while further rows go over panels in the cache.
 * After the last panel it fetches what nobody asked for, which is harmless wherever that lies. */
INLINE void prefetch_group(const uint8_t *panels, int64_t stride, int64_t groups, int64_t g, int wide, int bits) {
    for (int p = 0; p < wide; p++) {
        prefetch(panels + p * stride + g * code_bytes(bits), code_bytes(bits));
        prefetch(scales_of(panels + p * stride, groups, bits) + g, sizeof(panel_scales));
    }
}

#if HAVE_X86
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

VNNI INLINE void tile_vnni(const uint8_t *panels, int64_t stride, int64_t groups, const int8_group *x, int rows,
                           int wide, int bits, float sums[][PAIR * PANEL]) {
    __m512 sum[BLOCK_ROWS][PAIR];
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < wide; p++) sum[r][p] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        prefetch_group(panels + wide * stride, stride, groups, g, wide, bits);
        __m512i dot[BLOCK_ROWS][PAIR];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < wide; p++) dot[r][p] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int step = 0; step < GROUP / QUAD; step += 2) {
            __m512i first[PAIR], second[PAIR];
            for (int p = 0; p < wide; p++) {
                const uint8_t *codes = panels + p * stride + g * code_bytes(bits);
                if (bits == 8) {
                    first[p] = _mm512_loadu_si512(codes + step * PANEL * QUAD);
                    second[p] = _mm512_loadu_si512(codes + (step + 1) * PANEL * QUAD);
                } else {
                    __m512i both = _mm512_loadu_si512(codes + step / 2 * PANEL * QUAD);
                    first[p] = _mm512_and_si512(both, low_half);
                    second[p] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half);
                }
            }
            for (int r = 0; r < rows; r++) {
                int32_t inputs[2];
                memcpy(inputs, x[r * groups + g].codes + step * QUAD, sizeof inputs);
                __m512i input = _mm512_set1_epi32(inputs[0]);
                for (int p = 0; p < wide; p++) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], first[p], input);
                input = _mm512_set1_epi32(inputs[1]);
                for (int p = 0; p < wide; p++) dot[r][p] = _mm512_dpbusd_epi32(dot[r][p], second[p], input);
            }
        }
        for (int p = 0; p < wide; p++) {
            const panel_scales *scales = scales_of(panels + p * stride, groups, bits) + g;
            __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales->scale));
            __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales->offset));
            __m512i codes = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)scales->sum));
            __m512 total = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale);
            for (int r = 0; r < rows; r++) {
                const int8_group *input = &x[r * groups + g];
                __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r][p]), _mm512_set1_ps(input->scale));
                sum[r][p] = _mm512_fmadd_ps(scaled, scale, sum[r][p]);
                sum[r][p] = _mm512_fmadd_ps(total, _mm512_set1_ps(input->base), sum[r][p]);
                sum[r][p] = _mm512_fmadd_ps(offset, _mm512_set1_ps(input->sum), sum[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < wide; p++) _mm512_storeu_ps(sums[r] + p * PANEL, sum[r][p]);
}
#endif

#if HAVE_X86
#define AVX2 __attribute__((target("avx2,fma,f16c")))

enum { VECTOR = 32, HALVES = PANEL / 8, STEPS = GROUP / QUAD }; /* bytes of a vector; vectors of a panel's outputs */

/* Codes of 4 bits: a byte each, then products of them and the inputs added up in 16 bits, where 16 of at most
 * 15 * 128 have room. */
AVX2 INLINE void unpack_4_bits(const uint8_t *codes, __m256i unpacked[][HALVES]) {
    const __m256i low_half = _mm256_set1_epi8(15);
    for (int step = 0; step < STEPS; step += 2)
        for (int h = 0; h < HALVES; h++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(codes + step / 2 * PANEL * QUAD + h * VECTOR));
            unpacked[step][h] = _mm256_and_si256(both, low_half);
            unpacked[step + 1][h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
        }
}

AVX2 INLINE void dot_4_bits(const __m256i unpacked[][HALVES], const int8_t *inputs, __m256i dot[HALVES]) {
    __m256i sum[HALVES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int step = 0; step < STEPS; step++) {
        int32_t quad;
        memcpy(&quad, inputs + step * QUAD, sizeof quad);
        __m256i input = _mm256_set1_epi32(quad);
        for (int h = 0; h < HALVES; h++)
            sum[h] = _mm256_add_epi16(sum[h], _mm256_maddubs_epi16(unpacked[step][h], input));
    }
    for (int h = 0; h < HALVES; h++) dot[h] = _mm256_madd_epi16(sum[h], _mm256_set1_epi16(1));
}

/* Codes of 8 bits: 16 bits each, because products of bytes would saturate; four outputs to a vector. */
AVX2 INLINE void unpack_8_bits(const uint8_t *codes, __m256i unpacked[][2 * HALVES]) {
    for (int step = 0; step < STEPS; step++)
        for (int h = 0; h < 2 * HALVES; h++)
            unpacked[step][h] = _mm256_cvtepu8_epi16(
                _mm_loadu_si128((const __m128i *)(codes + step * PANEL * QUAD + h * (VECTOR / 2))));
}

AVX2 INLINE void dot_8_bits(const __m256i unpacked[][2 * HALVES], const int8_t *inputs, __m256i dot[HALVES]) {
    __m256i sum[2 * HALVES];
    int16_t wide[GROUP];
    for (int i = 0; i < GROUP; i += 16)
        _mm256_storeu_si256((__m256i *)(wide + i), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(inputs + i))));
    for (int h = 0; h < 2 * HALVES; h++) sum[h] = _mm256_setzero_si256();
    for (int step = 0; step < STEPS; step++) {
        int64_t quad;
        memcpy(&quad, wide + step * QUAD, sizeof quad);
        __m256i input = _mm256_set1_epi64x(quad);
        for (int h = 0; h < 2 * HALVES; h++)
            sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(unpacked[step][h], input));
    }
    for (int h = 0; h < HALVES; h++)
        dot[h] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[2 * h], sum[2 * h + 1]), 0xd8);
}

AVX2 INLINE void tile_avx2(const uint8_t *panels, int64_t stride, int64_t groups, const int8_group *x, int rows,
                           int wide, int bits, float sums[][PAIR * PANEL]) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < wide * PANEL; i++) sums[r][i] = 0.0f;
    for (int64_t g = 0; g < groups; g++) {
        prefetch_group(panels + wide * stride, stride, groups, g, wide, bits);
        for (int p = 0; p < wide; p++) {
            const uint8_t *codes = panels + p * stride + g * code_bytes(bits);
            const panel_scales *scales = scales_of(panels + p * stride, groups, bits) + g;
            __m256i four[STEPS][HALVES], eight[STEPS][2 * HALVES];
            __m256 scale[HALVES], offset[HALVES], total[HALVES];
            if (bits == 8)
                unpack_8_bits(codes, eight);
            else
                unpack_4_bits(codes, four);
            for (int h = 0; h < HALVES; h++) {
                scale[h] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales->scale + h));
                offset[h] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales->offset + h));
                __m256i sum = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)scales->sum + h));
                total[h] = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale[h]);
            }
            for (int r = 0; r < rows; r++) {
                const int8_group *input = &x[r * groups + g];
                __m256i dot[HALVES];
                if (bits == 8)
                    dot_8_bits(eight, input->codes, dot);
                else
                    dot_4_bits(four, input->codes, dot);
                for (int h = 0; h < HALVES; h++) {
                    float *to = sums[r] + p * PANEL + h * 8;
                    __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[h]), _mm256_set1_ps(input->scale));
                    __m256 sum = _mm256_fmadd_ps(scaled, scale[h], _mm256_loadu_ps(to));
                    sum = _mm256_fmadd_ps(total[h], _mm256_set1_ps(input->base), sum);
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(offset[h], _mm256_set1_ps(input->sum), sum));
                }
            }
        }
    }
}
#endif

/* The same sums on any processor, one row and panel at a time. */
INLINE void tile_plain(const uint8_t *panels, int64_t stride, int64_t groups, const int8_group *x, int rows,
                       int wide, int bits, float sums[][PAIR * PANEL]) {
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < wide; p++) {
            float *sum = sums[r] + p * PANEL;
            for (int lane = 0; lane < PANEL; lane++) sum[lane] = 0.0f;
            for (int64_t g = 0; g < groups; g++) {
                const panel_scales *scales = scales_of(panels + p * stride, groups, bits) + g;
                const uint8_t *codes = panels + p * stride + g * code_bytes(bits);
                const int8_group *input = &x[r * groups + g];
                int32_t dot[PANEL] = {0};
                for (int step = 0; step < GROUP / QUAD; step++) {
                    const uint8_t *vector = codes + step * bits / 8 * PANEL * QUAD;
                    for (int lane = 0; lane < PANEL; lane++)
                        for (int i = 0; i < QUAD; i++) {
                            int code = vector[lane * QUAD + i];
                            if (bits == 4) code = step % 2 ? code >> 4 : code & 15;
                            dot[lane] += code * input->codes[step * QUAD + i];
                        }
                }
                for (int lane = 0; lane < PANEL; lane++) {
                    float scale = half_to_float(scales->scale[lane]);
                    sum[lane] += (float)dot[lane] * input->scale * scale;
                    sum[lane] += (float)scales->sum[lane] * scale * input->base;
                    sum[lane] += half_to_float(scales->offset[lane]) * input->sum;
                }
            }
        }
    }
}

INLINE void store_tile(float sums[][PAIR * PANEL], const int8_weight *weight, int64_t first, int64_t rows, int64_t row,
                       void *out, int bf16) {
    int64_t count = weight->out_features - first < PAIR * PANEL ? weight->out_features - first : PAIR * PANEL;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i += LANES) {
            floats value = load(sums[r], i, 0);
            if (weight->bias) value += load_part(weight->bias, first + i, count - i, 0.0f, 0);
            store_part(out, (row + r) * weight->out_features + first + i, count - i, value, bf16);
        }
}

#define CASE(N, TILE, WIDE_PANELS, BITS) \
    case N: TILE(panels, stride, groups, x + row * groups, N, WIDE_PANELS, BITS, sums); break;
#define BLOCK(TILE, WIDE_PANELS, BITS)                                            \
    switch (rows) {                                                               \
        CASE(1, TILE, WIDE_PANELS, BITS)                                          \
        CASE(2, TILE, WIDE_PANELS, BITS)                                          \
        CASE(3, TILE, WIDE_PANELS, BITS)                                          \
        CASE(4, TILE, WIDE_PANELS, BITS)                                          \
        CASE(5, TILE, WIDE_PANELS, BITS)                                          \
        CASE(6, TILE, WIDE_PANELS, BITS)                                          \
    }

/* out [rows, out_features]: the columns of a pair of panels, for rows [begin, end). */
#define DEFINE_PRODUCT(NAME, ATTRIBUTES, TILE)                                                                    \
    ATTRIBUTES static void NAME(const int8_weight *weight, int64_t pair, const int8_group *x, int64_t begin,      \
                                int64_t end, void *out, int bf16) {                                               \
        int64_t groups = weight->groups, stride = panel_bytes(groups, weight->bits);                              \
        const uint8_t *panels = weight->panels + pair * PAIR * stride;                                            \
        float sums[BLOCK_ROWS][PAIR * PANEL];                                                                     \
        for (int64_t row = begin, rows; row < end; row += rows) {                                                 \
            rows = end - row < BLOCK_ROWS ? end - row : BLOCK_ROWS;                                               \
            if (weight->bits == 8) {                                                                              \
                BLOCK(TILE, PAIR, 8)                                                                              \
            } else {                                                                                              \
                BLOCK(TILE, PAIR, 4)                                                                              \
            }                                                                                                     \
            store_tile(sums, weight, pair * PAIR * PANEL, rows, row, out, bf16);                                  \
        }                                                                                                         \
    }

typedef void (*int8_product)(const int8_weight *weight, int64_t pair, const int8_group *x, int64_t begin, int64_t end,
                             void *out, int bf16);

DEFINE_PRODUCT(int8_product_plain, CPU_CLONES, tile_plain)
#if HAVE_X86
DEFINE_PRODUCT(int8_product_vnni, VNNI, tile_vnni)
DEFINE_PRODUCT(int8_product_avx2, AVX2, tile_avx2)
static int has_vnni(void) { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"); }
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
static int has_vnni(void) { return 0; }
static int has_avx2(void) { return 0; }
#define int8_product_vnni int8_product_plain
#define int8_product_avx2 int8_product_plain
#endif

#endif
