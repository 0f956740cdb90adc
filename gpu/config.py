"""What a device is asked to hold and how it computes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from foreword.gpu.models.config import ModelConfig
from foreword.scheduler.errors import ConfigError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 2}
"""Number formats, and the bytes that an element of the KV cache takes in each."""
DEVICE_DTYPES = {"cpu": ("bfloat16", "float32", "int8"), "cuda": ("bfloat16", "float16", "float32")}
"""Number formats that a device computes in."""
SPECULATION_MODES = ("off", "auto", "ngram", "suffix", "hybrid", "draft-model")


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time, or "max", and of each period they are for: what a container may use (cgroup v2)."""


def available_cpus() -> int:
    """Processors this process may run on, as far as its container's quota goes; one at least."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):  # no container, or an older kernel
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, -(-int(quota) // int(period))))


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Capacities and number format of a device; the memory for all of it is allocated once.

    Attributes:
        num_blocks: blocks of the KV cache that sequences share.
        device: "cpu" or "cuda".
        dtype: number format: "bfloat16", "float32", or on the CUDA device "float16", for weights, activations and KV
            cache, or on the CPU device "int8" for integer matrix products with everything else in bfloat16.
        num_threads: threads that compute, on the CPU device.
        block_size: tokens per block.
        max_num_sequences: rows of the batch.
        max_num_batched_tokens: tokens of a step.
        max_model_len: tokens (prompt and output) a sequence may have.
        speculation: "off", "auto" (a controller decides at every step) or the name of a drafter that always proposes:
            "ngram", "suffix", "hybrid" for the better of both, or "draft-model".
        max_draft_tokens: drafts of a sequence that a step checks at most.

    Raises:
        ConfigError: a value that cannot be used.
    """

    num_blocks: int
    device: str = "cpu"
    dtype: str = "bfloat16"
    num_threads: int = field(default_factory=available_cpus)
    block_size: int = 16
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    speculation: str = "off"
    max_draft_tokens: int = 6

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device: '{self.device}' is unknown; use one of cpu, cuda")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype: '{self.dtype}' is unknown; use one of {', '.join(sorted(DTYPE_BYTES))}")
        if self.dtype not in DEVICE_DTYPES[self.device]:
            choices = ", ".join(DEVICE_DTYPES[self.device])
            raise ConfigError(f"dtype: the {self.device} device does not compute in {self.dtype}; use one of {choices}")
        if self.speculation not in SPECULATION_MODES:
            raise ConfigError(
                f"speculation: '{self.speculation}' is unknown; use one of {', '.join(SPECULATION_MODES)}"
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{entry.name}: must be at least 1, got {value}")

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks that a sequence of `max_model_len` tokens takes."""
        return -(-self.max_model_len // self.block_size)


def kv_cache_bytes_per_block(model: ModelConfig, block_size: int, dtype: str) -> int:
    """Memory that one block takes: keys and values of `block_size` tokens in every layer."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * block_size * DTYPE_BYTES[dtype]
