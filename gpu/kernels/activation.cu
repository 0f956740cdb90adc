// Gated activations (Shazeer, 2020): out = act(gate) * up, where gate_up holds gate, then up.
//
//   gate_up T [rows, 2 * width], out T [rows, width]
//
// silu_and_mul: act(x) = x / (1 + e^-x). gelu_and_mul: the tanh form of GELU (Hendrycks and Gimpel, 2016).
// Grid (rows). Threads walk the row.
#include "device.cuh"

struct Silu {
    __device__ __forceinline__ float operator()(float x) const { return x / (1.0f + expf(-x)); }
};
struct GeluTanh {
    __device__ __forceinline__ float operator()(float x) const {
        const float sqrt_2_over_pi = 0.79788456080286536f;
        return 0.5f * x * (1.0f + tanhf(sqrt_2_over_pi * (x + 0.044715f * x * x * x)));
    }
};

template <typename T, typename Activation>
__device__ __forceinline__ void gate(const T* __restrict__ gate_up, T* __restrict__ out, int width, Activation act) {
    const T* gates = gate_up + static_cast<size_t>(blockIdx.x) * 2 * width;
    const T* ups = gates + width;
    T* row = out + static_cast<size_t>(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        row[i] = from_float<T>(act(to_float(gates[i])) * to_float(ups[i]));
}

template <typename T>
__global__ void __launch_bounds__(256) silu_and_mul(const T* __restrict__ gate_up, T* __restrict__ out, int width) {
    gate(gate_up, out, width, Silu());
}

template <typename T>
__global__ void __launch_bounds__(256) gelu_and_mul(const T* __restrict__ gate_up, T* __restrict__ out, int width) {
    gate(gate_up, out, width, GeluTanh());
}
