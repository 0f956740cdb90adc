"""One step's input on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

A = TypeVar("A")
"""The array type of a backend: `numpy.ndarray`, `torch.Tensor`."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[A]):
    """The tokens of a step, on the device. All int32; T tokens in the step, L positions whose logits are needed.

    Attributes:
        token_ids: `[T]`.
        positions: `[T]` position of each token in its sequence; it attends to positions up to its own.
        token_rows: `[T]` row of the block table that each token's sequence owns.
        slot_mapping: `[T]` where its key and value go: block * block_size + offset in block.
        logits_indices: `[L]` tokens (of T) that go through the output head, ascending.
    """

    token_ids: A
    positions: A
    token_rows: A
    slot_mapping: A
    logits_indices: A
