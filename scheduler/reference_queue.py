"""The order of admission once more in plain Python, for the reference scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request


class _Sequence(Protocol):
    request: Request
    order: int
    tokens: list[int]


S = TypeVar("S", bound=_Sequence)


@dataclass(eq=False)
class _Flow:
    """What one tenant asks for at one priority."""

    cost_per_token: int
    service: int = 0
    num_requests: int = 0


class ReferenceQueue(Generic[S]):
    """Requests that may be admitted.

    Attributes:
        members: all of them.
        flows: by tenant and priority; those without an active request are kept as long as there is room.
        idle: keys of these, the one that became idle first in front.
        virtual_time: of each priority: service of the flow that was admitted last.
        waits_since_ns: of each priority.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.members: list[S] = []
        self.flows: dict[tuple[str, int], _Flow] = {}
        self.idle: list[tuple[str, int]] = []
        self.virtual_time: dict[int, int] = {}
        self.waits_since_ns: dict[int, int] = {}

    def open_flow(self, request: Request) -> None:
        """Count an active request."""
        key = request.tenant, request.priority
        if key in self.idle:
            self.idle.remove(key)
        if key not in self.flows:
            if len(self.flows) == self.config.max_num_sequences + self.config.max_num_waiting:
                forgotten = min(self.idle, key=lambda key: self.flows[key].service)
                self.idle.remove(forgotten)
                del self.flows[forgotten]
            self.flows[key] = _Flow(65536 // dict(self.config.tenant_weights).get(request.tenant, 1))
        self.flows[key].num_requests += 1

    def close_flow(self, request: Request) -> None:
        """Count one fewer."""
        key = request.tenant, request.priority
        self.flows[key].num_requests -= 1
        if self.flows[key].num_requests == 0:
            self.idle.append(key)

    def push(self, s: S, now_ns: int) -> None:
        """A request joins; a flow that had none in the queue has no credit for that time."""
        level = [other for other in self.members if other.request.priority == s.request.priority]
        if all(other.request.tenant != s.request.tenant for other in level):
            least = min((self._flow(other).service for other in level), default=None)
            floor = self.virtual_time.get(s.request.priority, 0) if least is None else least
            self._flow(s).service = max(self._flow(s).service, floor)
        if not level:
            self.waits_since_ns[s.request.priority] = now_ns
        self.members.append(s)

    def discard(self, s: S) -> None:
        """A request leaves, if it is a member."""
        if s in self.members:
            self.members.remove(s)

    def best(self, passed: list[S], above: int, now_ns: int) -> S | None:
        """The next request of a priority above `above` that has not been passed."""
        candidates = [s for s in self.members if s not in passed and s.request.priority > above]
        if not candidates:
            return None
        priority = max({s.request.priority for s in candidates}, key=lambda p: (self._rank(p, now_ns), -p))
        return self._first([s for s in candidates if s.request.priority == priority])

    def overdue(self, priority: int, holders: set[tuple[str, int]], now_ns: int) -> S | None:
        """The next request of a priority that has been passed over until it aged, unless its flow holds rows."""
        level = [s for s in self.members if s.request.priority == priority]
        if not level or now_ns - self.waits_since_ns[priority] < self.config.priority_aging_ns:
            return None
        s = self._first(level)
        return None if (s.request.tenant, priority) in holders else s

    def _first(self, level: list[S]) -> S:
        """Of one priority: the oldest of the flow that has got least."""
        oldest = {s.request.tenant: s for s in sorted(level, key=lambda s: -s.order)}
        return min(oldest.values(), key=lambda s: (self._flow(s).service, s.order))

    def admit(self, s: S, now_ns: int) -> None:
        """A request leaves because it gets a row."""
        self.members.remove(s)
        priority = s.request.priority
        self.waits_since_ns[priority] = now_ns
        self.virtual_time[priority] = max(self.virtual_time.get(priority, 0), self._flow(s).service)

    def charge(self, s: S, num_tokens: int) -> None:
        """Its flow gets tokens."""
        self._flow(s).service += num_tokens * self._flow(s).cost_per_token

    def num_tokens_before(self, request: Request) -> int:
        """Tokens that go before a new request for certain."""
        return sum(
            len(s.tokens)
            for s in self.members
            if s.request.priority > request.priority
            or (s.request.priority, s.request.tenant) == (request.priority, request.tenant)
        )

    def _flow(self, s: S) -> _Flow:
        return self.flows[s.request.tenant, s.request.priority]

    def _rank(self, priority: int, now_ns: int) -> int:
        return priority + (now_ns - self.waits_since_ns[priority]) // self.config.priority_aging_ns
