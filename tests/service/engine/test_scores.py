"""Scores are each request's own, whatever is drafted, preempted, cached or cut into chunks around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import TokenScores

VOCAB = 49152
NUM_ROWS = 8

Row = tuple[float, int, tuple[int, ...], tuple[float, ...]]


@dataclass
class Output:
    """What came of a request; scores as bytes of floats, so that they compare bit by bit."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)
    prompt_scores: list[Row] = field(default_factory=list)
    num_preemptions: int = 0
    num_accepted: int = 0


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    config = DeviceConfig(num_blocks=128, num_threads=1, max_num_sequences=NUM_ROWS, max_model_len=256)
    return load_runner(config, open_checkpoint(default_model_path()))


def rows(scores: TokenScores | None, num_top: int) -> list[Row]:
    if scores is None:
        return []
    shape = (len(scores.ranks), scores.num_top)
    ids = scores.top_token_ids.reshape(shape)[:, :num_top].tolist()
    logprobs = scores.top_logprobs.reshape(shape)[:, :num_top].tolist()
    return list(
        zip(scores.logprobs.tolist(), scores.ranks.tolist(), map(tuple, ids), map(tuple, logprobs), strict=True)
    )


def generate(
    runner: ModelRunner, requests: Sequence[Request], num_blocks: int = 128, budget: int = 256, num_drafts: int = 0
) -> dict[int, Output]:
    drafter = NgramDrafter(NUM_ROWS, 256, num_drafts or 1, VOCAB)
    runner.speculator = (
        Speculator(drafter, None, max_num_sequences=NUM_ROWS, max_draft_tokens=num_drafts, vocab_size=VOCAB)
        if num_drafts
        else None
    )
    scheduler = Scheduler(SchedulerConfig(num_blocks, 16, NUM_ROWS, budget, 256))
    outputs = {request.request_key: Output() for request in requests}
    wanted = {request.request_key: request for request in requests}
    for request in requests:
        scheduler.add(request, 0)
    while scheduler.has_work:
        result = runner.execute(scheduler.schedule(0))
        update = scheduler.apply(result)
        scores = result.scores and result.scores.take(update.result_indices)
        prompt_scores = result.prompt_scores and result.prompt_scores.take(update.scored_indices)
        start = prompt_start = 0
        for record in update.sequences:
            key = int(record["request_key"])
            output, num_top = outputs[key], wanted[key].num_top_logprobs
            end, prompt_end = start + int(record["num_tokens"]), prompt_start + int(record["num_scored"])
            output.tokens += update.token_ids[start:end].tolist()
            output.scores += rows(scores and scores.take(slice(start, end)), num_top)
            output.prompt_scores += rows(prompt_scores and prompt_scores.take(slice(prompt_start, prompt_end)), num_top)
            output.num_preemptions = int(record["num_preemptions"])
            output.num_accepted += int(record["num_accepted"])
            start, prompt_start = end, prompt_end
    runner.speculator = None
    return outputs


def make_request(key: int) -> Request:
    """Every request asks for something else; prompts repeat themselves and share their beginning."""
    pattern = np.random.default_rng(key).integers(100, 2000, 4 + key)
    prompt = np.concatenate([np.arange(300, 320), np.tile(pattern, 3)]).astype(np.int32)
    return Request(
        key,
        prompt,
        StoppingParams(20),
        SamplingParams(temperature=(0.0, 0.8)[key % 2], seed=key, repetition_penalty=(1.0, 0.8)[key // 2 % 2]),
        want_ranks=key % 3 > 0,
        num_top_logprobs=(0, 3, 0, 1)[key % 4],
        want_prompt_logprobs=key in (1, 3, 4),
    )


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[int, Output]:
    return {key: generate(runner, [make_request(key)])[key] for key in range(6)}


@pytest.mark.parametrize(("num_blocks", "budget", "num_drafts"), [(128, 256, 0), (128, 16, 4), (6, 24, 0), (6, 17, 4)])
def test_scores_are_each_requests_own(
    runner: ModelRunner, alone: dict[int, Output], num_blocks: int, budget: int, num_drafts: int
) -> None:
    outputs = generate(runner, [make_request(key) for key in range(6)], num_blocks, budget, num_drafts)
    for key, output in outputs.items():
        request = make_request(key)
        assert output.tokens == alone[key].tokens
        assert output.prompt_scores == alone[key].prompt_scores, key
        assert len(output.prompt_scores) == (len(request.prompt_token_ids) - 1) * request.want_prompt_logprobs
        if request.want_ranks or request.num_top_logprobs:
            assert output.scores == alone[key].scores, key
            assert len(output.scores) == 20
    if num_blocks == 6:
        assert sum(output.num_preemptions for output in outputs.values()) > 0
    if num_drafts and num_blocks == 128:  # where blocks are short, drafts give way
        assert sum(output.num_accepted for output in outputs.values()) > 0


def test_a_preemption_within_a_scored_prompt_loses_and_doubles_nothing(
    runner: ModelRunner, alone: dict[int, Output]
) -> None:
    """A sequence of higher priority arrives while the prompt is computed in chunks, and takes its blocks."""
    scored = make_request(4)
    scheduler = Scheduler(SchedulerConfig(6, 16, NUM_ROWS, 10, 96))
    scheduler.add(scored, 0)
    collected: list[Row] = []
    num_preemptions = 0
    for step in range(200):
        if step == 2:
            prompt = np.arange(40, 60, dtype=np.int32)
            scheduler.add(Request(9, prompt, StoppingParams(70), SamplingParams(0.0), priority=1), 0)
        if not scheduler.has_work:
            break
        result = runner.execute(scheduler.schedule(0))
        update = scheduler.apply(result)
        if result.prompt_scores is not None:
            collected += rows(result.prompt_scores.take(update.scored_indices), 0)
        mine = update.sequences[update.sequences["request_key"] == 4]
        num_preemptions = max([num_preemptions, *mine["num_preemptions"].tolist()])
    assert num_preemptions > 0
    assert collected == alone[4].prompt_scores
