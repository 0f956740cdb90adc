from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from foreword.scheduler.errors import QueueFull
from foreword.service.text.fair_executor import FairExecutor

LIMIT_S = 30


class Work:
    """An executor whose thread is busy until `go`, and the order in which its work was done."""

    def __init__(self, max_waiting: int = 100) -> None:
        self.executor = FairExecutor("work", max_waiting)
        self.done: list[str] = []
        self.go = threading.Event()
        begun = threading.Event()
        self.blocked = self.executor.submit("flood", lambda: (begun.set(), self.go.wait(LIMIT_S)))
        assert begun.wait(LIMIT_S)

    def add(self, tenant: str, name: str) -> Future[None]:
        return self.executor.submit(tenant, lambda: self.done.append(name))

    def close(self) -> None:
        self.go.set()
        self.executor.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Work]]:
    made: list[Work] = []

    def build(max_waiting: int = 100) -> Work:
        made.append(Work(max_waiting))
        return made[-1]

    yield build
    for work in made:
        work.close()


def test_a_flood_of_one_tenant_holds_up_no_other(make: Callable[..., Work]) -> None:
    work = make()
    flood = [work.add("flood", f"flood {i}") for i in range(50)]
    others = [work.add(tenant, f"{tenant} {i}") for i in range(2) for tenant in ("gold", "free")]
    work.go.set()
    for future in (*flood, *others):
        future.result(LIMIT_S)
    turns = ["flood 0", "gold 0", "free 0", "flood 1", "gold 1", "free 1"]
    assert work.done == [*turns, *(f"flood {i}" for i in range(2, 50))]


def test_each_tenant_has_its_own_bound(make: Callable[..., Work]) -> None:
    work = make(2)
    first, second = work.add("flood", "a"), work.add("flood", "b")
    with pytest.raises(QueueFull) as caught:
        work.add("flood", "c")
    assert caught.value.metadata == {"max_waiting": "2"}
    gold = work.add("gold", "d")
    first.cancel()  # makes room
    fifth = work.add("flood", "e")
    work.go.set()
    for future in (second, gold, fifth):
        future.result(LIMIT_S)
    assert sorted(work.done) == ["b", "d", "e"]


def test_what_was_cancelled_is_not_done(make: Callable[..., Work]) -> None:
    work = make()
    futures = [work.add("flood", str(i)) for i in range(4)]
    assert futures[0].cancel()
    assert futures[2].cancel()
    work.go.set()
    futures[3].result(LIMIT_S)
    assert work.done == ["1", "3"]


def test_an_error_reaches_who_handed_the_work_in(make: Callable[..., Work]) -> None:
    work = make()
    bad = work.executor.submit("gold", lambda: 1 // 0)
    good = work.add("flood", "good")
    work.go.set()
    with pytest.raises(ZeroDivisionError):
        bad.result(LIMIT_S)
    good.result(LIMIT_S)


def test_closing_ends_what_has_not_begun(make: Callable[..., Work]) -> None:
    work = make()
    waiting = work.add("flood", "never")
    closer = threading.Thread(target=work.executor.close)
    closer.start()
    with pytest.raises(CancelledError):
        waiting.result(LIMIT_S)
    work.go.set()
    closer.join(LIMIT_S)
    assert work.done == []
