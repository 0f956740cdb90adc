"""Sampling on the CUDA device: one upload of all that a draw depends on, its kernels, one download of what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foreword.gpu.backends.acceptance import AcceptedTokens, spread
from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.gpu.backends.staging import ResultBuffer, StagingBuffer
from foreword.gpu.kernels.launcher import Argument, Grid, KernelLauncher
from foreword.gpu.kernels.table import ACCEPT, PROCESS, SAMPLE, SCORE, Kernel
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.step import BoolArray, Int32Array, TokenScores

MAX_VOCAB_SIZE = 1 << 18
WARP = 32
_STAGING_BYTES = 1 << 20
_NOWHERE = -1
"""Position of a row that is not drawn from."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How tokens are drawn from a step's logits, on the device, and what of it the host needs afterwards.

    Attributes:
        process: arguments of `PROCESS` from its rows on, but the output.
        sample: arguments of `SAMPLE` between the logits and the outputs.
        accept: input ids and offsets of `ACCEPT`.
        keep: rows of the block table whose last token is kept; None for nobody's.
        scored: rows of logits that are scored, on the device.
        scored_rows: the same on the host.
        sizes: of the results: `ACCEPT`'s outputs, then `SCORE`'s.
        num_sequences: that the results are of, when there is room for more.
        num_top: most probable tokens at each position that is scored.
    """

    process: list[torch.Tensor]
    sample: list[torch.Tensor]
    accept: list[torch.Tensor]
    keep: torch.Tensor | None
    scored: torch.Tensor
    scored_rows: Int32Array
    sizes: list[int]
    num_sequences: int
    num_top: int

    @property
    def address(self) -> int:
        """Of an array that is never empty; one of equal sizes has the same, until the buffer moves."""
        return self.accept[1].data_ptr()


class CudaSampler:
    """Draws from logits in one compute dtype on one device."""

    def __init__(self, launcher: KernelLauncher, dtype: str, device: torch.device) -> None:
        self._launcher = launcher
        self._dtype = dtype
        self._device = device
        self._inputs = StagingBuffer(device, _STAGING_BYTES)
        self._results = ResultBuffer(device, _STAGING_BYTES)
        self._score_inputs = StagingBuffer(device, _STAGING_BYTES)
        self._score_results = ResultBuffer(device, _STAGING_BYTES)

    def prepare(
        self,
        params: SamplingBatch,
        input_ids: Int32Array,
        logits_offsets: Int32Array,
        rows: Int32Array | None,
        room: int = 0,
    ) -> Draw:
        """Queue the upload of what a draw depends on.

        Args:
            params: of each row of logits.
            input_ids: see `Backend.sample_and_accept`, as the others.
            logits_offsets: of the sequences.
            rows: of the block table.
            room: rows of logits and sequences to make room for, if they are fewer.
        """
        changed_rows = np.flatnonzero(is_processed(params)).astype(np.int32)
        changed_index = np.full(len(input_ids), -1, np.int32)
        changed_index[changed_rows] = np.arange(len(changed_rows))
        biases, masks, history = params.biases, params.masks, params.history
        process: list[npt.NDArray[Any]] = [
            *(changed_rows, masks.index, masks.words),
            *(biases.index, biases.offsets, biases.ids, biases.values),
            *(params.masked_ids, params.num_masked),
            *(history.index, history.offsets, history.ids, history.counts),
            *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
        ]
        padding, more_sequences = max(room - len(input_ids), 0), max(room - len(logits_offsets) + 1, 0)
        numbers = (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p, params.seed)
        sample: list[npt.NDArray[Any]] = [
            np.pad(changed_index, (0, padding), constant_values=-1),
            *(np.pad(array, (0, padding)) for array in numbers),
            np.pad(params.position, (0, padding), constant_values=_NOWHERE),
            *(np.pad(array, (0, padding)) for array in (params.by_rejection, params.draft_ids, params.want_logprob)),
        ]
        accept = (np.pad(input_ids, (0, padding)), np.pad(logits_offsets, (0, more_sequences), mode="edge"))
        keep = np.zeros(0, np.int32) if rows is None else np.pad(rows, (0, more_sequences))
        scored_rows = np.flatnonzero(wants_scores(params)).astype(np.int32)
        if room:  # nothing of `process` is read, and its sizes must not be part of the recording
            process = [array[:0] for array in process]
        uploaded = self._inputs.upload(*process, *sample, *accept, keep, scored_rows)
        ends = np.cumsum([len(process), len(sample), len(accept)])
        num_rows, num_sequences = len(accept[0]), len(accept[1]) - 1
        return Draw(
            process=uploaded[: ends[0]],
            sample=uploaded[ends[0] : ends[1]],
            accept=uploaded[ends[1] : ends[2]],
            keep=None if rows is None else uploaded[-2],
            scored=uploaded[-1],
            scored_rows=scored_rows,
            sizes=[num_sequences + 1, num_sequences, *[num_rows] * 3, *_score_sizes(len(scored_rows), params.num_top)],
            num_sequences=len(logits_offsets) - 1,
            num_top=params.num_top,
        )

    def draw(self, logits: torch.Tensor, draw: Draw, last_tokens: torch.Tensor) -> torch.Tensor:
        """Queue the draw; reads everything but sizes from device memory.

        Args:
            logits: `[L, V]`.
            draw: from `prepare`.
            last_tokens: int32 `[num_rows]`, takes what is kept.

        Returns:
            int32 results, to be given to `read`.
        """
        drawn = self._draw(logits, draw)
        out = torch.empty(sum(draw.sizes), dtype=torch.int32, device=self._device)
        offsets, failed, logits_rows, token_ids, logprobs, *scores = torch.split(out, draw.sizes)
        samples = (drawn[0], drawn[1].view(torch.float32), drawn[2])
        outputs = (offsets, logits_rows, token_ids, logprobs.view(torch.float32), failed)
        kept = (None, None) if draw.keep is None else (draw.keep, last_tokens)
        num_sequences = draw.sizes[1]
        threads = min(ACCEPT.threads, WARP * max(num_sequences, 1))
        self._launcher.launch(ACCEPT, (), (1,), *samples, *draw.accept, *outputs, *kept, num_sequences, threads=threads)
        if len(draw.scored):
            self._launch_score(logits, draw.scored, drawn[0].index_select(0, draw.scored), scores, draw.num_top)
        return out

    def read(self, draw: Draw, results: torch.Tensor) -> Callable[[], AcceptedTokens]:
        """Queue the download of a draw's results; the returned function waits for it."""
        wait = self._results.download(results)
        return lambda: _accepted(draw, wait())

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> Samples:
        """See `Backend.sample`."""
        nothing = np.zeros(len(logits), np.int32), np.zeros(1, np.int32)
        drawn = self._draw(logits, self.prepare(params, *nothing, None))
        token_ids, logprobs, failed = drawn.cpu().numpy()
        return Samples(token_ids, logprobs.view(np.float32), failed.astype(np.bool_))

    def score(
        self, logits: torch.Tensor, rows: Int32Array, token_ids: Int32Array, num_top: int
    ) -> Callable[[], TokenScores]:
        """See `Backend.score`."""
        sizes = _score_sizes(len(rows), num_top)
        out = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        row_inputs, token_inputs = self._score_inputs.upload(rows, token_ids)
        self._launch_score(logits, row_inputs, token_inputs, torch.split(out, sizes), num_top)
        wait = self._score_results.download(out)
        return lambda: _token_scores(np.split(wait(), np.cumsum(sizes)[:-1]), num_top)

    def _draw(self, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Queue the draw of a token from each row: int32 `[3, L]` ids, bits of log probabilities, failures."""
        rows, vocab = logits.shape
        if vocab > MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size: at most {MAX_VOCAB_SIZE} on the CUDA device, got {vocab}")
        threads, changed_rows = _row_threads(vocab), len(draw.process[0])
        processed = torch.empty(changed_rows, vocab, device=self._device)
        if changed_rows:
            sizes = (vocab, draw.process[2].shape[1], draw.process[7].shape[1])
            self._launch(PROCESS, (changed_rows,), logits, *draw.process, processed, *sizes, threads=threads)
        drawn = torch.empty(3, rows, dtype=torch.int32, device=self._device)
        outputs = (drawn[0], drawn[1].view(torch.float32), drawn[2])
        self._launch(SAMPLE, (rows,), logits, processed, *draw.sample, *outputs, vocab, threads=threads)
        return drawn

    def _launch_score(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        out: Sequence[torch.Tensor],
        num_top: int,
    ) -> None:
        vocab, shape = logits.shape[1], (len(rows), num_top)
        logprobs, ranks, top_ids, top_logprobs = out
        top = (top_ids.view(shape), top_logprobs.view(torch.float32).view(shape))
        threads = _row_threads(vocab)
        outputs = (logprobs.view(torch.float32), ranks, *top)
        self._launch(SCORE, (len(rows),), logits, rows, token_ids, *outputs, vocab, num_top, threads=threads)

    def _launch(self, kernel: Kernel, grid: Grid, *arguments: Argument, threads: int) -> None:
        self._launcher.launch(kernel, (self._dtype,), grid, *arguments, threads=threads)


def is_processed(params: SamplingBatch) -> BoolArray:
    """Rows `[L]` whose logits a request changes before a token is drawn."""
    biases, masks, history = params.biases.index, params.masks.index, params.history.index
    changes: BoolArray = (biases >= 0) | (masks >= 0) | (history >= 0) | (params.num_masked > 0)
    return changes


def wants_scores(params: SamplingBatch) -> npt.NDArray[np.bool_]:
    """Rows `[L]` that are scored."""
    return np.zeros(len(params.top_k), np.bool_) if params.want_scores is None else params.want_scores


def _score_sizes(num_tokens: int, num_top: int) -> list[int]:
    """Values of log probabilities, ranks, most probable ids and their log probabilities."""
    return [num_tokens, num_tokens, num_tokens * num_top, num_tokens * num_top]


def _token_scores(values: list[Int32Array], num_top: int) -> TokenScores:
    logprobs, ranks, top_ids, top_logprobs = values
    return TokenScores(logprobs.view(np.float32), ranks, num_top, top_ids, top_logprobs.view(np.float32))


def _accepted(draw: Draw, results: Int32Array) -> AcceptedTokens:
    offsets, failed, *tokens = np.split(results, np.cumsum(draw.sizes)[:-1])
    rows, token_ids, logprobs = (array[: offsets[-1]] for array in tokens[:3])
    is_scored, scores = np.isin(rows, draw.scored_rows), None
    if is_scored.any():
        scores = _token_scores(tokens[3:], draw.num_top).take(np.searchsorted(draw.scored_rows, rows[is_scored]))
        scores = spread(scores, is_scored)
    is_failed = failed[: draw.num_sequences].astype(np.bool_)
    offsets = offsets[: draw.num_sequences + 1]
    return AcceptedTokens(offsets, rows, token_ids, logprobs.view(np.float32), is_failed, scores)


def _row_threads(vocab: int) -> int:
    """Threads of a block that walks a row of logits; the order of its sums depends on them, so on nothing else."""
    return min(SAMPLE.threads, vocab + -vocab % WARP)
