// Floats as integers in the same order, and (value, id) pairs of which the greatest value wins, then the lowest id.
#pragma once

using Key = unsigned long long;

__device__ __forceinline__ unsigned order_key(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);  // -0 and 0 are equal
    return bits ^ (bits & 0x80000000u ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float key_value(unsigned key) {
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ Key ranked(float value, int id) {
    return static_cast<Key>(order_key(value)) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}

__device__ __forceinline__ float ranked_value(Key key) { return key_value(static_cast<unsigned>(key >> 32)); }

__device__ __forceinline__ int ranked_id(Key key) {
    return static_cast<int>(0xffffffffu - static_cast<unsigned>(key));
}
