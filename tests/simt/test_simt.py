"""The checker itself: what it computes, what it refuses, and that each kind of fault is noticed."""

from __future__ import annotations

import numpy as np
import pytest

import simt


def kernel(body: str, parameters: str = "float* x", name: str = "k") -> simt.Kernel:
    return simt.RawModule(f'extern "C" __global__ void {name}({parameters}) {{ {body} }}').get_function(name)


@pytest.fixture(scope="module")
def scale() -> simt.Kernel:
    return kernel("if (threadIdx.x < n) x[threadIdx.x] *= s;", "float* x, int n, float s")


def test_runs_a_kernel(scale: simt.Kernel) -> None:
    x = np.ones(8, np.float32)
    scale((1,), (32,), (x, np.int32(6), np.float32(2)))
    np.testing.assert_array_equal(x, [2] * 6 + [1] * 2)
    scale((1,), (32,), (x.ctypes.data, np.int32(6), np.float32(2)))
    np.testing.assert_array_equal(x, [4] * 6 + [1] * 2)


@pytest.mark.parametrize(
    "args",
    [
        lambda x: (x, 8, np.float32(2)),
        lambda x: (x, np.int32(8), 2.0),
        lambda x: (x, np.float32(8), np.float32(2)),
        lambda x: (x, np.int32(8)),
        lambda x: (x[::2], np.int32(4), np.float32(2)),
        lambda x: (x, x, np.float32(2)),
    ],
)
def test_arguments_are_checked(scale: simt.Kernel, args: object) -> None:
    with pytest.raises(TypeError, match="argument"):
        scale((1,), (32,), args(np.ones(8, np.float32)))


def test_shared_memory_is_asked_for_and_starts_as_nan() -> None:
    body = """
        __shared__ float fixed[32];
        extern __shared__ float sized[];
        x[threadIdx.x] = blockIdx.x ? fixed[threadIdx.x] + sized[threadIdx.x] : 0.f;
        fixed[threadIdx.x] = sized[threadIdx.x] = 1.f;"""
    x = np.zeros(32, np.float32)
    poisoned = kernel(body)
    poisoned((2,), (32,), (x,), shared_mem=128)
    assert np.isnan(x).all()
    with pytest.raises(simt.LaunchError, match="max_dynamic_shared_size_bytes"):
        poisoned((2,), (32,), (x,), shared_mem=64 * 1024)


WARP = """
    const int lane = threadIdx.x;
    x[lane] = __shfl_sync(~0u, lane, 3) + __shfl_up_sync(~0u, lane, 1) + __shfl_down_sync(~0u, lane, 2, 16);
    x[lane + 32] = __ballot_sync(~0u, lane % 3 == 0);
    x[lane + 64] = __reduce_max_sync(~0u, lane * 7 % 32) + __shfl_xor_sync(~0u, lane, 5);
    x[lane + 96] = __match_any_sync(~0u, lane / 8);
    atomicAdd(&x[128], lane);
    if (lane == 0) atomicMax(&x[129], 5);"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_warp_operations(seed: int) -> None:
    x = np.zeros(130, np.int32)
    kernel(WARP, "int* x")((1,), (32,), (x,), seed=seed)
    lane = np.arange(32)
    down = np.where(lane % 16 + 2 < 16, lane + 2, lane)
    np.testing.assert_array_equal(x[:32], 3 + np.maximum(lane - 1, 0) + down)
    assert (x[32:64].view(np.uint32) == 0x49249249).all()
    np.testing.assert_array_equal(x[64:96], 31 + (lane ^ 5))
    np.testing.assert_array_equal(x[96:128].view(np.uint32), np.uint32(0xFF) << (lane // 8 * 8).astype(np.uint32))
    assert (x[128], x[129]) == (496, 5)


def test_half_types_round_as_on_the_device() -> None:
    body = """
        const float v = x[threadIdx.x];
        x[threadIdx.x] = __bfloat162float(__float2bfloat16(v));
        x[threadIdx.x + 32] = __half2float(__float2half(v));"""
    x = np.zeros(64, np.float32)
    values = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    x[:32] = values
    kernel(body)((1,), (32,), (x,))
    np.testing.assert_array_equal(x[32:], values.astype(np.float16).astype(np.float32))
    assert (np.abs(x[:32] - values) <= np.abs(values) * 2.0**-8).all()
    assert not (x[:32].view(np.uint32) & 0xFFFF).any()


FAULTS = {
    "barrier in one warp": ("if (threadIdx.x < 32) __syncthreads();", "have exited|deadlock"),
    "two barriers": ("if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();", "different barriers"),
    "exited lane": ("if (threadIdx.x == 5) return; __syncwarp();", "has exited"),
    "divergent shuffle": ("if (threadIdx.x % 2) x[0] = __shfl_sync(~0u, x[0], 0); else __syncwarp();", "different"),
    "lane outside its mask": ("__syncwarp(1u);", "leaves out"),
    "shuffle from outside the mask": ("if (threadIdx.x < 2) x[0] = __shfl_sync(3u, x[0], 9);", "not in mask"),
    "wait that never ends": ("if (threadIdx.x == 0) __syncwarp(); else __syncthreads();", "deadlock|different|exited"),
    "copies never waited for": ("__shared__ float4 s[64]; simt::cp_async16(s, x, true);", "never waited"),
    "misaligned copy": ("__shared__ float4 s[64]; simt::cp_async16(s, x + 1, true);", "not 16-byte aligned"),
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault: str, seed: int) -> None:
    body, message = FAULTS[fault]
    with pytest.raises(simt.LaunchError, match=message):
        kernel(body)((1,), (64,), (np.zeros(64, np.float32),), seed=seed)


@pytest.mark.parametrize(("grid", "block"), [((0,), (32,)), ((1,), (0,)), ((1,), (2048,))])
def test_impossible_launches(scale: simt.Kernel, grid: tuple[int], block: tuple[int]) -> None:
    with pytest.raises(simt.LaunchError, match="block"):
        scale(grid, block, (np.zeros(1, np.float32), np.int32(0), np.float32(0)))


def test_compile_errors_name_the_line() -> None:
    module = simt.RawModule("\n__global__ void k() { nonsense; }", filename="broken.cu")
    with pytest.raises(RuntimeError, match=r"broken\.cu:2:"):
        module.get_function("k")((1,), (1,), ())
