"""CUDA kernels: one family a `.cu` file."""
