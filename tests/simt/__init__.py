"""Runs CUDA C++ kernels on the CPU behind CuPy's RawModule interface: the project's check of its kernels.

    module = simt.RawModule(path="scale.cu", options=("-Igpu/kernels",), name_expressions=["scale<float>"])
    module.get_function("scale<float>")((grid,), (block,), (x, np.int32(n)), shared_mem=0)

Finds wrong values, deadlocks, divergent barriers and warp operations, reads of unset shared memory; under sanitizers
also stray addresses (address, undefined) and missing barriers (thread). It does not see races between blocks, memory
that a kernel reads before another block wrote it, or what a GPU rounds differently.
"""

from simt.compiler import cuda_include_dirs
from simt.module import Kernel, LaunchError, RawModule

__all__ = ["Kernel", "LaunchError", "RawModule", "cuda_include_dirs"]
