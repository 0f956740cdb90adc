"""The contract between a model and a device: every operation a decoder needs, and nothing else.

A backend works on whole batches; axis letters: T tokens, L rows of logits, E hidden size, H query heads, G KV heads,
D head size, F intermediate size, V vocabulary. "compute dtype" is the backend's own (float32, bfloat16 or float16). The
residual stream is always float32. Linear weights and the KV cache are opaque: a backend may store them in any layout
or precision.

Row independence: the result for a token depends on that token and its sequence alone, bit for bit. Whatever else is
in the batch, and however its prompt was cut into chunks, it is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.acceptance import AcceptedTokens, accept, spread
from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.gpu.batch import A, Batch
from foreword.scheduler.step import Int32Array, StepPlan, TokenScores

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LinearWeight(Generic[A]):
    """Weight `[out_features, in_features]` and bias `[out_features]` of a linear layer, in the backend's own form."""

    weight: A
    bias: A | None


@dataclass(frozen=True, slots=True)
class RotaryTable(Generic[A]):
    """Rotary position embedding: cos and sin, float32 `[max_model_len, D / 2]`, of each position and pair."""

    cos: A
    sin: A


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What the KV cache has room for.

    Attributes:
        num_layers: layers, each with its own keys and values.
        num_blocks: blocks that sequences share.
        block_size: tokens per block.
        num_kv_heads: G.
        head_dim: D.
        num_rows: sequences with a block table.
        max_blocks_per_sequence: entries of a block table.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    max_blocks_per_sequence: int


@dataclass(frozen=True, slots=True)
class KVCache(Generic[A]):
    """Paged keys and values of all layers, and the block tables that say which blocks a sequence owns.

    Attributes:
        shape: capacities.
        keys: compute dtype, layout of the backend.
        values: compute dtype, layout of the backend.
        block_table: int32 `[num_rows, max_blocks_per_sequence]`.
    """

    shape: KVCacheShape
    keys: A
    values: A
    block_table: A


class Backend(ABC, Generic[A]):
    """The operations of one device, in one compute dtype.

    Attributes:
        device: "cpu".
        device_name: as the operating system or driver calls it.
        dtype: number format, "float32", "bfloat16", "float16", or "int8" with compute dtype bfloat16.
    """

    device: str
    device_name: str
    dtype: str

    # Memory

    @abstractmethod
    def weight(self, values: Float32) -> A:
        """Upload a small weight or table that stays float32, any shape."""

    @abstractmethod
    def embedding_weight(self, table: Float32) -> A:
        """Upload an embedding table `[V, E]` in compute dtype."""

    @abstractmethod
    def linear_weight(self, weight: Float32, bias: Float32 | None = None) -> LinearWeight[A]:
        """Upload a linear layer: weight `[out_features, in_features]`, bias `[out_features]`."""

    def head_weight(self, weight: Float32) -> LinearWeight[A]:
        """Upload an output head `[V, E]` of its own; its products, logits, may be float32 in any compute dtype."""
        return self.linear_weight(weight)

    @abstractmethod
    def tied_linear_weight(self, table: A) -> LinearWeight[A]:
        """The embedding table `[V, E]` as an output head like `head_weight`'s; memory is shared where layouts allow."""

    @abstractmethod
    def kv_cache(self, shape: KVCacheShape) -> KVCache[A]:
        """Allocate a KV cache. Its content is arbitrary and must never reach a result.

        Raises:
            ConfigError: a block size or head size that the device cannot use.
        """

    @abstractmethod
    def upload(self, plan: StepPlan, cache: KVCache[A]) -> Batch[A]:
        """Apply the plan's block-table updates to the cache and copy its tokens to the device.

        The plan's arrays may change once this returns.
        """

    def compute(self, model: Callable[[Batch[A]], A], batch: Batch[A]) -> A:
        """Run a model on a batch; a device may record it once and repeat the recording for batches of the same size.

        Args:
            model: the same one in every call; its result has a row for each of the batch's logits, and may have more.
            batch: from the last `upload`.
        """
        return model(batch)

    # Operations

    @abstractmethod
    def embedding(self, token_ids: A, table: A) -> A:
        """Look token_ids `[T]` up in the table `[V, E]`: the residual stream, float32 `[T, E]`."""

    @abstractmethod
    def rms_norm(self, stream: A, weight: A, eps: float, delta: A | None = None) -> A:
        """Add to the residual stream and normalise (Zhang and Sennrich, 2019).

        Args:
            stream: float32 `[T, E]`; `delta` is added in place.
            weight: float32 `[E]`.
            eps: added to the mean square.
            delta: compute dtype `[T, E]`.

        Returns:
            stream / rms(stream) * weight, compute dtype `[T, E]`.
        """

    @abstractmethod
    def linear(self, x: A, weight: LinearWeight[A]) -> A:
        """Multiply x `[T, in_features]` by the weight and add the bias: `[T, out_features]`, compute dtype."""

    @abstractmethod
    def rotate_and_store(self, qkv: A, rotary: RotaryTable[A], batch: Batch[A], cache: KVCache[A], layer: int) -> A:
        """Rotate queries and keys (Su et al., 2021; pairs i and i + D / 2), put keys and values into the cache.

        Args:
            qkv: compute dtype `[T, (H + 2 G) * D]`: query heads, key heads, value heads. Overwritten.
            rotary: angles of each position.
            batch: positions and slots.
            cache: takes the step's keys and values.
            layer: of the cache.

        Returns:
            rotated queries, compute dtype `[T, H * D]`; may be a view of `qkv`.
        """

    @abstractmethod
    def attention(
        self, queries: A, batch: Batch[A], cache: KVCache[A], layer: int, scale: float, window: int | None
    ) -> A:
        """Causal attention of each token over its sequence's cached keys and values, grouped heads.

        Prompt chunks, decoding and verification are one case: the token at position p attends to positions
        max(0, p - window + 1)..p of the blocks in its row of the block table.

        Args:
            queries: from `rotate_and_store` of the same layer.
            batch: positions and rows.
            cache: holds every position up to each token's own.
            layer: of the cache.
            scale: factor on the scores.
            window: keys a token sees, itself included; None for all.

        Returns:
            compute dtype `[T, H * D]`.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up: A) -> A:
        """Split gate_up `[T, 2 F]` and return silu(gate) * up, `[T, F]`, compute dtype (SwiGLU; Shazeer, 2020)."""

    @abstractmethod
    def gather_rows(self, x: A, indices: A) -> A:
        """Take rows `[L]` of x `[T, E]`: `[L, E]`."""

    @abstractmethod
    def sample(self, logits: A, params: SamplingBatch) -> Samples:
        """Draw a token from each row of logits `[L, V]`, the head's product, by the rule of `sampling`."""

    def sample_and_accept(
        self,
        logits: A,
        params: SamplingBatch,
        input_ids: Int32Array,
        logits_offsets: Int32Array,
        rows: Int32Array | None = None,
    ) -> Callable[[], AcceptedTokens]:
        """Draw a token from each row of logits and accept drafts while they equal what was drawn; see `acceptance`.

        A device that works asynchronously begins it.

        Args:
            logits: `[L, V]`, the head's product.
            params: of each row.
            input_ids: `[L]` the token that each row follows.
            logits_offsets: `[B + 1]` rows of logits of each sequence.
            rows: `[B]` of the block table. The last token that comes out of each is what -1 means in its next plan, on
                a device whose plans are made ahead; None keeps none.

        Returns:
            waits for the tokens.
        """
        tokens = accept(self.sample(logits, params), input_ids, logits_offsets)
        if params.want_scores is not None and (is_scored := params.want_scores[tokens.logits_rows]).any():
            scored = (tokens.logits_rows[is_scored], tokens.token_ids[is_scored])
            tokens = replace(tokens, scores=spread(self.score(logits, *scored, params.num_top)(), is_scored))
        return lambda: tokens

    def compute_and_accept(
        self,
        model: Callable[[Batch[A]], A],
        batch: Batch[A],
        params: SamplingBatch,
        input_ids: Int32Array,
        logits_offsets: Int32Array,
        rows: Int32Array,
    ) -> Callable[[], AcceptedTokens]:
        """`compute` and `sample_and_accept` as one, for a batch whose logits are all drawn from."""
        logits = self.compute(model, batch)
        return self.sample_and_accept(logits[: len(input_ids)], params, input_ids, logits_offsets, rows)  # type: ignore[index]

    @abstractmethod
    def score(self, logits: A, rows: Int32Array, token_ids: Int32Array, num_top: int) -> Callable[[], TokenScores]:
        """Say how probable given tokens are under softmax(logits), and which are the most probable.

        Args:
            logits: compute dtype `[L, V]`.
            rows: `[M]` of the logits. In a row with NaN the log probabilities are NaN.
            token_ids: `[M]` of the vocabulary, one for each of the rows.
            num_top: most probable tokens wanted of each row, at most V.

        Returns:
            waits for the scores.
        """
