"""Limits the scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

MAX_TENANT_WEIGHT = 1000


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
        priority_aging_ns: a priority whose waiting requests have all been passed over for so long ranks one higher, and
            so on until one of them is admitted.
        lookahead: plans that may be made before the result of the plan before them is there, 0 or 1. With 1 a device
            that works asynchronously never waits for the scheduler.
        tenant_weights: (tenant, weight) pairs, weights from 1 to 1000: among waiting requests of one priority, tenants
            get tokens in proportion to their weights. A tenant that is not listed weighs 1.
    """

    num_blocks: int
    block_size: int = 16
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 1 << 20
    priority_aging_ns: int = 5_000_000_000
    lookahead: int = 0
    tenant_weights: tuple[tuple[str, int], ...] = ()
    hash_key: bytes = field(default=bytes(16), repr=False)

    def __post_init__(self) -> None:
        for limit in fields(self):
            if limit.name not in ("hash_key", "lookahead", "tenant_weights") and getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} must be at least 1, got {getattr(self, limit.name)}")
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead must be 0 or 1, got {self.lookahead}")
        for tenant, weight in self.tenant_weights:
            if not 1 <= weight <= MAX_TENANT_WEIGHT:
                raise ValueError(f"tenant_weights: {tenant!r} must weigh 1 to {MAX_TENANT_WEIGHT}, got {weight}")
        if len(dict(self.tenant_weights)) < len(self.tenant_weights):
            raise ValueError("tenant_weights must name each tenant once")
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
