"""Drafts between one step and the next: what is proposed, how much of it, and what became of it."""

from __future__ import annotations

import numpy as np
import structlog

from foreword.gpu.guided.guide import GuidedRows
from foreword.gpu.speculative.controller import DraftController, IntArray
from foreword.gpu.speculative.drafter import Drafter, PlanDrafter, Proposals
from foreword.scheduler.request import Request
from foreword.scheduler.step import Drafts, DraftState, Int32Array, StepForecast, StepPlan

_log = structlog.get_logger(__name__)


class Speculator:
    """Follows the steps of a model runner and proposes drafts for the rows that decode next.

    Where a grammar leaves one text only, its tokens stand in for a drafter that has nothing to propose there; they have
    a place behind the drafters' names, and a confidence above the drafter's.

    A drafter that raises an exception, or proposes what is no token, is not used any more.

    Attributes:
        drafter_name: of its drafter.
        drafter_names: of the drafters that it chooses among, or of its drafter alone.
        state: whether it proposes, and why not.
        cost: what its controller knows of the cost of steps; None without one.
        forecast: what was expected of the last step.
    """

    def __init__(
        self,
        drafter: Drafter,
        controller: DraftController | None,
        *,
        max_num_sequences: int,
        max_draft_tokens: int,
        vocab_size: int,
    ) -> None:
        """Follow no row yet.

        Args:
            drafter: proposes.
            controller: decides how many of the proposals are checked; without one it is all of them. Knows the
                confidence of grammars.
            max_num_sequences: rows.
            max_draft_tokens: bound of the drafts of a row.
            vocab_size: token ids are below it.
        """
        self.drafter_name = drafter.name
        self.drafter_names = drafter.names
        self._drafter: Drafter | None = drafter
        self._plan_drafter = drafter if isinstance(drafter, PlanDrafter) else None
        self._controller = controller
        self.cost = None if controller is None else controller.cost
        self.forecast = StepForecast()
        self._max_draft_tokens = max_draft_tokens
        self._vocab_size = vocab_size
        self._row_limits = np.zeros(max_num_sequences, np.int32)
        self._ends = np.zeros(max_num_sequences, np.int32)
        self._confidences = np.zeros(max_num_sequences, np.int32)
        self._first_drafts = np.zeros(max_num_sequences, np.int32)
        self.state = DraftState.ACTIVE if controller is None else controller.state

    def follow(
        self,
        plan: StepPlan,
        token_offsets: Int32Array,
        token_ids: Int32Array,
        model_duration_ns: int,
        guided_rows: GuidedRows | None = None,
    ) -> Drafts | None:
        """Learn what a step computed and propose for the next; `None` for nothing.

        Args:
            plan: of the step.
            token_offsets: of the step's result.
            token_ids: of the step's result.
            model_duration_ns: of the step's result.
            guided_rows: have followed the step's tokens; None where no request has a grammar.
        """
        self.forecast = StepForecast()
        if self._drafter is None:
            return None
        try:
            return self._follow(self._drafter, plan, token_offsets, token_ids, model_duration_ns, guided_rows)
        except Exception:
            _log.error("drafter failed; going on without drafts", drafter=self._drafter.name, exc_info=True)
            self._drafter = None
            self.state = DraftState.DRAFTER_FAILED
            return None

    def _follow(
        self,
        drafter: Drafter,
        plan: StepPlan,
        token_offsets: Int32Array,
        token_ids: Int32Array,
        model_duration_ns: int,
        guided_rows: GuidedRows | None,
    ) -> Drafts | None:
        for a, (row, request) in enumerate(plan.admitted):
            output = slice(plan.output_offsets[a], plan.output_offsets[a + 1])
            self._admit(drafter, row, request, plan.output_token_ids[output])
        if self._plan_drafter:
            self._plan_drafter.see(plan)
        num_drafted = np.maximum(np.diff(plan.logits_offsets) - 1, 0)
        starts, ends = plan.query_offsets[:-1], plan.query_offsets[1:] - num_drafted
        drafter.observe(plan.rows, plan.positions[starts], plan.token_ids, starts, ends)
        num_known = plan.context_lens - num_drafted
        drafter.observe(plan.rows, num_known, token_ids, token_offsets[:-1], token_offsets[1:])
        num_new = np.diff(token_offsets)
        decoding = num_new > 0
        if self._controller:
            if plan.num_tokens == len(plan.logits_indices):
                self.forecast = self._controller.cost.forecast(plan.num_sequences, plan.num_tokens, len(token_ids))
                self._controller.cost.observe(plan.num_tokens, model_duration_ns)
            first_ids = token_ids[token_offsets[:-1][decoding]]
            self._learn(self._controller, plan.rows[decoding], num_drafted[decoding], num_new[decoding] - 1, first_ids)
        rows = plan.rows[decoding]
        if self._controller and not self._controller.looks(len(rows)):
            self._confidences[rows] = 0
            return None
        num_left = self._ends[rows] - num_known[decoding] - num_new[decoding]
        limits = np.clip(num_left - 1, 0, self._row_limits[rows]).astype(np.int32)
        proposals = drafter.propose(rows, limits)
        if ((proposals.token_ids < 0) | (proposals.token_ids >= self._vocab_size)).any():
            raise ValueError("a draft is outside the vocabulary")
        if guided_rows:
            proposals = self._amend(drafter, guided_rows, rows, limits, proposals)
        proposed = np.diff(proposals.offsets)
        self._confidences[rows] = proposals.confidences
        self._first_drafts[rows[proposed > 0]] = proposals.token_ids[proposals.offsets[:-1][proposed > 0]]
        lengths: IntArray = proposed.astype(np.int64)
        if self._controller:
            has_prefill = len(rows) < plan.num_sequences
            lengths = self._controller.choose(rows, proposals.confidences, proposed, has_prefill)
            self.state = self._controller.state
        return _cut(proposals, lengths, decoding) if lengths.any() else None

    def _admit(self, drafter: Drafter, row: int, request: Request, output_token_ids: Int32Array) -> None:
        drafter.admit(row, request, output_token_ids)
        self._row_limits[row] = min(request.max_draft_tokens, self._max_draft_tokens)
        self._ends[row] = len(request.prompt_token_ids) + request.stopping.max_output_tokens
        self._confidences[row] = 0
        if self._controller:
            self._controller.admit(row)

    def _amend(
        self, drafter: Drafter, guided_rows: GuidedRows, rows: Int32Array, limits: Int32Array, proposals: Proposals
    ) -> Proposals:
        """The proposals that agree with the rows' grammars, and the grammars' own."""
        offsets, token_ids, is_forced = guided_rows.amend(rows, limits, proposals.offsets, proposals.token_ids)
        confidences = np.where(is_forced, drafter.max_confidence + 1, proposals.confidences)
        confidences[np.diff(offsets) == 0] = 0
        drafters = np.zeros(len(rows), np.int32) if proposals.drafters is None else proposals.drafters
        drafters = np.where(is_forced, np.int32(len(self.drafter_names)), drafters)
        return Proposals(offsets, token_ids, confidences.astype(np.int32), drafters)

    def _learn(
        self,
        controller: DraftController,
        rows: Int32Array,
        num_drafted: Int32Array,
        num_accepted: Int32Array,
        first_ids: Int32Array,
    ) -> None:
        """Tell how the last proposals fared. Of one that was not checked, the first draft can be judged."""
        trials = np.maximum(np.minimum(num_accepted + 1, num_drafted), 1)
        successes = np.where(num_drafted > 0, num_accepted, first_ids == self._first_drafts[rows])
        known = self._confidences[rows] > 0
        if known.any():
            confidences = self._confidences[rows[known]]
            controller.learn(rows[known], confidences, trials[known], successes[known].astype(np.int32))


def _cut(proposals: Proposals, lengths: IntArray, decoding: np.typing.NDArray[np.bool_]) -> Drafts:
    """The first `lengths` drafts of the decoding sequences, as drafts of all sequences of the plan."""
    starts = np.repeat(proposals.offsets[:-1] - np.cumsum(lengths) + lengths, lengths)
    token_ids = proposals.token_ids[starts + np.arange(len(starts))]
    counts = np.zeros(len(decoding), np.int64)
    counts[decoding] = lengths
    drafters = None
    if proposals.drafters is not None:
        drafters = np.zeros(len(decoding), np.int32)
        drafters[decoding] = proposals.drafters
    return Drafts(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), token_ids, drafters)
