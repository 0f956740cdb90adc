"""Which device computes, and what it has."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from foreword.gpu.config import DTYPE_BYTES
from foreword.gpu.models.config import ModelConfig
from foreword.scheduler.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from foreword.gpu.backends.cuda_backend import CudaBackend

MIN_COMPUTE_CAPABILITY = (8, 0)
"""Of a CUDA device: the first with bfloat16 tensor cores and asynchronous copies."""

_CACHE_SHARE = 0.9  # of the memory that weights leave; the rest is for activations, workspaces and recorded graphs


def find_device(wanted: str) -> str:
    """Settle which device computes.

    Args:
        wanted: "cpu", "cuda", or "auto" for the CUDA device if there is one that can be used.

    Returns:
        "cpu" or "cuda".

    Raises:
        ConfigError: an unknown device, or CUDA is asked for and cannot be used here; the message says why.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: '{wanted}' is unknown; use one of auto, cpu, cuda")
    if wanted == "cpu":
        return "cpu"
    obstacle = _cuda_obstacle()
    if obstacle is None:
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"device: 'cuda' cannot be used here: {obstacle}")
    return "cpu"


def _cuda_obstacle() -> str | None:
    """Why the CUDA device cannot be used; None if it can."""
    if find_spec("cupy") is None:
        return "CuPy is not installed; install foreword[cuda12] or foreword[cuda13]"
    import torch  # takes a second

    if torch.version.cuda is None:
        return "the installed PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "there is no NVIDIA driver, or no device that it knows"
    try:
        capability = torch.cuda.get_device_capability()
    except RuntimeError as error:
        return f"the device does not start: {_first_line(error)}"
    if capability < MIN_COMPUTE_CAPABILITY:
        found, needed = (".".join(map(str, version)) for version in (capability, MIN_COMPUTE_CAPABILITY))
        return f"compute capability {needed} is needed, {torch.cuda.get_device_name()} has {found}"
    return None


def open_cuda_backend(dtype: str) -> CudaBackend:
    """The CUDA device in a compute dtype.

    Raises:
        ConfigError: CuPy cannot be used.
        DeviceError: kernels cannot be compiled here, or the device does not start.
    """
    from foreword.gpu.backends.cuda_backend import CudaBackend

    try:
        from foreword.gpu.kernels.cupy_driver import CupyDriver
    except ImportError as error:
        raise ConfigError(f"device: 'cuda' cannot be used here: CuPy cannot be imported: {error}") from error
    try:
        return CudaBackend(dtype, CupyDriver())
    except RuntimeError as error:
        raise DeviceError(f"the CUDA device does not start: {_first_line(error)}") from error


def cuda_cache_memory(model: ModelConfig, dtype: str) -> int:
    """Bytes of the CUDA device that the KV cache of a model may take; 0 if its weights do not leave any.

    Raises:
        DeviceError: the device does not start.
    """
    import torch

    try:
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError as error:
        raise DeviceError(f"the CUDA device does not start: {_first_line(error)}") from error
    return max(0, int((free - model.num_weights * DTYPE_BYTES[dtype]) * _CACHE_SHARE))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
