"""Limits the scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Fixed capacities; every pool and array is allocated once from these.

    Attributes:
        num_blocks: blocks of the KV cache that sequences share.
        block_size: tokens per block.
        max_num_sequences: sequences that may hold blocks at once (rows of the batch).
        max_num_batched_tokens: token budget of one step; at least `max_num_sequences`, so that every running sequence
            can decode in every step.
        max_model_len: tokens (prompt and output) a sequence may have.
        max_num_waiting: requests that may wait, each output of one counted; one more is refused.
        max_num_waiting_tokens: prompt tokens that may wait, counted for each output; a request that would pass it is
            refused, unless the queue is empty.
    """

    num_blocks: int
    block_size: int = 16
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 1 << 20
    hash_key: bytes = field(default=bytes(16), repr=False)

    def __post_init__(self) -> None:
        for limit in fields(self):
            if limit.name != "hash_key" and getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} must be at least 1, got {getattr(self, limit.name)}")
        if len(self.hash_key) != 16:
            raise ValueError(f"hash_key must have 16 bytes, has {len(self.hash_key)}")
        if self.max_num_batched_tokens < self.max_num_sequences:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_sequences ({self.max_num_sequences})"
            )

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens takes."""
        return -(-self.max_model_len // self.block_size)
