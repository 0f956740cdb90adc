"""Plans in, tokens out, bit-equal whatever else is in the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from simt.driver import CheckerDriver

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.numpy_backend import NumpyBackend
from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, best_dtype, load_runner
from foreword.scheduler.request import Request
from foreword.scheduler.step import StepResult

Tokens = list[int]
Output = list[tuple[int, float]]


def random_prompt(length: int, seed: int, vocab: int = 131) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def sequence_tokens(result: StepResult, b: int) -> Output:
    part = slice(result.token_offsets[b], result.token_offsets[b + 1])
    return list(zip(result.token_ids[part].tolist(), result.logprobs[part].tolist(), strict=True))


def generate(
    runner: ModelRunner, writer: Any, requests: Sequence[Request], num_output: int, chunk: int
) -> list[Output]:
    """Run requests together, request i in row i: prompts in chunks, then one token a step each."""
    outputs: list[Output] = [[] for _ in requests]
    waiting = [request.prompt_token_ids.tolist() for request in requests]
    admitted = list(enumerate(requests))
    while active := [row for row in range(len(requests)) if len(outputs[row]) < num_output]:
        work = []
        for row in active:
            tokens, waiting[row] = waiting[row][:chunk], waiting[row][chunk:]
            work.append((row, tokens, 0 if waiting[row] else 1))
        result = runner.execute(writer.plan(work, admitted))
        admitted = []
        for b, row in enumerate(active):
            for token, logprob in sequence_tokens(result, b):
                outputs[row].append((token, logprob))
                waiting[row] = [token]
    return outputs


@pytest.fixture
def requests(new_request: Callable[..., Request]) -> list[Request]:
    """Eight requests of different lengths, greedy and random, with every processor somewhere."""
    processors: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": ((3, 4.0), (100, -5.0)), "typical_p": 0.9},
        {"banned_token_ids": tuple(range(0, 131, 2)), "repetition_penalty": 0.8},
        {"typical_p": 0.5, "min_p": 0.01},
        {"allowed_token_ids": tuple(range(20, 90)), "frequency_penalty": -0.5},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ]
    lengths = (1, 5, 16, 17, 33, 47, 64, 90)
    return [
        new_request(
            random_prompt(length, i),
            key=i,
            want_logprobs=True,
            temperature=(0.0, 0.8)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            top_k=(0, 20)[i // 4],
            seed=100 + i,
            **processors[i],
        )
        for i, length in enumerate(lengths)
    ]


def test_together_equals_alone_for_every_chunking(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], requests: list[Request], dtype: str
) -> None:
    runner = new_runner(dtype)
    alone = [generate(runner, plan_writer(), [request], 12, chunk=1000)[0] for request in requests]
    assert len({tuple(output) for output in alone}) == len(requests)
    for chunk in (1, 7, 16, 40, 1000):
        assert generate(runner, plan_writer(), requests, 12, chunk) == alone, f"chunks of {chunk}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_together_equals_alone_on_the_cuda_device(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    requests: list[Request],
    checker: CheckerDriver,
    dtype: str,
) -> None:
    runner = new_runner(dtype, CudaBackend(dtype, checker, device="cpu"))
    some = requests[2:7:2]
    alone = [generate(runner, plan_writer(), [request], 5, chunk=1000)[0] for request in some]
    for chunk in (16, 31):
        assert generate(runner, plan_writer(), some, 5, chunk) == alone, f"chunks of {chunk}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_oracle_generates_the_same_tokens(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    requests: list[Request],
    checker: CheckerDriver,
    device: str,
) -> None:
    backend = None if device == "cpu" else CudaBackend("float32", checker, device="cpu")
    actual = generate(new_runner(backend=backend), plan_writer(), requests, 8, chunk=20)
    expected = generate(new_runner(backend=NumpyBackend()), plan_writer(), requests, 8, chunk=20)
    assert [[token for token, _ in output] for output in actual] == [[token for token, _ in out] for out in expected]
    np.testing.assert_allclose(
        [[logprob for _, logprob in output] for output in actual],
        [[logprob for _, logprob in output] for output in expected],
        atol=1e-3,
    )


@pytest.mark.parametrize("window", [None, 24])
def test_what_a_cache_held_before_does_not_matter(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    requests: list[Request],
    dtype: str,
    window: int | None,
) -> None:
    clean = generate(new_runner(dtype, sliding_window=window), plan_writer(), requests, 6, chunk=30)
    poisoned = new_runner(dtype, sliding_window=window)
    poisoned.cache.keys.fill_(float("nan"))
    poisoned.cache.values.fill_(float("nan"))
    poisoned.cache.block_table.fill_(7)
    assert generate(poisoned, plan_writer(), requests, 6, chunk=30) == clean
    # Rows and blocks go to other sequences; tables keep stale entries of the ones before.
    writer = plan_writer()
    for row, request in enumerate(requests):
        poisoned.execute(writer.plan([(7 - row, request.prompt_token_ids.tolist(), 1)], [(7 - row, request)]))
    for row in range(8):
        writer.release(row)
    assert generate(poisoned, writer, requests, 6, chunk=30) == clean


def test_a_resumed_sequence_goes_on_with_the_same_tokens(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    dtype: str,
) -> None:
    runner = new_runner(dtype)
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5}
    request = new_request(random_prompt(20, 3), temperature=1.0, seed=5, want_logprobs=True, **penalties)
    expected = generate(runner, plan_writer(), [request], 10, chunk=1000)[0]
    writer = plan_writer()
    done = [token for token, _ in expected[:4]]
    work = [(6, request.prompt_token_ids.tolist() + done, 1)]
    result = runner.execute(writer.plan(work, [(6, request)], outputs={6: done}))
    assert sequence_tokens(result, 0) == expected[4:5]


def test_incomplete_prompts_give_no_tokens(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    runner, writer = new_runner(), plan_writer()
    result = runner.execute(
        writer.plan([(0, [1, 2], 0), (1, [3], 1), (2, [4], 0)], [(row, new_request([1])) for row in range(3)])
    )
    assert result.step_id == 1
    assert result.token_offsets.tolist() == [0, 0, 1, 1]
    assert not result.failed.any()
    assert result.model_duration_ns > 0
    nothing = runner.execute(writer.plan([(0, [1, 2], 0)]))
    assert nothing.token_offsets.tolist() == [0, 0]
    assert len(nothing.token_ids) == len(nothing.logprobs) == 0


def test_end_tokens_wait_for_the_minimum(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    runner = new_runner()
    prompt = random_prompt(10, 0)
    free = generate(runner, plan_writer(), [new_request(prompt, temperature=0.0)], 1, chunk=1000)[0]
    first = free[0][0]
    held = new_request(prompt, temperature=0.0, min_output_tokens=1, eos_token_ids=(first,))
    output = generate(runner, plan_writer(), [held], 1, chunk=1000)[0]
    assert output[0][0] != first


def test_logits_that_are_not_finite_fail_their_sequence_alone(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], requests: list[Request], dtype: str
) -> None:
    runner = new_runner(dtype, tie_word_embeddings=False)
    expected = generate(runner, plan_writer(), requests[:3], 1, chunk=1000)
    prompts = [request.prompt_token_ids.tolist() for request in requests[:3]]
    unused = next(token for token in range(131) if not any(token in prompt for prompt in prompts))
    runner.decoder.weights.embedding[unused] = float("nan")
    plan = plan_writer().plan(
        [(0, prompts[0], 1), (1, prompts[1], 1), (3, [5, unused, 6], 1), (2, prompts[2], 1)],
        list(enumerate(requests[:4])),
    )
    result = runner.execute(plan)
    assert result.failed.tolist() == [False, False, True, False]
    assert result.token_offsets.tolist() == [0, 1, 2, 2, 3]
    assert [sequence_tokens(result, b) for b in (0, 1, 3)] == expected


def test_scores_come_for_those_who_ask(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    runner, writer = new_runner(), plan_writer()
    wanted: list[dict[str, Any]] = [{}, {"num_top_logprobs": 3}, {"want_ranks": True, "num_top_logprobs": 1}, {}]
    requests = [
        new_request(random_prompt(9, i), temperature=0.0, want_logprobs=True, **w) for i, w in enumerate(wanted)
    ]
    work = [(i, request.prompt_token_ids.tolist(), 1) for i, request in enumerate(requests)]
    result = runner.execute(writer.plan(work, list(enumerate(requests))))
    assert result.scores is not None
    assert result.scores.num_top == 3
    assert result.scores.ranks.tolist() == [0, 1, 1, 0]
    assert result.scores.logprobs[1:3].tolist() == result.logprobs[1:3].tolist()
    top = result.scores.top_token_ids.reshape(4, 3)
    assert top[1:3, 0].tolist() == result.token_ids[1:3].tolist()
    assert not top[[0, 3]].any()
    nobody = runner.execute(writer.plan([(0, result.token_ids[:1].tolist(), 1)]))
    assert nobody.scores is None


def test_prompt_scores_do_not_depend_on_the_chunks(
    new_runner: Callable[..., ModelRunner],
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Request],
    dtype: str,
) -> None:
    """And are those that the tokens get when they are drawn, bit for bit."""
    runner = new_runner(dtype)
    prompt = random_prompt(30, 4)
    request = new_request(prompt, temperature=0.0, want_logprobs=True, num_top_logprobs=2)
    drawn = generate(runner, plan_writer(), [new_request(prompt[:10], temperature=0.0, want_logprobs=True)], 8, 1000)[0]
    prompt[10:18] = [token for token, _ in drawn]
    collected = []
    for chunk in (1000, 7, 1):
        writer = plan_writer()
        rows: list[tuple[float, int, tuple[int, ...], tuple[float, ...]]] = []
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            work = [(3, tokens, int(start + chunk >= len(prompt))), (1, [5], 1)]
            admitted = [(3, request), (1, new_request([5]))] if start == 0 else []
            scores = runner.execute(writer.plan(work, admitted, prompts={3: prompt})).prompt_scores
            if scores is not None:
                top = scores.top_token_ids.reshape(-1, 2).tolist(), scores.top_logprobs.reshape(-1, 2).tolist()
                rows += zip(
                    scores.logprobs.tolist(), scores.ranks.tolist(), map(tuple, top[0]), map(tuple, top[1]), strict=True
                )
        collected.append(rows)
    assert collected[0] == collected[1] == collected[2]
    assert len(collected[0]) == len(prompt) - 1
    assert [row[0] for row in collected[0][9:17]] == [logprob for _, logprob in drawn]
    assert all(row[1] == 1 and row[2][0] == token for row, (token, _) in zip(collected[0][9:17], drawn, strict=True))


def test_only_allowed_ids_come_out(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    masks = [{"allowed_token_ids": (3, 7, 130)}, {"banned_token_ids": tuple(range(100))}, {}]
    requests = [new_request(random_prompt(9, i), key=i, temperature=2.0, seed=i, **masks[i % 3]) for i in range(6)]
    outputs = generate(new_runner(), plan_writer(), requests, 10, chunk=4)
    for i in (0, 3):
        assert {token for token, _ in outputs[i]} <= {3, 7, 130}
        assert min(token for token, _ in outputs[i + 1]) >= 100
    assert min(token for token, _ in outputs[2] + outputs[5]) < 100


# Drafts


def test_drafts_do_not_change_the_tokens(
    new_runner: Callable[..., ModelRunner], plan_writer: Callable[..., Any], requests: list[Request], dtype: str
) -> None:
    """Right drafts are accepted with a bonus token, wrong ones cut the run; tokens and logprobs stay bit-equal."""
    runner = new_runner(dtype)
    expected = generate(runner, plan_writer(), requests, 8, chunk=1000)
    for num_right in range(5):
        writer = plan_writer()
        prompts = [(i, request.prompt_token_ids.tolist(), 1) for i, request in enumerate(requests)]
        runner.execute(writer.plan(prompts, list(enumerate(requests))))
        work = []
        for row, output in enumerate(expected):
            right = [token for token, _ in output[: 1 + num_right]]
            wrong = [] if num_right == 4 else [(output[1 + num_right][0] + 1) % 131, 0]
            work.append((row, right + wrong, len(right + wrong)))
        result = runner.execute(writer.plan(work))
        for row, output in enumerate(expected):
            assert sequence_tokens(result, row) == output[1 : 2 + num_right]


# The default model


def test_default_model_facts(default_runner: ModelRunner) -> None:
    assert default_runner.device == "cpu"
    assert default_runner.device_name
    assert default_runner.dtype == "bfloat16"
    assert default_runner.architecture == "LlamaForCausalLM"
    assert default_runner.vocab_size == 49152
    assert default_runner.num_parameters == 134_515_008


@pytest.fixture(scope="module")
def default_runner(default_checkpoint: Checkpoint) -> ModelRunner:
    return load_runner(DeviceConfig(num_blocks=160, num_threads=1), default_checkpoint)


def test_32_streams_of_the_default_model_equal_each_alone(
    default_runner: ModelRunner, plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    requests = [
        new_request(
            random_prompt(3 + 2 * i, i, vocab=49152),
            key=i,
            want_logprobs=True,
            temperature=(0.0, 0.7)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            seed=i,
        )
        for i in range(32)
    ]
    capacity = {"num_blocks": 160, "max_num_sequences": 32}
    together = generate(default_runner, plan_writer(**capacity), requests, 5, chunk=24)
    for request, output in zip(requests, together, strict=True):
        assert generate(default_runner, plan_writer(**capacity), [request], 5, chunk=1000)[0] == output


def test_one_openmp_runtime_that_spins_shortly() -> None:
    """PyTorch and the kernels share one pool of threads, which lets other processes have the processor."""
    code = (
        "from foreword.gpu.runner import _open_backend; _open_backend('bfloat16', 2);"
        "print('runtimes', len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "runtimes 1" in done.stdout
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


@pytest.mark.parametrize(
    ("kernels", "dtypes"),
    [(("vnni", "plain"), {"int8"}), (("avx2", "plain"), {"int8"}), (("plain",), {"bfloat16", "float32"})],
)
def test_the_best_format_is_the_one_that_the_processor_has_instructions_for(
    new_runner: Callable[..., ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
    kernels: tuple[str, ...],
    dtypes: set[str],
) -> None:
    monkeypatch.setattr(cpu_kernels, "INT8_KERNELS", kernels)
    assert best_dtype(new_runner().decoder.config, 1, 64) in dtypes
