"""Continuous batching with chunked prefill over a paged KV cache."""

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.prefix_cache import PrefixCache
from foreword.scheduler.request import Request
from foreword.scheduler.step import SchedulerLoad, StepPlan, StepResult, StepUpdate

class Scheduler:
    """Packs all requests into one batch every step.

    There is no prefill phase and no decode phase: every sequence has `num_computed` tokens in the KV cache and chases
    `num_tokens`; each step gives every sequence as many tokens as the token budget and the free blocks allow, decoding
    sequences first, then prompt chunks in (priority, arrival) order. What begins like an earlier sequence begins with
    that one's blocks. One thread may use it.
    """

    config: SchedulerConfig
    prefix_cache: PrefixCache

    def __init__(self, config: SchedulerConfig) -> None: ...
    def add(self, request: Request, now_ns: int) -> None:
        """Queue a request.

        One for several outputs becomes as many sequences, with keys `request_key`, `request_key + 1` and so on, which
        all other calls and the updates name one by one. The first computes the prompt. Once it has, or has ended, the
        others are queued; they take the prompt's full blocks from the prefix cache and compute what is left of it.

        Raises:
            DuplicateRequest: one of its keys is active.
            ContextLengthExceeded: prompt and output exceed `max_model_len`, or need more blocks than there are.
            QueueFull: a bound of the waiting queue is reached.
            DeadlineInfeasible: its deadline has passed.
            ValueError: it asks for no output or for more than may wait, the prompt is empty, not int32 or has a
                negative id, or another field is out of its range.
        """

    def cancel(self, request_key: int) -> bool:
        """End a request; its blocks are free after the next `apply`. False when the key is not active."""

    def pause(self, request_key: int) -> bool:
        """Stop scheduling a sequence, keeping its blocks, until `resume`. False when the key is not active.

        One that waits and may not be overtaken any more keeps its place: it pauses once it has its row.
        """

    def resume(self, request_key: int) -> bool:
        """Undo `pause`. False when the key is not active."""

    @property
    def can_schedule(self) -> bool:
        """True when no plan waits for its result, or when `lookahead` allows to plan ahead of one that does.

        It does not where a sequence has to lose its blocks to another: that waits until no plan is open.
        """

    def schedule(self, now_ns: int) -> StepPlan:
        """Decide the next step. An empty plan (no sequences) must be applied with `apply(None)` all the same.

        A plan made ahead continues the sequences of the open one behind the token that this one draws, whose id it
        gives as -1. It leaves out those whose drafts are being checked, that reach their length, or whose request
        `needs_last_token`: what they do next depends on the result.

        Raises:
            RuntimeError: `can_schedule` is false.
        """

    def apply(self, result: StepResult | None) -> StepUpdate:
        """Take the result of the oldest open plan: append tokens, end sequences, free blocks. `None` for an empty plan.

        Drafts of sequences that go on are verified by the next step, never more than a sequence may still produce
        after its next token, and as far as budget and free blocks allow without a preemption. Those of a sequence that
        is paused, preempted or part of the next plan already are dropped. A sequence that ends and is part of the next
        plan keeps its row until that one's result, whose token for it is dropped.

        Raises:
            ValueError: the result does not belong to that plan, or a token id is negative.
        """

    @property
    def has_work(self) -> bool:
        """True while a `schedule` could return a plan or an update (unpaused sequences, waiting or ended requests)."""

    @property
    def next_deadline_ns(self) -> int:
        """Earliest deadline of all active requests; 0 for none."""

    def load(self) -> SchedulerLoad:
        """Gauges of the present state."""

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block, row and queue is accounted for. Slow; for tests."""
