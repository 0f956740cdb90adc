"""Many small host arrays to the device in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Of each array in the buffer, in bytes: what the widest load of a kernel asks for."""
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.uint8,
}


class StagingBuffer:
    """Page-locked memory on the host and its counterpart on the device.

    Arrays of the same sizes land at the same addresses, so a recorded graph reads what the last upload brought, unless
    the buffer had to grow between.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._allocate(num_bytes)

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Queue one copy of all arrays, once the one before it has left the host.

        What the device still has to read of an earlier upload must have been queued before.

        Returns:
            tensors on the device, of the arrays' shapes and types; booleans become bytes.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        if ends[-1] > len(self._host):
            self._allocate(2 * ends[-1])
        tensors = []
        for array, start in zip(arrays, [0, *ends], strict=False):
            part = slice(start, start + array.nbytes)
            self._view[part] = array.reshape(-1).view(np.uint8)
            tensors.append(self._on_device[part].view(_DTYPES[array.dtype]).view(array.shape))
        self._on_device[: ends[-1]].copy_(self._host[: ends[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return tensors

    def _allocate(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._view = self._host.numpy()
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
