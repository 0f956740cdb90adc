"""A smaller model of the same vocabulary that generates the drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.backends.backend import KVCacheShape
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.gpu.config import DeviceConfig
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.speculative.drafter import Proposals
from foreword.scheduler.request import AcceptanceRule, Request
from foreword.scheduler.step import BoolArray, Int32Array, StepPlan

MAX_CONFIDENCE = 1
_EMPTY = np.zeros(0, np.int32)


class ModelDrafter:
    """Generates with a draft model (Leviathan et al. 2023), in the places of the target's own tokens.

    The draft model computes every token that the target computes, at the same position and in the same block of a KV
    cache of its own. So prefixes that the target has cached are there for it too, and a preempted sequence is computed
    again for both. The drafts themselves, and the token they follow, may lie behind the blocks that a sequence owns:
    each row has blocks of its own for them, until the next step computes those tokens in their places.

    It draws as the target will, by the same rule and with the noise of the same positions: of two distributions that
    are alike, the same noise mostly draws the same token. Penalties do not count the drafts before a position.

    Attributes:
        name: "draft-model".
        names: its own.
        max_confidence: of all its proposals.
    """

    name: str = "draft-model"
    names: tuple[str, ...] = ("draft-model",)
    max_confidence: int = MAX_CONFIDENCE

    def __init__(self, config: DeviceConfig, decoder: Decoder[Any], is_mapped: BoolArray | None = None) -> None:
        """Allocate a KV cache.

        Args:
            config: of the target's device.
            decoder: the draft model, with the target's vocabulary.
            is_mapped: `[V]` tokens that the draft model knows; None for all.
        """
        model, num_rows = decoder.config, config.max_num_sequences
        self._decoder = decoder
        self._is_mapped = is_mapped
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._num_row_blocks = -(-config.max_draft_tokens // config.block_size)
        self._max_draft_tokens = config.max_draft_tokens
        self._cache = decoder.backend.kv_cache(
            KVCacheShape(
                num_layers=model.num_layers,
                num_blocks=config.num_blocks + num_rows * self._num_row_blocks,
                block_size=config.block_size,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                num_rows=num_rows,
                max_blocks_per_sequence=config.max_blocks_per_sequence,
            )
        )
        self._sampling = SamplingState(num_rows, model.vocab_size)
        self._block_table = np.zeros((num_rows, config.max_blocks_per_sequence), np.int32)
        self._is_borrowed = np.zeros((num_rows, config.max_blocks_per_sequence), np.bool_)
        self._lengths = np.zeros(num_rows, np.int32)
        self._last_ids = np.zeros(num_rows, np.int32)
        self._plan: StepPlan | None = None

    def see(self, plan: StepPlan) -> None:
        """Take the plan of the step whose tokens come next."""
        rows = np.repeat(plan.rows, np.diff(plan.query_offsets))
        token_ids = np.where(plan.token_ids < 0, self._last_ids[rows], plan.token_ids)
        self._plan = replace(plan, token_ids=token_ids.astype(np.int32))

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        """Forget what a row held; it (re)starts with the prompt of a request and the output so far."""
        # Rejection sampling draws with noise of its own purpose, which a draft must know nothing of.
        self._sampling.admit(row, replace(request, acceptance=AcceptanceRule.EXACT_MATCH), output_token_ids)
        self._lengths[row] = len(request.prompt_token_ids) + len(output_token_ids)
        self._last_ids[row] = (output_token_ids if len(output_token_ids) else request.prompt_token_ids)[-1]

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        """Take the tokens that came out of the step, which follow those that are known."""
        is_new = (ends > starts) & (positions + ends - starts > self._lengths[rows])
        if not is_new.any():
            return
        assert self._plan is not None
        self._sampling.append(self._plan, np.append(starts, ends[-1]).astype(np.int32), token_ids)
        self._lengths[rows[is_new]] = (positions + ends - starts)[is_new]
        self._last_ids[rows[is_new]] = token_ids[ends[is_new] - 1]

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        """Compute the step's tokens, then guess what follows the last token of each row, at most `limits[b]` tokens."""
        assert self._plan is not None
        limits = np.minimum(limits, self._max_draft_tokens)
        drafts = np.full((len(rows), self._max_draft_tokens), -1, np.int32)
        active = np.flatnonzero(limits > 0)
        plan = self._catch_up(self._plan, rows[active])
        for depth in range(max(int(limits.max(initial=0)), 1)):
            token_ids = self._draw(plan)
            if not len(token_ids):
                break
            drafts[active, depth] = token_ids
            active = active[(limits[active] > depth + 1) & (token_ids >= 0)]
            if not len(active):
                break
            plan = self._next_plan(rows[active], drafts[active, depth], depth + 1)
        return self._proposals(drafts, limits)

    def _proposals(self, drafts: Int32Array, limits: Int32Array) -> Proposals:
        depths = np.arange(drafts.shape[1])
        is_usable = (depths < limits[:, None]) & (drafts >= 0)
        if self._is_mapped is not None:
            is_usable &= self._is_mapped[np.maximum(drafts, 0)]
        is_usable = np.logical_and.accumulate(is_usable, axis=1)
        counts = is_usable.sum(axis=1)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return Proposals(offsets, drafts[is_usable], np.minimum(counts, MAX_CONFIDENCE).astype(np.int32))

    def _draw(self, plan: StepPlan) -> Int32Array:
        """Compute a plan and draw a token where it asks for logits, -1 where none can be drawn."""
        backend = self._decoder.backend
        logits = self._decoder.logits(backend.upload(plan, self._cache), self._cache)
        num_logits = len(plan.logits_indices)
        if not num_logits:
            return _EMPTY
        samples = backend.sample(logits[:num_logits], self._sampling.select(plan))
        return np.where(samples.failed, -1, samples.token_ids).astype(np.int32)

    def _catch_up(self, plan: StepPlan, active: Int32Array) -> StepPlan:
        """The step's tokens without rejected drafts, and the last token of each active row behind them."""
        num_drafted = np.maximum(np.diff(plan.logits_offsets) - 1, 0)
        num_rejected = np.clip(plan.context_lens - self._lengths[plan.rows] + 1, 0, num_drafted)
        starts, ends = plan.query_offsets[:-1], plan.query_offsets[1:] - num_rejected
        is_active = np.isin(plan.rows, active)
        token_ids, positions, slots = [], [], []
        updates = self._block_table_updates(plan, active)
        for row, start, end, follows in zip(plan.rows, starts, ends, is_active, strict=True):
            last = self._lengths[row : row + 1] - 1
            token_ids += [plan.token_ids[start:end], self._last_ids[row : row + 1][: int(follows)]]
            positions += [plan.positions[start:end], last[: int(follows)]]
            slots += [plan.slot_mapping[start:end], self._slots(np.array([row]), last)[: int(follows)]]
        counts = ends - starts + is_active
        query_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return replace(
            plan,
            query_offsets=query_offsets,
            context_lens=np.where(is_active, self._lengths[plan.rows], plan.context_lens - num_rejected).astype(
                np.int32
            ),
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            logits_indices=(query_offsets[1:] - 1)[is_active].astype(np.int32),
            logits_offsets=np.concatenate([[0], np.cumsum(is_active)]).astype(np.int32),
            scored_indices=_EMPTY,
            scored_token_ids=_EMPTY,
            scored_offsets=np.zeros(len(plan.rows) + 1, np.int32),
            block_table_updates=updates,
        )

    def _next_plan(self, rows: Int32Array, token_ids: Int32Array, depth: int) -> StepPlan:
        """One more token in each row, `depth` behind its last one."""
        assert self._plan is not None
        positions = self._lengths[rows] - 1 + depth
        each = np.arange(len(rows) + 1, dtype=np.int32)
        return replace(
            self._plan,
            rows=rows,
            query_offsets=each,
            context_lens=positions + 1,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=self._slots(rows, positions),
            logits_indices=each[:-1],
            logits_offsets=each,
            scored_indices=_EMPTY,
            scored_token_ids=_EMPTY,
            scored_offsets=np.zeros(len(rows) + 1, np.int32),
            block_table_updates=np.zeros((0, 3), np.int32),
        )

    def _slots(self, rows: npt.NDArray[Any], positions: npt.NDArray[Any]) -> Int32Array:
        """Where keys and values at these positions go, once `_block_table_updates` has lent the blocks."""
        index, offset = np.divmod(positions, self._block_size)
        index = np.minimum(index, self._block_table.shape[1] - 1)
        blocks = np.where(self._is_borrowed[rows, index], self._borrowed(rows, index), self._block_table[rows, index])
        return (blocks * self._block_size + offset).astype(np.int32)

    def _borrowed(self, rows: npt.NDArray[Any], index: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The row's own block that stands in for the one at this index of its block table."""
        blocks: npt.NDArray[Any] = self._num_blocks + rows * self._num_row_blocks + index % self._num_row_blocks
        return blocks

    def _block_table_updates(self, plan: StepPlan, active: Int32Array) -> Int32Array:
        """Those of the plan, with blocks lent for drafts behind what a row owns, and those lent before returned."""
        returned = np.argwhere(self._is_borrowed)
        self._is_borrowed[:] = False
        table_rows, indices, blocks = plan.block_table_updates.T
        self._block_table[table_rows, indices] = blocks
        num_owned = dict(zip(plan.rows.tolist(), (-(-plan.context_lens // self._block_size)).tolist(), strict=True))
        for row in active.tolist():
            last_index = (int(self._lengths[row]) - 2 + self._max_draft_tokens) // self._block_size
            self._is_borrowed[row, num_owned[row] : last_index + 1] = True
        changed = np.unique(
            np.concatenate([returned, np.argwhere(self._is_borrowed), plan.block_table_updates[:, :2]]), axis=0
        )
        rows, index = changed.astype(np.int64).T
        entries = np.where(self._is_borrowed[rows, index], self._borrowed(rows, index), self._block_table[rows, index])
        return np.stack([rows, index, entries], axis=1).astype(np.int32)
