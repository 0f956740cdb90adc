"""Many small arrays between host and device in one copy each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foreword.scheduler.step import Int32Array

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


class HostBuffer:
    """Page-locked memory, and whether the copy that was queued last from or to it is done."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.view: npt.NDArray[np.uint8] = self.memory.numpy()
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """A copy was queued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Wait until it is done."""
        if self._copied is not None:
            self._copied.synchronize()


class StagingBuffer:
    """Memory on the device that arrays are uploaded to, and two page-locked buffers that they leave from in turn.

    So the next upload can be queued while the device has not come to the one before. Arrays of the same sizes land at
    the same addresses: a recorded graph reads what the last upload brought, unless the buffer had to grow between.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._allocate(num_bytes)

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Queue one copy of all arrays, once the last but one has left the host.

        What the device still has to read of an earlier upload must have been queued before.

        Returns:
            tensors on the device, of the arrays' shapes and types; booleans become bytes.
        """
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        if ends[-1] > len(self._on_device):
            self._allocate(2 * ends[-1])
        self._hosts.reverse()
        host = self._hosts[0]
        host.wait()
        tensors = []
        for array, start in zip(arrays, [0, *ends], strict=False):
            part = slice(start, start + array.nbytes)
            host.view[part] = array.reshape(-1).view(np.uint8)
            tensors.append(self._on_device[part].view(_DTYPES[array.dtype]).view(array.shape))
        self._on_device[: ends[-1]].copy_(host.memory[: ends[-1]], non_blocking=True)
        host.record()
        return tensors

    def _allocate(self, num_bytes: int) -> None:
        self._hosts = [HostBuffer(self._device, num_bytes) for _ in range(2)]
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class ResultBuffer:
    """Two page-locked buffers that results arrive in, in turn: one result may be queued while another is waited for."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._hosts = [HostBuffer(device, num_bytes) for _ in range(2)]

    def download(self, results: torch.Tensor) -> Callable[[], Int32Array]:
        """Queue a copy of int32 results, which the next but one must not overtake.

        Returns:
            waits for it.
        """
        self._hosts.reverse()
        if results.nbytes > len(self._hosts[0].view):
            self._hosts[0] = HostBuffer(self._device, 2 * results.nbytes)
        host = self._hosts[0]
        host.memory[: results.nbytes].view(torch.int32).copy_(results, non_blocking=True)
        host.record()

        def wait() -> Int32Array:
            host.wait()
            return host.view[: results.nbytes].view(np.int32).copy()

        return wait
