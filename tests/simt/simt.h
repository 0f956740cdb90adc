// CUDA C++ kernels on the CPU: what a kernel's source sees.
//
// Force-included ahead of an unmodified kernel file. Every CUDA thread of a block is a fiber that runs until it blocks in
// a barrier or in a warp operation; blocks run one after another. Types and conversions (float4, __half, __nv_bfloat16)
// are NVIDIA's own headers in their host mode, so their bits equal the device's.
#pragma once
#define SIMT_CPU 1

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

// Declaration specifiers

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __noinline__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time; `extern __shared__` is rewritten by the compiler module
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__ __attribute__((noinline))

namespace simt {

struct Thread {  // what device code may read of the running fiber
    uint3 index;
    unsigned lane, warp;
};
extern Thread* current;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;
extern char* dynamic_shared;  // exactly as many bytes as the launch asked for

enum class Reduce { Or, And, Count };
int barrier(int line, int predicate, Reduce how);
using WarpOperation = void (*)(unsigned mask, void** slots);
void collective(const char* what, unsigned mask, int line, void* slot, WarpOperation operation, bool fence);
[[noreturn]] void fail(const char* format, ...);
void yield();

template <class T> inline T* dynamic() { return reinterpret_cast<T*>(dynamic_shared); }
template <class R, class T> inline R bits(T v) {
    static_assert(sizeof(R) == sizeof(T), "");
    R r;
    memcpy(&r, &v, sizeof r);
    return r;
}
template <class T> struct identity { using type = T; };

// Warp operations: each lane brings a slot, and the *_all function of warp_operations.cc works on all of them.

struct ShuffleSlot { unsigned long long value, out; int source; };
struct VoteSlot { unsigned long long value; unsigned out; };
void shuffle_all(unsigned mask, void** slots);
void ballot_all(unsigned mask, void** slots);
void match_all(unsigned mask, void** slots);
void sync_all(unsigned mask, void** slots);

enum class Shuffle { Index, Up, Down, Xor };
inline int shuffle_source(Shuffle mode, int b, int width) {  // as PTX `shfl.sync` defines it
    const int lane = current->lane, segment = 32 - width, first = lane & segment, last = first | (31 & ~segment);
    const int source = mode == Shuffle::Index ? (first | (b & ~segment & 31))
                       : mode == Shuffle::Up  ? lane - b
                       : mode == Shuffle::Down ? lane + b
                                               : lane ^ b;
    if (mode == Shuffle::Up) return source >= first ? source : lane;
    return source <= last ? source : lane;
}
template <class T> inline T shuffle(const char* what, unsigned mask, T v, int source, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 8 bytes");
    ShuffleSlot slot{0, 0, source};
    memcpy(&slot.value, &v, sizeof(T));
    collective(what, mask, line, &slot, shuffle_all, false);
    T r;
    memcpy(&r, &slot.out, sizeof(T));
    return r;
}
inline unsigned vote(const char* what, unsigned mask, unsigned long long value, WarpOperation operation, int line) {
    VoteSlot slot{value, 0};
    collective(what, mask, line, &slot, operation, false);
    return slot.out;
}
template <class T, class F> inline T reduce(const char* what, unsigned mask, T v, F f, int line) {
    T sum = v;
    for (int lane = 0, first = 1; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const T other = shuffle(what, mask, v, lane, line);
        sum = first ? other : f(sum, other);
        first = 0;
    }
    return sum;
}

// Tensor cores

struct MmaSlot { const uint32_t *a, *b; const float* c; float d[4]; };
void mma16816_bf16_all(unsigned mask, void** slots);
void mma16816_f16_all(unsigned mask, void** slots);
template <class T16>
inline void mma16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4], int line) {
    MmaSlot slot{a, b, c, {0, 0, 0, 0}};
    const bool bf16 = std::is_same<T16, __nv_bfloat16>::value;
    collective("mma.m16n8k16", 0xffffffffu, line, &slot, bf16 ? mma16816_bf16_all : mma16816_f16_all, false);
    memcpy(d, slot.d, sizeof slot.d);
}

struct LdmatrixSlot { const void* row; int count; bool transposed; uint32_t out[4]; };
void ldmatrix_all(unsigned mask, void** slots);
template <int N, bool Transposed> inline void ldmatrix(uint32_t (&d)[N], const void* row, int line) {
    if (reinterpret_cast<uintptr_t>(row) & 15) fail("ldmatrix row address is not 16-byte aligned (line %d)", line);
    LdmatrixSlot slot{row, N, Transposed, {0, 0, 0, 0}};
    if (static_cast<int>(current->lane) < 8 * N) {  // read by this thread, so that sanitizers see who reads
        volatile const uint32_t* p = static_cast<const uint32_t*>(row);
        for (int i = 0; i < 4; ++i) (void)p[i];
    }
    collective("ldmatrix", 0xffffffffu, line, &slot, ldmatrix_all, false);
    memcpy(d, slot.out, sizeof d);
}

// Asynchronous copies: they happen no earlier than the wait that covers them.

struct Copy { void* to; const void* from; bool commit; };
void copy_push(const Copy&);
bool copy_pop(int keep_groups, Copy& out);  // oldest copy outside the newest `keep_groups` groups
inline void cp_async16(void* to, const void* from, bool valid) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15)
        fail("cp.async address is not 16-byte aligned");
    auto* words = static_cast<volatile uint64_t*>(to);  // plain stores: a small memset would escape TSan
    words[0] = words[1] = ~0ull;                        // anyone who reads too early sees NaN
    copy_push({to, valid ? from : nullptr, false});
}
inline void cp_async_commit() { copy_push({nullptr, nullptr, true}); }
inline void cp_async_wait(int keep_groups) {
    Copy c;
    while (copy_pop(keep_groups, c)) {
        if (c.from) memcpy(c.to, c.from, 16);
        else memset(c.to, 0, 16);
    }
}

// Host side: call a kernel through an array of pointers to its arguments.

template <class... A, size_t... I> inline void call_with(void (*f)(A...), void** p, std::index_sequence<I...>) {
    f(*static_cast<std::remove_reference_t<A>*>(p[I])...);
}
template <class... A> inline void call(void (*f)(A...), void** p) { call_with(f, p, std::index_sequence_for<A...>{}); }
template <class T> constexpr char kind() {  // pointer, float, integer or bool, struct
    return std::is_pointer<T>::value          ? 'p'
           : std::is_floating_point<T>::value ? 'f'
           : std::is_integral<T>::value       ? 'i'
                                              : 's';
}
template <class... A> inline int signature(void (*)(A...), int* sizes, char* kinds) {
    const int all_sizes[] = {static_cast<int>(sizeof(A))..., 0};
    const char all_kinds[] = {kind<A>()..., 0};
    for (size_t i = 0; i < sizeof...(A); ++i) { sizes[i] = all_sizes[i]; kinds[i] = all_kinds[i]; }
    return sizeof...(A);
}

// Atomics are real ones, so that ThreadSanitizer sees them as such.

template <class T, class F> inline T atomic_update(T* p, F f) {
    using U = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    U* word = reinterpret_cast<U*>(p);
    U old = __atomic_load_n(word, __ATOMIC_RELAXED), updated;
    do updated = bits<U>(f(bits<T>(old)));
    while (!__atomic_compare_exchange_n(word, &old, updated, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return bits<T>(old);
}
}  // namespace simt

// Built-in variables

#define threadIdx (::simt::current->index)
#define blockIdx (::simt::block_index)
#define blockDim (::simt::block_dim)
#define gridDim (::simt::grid_dim)
#define warpSize 32

// Barriers and fences

#define SIMT_LINE int line = __builtin_LINE()
inline void __syncthreads(SIMT_LINE) { simt::barrier(line, 0, simt::Reduce::Count); }
inline int __syncthreads_or(int p, SIMT_LINE) { return simt::barrier(line, p, simt::Reduce::Or); }
inline int __syncthreads_and(int p, SIMT_LINE) { return simt::barrier(line, p, simt::Reduce::And); }
inline int __syncthreads_count(int p, SIMT_LINE) { return simt::barrier(line, p, simt::Reduce::Count); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_LINE) {
    char slot;
    simt::collective("__syncwarp", mask, line, &slot, simt::sync_all, true);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { simt::yield(); }

// Warp intrinsics

template <class T> inline T __shfl_sync(unsigned m, T v, int source, int width = 32, SIMT_LINE) {
    return simt::shuffle("__shfl_sync", m, v, simt::shuffle_source(simt::Shuffle::Index, source, width), line);
}
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32, SIMT_LINE) {
    return simt::shuffle("__shfl_up_sync", m, v, simt::shuffle_source(simt::Shuffle::Up, d, width), line);
}
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32, SIMT_LINE) {
    return simt::shuffle("__shfl_down_sync", m, v, simt::shuffle_source(simt::Shuffle::Down, d, width), line);
}
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int width = 32, SIMT_LINE) {
    return simt::shuffle("__shfl_xor_sync", m, v, simt::shuffle_source(simt::Shuffle::Xor, x, width), line);
}
inline unsigned __ballot_sync(unsigned m, int p, SIMT_LINE) {
    return simt::vote("__ballot_sync", m, p != 0, simt::ballot_all, line);
}
inline int __any_sync(unsigned m, int p, SIMT_LINE) {
    return simt::vote("__any_sync", m, p != 0, simt::ballot_all, line) != 0;
}
inline int __all_sync(unsigned m, int p, SIMT_LINE) {
    return simt::vote("__all_sync", m, p != 0, simt::ballot_all, line) == m;
}
template <class T> inline unsigned __match_any_sync(unsigned m, T v, SIMT_LINE) {
    unsigned long long value = 0;
    memcpy(&value, &v, sizeof v);
    return simt::vote("__match_any_sync", m, value, simt::match_all, line);
}
#define SIMT_REDUCE(name, expression)                                                               \
    template <class T> inline T name(unsigned m, T v, SIMT_LINE) {                                  \
        return simt::reduce(#name, m, v, [](T a, T b) -> T { return expression; }, line);           \
    }
SIMT_REDUCE(__reduce_add_sync, a + b)
SIMT_REDUCE(__reduce_min_sync, b < a ? b : a)
SIMT_REDUCE(__reduce_max_sync, a < b ? b : a)
SIMT_REDUCE(__reduce_and_sync, a & b)
SIMT_REDUCE(__reduce_or_sync, a | b)
#undef SIMT_REDUCE
#undef SIMT_LINE

// Atomics

#define SIMT_ATOMIC(name, expression)                                                               \
    template <class T> inline T name(T* p, typename simt::identity<T>::type v) {                    \
        return simt::atomic_update(p, [&](T old) -> T { return static_cast<T>(expression); });      \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicExch, ((void)old, v))
SIMT_ATOMIC(atomicMin, v < old ? v : old)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicAnd, old & v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
#undef SIMT_ATOMIC
template <class T>
inline T atomicCAS(T* p, typename simt::identity<T>::type expected, typename simt::identity<T>::type v) {
    return simt::atomic_update(p, [&](T old) -> T { return old == expected ? v : old; });
}

// Loads, bit casts, integer and float intrinsics

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
inline unsigned __float_as_uint(float v) { return simt::bits<unsigned>(v); }
inline int __float_as_int(float v) { return simt::bits<int>(v); }
inline float __uint_as_float(unsigned v) { return simt::bits<float>(v); }
inline float __int_as_float(int v) { return simt::bits<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
