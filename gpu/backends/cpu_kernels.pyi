"""The CPU device's operations between the matrix products, in C, over all rows of a batch at once.

Arrays are addresses of contiguous memory whose shapes the caller has checked; "element" is bfloat16 when `bf16` is
true and float32 otherwise. Rows are computed in parallel by up to `num_threads` threads without the GIL, and each row
in an order that does not depend on the others.
"""

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.scheduler.step import TokenScores

VECTOR_LANES: int
HEAD_DIM_LIMIT: int
WIDEST_LANES: int
NOISE_LANES: int
INT8_KERNELS: tuple[str, ...]
"""Kernels of integer products that run on this processor, fastest first; the last is "plain", which runs on all."""
ATTENTION_KERNELS: tuple[str, ...]
"""Kernels of attention that run on this processor, fastest first; the last is "plain", which runs on all."""
SAMPLING_SCRATCH_ROWS: int

class PagedCache:
    """One layer of the KV cache.

    Args:
        keys: element `[num_blocks, num_kv_heads, head_dim, block_size]`.
        values: element `[num_blocks, num_kv_heads, block_size, head_dim]`, readable `WIDEST_LANES` elements past its
            end.
        block_size: a multiple of `VECTOR_LANES`.
    """

    def __init__(self, keys: int, values: int, block_size: int, num_kv_heads: int, head_dim: int) -> None: ...

def rms_norm(
    stream: int, delta: int, weight: int, out: int, rows: int, width: int, eps: float, bf16: bool, num_threads: int
) -> None:
    """Stream += delta, then out = stream / rms(stream) * weight.

    stream: float32 `[rows, width]`; delta: element `[rows, width]`, or 0 for none; weight: float32 `[width]`;
    out: element `[rows, width]`.
    """

def silu_and_mul(gate_up: int, out: int, rows: int, width: int, bf16: bool, num_threads: int) -> None:
    """gate_up element `[rows, 2 * width]` -> out element `[rows, width]` = silu(gate) * up."""

def rotate_and_store(
    qkv: int,
    cos: int,
    sin: int,
    positions: int,
    slots: int,
    cache: PagedCache,
    num_tokens: int,
    num_heads: int,
    bf16: bool,
    num_threads: int,
) -> None:
    """Rotate queries and keys in place and put keys and values into the cache.

    qkv: element `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; cos, sin: float32
    `[max_model_len, head_dim / 2]`; positions, slots: int32 `[num_tokens]`.
    """

def attention(
    queries: int,
    query_stride: int,
    positions: int,
    token_rows: int,
    block_table: int,
    max_blocks: int,
    cache: PagedCache,
    out: int,
    num_tokens: int,
    num_heads: int,
    scale: float,
    window: int,
    bf16: bool,
    kernel: str,
    num_threads: int,
) -> None:
    """Causal attention of every token over its sequence's cached keys.

    queries: element `[num_tokens, num_heads * head_dim]` with rows `query_stride` elements apart; positions,
    token_rows: int32 `[num_tokens]`; block_table: int32 `[num_rows, max_blocks]`; out: element
    `[num_tokens, num_heads * head_dim]`; window: keys a token sees, itself included, or 0 for all; kernel: one of
    `ATTENTION_KERNELS` ("avx512" needs blocks of a multiple of `WIDEST_LANES` tokens and leaves others to "avx2").
    """

def sample(
    logits: int, vocab: int, bf16: bool, params: SamplingBatch, scratch: int, samples: Samples, num_threads: int
) -> None:
    """Draw a token from each row of logits, element `[L, vocab]`.

    scratch: float32 `[num_threads, SAMPLING_SCRATCH_ROWS * vocab rounded up to NOISE_LANES]`. Writes the arrays of
    samples; leaves token and logprob of a failed row alone.
    """

def score(
    logits: int,
    vocab: int,
    bf16: bool,
    rows: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    scores: TokenScores,
    num_threads: int,
) -> None:
    """Score a token of each of some rows of logits, element `[L, vocab]`, and find the most probable ones.

    rows: below L, `[M]`; token_ids: below vocab, `[M]`. Writes the arrays of scores, `[M]` and `[M * num_top]`.
    """

class Int8Weight:
    """A linear layer's weights in the layout of the integer products (see cpu_int8.h).

    Attributes:
        out_features: rows of the weight.
        in_features: columns of the weight.
        num_bytes: size of its panels.
        row_bytes: size of one row of quantised input.
    """

    out_features: int
    in_features: int
    num_bytes: int
    row_bytes: int

    def __init__(self, out_features: int, in_features: int, bits: int) -> None: ...
    def pack(self, weight: npt.NDArray[np.float32], bias: int, panels: int, num_threads: int) -> bool:
        """Quantise weight `[out_features, in_features]` into panels, `num_bytes` bytes that stay with the layer.

        bias: float32 `[out_features]` that stays with the layer, or 0 for none. Returns False, leaving the panels
        unfinished, when the layer has 4 bits and they do not hold the weights without loss.
        """

def linear_int8(
    x: int,
    weight: Int8Weight,
    quantised: int,
    out: int,
    rows: int,
    bf16_out: bool,
    kernel: str,
    num_threads: int,
) -> None:
    """Out `[rows, out_features]` = x @ weight + bias; x is bfloat16 `[rows, in_features]`, out bfloat16 or float32.

    quantised: scratch of `rows * weight.row_bytes` bytes; kernel: one of `INT8_KERNELS`.
    """
