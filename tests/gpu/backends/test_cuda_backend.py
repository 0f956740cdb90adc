"""What the CUDA device does besides computing: errors, and steps that ask for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends import cuda_attention, cuda_backend, cuda_sampling
from foreword.gpu.backends.backend import KVCacheShape
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.cuda_sampling import MAX_VOCAB_SIZE
from foreword.gpu.backends.staging import StagingBuffer
from foreword.gpu.kernels.launcher import Function, Grid
from foreword.gpu.runner import ModelRunner
from foreword.scheduler.errors import ConfigError, DeviceError
from foreword.scheduler.request import Request
from tests.gpu.backends.test_sampling import parameters

ENOUGH = KVCacheShape(1, 4, 16, 1, 64, 2, 4)


@pytest.fixture
def cuda(checker: CheckerDriver) -> CudaBackend:
    return CudaBackend("bfloat16", checker, device="cpu")


def out_of_memory(*arguments: Any, **keywords: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def test_a_number_format_of_another_device_is_refused(checker: CheckerDriver) -> None:
    with pytest.raises(
        ConfigError, match="dtype: must be one of bfloat16, float16, float32 on the CUDA device, got 'int8'"
    ):
        CudaBackend("int8", checker, device="cpu")


def test_weights_beyond_float16_are_refused(checker: CheckerDriver) -> None:
    cuda, weight = CudaBackend("float16", checker, device="cpu"), np.array([[65504.0, 1.0]], np.float32)
    assert cuda.linear_weight(weight).weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="dtype: float16 has no room for a weight of this model; use bfloat16 or"):
        cuda.linear_weight(weight * 2)
    assert cuda.weight(weight * 2).tolist() == [[131008.0, 2.0]]  # of a norm, in float32


def test_a_cache_that_does_not_fit_names_the_setting(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", out_of_memory)
    with pytest.raises(ConfigError, match="kv_cache_memory: 4 blocks do not fit the memory left on CUDA checker"):
        cuda.kv_cache(ENOUGH)


@pytest.mark.parametrize("upload", ["weight", "embedding_weight", "linear_weight", "head_weight"])
def test_weights_that_do_not_fit_are_an_error_of_the_device(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch, upload: str
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", out_of_memory)
    with pytest.raises(DeviceError, match="weights do not fit the memory of CUDA checker"):
        getattr(cuda, upload)(np.zeros((2, 2), np.float32))


def test_a_bias_that_does_not_fit_is_one_too(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def only_matrices(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return out_of_memory() if tensor.ndim == 1 else to(tensor, *arguments, **keywords)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.Tensor, "to", only_matrices)
    with pytest.raises(DeviceError, match="weights do not fit the memory of CUDA checker"):
        cuda.linear_weight(np.zeros((2, 2), np.float32), np.zeros(2, np.float32))


def test_block_tables_that_do_not_fit_name_the_setting_of_the_cache(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "zeros", out_of_memory)
    with pytest.raises(ConfigError, match="kv_cache_memory: 4 blocks do not fit"):
        cuda.kv_cache(ENOUGH)


def test_memory_that_ends_within_a_step_leaves_the_runner_usable(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    cuda: CudaBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, request = new_runner("bfloat16", cuda), new_request([1, 2, 3], temperature=0.0)
    plan = plan_writer().plan([(0, [1, 2, 3], 1)], [(0, request)])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            runner.execute(plan)
    again = runner.execute(plan)
    assert again.token_ids.tolist() == new_runner("bfloat16", cuda).execute(plan).token_ids.tolist()


def test_a_vocabulary_beyond_the_sampler_is_refused(cuda: CudaBackend) -> None:
    logits = torch.empty(1, MAX_VOCAB_SIZE + 1, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="vocab_size: at most 262144 on the CUDA device, got 262145"):
        cuda.sample(logits, parameters(1))


def test_a_step_without_logits_draws_nothing(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    cuda: CudaBackend,
) -> None:
    result = new_runner("bfloat16", cuda).execute(
        plan_writer().plan([(3, [1, 2, 3], 0)], [(3, new_request([1, 2, 3, 4]))])
    )
    assert result.token_offsets.tolist() == [0, 0]
    assert not result.failed.any()


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_do_not_depend_on_the_order_of_threads(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    cuda: CudaBackend,
    seed: int,
) -> None:
    requests = [(row, new_request([5] * (row + 1), temperature=0.9, top_p=0.9, top_k=40)) for row in range(3)]
    plan = plan_writer().plan([(row, [5] * (row + 1), 1) for row in range(3)], requests)
    expected = new_runner("bfloat16", cuda).execute(plan)
    shuffled = new_runner("bfloat16", CudaBackend("bfloat16", CheckerDriver(seed), device="cpu")).execute(plan)
    assert shuffled.token_ids.tolist() == expected.token_ids.tolist()


def test_float16_is_nearer_to_float32_than_bfloat16(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    checker: CheckerDriver,
) -> None:
    """A model's logits, for a prompt in wide tiles and for a few tokens in narrow ones; then a token is drawn."""
    prompt = np.random.default_rng(0).integers(0, 131, 60).tolist()

    def logits(dtype: str) -> torch.Tensor:
        backend, writer, parts = CudaBackend(dtype, checker, device="cpu"), plan_writer(), []
        runner = new_runner(dtype, backend)
        for tokens in (prompt[:56], prompt[56:]):
            batch = backend.upload(writer.plan([(0, tokens, len(tokens))]), runner.cache)
            parts.append(runner.decoder.logits(batch, runner.cache)[: len(tokens)].float())
        result = runner.execute(writer.plan([(0, [1], 1)], [(0, new_request([*prompt, 1], temperature=0.8))]))
        assert not result.failed.any()
        return torch.cat(parts)

    exact = logits("float32")
    half_error, brain_error = ((logits(dtype) - exact).abs().max() for dtype in ("float16", "bfloat16"))
    assert 0 < half_error < brain_error / 4
    assert brain_error < 0.05 * exact.abs().max()


def test_a_device_with_little_shared_memory_computes_the_same_in_narrow_tiles(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    checker: CheckerDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compute capability 8.6 and 8.9 have 100 KiB a multiprocessor; wide tiles of heads of 128 need more."""
    logits = []
    for kibibytes in (228, 100):
        monkeypatch.setattr(cuda_backend, "_CHECKER_SHARED_BYTES", kibibytes << 10)
        backend = CudaBackend("bfloat16", checker, device="cpu")
        runner = new_runner("bfloat16", backend, head_dim=128)
        batch = backend.upload(plan_writer().plan([(0, range(40), 40)]), runner.cache)
        logits.append(runner.decoder.logits(batch, runner.cache))
        (work,) = batch.work.values()
        assert bool(len(work.wide)) == (kibibytes == 228)
    assert torch.equal(*(rows[:40] for rows in logits))


class RecordingDriver(CheckerDriver):
    """Counts recordings, how often they are run, and launches outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recordings = self.num_replays = self.num_launches = 0
        self.is_replaying = False

    def compile(self, source: Path, expression: str) -> Function:
        function = super().compile(source, expression)

        def launch(grid: Grid, threads: int, arguments: Sequence[object], shared_bytes: int) -> None:
            self.num_launches += not self.is_replaying
            function(grid, threads, arguments, shared_bytes)

        return launch

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recordings += 1

        def replay() -> torch.Tensor:
            self.num_replays += 1
            self.is_replaying = True
            result = compute()
            self.is_replaying = False
            return result

        return replay


def test_a_decode_step_is_one_replay(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """Model, sampling and acceptance; what masks, penalties and scores need is launched behind it."""
    driver, writer = RecordingDriver(), plan_writer()
    runner = new_runner("float32", CudaBackend("float32", driver, device="cpu"))
    requests = [new_request([7] * (row + 1), temperature=0.8, top_k=9, seed=row) for row in range(3)]
    wanted = {"temperature": 0.8, "repetition_penalty": 1.2, "num_top_logprobs": 1}
    requests.append(new_request([7] * 4, **wanted))
    tokens = []
    for row, request in enumerate(requests):
        plan = writer.plan([(row, request.prompt_token_ids.tolist(), 1)], [(row, request)])
        tokens += runner.execute(plan).token_ids.tolist()
    runner.execute(writer.plan([(row, tokens[row : row + 1], 1) for row in range(3)]))
    before = driver.num_replays, driver.num_launches
    runner.execute(writer.plan([(row, tokens[row : row + 1], 1) for row in range(3)]))
    runner.execute(writer.plan([(row, [5, 6, 7][:row], row) for row in (2, 1)]))  # drafts are checked like that, too
    assert (driver.num_replays, driver.num_launches) == (before[0] + 2, before[1])
    for _ in range(2):
        before = driver.num_replays, driver.num_launches
        runner.execute(writer.plan([(row, tokens[row : row + 1], 1) for row in range(4)]))
    assert driver.num_replays == before[0] + 1
    assert driver.num_launches == before[1] + 4  # process, sample, accept, score


def decode(runner: ModelRunner, writer: Any, requests: list[Request], num_steps: int) -> list[list[int]]:
    """Run whole prompts in one step each, then decode all of them; in the middle one sequence goes and comes back."""
    outputs: list[list[int]] = []
    for row, request in enumerate(requests):
        prompt = request.prompt_token_ids.tolist()
        outputs.append(runner.execute(writer.plan([(row, prompt, 1)], [(row, request)])).token_ids.tolist())
    for step in range(num_steps):
        rows = [row for row in range(len(requests)) if not (row == 1 and step % 3 == 1)]
        result = runner.execute(writer.plan([(row, outputs[row][-1:], 1) for row in rows]))
        for row, token in zip(rows, result.token_ids.tolist(), strict=True):
            outputs[row].append(token)
    return outputs


def test_recorded_steps_give_the_tokens_of_steps_computed_one_by_one(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    checker: CheckerDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checker's recordings read the memory that they were made with, as a graph does."""
    requests = [new_request(range(3, 3 + length), temperature=0.8, seed=length) for length in (1, 14, 40)]
    driver = RecordingDriver()
    recorded = decode(new_runner("float32", CudaBackend("float32", driver, device="cpu")), plan_writer(), requests, 9)
    assert driver.num_recordings == 1
    assert driver.num_replays == 9  # the prompt of one token is a step like the others
    monkeypatch.setattr(cuda_backend, "padded_size", lambda num_tokens: 0)
    alone = decode(new_runner("float32", CudaBackend("float32", checker, device="cpu")), plan_writer(), requests, 9)
    assert recorded == alone


def test_a_recording_is_made_again_when_its_memory_moved(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_backend, "_STAGING_BYTES", 400)
    driver, writer = RecordingDriver(), plan_writer()
    runner = new_runner("float32", CudaBackend("float32", driver, device="cpu"))
    request = new_request([5, 6], temperature=0.0)
    first = runner.execute(writer.plan([(0, [5, 6], 1)], [(0, request)])).token_ids.tolist()
    outputs = decode_one(runner, writer, first, 3)
    assert driver.num_recordings == 1
    long_prompt = new_request([9] * 200)
    runner.execute(writer.plan([(1, [9] * 200, 1)], [(1, long_prompt)]))
    outputs = decode_one(runner, writer, outputs, 3)
    assert driver.num_recordings == 2
    whole = new_runner("float32", CudaBackend("float32", CheckerDriver(), device="cpu"))
    fresh = plan_writer()
    expected = whole.execute(fresh.plan([(0, [5, 6], 1)], [(0, request)])).token_ids.tolist()
    assert outputs == decode_one(whole, fresh, expected, 6)


def test_a_recording_is_made_again_when_the_memory_of_sampling_moved(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_sampling, "_STAGING_BYTES", 64)
    request, other = new_request([5, 6], temperature=0.9, seed=4), new_request([9] * 12)
    outputs = []
    for is_moved in (True, False):
        runner, writer = new_runner("float32", CudaBackend("float32", CheckerDriver(), device="cpu")), plan_writer()
        tokens = runner.execute(writer.plan([(0, [5, 6], 1)], [(0, request)])).token_ids.tolist()
        tokens = decode_one(runner, writer, tokens, 3)
        if is_moved:
            runner.execute(writer.plan([(1, [9] * 12, 12)], [(1, other)]))
        outputs.append(decode_one(runner, writer, tokens, 4))
    assert outputs[0] == outputs[1]


def test_a_recording_is_made_again_when_the_memory_of_attention_moved(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where its first list is empty, as in a verification of many tokens, all of whose tiles are wide."""
    monkeypatch.setattr(cuda_attention, "_STAGING_BYTES", 16)
    monkeypatch.setattr(cuda_attention, "_LEAST_ROOM", 1)
    prompt = list(range(12))
    outputs = []
    for is_moved in (True, False):
        runner, writer = new_runner("bfloat16", CudaBackend("bfloat16", CheckerDriver(), device="cpu")), plan_writer()
        requests = [new_request(prompt, temperature=0.0), new_request([9] * 200, temperature=0.0)]
        tokens = runner.execute(writer.plan([(0, prompt, 12)], [(0, requests[0])])).token_ids.tolist()
        if is_moved:
            runner.execute(writer.plan([(1, [9] * 200, 1)], [(1, requests[1])]))
        tokens += runner.execute(writer.plan([(0, prompt[::-1], 12)])).token_ids.tolist()
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


def decode_one(runner: ModelRunner, writer: Any, output: list[int], num_steps: int) -> list[int]:
    for _ in range(num_steps):
        output = output + runner.execute(writer.plan([(0, output[-1:], 1)])).token_ids.tolist()
    return output


def test_staging_keeps_values_shapes_and_types() -> None:
    staging = StagingBuffer(torch.device("cpu"), 16)
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros((0, 3), np.int32),
        np.array([2**64 - 1], np.uint64),
        np.array([[True], [False]]),
        np.arange(6, dtype=np.float32).reshape(2, 3),
    ]
    for given, got in zip(arrays, staging.upload(*arrays), strict=True):
        assert got.shape == given.shape
        assert got.data_ptr() % 16 == 0
        np.testing.assert_array_equal(got.numpy(), given)


def test_staging_puts_arrays_of_equal_sizes_at_equal_addresses() -> None:
    staging = StagingBuffer(torch.device("cpu"), 1 << 12)
    first = staging.upload(np.arange(5, dtype=np.int32), np.arange(7, dtype=np.int64))
    second = staging.upload(np.arange(5, dtype=np.int32) + 1, np.arange(7, dtype=np.int64))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[0].tolist() == [1, 2, 3, 4, 5]
