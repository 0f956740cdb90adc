"""Runs the scheduler's plans on a device."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.gpu.backends.acceptance import AcceptedTokens
from foreword.gpu.backends.backend import Backend, KVCacheShape
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
from foreword.gpu.speculative.open import open_speculator
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.step import BoolArray, DraftState, StepPlan, StepResult, TokenScores

if TYPE_CHECKING:
    from foreword.gpu.backends.cpu_backend import CpuBackend


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
        """Number format: "int8", "bfloat16" or "float32"."""
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

        Draft tokens are accepted while they equal the token that the model draws in their place.
        """
        start_ns = time.perf_counter_ns()
        for a, (row, request) in enumerate(plan.admitted):
            output = slice(plan.output_offsets[a], plan.output_offsets[a + 1])
            self._sampling.admit(row, request, plan.output_token_ids[output])
        backend, guided_rows = self.decoder.backend, self.guided_rows
        batch = backend.upload(plan, self.cache)
        logits = backend.compute(self._compute_logits, batch)
        num_logits = len(plan.logits_indices)
        params, constraint_reasons = self._sampling.select(plan), None
        if guided_rows:
            guided_rows.admit(plan)
            params = guided_rows.restrict(plan, params)
        input_ids = plan.token_ids[plan.logits_indices]
        tokens = backend.sample_and_accept(logits[:num_logits], params, input_ids, plan.logits_offsets)
        if guided_rows:
            tokens, constraint_reasons = guided_rows.follow(plan, params, tokens)
        self._sampling.append(plan, tokens.offsets, tokens.token_ids)
        scores = self._score(logits, plan, tokens)
        prompt_scores = self._score_prompts(logits, plan)
        drafts, draft_state = None, DraftState.DISABLED
        model_end_ns = draft_end_ns = time.perf_counter_ns()
        if self.speculator is not None:
            drafts = self.speculator.follow(plan, tokens.offsets, tokens.token_ids, model_end_ns - start_ns)
            if guided_rows:
                drafts, forced_rows = guided_rows.amend(plan, drafts)
                self.speculator.disown(forced_rows)
            draft_state = self.speculator.state
            draft_end_ns = time.perf_counter_ns()
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
            scores=scores,
            prompt_scores=prompt_scores,
        )

    def _compute_logits(self, batch: Batch[Any]) -> Any:
        return self.decoder.logits(batch, self.cache)

    def _score_prompts(self, logits: Any, plan: StepPlan) -> TokenScores | None:
        """Scores of the plan's prompt tokens `[P]`; None without any."""
        num_scored = len(plan.scored_token_ids)
        if not num_scored:
            return None
        num_top = self._sampling.num_top(plan.rows[np.diff(plan.scored_offsets) > 0])
        rows = np.arange(len(plan.logits_indices), len(plan.logits_indices) + num_scored, dtype=np.int32)
        return self.decoder.backend.score(logits, rows, plan.scored_token_ids, num_top)

    def _score(self, logits: Any, plan: StepPlan, tokens: AcceptedTokens) -> TokenScores | None:
        """Scores of a result's tokens `[N]`; None when no request asks for any."""
        is_scored, num_top = self._sampling.scored(plan, tokens.offsets)
        if not is_scored.any():
            return None
        rows, token_ids = tokens.logits_rows[is_scored], tokens.token_ids[is_scored]
        scores = self.decoder.backend.score(logits, rows, token_ids, num_top)
        return scores if is_scored.all() else _spread(scores, is_scored)


def _spread(scores: TokenScores, is_scored: BoolArray) -> TokenScores:
    """Scores of all tokens, zero for those that are not scored."""
    # An extra entry of zeros stands for them.
    padded = TokenScores(
        np.append(scores.logprobs, np.float32(0)),
        np.append(scores.ranks, np.int32(0)),
        scores.num_top,
        np.append(scores.top_token_ids, np.zeros(scores.num_top, np.int32)),
        np.append(scores.top_logprobs, np.zeros(scores.num_top, np.float32)),
    )
    return padded.take(np.where(is_scored, np.cumsum(is_scored) - 1, len(scores.ranks)))


def load_runner(
    config: DeviceConfig,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
    vocabulary: GrammarVocabulary | None = None,
) -> ModelRunner:
    """Put a checkpoint's model on a device.

    Args:
        config: capacities and number format.
        checkpoint: the model.
        progress: called with (tensors loaded, tensors in all).
        vocabulary: of the model; without one, no request can have a grammar.

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
    return ModelRunner(config, decoder, open_speculator(config, model_config.vocab_size), guided_rows)


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
