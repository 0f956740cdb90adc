"""What is computed before the first request: afterwards nothing is compiled or recorded, and no token is different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.config import DeviceConfig
from foreword.gpu.kernels.launcher import Function
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.gpu.warm_up import warm_up
from foreword.scheduler.errors import ConfigError, DeviceError
from foreword.scheduler.request import Request
from foreword.scheduler.step import DraftState


class CountingDriver(CheckerDriver):
    """Counts what is compiled and recorded; refuses to compile a kernel."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.refused = refused
        self.num_compiled = self.num_recorded = 0

    def compile(self, source: Path, expression: str) -> Function:
        if self.refused and expression.startswith(self.refused):
            raise DeviceError(f"kernel {expression} cannot be compiled: error")
        self.num_compiled += 1
        return super().compile(source, expression)

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        return super().record(compute)


def test_a_request_finds_everything_compiled_and_recorded(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    driver = CountingDriver()
    runner = new_runner("float32", CudaBackend("float32", driver, device="cpu"))
    warm_up(runner)
    assert driver.num_recorded == 2  # eight rows at most, with sampling and without
    before = driver.num_compiled
    cold = new_runner("float32", CudaBackend("float32", CheckerDriver(), device="cpu"))
    prompts = [[5, 6, 7, 8], [9] * 20]
    wanted: list[dict[str, Any]] = [{"temperature": 0.8, "seed": 3}, {"banned_token_ids": (1, 2), "want_ranks": True}]
    requests = [new_request(prompt, key=key, **wanted[key]) for key, prompt in enumerate(prompts)]
    outputs = []
    for each in (runner, cold):
        writer = plan_writer()
        plan = writer.plan([(row, prompt, 1) for row, prompt in enumerate(prompts)], list(enumerate(requests)))
        outputs.append([each.execute(plan).token_ids.tolist()])
        for _ in range(3):
            plan = writer.plan([(row, [token], 1) for row, token in enumerate(outputs[-1][-1])])
            outputs[-1].append(each.execute(plan).token_ids.tolist())
    assert outputs[0] == outputs[1]
    assert (driver.num_compiled, driver.num_recorded) == (before, 2)


def out_of_memory(*arguments: Any, **keywords: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def device_lost(*arguments: Any, **keywords: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (
            out_of_memory,
            ConfigError,
            "kv_cache_memory: 64 blocks leave too little memory on CUDA checker for a step of 256",
        ),
        (device_lost, DeviceError, "CUDA checker failed in the first step: CUDA error: an illegal memory access"),
    ],
)
def test_what_a_step_lacks_shows_before_the_server_is_ready(
    new_runner: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[..., None],
    error: type[Exception],
    message: str,
) -> None:
    runner = new_runner("float32", CudaBackend("float32", CheckerDriver(), device="cpu"))
    monkeypatch.setattr(torch, "mm", failure)
    with pytest.raises(error, match=message):
        warm_up(runner)


def test_workspaces_are_part_of_it(new_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner("float32", CudaBackend("float32", CheckerDriver(), device="cpu"))
    monkeypatch.setattr("foreword.gpu.backends.cuda_attention.CudaAttention._partials_of", out_of_memory)
    with pytest.raises(ConfigError, match="lower kv_cache_memory or max_num_batched_tokens"):
        warm_up(runner)


@pytest.mark.parametrize("kernel", ["rms_norm", "sample", "process", "score", "accept", "paged_attention_fma"])
def test_a_kernel_that_cannot_be_compiled_shows_before_the_server_is_ready(
    new_runner: Callable[..., ModelRunner], kernel: str
) -> None:
    runner = new_runner("float32", CudaBackend("float32", CountingDriver(kernel), device="cpu"))
    with pytest.raises(DeviceError, match=f"kernel {kernel}.* cannot be compiled"):
        warm_up(runner)


def test_the_cuda_device_is_warm_when_it_is_loaded(
    tiny_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CountingDriver()
    backend = CudaBackend("float32", driver, device="cpu")
    monkeypatch.setattr("foreword.gpu.runner.open_cuda_backend", lambda dtype: backend)
    sizes = {"num_blocks": 8, "max_num_sequences": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    config = DeviceConfig(device="cuda", dtype="float32", speculation="ngram", **sizes)  # type: ignore[arg-type]
    runner = load_runner(config, tiny_checkpoint())
    assert driver.num_compiled > 8
    assert runner.speculator is not None
    assert runner.speculator.state is DraftState.ACTIVE
