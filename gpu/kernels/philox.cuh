// Philox4x32-10 (Salmon et al., 2011) and the Gumbel noise made of it; which word belongs to which id is written in
// gpu/backends/sampling.py.
#pragma once

constexpr int kNoiseCounters = 16;  // of one group of ids
constexpr int kNoiseWords = 4;
constexpr int kNoiseIds = kNoiseWords * kNoiseCounters;

__device__ __forceinline__ void philox(unsigned (&counter)[kNoiseWords], unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, counter[0]), low0 = 0xD2511F53u * counter[0];
        const unsigned high1 = __umulhi(0xCD9E8D57u, counter[2]), low1 = 0xCD9E8D57u * counter[2];
        counter[0] = high1 ^ counter[1] ^ key0;
        counter[2] = high0 ^ counter[3] ^ key1;
        counter[1] = low1;
        counter[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// What a random word is used for (gpu/backends/noise.py).
enum Purpose : unsigned { kSampling, kAcceptance, kResidual, kBlockAcceptance };

// Uniform in [0, 1).
__device__ __forceinline__ float uniform_of(unsigned long long seed, unsigned long long position, Purpose purpose,
                                            unsigned index = 0) {
    unsigned words[kNoiseWords] = {index, static_cast<unsigned>(position), static_cast<unsigned>(position >> 32), purpose};
    philox(words, static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
    return static_cast<float>(words[0] >> 8) * 0x1p-24f;
}

// Noise of the four ids that share counter `index`: noise_id(index, 0..3).
__device__ __forceinline__ void gumbel_noise(unsigned long long seed, unsigned long long position, Purpose purpose,
                                             unsigned index, float (&noise)[kNoiseWords]) {
    unsigned counter[kNoiseWords] = {index, static_cast<unsigned>(position), static_cast<unsigned>(position >> 32), purpose};
    philox(counter, static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32));
#pragma unroll
    for (int w = 0; w < kNoiseWords; ++w) {
        const float uniform = static_cast<float>(counter[w] >> 9 << 1 | 1u) * 0x1p-24f;  // exact, neither 0 nor 1
        noise[w] = -logf(-logf(uniform));
    }
}

__device__ __forceinline__ int noise_id(int index, int word) {
    return index / kNoiseCounters * kNoiseIds + word * kNoiseCounters + index % kNoiseCounters;
}
