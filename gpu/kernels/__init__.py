"""The CUDA device's kernels: sources, the table of them, and what compiles and launches them."""
