// What kernels share: the operations that need PTX, each with a GPU body and a body for the CPU checker (tests/simt),
// and 16-byte loads and conversions of the element types float, __nv_bfloat16 and __half. Kernel files hold no assembly.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

#ifdef SIMT_CPU

using u32 = uint32_t;

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4],
                                    int line = __builtin_LINE()) {
    simt::mma16816<T>(d, a, b, c, line);
}
__device__ __forceinline__ void load_matrices(u32 (&d)[4], const void* row, int line = __builtin_LINE()) {
    simt::ldmatrix<4, false>(d, row, line);
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&d)[4], const void* row, int line = __builtin_LINE()) {
    simt::ldmatrix<4, true>(d, row, line);
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) { simt::cp_async16(to, from, valid); }
__device__ __forceinline__ void commit_copies() { simt::cp_async_commit(); }
template <int KEEP> __device__ __forceinline__ void wait_for_copies() { simt::cp_async_wait(KEEP); }
__device__ __forceinline__ float exp2_fast(float x) { return exp2f(x); }

#else

using u32 = unsigned int;

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// d = a b + c, a [16, 16], b [16, 8]; fragments as PTX "mma.m16n8k16" lays them out.
template <typename T>
__device__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4]);
#define MMA_16816(type, name)                                                                                      \
    template <>                                                                                                    \
    __device__ __forceinline__ void mma<type>(float(&d)[4], const u32(&a)[4], const u32(&b)[2], const float(&c)[4]) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                                \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                                   \
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),     \
                       "f"(c[2]), "f"(c[3]));                                                                      \
    }
MMA_16816(__nv_bfloat16, "bf16")
MMA_16816(__half, "f16")
#undef MMA_16816

// Four 8 x 8 matrices of 16-bit elements from shared memory; lane l points at row l % 8 of matrix l / 8, 16-byte aligned.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&d)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Copy 16 bytes from global to shared memory, zeros when not `valid`; done once the group it is committed with is.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups but the newest KEEP are done, as far as this thread's copies go.
template <int KEEP> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16(v); }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half(v); }

// Two floats as two 16-bit elements, the first in the low half.
template <typename T> __device__ __forceinline__ u32 pack(float low, float high);
template <> __device__ __forceinline__ u32 pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}
template <> __device__ __forceinline__ u32 pack<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

// N elements of T that fill 16 bytes, as floats; addresses are 16-byte aligned.
template <typename T> struct Vector16 {
    static constexpr int N = 16 / sizeof(T);
    static __device__ __forceinline__ void load(const T* from, float (&to)[N]) {
        const uint4 raw = *reinterpret_cast<const uint4*>(from);
        const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = to_float(values[i]);
    }
    static __device__ __forceinline__ void store(T* to, const float (&from)[N]) {
        uint4 raw;
        T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = from_float<T>(from[i]);
        *reinterpret_cast<uint4*>(to) = raw;
    }
};
