"""Runs the scheduler's plans on a device."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.backend import Backend, KVCacheShape
from foreword.gpu.backends.sampling import SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.gpu.batch import Batch
from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.device import open_cuda_backend
from foreword.gpu.guided.grammar import GrammarCompiler, GrammarVocabulary
from foreword.gpu.guided.guide import GuidedRows
from foreword.gpu.models.config import ModelConfig
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.speculative.draft_model import DraftModel
from foreword.gpu.speculative.open import open_speculator
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.step import DraftState, StepForecast, StepPlan, StepResult, TokenScores

if TYPE_CHECKING:
    from foreword.gpu.backends.cpu_backend import CpuBackend


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that was begun: its plan, how its tokens are drawn, and what waits for its results."""

    plan: StepPlan
    start_ns: int
    params: SamplingBatch
    tokens: Callable[[], AcceptedTokens]
    prompt_scores: Callable[[], TokenScores] | None


class ModelRunner:
    """A model on a device, with the state that lives there between steps: KV cache, block tables, sampling rows.

    Attributes:
        config: capacities.
        decoder: the model.
        speculator: proposes drafts; `None` when speculation is off.
        guided_rows: makes outputs follow grammars; `None` where no request has one.
    """

    def __init__(
        self,
        config: DeviceConfig,
        decoder: Decoder[Any],
        speculator: Speculator | None = None,
        guided_rows: GuidedRows | None = None,
    ) -> None:
        model = decoder.config
        self.config = config
        self.decoder = decoder
        self.speculator = speculator
        self.guided_rows = guided_rows
        self.cache = decoder.backend.kv_cache(
            KVCacheShape(
                num_layers=model.num_layers,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                num_rows=config.max_num_sequences,
                max_blocks_per_sequence=config.max_blocks_per_sequence,
            )
        )
        self._sampling = SamplingState(config.max_num_sequences, model.vocab_size)
        self._last_tokens = np.zeros(config.max_num_sequences, np.int32)
        self._end_ns = 0

    @property
    def device(self) -> str:
        """Kind of device: "cpu", "cuda:0"."""
        return self.decoder.backend.device

    @property
    def device_name(self) -> str:
        """The device as the operating system or driver calls it."""
        return self.decoder.backend.device_name

    @property
    def dtype(self) -> str:
        """Number format: "int8", "bfloat16", "float16" or "float32"."""
        return self.decoder.backend.dtype

    @property
    def architecture(self) -> str:
        """Key into the model registry."""
        return self.decoder.config.architecture

    @property
    def vocab_size(self) -> int:
        """Rows of the output head; a token id is below it."""
        return self.decoder.config.vocab_size

    @property
    def num_parameters(self) -> int:
        """Values in the checkpoint's tensors."""
        return self.decoder.weights.num_parameters

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step: keys and values of its tokens, and the tokens that follow where the plan asks for logits.

        Draft tokens are accepted by the rule of their request: while they equal the token that the model draws in their
        place, unless it asks for another.
        """
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step behind those begun before.

        Args:
            plan: of the next step; -1 among its tokens is what the row draws in the step before, whose result need not
                have been waited for where the device works asynchronously.

        Returns:
            waits for the result; to be called in the order of the steps.
        """
        start_ns = time.perf_counter_ns()
        for a, (row, request) in enumerate(plan.admitted):
            output = slice(plan.output_offsets[a], plan.output_offsets[a + 1])
            self._sampling.admit(row, request, plan.output_token_ids[output])
        backend, guided_rows = self.decoder.backend, self.guided_rows
        batch = backend.upload(plan, self.cache)
        params, input_ids = self._sampling.select(plan), plan.token_ids[plan.logits_indices]
        if guided_rows:
            guided_rows.admit(plan)
        if not len(plan.scored_indices) and not (guided_rows and guided_rows.concerns(plan)):
            draw = (params, input_ids, plan.logits_offsets, plan.rows)
            tokens, prompt_scores = backend.compute_and_accept(self._compute_logits, batch, *draw), None
        else:
            logits = backend.compute(self._compute_logits, batch)
            if guided_rows:
                params = guided_rows.restrict(plan, params)  # while the device computes
            rows = logits[: len(input_ids)]
            tokens = backend.sample_and_accept(rows, params, input_ids, plan.logits_offsets, plan.rows)
            prompt_scores = self._score_prompts(logits, plan)
        return lambda: self._finish(_LaunchedStep(plan, start_ns, params, tokens, prompt_scores))

    def _finish(self, step: _LaunchedStep) -> StepResult:
        plan, guided_rows, constraint_reasons = self._with_known_tokens(step.plan), self.guided_rows, None
        tokens = step.tokens()
        prompt_scores = step.prompt_scores and step.prompt_scores()
        if guided_rows:
            tokens, constraint_reasons = guided_rows.follow(plan, step.params, tokens)
        self._sampling.append(plan, tokens.offsets, tokens.token_ids)
        has_tokens = np.diff(tokens.offsets) > 0
        self._last_tokens[plan.rows[has_tokens]] = tokens.token_ids[tokens.offsets[1:][has_tokens] - 1]
        drafts, draft_state, forecast = None, DraftState.DISABLED, StepForecast()
        start_ns = max(step.start_ns, self._end_ns)
        model_end_ns = draft_end_ns = time.perf_counter_ns()
        if self.speculator is not None:
            duration_ns = model_end_ns - start_ns
            drafts = self.speculator.follow(plan, tokens.offsets, tokens.token_ids, duration_ns, guided_rows)
            draft_state, forecast = self.speculator.state, self.speculator.forecast
            draft_end_ns = time.perf_counter_ns()
        self._end_ns = model_end_ns
        return StepResult(
            step_id=plan.step_id,
            token_offsets=tokens.offsets,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            failed=tokens.failed,
            draft_duration_ns=draft_end_ns - model_end_ns,
            model_duration_ns=model_end_ns - start_ns,
            drafts=drafts,
            draft_state=draft_state,
            constraint_reasons=constraint_reasons,
            scores=tokens.scores,
            prompt_scores=prompt_scores,
            forecast=forecast,
        )

    def duration_of(self, plan: StepPlan) -> int:
        """Nanoseconds that the model and sampling take for a plan; what comes out is dropped."""
        start_ns = time.perf_counter_ns()
        batch, input_ids = self.decoder.backend.upload(plan, self.cache), plan.token_ids[plan.logits_indices]
        draw = (self._sampling.select(plan), input_ids, plan.logits_offsets, plan.rows)
        self.decoder.backend.compute_and_accept(self._compute_logits, batch, *draw)()
        return time.perf_counter_ns() - start_ns

    def _with_known_tokens(self, plan: StepPlan) -> StepPlan:
        """The plan with the tokens that were not known when it was made."""
        is_unknown = plan.token_ids < 0
        if not is_unknown.any():
            return plan
        last_tokens = np.repeat(self._last_tokens[plan.rows], np.diff(plan.query_offsets))
        return replace(plan, token_ids=np.where(is_unknown, last_tokens, plan.token_ids))

    def _compute_logits(self, batch: Batch[Any]) -> Any:
        return self.decoder.logits(batch, self.cache)

    def _score_prompts(self, logits: Any, plan: StepPlan) -> Callable[[], TokenScores] | None:
        """Begin to score the plan's prompt tokens `[P]`; None without any."""
        num_scored = len(plan.scored_token_ids)
        if not num_scored:
            return None
        num_top = self._sampling.num_top(plan.rows[np.diff(plan.scored_offsets) > 0])
        rows = np.arange(len(plan.logits_indices), len(plan.logits_indices) + num_scored, dtype=np.int32)
        return self.decoder.backend.score(logits, rows, plan.scored_token_ids, num_top)


def load_runner(
    config: DeviceConfig,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
    vocabulary: GrammarVocabulary | None = None,
    draft_model: DraftModel | None = None,
) -> ModelRunner:
    """Put a checkpoint's model on a device.

    Args:
        config: capacities and number format.
        checkpoint: the model.
        progress: called with (tensors loaded, tensors in all).
        vocabulary: of the model; without one, no request can have a grammar.
        draft_model: what drafts, where `config` asks for it.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: the device cannot work within `config`.
        DeviceError: the device failed.
    """
    model = family(checkpoint)
    model_config = model.read_config(checkpoint)
    if config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: must be at most {model_config.max_position_embeddings}, the positions this model was made "
            f"for, got {config.max_model_len}"
        )
    backend: Backend[Any]
    if config.device == "cuda":
        backend = open_cuda_backend(config.dtype)
    else:
        backend = _open_backend(config.dtype, config.num_threads)
        layers, max_rows = model_config.linear_layers, config.max_num_batched_tokens
        if not _is_row_independent(config.dtype, config.num_threads, layers, max_rows):
            backend.use_tiles()
    weights = model.load_weights(checkpoint, model_config, backend, progress or (lambda loaded, total: None))
    decoder = Decoder(model_config, weights, backend, config.max_model_len)
    guided_rows = GuidedRows(GrammarCompiler(vocabulary), config.num_threads) if vocabulary else None
    runner = ModelRunner(config, decoder, guided_rows=guided_rows)
    if config.device == "cuda":
        from foreword.gpu.warm_up import warm_up  # imports torch

        warm_up(runner)
    drafter = draft_model.load(config, decoder, vocabulary) if draft_model else None
    runner.speculator = open_speculator(config, model_config.vocab_size, drafter)
    return runner


def best_dtype(model: ModelConfig, num_threads: int, max_num_batched_tokens: int) -> str:
    """The number format that serves this model fastest on this processor without depending on the batch.

    That is "int8" where the processor has instructions for integer products, AVX2 at least; else "bfloat16" where the
    library's bfloat16 products are row-independent, as on processors with instructions for them; otherwise "float32".
    """
    _open_backend("bfloat16", num_threads)
    from foreword.gpu.backends import cpu_kernels  # after torch, whose OpenMP it shares

    if cpu_kernels.INT8_KERNELS[0] != "plain":
        return "int8"
    independent = _is_row_independent("bfloat16", num_threads, model.linear_layers, max_num_batched_tokens)
    return "bfloat16" if independent else "float32"


@functools.cache
def _is_row_independent(dtype: str, num_threads: int, layers: frozenset[tuple[int, int]], max_rows: int) -> bool:
    return _open_backend(dtype, num_threads).is_row_independent(layers, max_rows)


def _open_backend(dtype: str, num_threads: int) -> CpuBackend:
    # Threads that spin long between parallel regions starve each other whenever another process wants the processor:
    # steps then take ten times as long. A short spin bridges the gaps within a step. OpenMP reads this once, when torch
    # is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from foreword.gpu.backends.cpu_backend import CpuBackend  # torch takes a second to import
    from foreword.gpu.backends.int8_backend import Int8Backend

    return Int8Backend(num_threads) if dtype == "int8" else CpuBackend(dtype, num_threads)
