// What a warp operation computes, on the slots of all its lanes at once. Fragment layouts: PTX ISA, "mma.m16n8k16" and
// "ldmatrix". Compiled without -fsanitize=thread, like the scheduler in fibers.cc.
#include "simt.h"

namespace simt {
namespace {
template <class Slot> Slot& at(void** slots, int lane) { return *static_cast<Slot*>(slots[lane]); }
bool has(unsigned mask, int lane) { return mask >> lane & 1; }

template <class T16> float half_of(uint32_t word, int high) {
    const uint16_t bits = high ? word >> 16 : word & 0xffff;
    T16 value;
    memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

template <class T16> void mma16816(unsigned mask, void** slots) {
    if (mask != 0xffffffffu) fail("mma with mask %08x", mask);
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& s = at<MmaSlot>(slots, lane);
        const int group = lane >> 2, pair = (lane & 3) * 2;
        for (int h = 0; h < 2; ++h) {
            for (int r = 0; r < 4; ++r) a[group + (r & 1) * 8][pair + h + (r >> 1) * 8] = half_of<T16>(s.a[r], h);
            for (int r = 0; r < 2; ++r) b[pair + h + r * 8][group] = half_of<T16>(s.b[r], h);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto& s = at<MmaSlot>(slots, lane);
        for (int i = 0; i < 4; ++i) {
            const int row = (lane >> 2) + (i >> 1) * 8, column = (lane & 3) * 2 + (i & 1);
            float sum = s.c[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            s.d[i] = sum;
        }
    }
}
}  // namespace

void sync_all(unsigned, void**) {}

void shuffle_all(unsigned mask, void** slots) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!has(mask, lane)) continue;
        auto& s = at<ShuffleSlot>(slots, lane);
        if (!has(mask, s.source)) fail("lane %d shuffles from lane %d, which is not in mask %08x", lane, s.source, mask);
        s.out = at<ShuffleSlot>(slots, s.source).value;
    }
}

void ballot_all(unsigned mask, void** slots) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (has(mask, lane) && at<VoteSlot>(slots, lane).value) votes |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (has(mask, lane)) at<VoteSlot>(slots, lane).out = votes;
}

void match_all(unsigned mask, void** slots) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!has(mask, lane)) continue;
        auto& s = at<VoteSlot>(slots, lane);
        s.out = 0;
        for (int other = 0; other < 32; ++other)
            if (has(mask, other) && at<VoteSlot>(slots, other).value == s.value) s.out |= 1u << other;
    }
}

void mma16816_bf16_all(unsigned mask, void** slots) { mma16816<__nv_bfloat16>(mask, slots); }
void mma16816_f16_all(unsigned mask, void** slots) { mma16816<__half>(mask, slots); }

void ldmatrix_all(unsigned mask, void** slots) {
    if (mask != 0xffffffffu) fail("ldmatrix with mask %08x", mask);
    const int count = at<LdmatrixSlot>(slots, 0).count;
    const bool transposed = at<LdmatrixSlot>(slots, 0).transposed;
    for (int m = 0; m < count; ++m) {
        uint16_t tile[8][8];
        for (int r = 0; r < 8; ++r) memcpy(tile[r], at<LdmatrixSlot>(slots, m * 8 + r).row, 16);
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane >> 2, t = (lane & 3) * 2;
            const uint32_t low = transposed ? tile[t][g] : tile[g][t];
            const uint32_t high = transposed ? tile[t + 1][g] : tile[g][t + 1];
            at<LdmatrixSlot>(slots, lane).out[m] = low | high << 16;
        }
    }
}
}  // namespace simt
