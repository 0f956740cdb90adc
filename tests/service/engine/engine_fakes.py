"""Engines without a model, for tests; engine processes import this module by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import CheckpointError, ForewordError
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason, StepPlan, StepResult, TokenScores
from foreword.service.engine.config import EngineConfig
from foreword.service.engine.engine import Engine
from foreword.service.engine.messages import EngineInfo, StepHeader

VOCAB_SIZE = 1000
POISON = VOCAB_SIZE - 1
"""A prompt with this token makes the step that computes it raise; the fake runner never draws it."""
NO_LIMIT = 1000
"""A length that no test reaches when steps are slow."""

Progress = Callable[[str, int, int], None]


class FakeRunner:
    """Answers every sequence with its own length as the next token, in steps of a given duration."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def execute(self, plan: StepPlan) -> StepResult:
        if POISON in plan.token_ids:
            raise RuntimeError("the poison of the prompt")
        time.sleep(self.step_s)
        ends = np.flatnonzero(np.diff(plan.logits_offsets))
        offsets = np.zeros(plan.num_sequences + 1, np.int32)
        offsets[1:] = np.cumsum(np.diff(plan.logits_offsets) > 0)
        token_ids = plan.context_lens[ends] % POISON
        return StepResult(
            step_id=plan.step_id,
            token_offsets=offsets,
            token_ids=token_ids.astype(np.int32),
            logprobs=np.full(len(token_ids), -0.5, np.float32),
            failed=np.zeros(plan.num_sequences, np.bool_),
            model_duration_ns=int(self.step_s * 1e9),
            scores=scores_of(token_ids),
            prompt_scores=scores_of(plan.scored_token_ids) if len(plan.scored_token_ids) else None,
        )


def scores_of(token_ids: npt.NDArray[np.int32]) -> TokenScores:
    """Scores that tell which token they belong to."""
    ids = token_ids.astype(np.int32)
    top = np.stack([ids, ids + 1], axis=1).ravel()
    return TokenScores(-ids.astype(np.float32), ids + 5, 2, top, top.astype(np.float32))


def make_engine(config: EngineConfig, runner: FakeRunner) -> Engine:
    num_blocks = config.kv_cache_bytes or 4096
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_sequences=config.max_num_sequences,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len or 2048,
            max_num_waiting=config.max_num_waiting,
            max_num_waiting_tokens=config.max_num_waiting_tokens,
        )
    )
    info = EngineInfo(
        device="cpu",
        device_name="fake",
        dtype=config.dtype,
        architecture="FakeForCausalLM",
        vocab_size=VOCAB_SIZE,
        num_parameters=0,
        max_model_len=scheduler.config.max_model_len,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        load_duration_s=0.0,
    )
    return Engine(scheduler, runner, info)


def build_fast(config: EngineConfig, progress: Progress) -> Engine:
    for done in range(1, 4):
        progress("weights", done, 3)
    return make_engine(config, FakeRunner())


def build_slow(config: EngineConfig, progress: Progress) -> Engine:
    return make_engine(config, FakeRunner(step_s=0.01))


def build_damaged(config: EngineConfig, progress: Progress) -> Engine:
    raise CheckpointError(f"{config.model_path}: not a model file", path=config.model_path)


def build_too_large(config: EngineConfig, progress: Progress) -> Engine:
    raise MemoryError


def build_wrong(config: EngineConfig, progress: Progress) -> Engine:
    raise TypeError("a mistake")


def build_deadly(config: EngineConfig, progress: Progress) -> Engine:
    progress("weights", 1, 2)
    os._exit(7)


def build_endless(config: EngineConfig, progress: Progress) -> Engine:
    progress("weights", 0, 1)
    while True:
        time.sleep(3600)


def build_once(config: EngineConfig, progress: Progress) -> Engine:
    """Build an engine the first time only: `model_path` is the file that remembers."""
    if os.path.exists(config.model_path):
        return build_damaged(config, progress)
    with open(config.model_path, "x"):
        return build_slow(config, progress)


def make_request(request_key: int, num_prompt_tokens: int = 4, max_output_tokens: int = 8, **fields: object) -> Request:
    prompt = np.arange(1, num_prompt_tokens + 1, dtype=np.int32)
    return Request(request_key, prompt, StoppingParams(max_output_tokens), **fields)  # type: ignore[arg-type]


def expected_tokens(num_prompt_tokens: int, num_output_tokens: int) -> list[int]:
    return [length % POISON for length in range(num_prompt_tokens, num_prompt_tokens + num_output_tokens)]


class RecordingSink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.scored_prompt_ids: list[int] = []
        self.num_updates = 0
        self.finish_reason = FinishReason.NONE
        self.error: ForewordError | None = None
        self.headers: list[StepHeader] = []

    def on_step(
        self,
        header: StepHeader,
        update: np.void,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        scores: TokenScores | None = None,
        prompt_scores: TokenScores | None = None,
    ) -> None:
        assert not self.ended, "nothing follows the last update"
        assert len(token_ids) == len(logprobs) == update["num_tokens"]
        self.headers.append(header)
        if scores is not None:
            assert (scores.ranks - 5).tolist() == scores.top_token_ids[::2].tolist() == token_ids.tolist()
        if prompt_scores is not None:
            self.scored_prompt_ids += (prompt_scores.ranks - 5).tolist()
            assert len(prompt_scores.ranks) == len(prompt_scores.top_token_ids) // 2 == update["num_scored"]
        self.num_updates += 1
        self.token_ids += token_ids.tolist()
        self.logprobs += logprobs.tolist()
        self.finish_reason = FinishReason(int(update["finish_reason"]))

    def on_failure(self, error: ForewordError) -> None:
        assert not self.ended, "nothing follows the last update"
        self.error = error

    @property
    def ended(self) -> bool:
        return self.finish_reason is not FinishReason.NONE or self.error is not None
