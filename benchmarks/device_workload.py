"""Steps, attention and sampling parameters for checks of a device, made without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from foreword.gpu.backends.backend import Backend, KVCache, KVCacheShape, RotaryTable
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.sampling import HistoryCounts, LogitBiases, SamplingBatch, TokenMasks
from foreword.gpu.models.rope import RopeConfig, rotary_angles
from foreword.scheduler.request import Request
from foreword.scheduler.step import StepPlan

BLOCK_SIZE = 16
NOTHING = np.zeros(0, np.int32)


def int32(values: Any) -> np.ndarray:
    """An array of the scheduler's integers."""
    return np.asarray(values, np.int32)


def step_plan(
    first_position: int,
    tokens: Sequence[Sequence[int]],
    blocks_per_sequence: int,
    num_logits: int,
    admitted: Sequence[tuple[int, Request]] = (),
) -> StepPlan:
    """A step of sequences of equal length: row s has the blocks from `s * blocks_per_sequence` on."""
    num_sequences, num_tokens = len(tokens), len(tokens[0])
    positions = np.tile(np.arange(first_position, first_position + num_tokens), num_sequences)
    rows = np.repeat(np.arange(num_sequences), num_tokens)
    rows_of_table, entries = np.divmod(np.arange(num_sequences * blocks_per_sequence), blocks_per_sequence)
    table = np.stack([rows_of_table, entries, rows_of_table * blocks_per_sequence + entries], axis=1)
    wanted = np.arange(num_sequences * num_tokens).reshape(num_sequences, num_tokens)[:, num_tokens - num_logits :]
    return StepPlan(
        step_id=1,
        rows=int32(range(num_sequences)),
        generations=int32([0] * num_sequences),
        query_offsets=int32(np.arange(num_sequences + 1) * num_tokens),
        context_lens=int32([first_position + num_tokens] * num_sequences),
        token_ids=int32(tokens).ravel(),
        positions=int32(positions),
        slot_mapping=int32(rows * blocks_per_sequence * BLOCK_SIZE + positions),
        logits_indices=int32(wanted).ravel(),
        logits_offsets=int32(np.arange(num_sequences + 1) * num_logits),
        scored_indices=NOTHING,
        scored_token_ids=NOTHING,
        scored_offsets=int32([0] * (num_sequences + 1)),
        block_table_updates=int32(table),
        admitted=tuple(admitted),
        output_offsets=int32([0] * (len(admitted) + 1)),
        output_token_ids=NOTHING,
    )


class StepWriter:
    """Writes the steps of one sequence that owns all blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._length = 0

    def plan(self, tokens: Sequence[int], admitted: Sequence[tuple[int, Request]] = ()) -> StepPlan:
        """Append tokens; the last one's logits are wanted."""
        plan = step_plan(self._length, [tokens], self._num_blocks, 1, admitted)
        self._length += len(tokens)
        return plan


class AttentionWorkload:
    """Attention of one layer over sequences of one length.

    Attributes:
        num_kv_heads, group, head_dim: of the model.
        context: tokens of each sequence, those of the step included.
        num_sequences: in the step.
        query_len: tokens of each sequence in the step.
    """

    def __init__(
        self, num_kv_heads: int, group: int, head_dim: int, context: int, num_sequences: int = 3, query_len: int = 5
    ) -> None:
        self.num_kv_heads, self.group, self.head_dim = num_kv_heads, group, head_dim
        self.context, self.num_sequences, self.query_len = context, num_sequences, query_len

    def run(self, backend: Backend[Any]) -> Any:
        """Fill a cache with random keys and values, then attend: `[T, H * D]`, the same input on every backend."""
        cache = self._cache(backend)
        rotary = RotaryTable(*map(backend.weight, rotary_angles(RopeConfig(), self.head_dim, self.context)))
        generator = torch.Generator().manual_seed(self.head_dim)
        before = self.context - self.query_len
        for first, length in ((0, before), (before, self.query_len)):
            width = (self.group + 2) * self.num_kv_heads * self.head_dim
            values = torch.randn(self.num_sequences * length, width, generator=generator).bfloat16().float().numpy()
            batch = backend.upload(self._plan(first, length), cache)
            queries = backend.rotate_and_store(backend.embedding_weight(values), rotary, batch, cache, 0)
        out = backend.attention(queries, batch, cache, 0, self.head_dim**-0.5, None)
        return out.astype(np.float64) if isinstance(out, np.ndarray) else out

    def prepared(self, cuda: CudaBackend) -> Callable[[], torch.Tensor]:
        """The attention of one layer alone, its work list planned, over a cache of random values."""
        cache = self._cache(cuda)
        cache.keys.normal_()
        cache.values.normal_()
        batch = cuda.upload(self._plan(self.context - self.query_len, self.query_len), cache)
        num_tokens, width = self.num_sequences * self.query_len, self.num_kv_heads * self.group * self.head_dim
        queries = torch.randn(num_tokens, width, device=cache.keys.device).to(cache.keys.dtype)
        return lambda: cuda.attention(queries, batch, cache, 0, self.head_dim**-0.5, None)

    @property
    def _blocks_per_sequence(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    def _plan(self, first: int, length: int) -> StepPlan:
        return step_plan(first, [[0] * length] * self.num_sequences, self._blocks_per_sequence, 0)

    def _cache(self, backend: Backend[Any]) -> KVCache[Any]:
        blocks = self._blocks_per_sequence
        return backend.kv_cache(
            KVCacheShape(
                num_layers=1,
                num_blocks=self.num_sequences * blocks,
                block_size=BLOCK_SIZE,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                num_rows=self.num_sequences,
                max_blocks_per_sequence=blocks,
            )
        )


def sampling_batch(rows: int, **changes: float) -> SamplingBatch:
    """Random rows without limits, each with a seed of its own; a keyword changes a number in all of them."""
    numbers: dict[str, float] = {
        "temperature": 0.8,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    top_k = int(changes.pop("top_k", 0))
    none = np.full(rows, -1, np.int32)
    no_list = (np.zeros(1, np.int32), NOTHING)
    return SamplingBatch(
        top_k=np.full(rows, top_k, np.int32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.arange(rows, dtype=np.int64),
        biases=LogitBiases(*no_list, np.zeros(0, np.float32), none),
        masks=TokenMasks(np.zeros((0, 1), np.uint32), none),
        history=HistoryCounts(*no_list, NOTHING, none),
        masked_ids=np.zeros((rows, 1), np.int32),
        num_masked=np.zeros(rows, np.int32),
        by_rejection=np.zeros(rows, np.bool_),
        draft_ids=none,
        want_logprob=np.ones(rows, np.bool_),
        **{name: np.full(rows, value, np.float32) for name, value in (numbers | changes).items()},
    )
