// Residual addition and RMS normalisation (Zhang and Sennrich, 2019):
// stream += delta; out = stream / sqrt(mean(stream^2) + eps) * weight.
//
//   stream float [rows, width], updated; delta T [rows, width] or null; weight float [width]; out T [rows, width]
//
// Grid (rows). A thread owns every blockDim-th element in both passes, so it reads back what it wrote itself. The sum
// runs in an order fixed by the width: a row's result does not depend on the batch.
#include "device.cuh"
#include "reduce.cuh"

template <typename T>
__global__ void __launch_bounds__(256)
rms_norm(float* __restrict__ stream, const T* __restrict__ delta, const float* __restrict__ weight,
         T* __restrict__ out, int width, float eps) {
    __shared__ float partial[kMaxWarps];
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float x = stream[row + i];
        if (delta) {
            x += to_float(delta[row + i]);
            stream[row + i] = x;
        }
        sum += x * x;
    }
    const float scale = 1.0f / sqrtf(block_reduce(sum, partial, Sum()) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        out[row + i] = from_float<T>(stream[row + i] * scale * weight[i]);
}
