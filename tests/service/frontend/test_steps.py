from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.service.engine.messages import StepHeader
from foreword.service.frontend.steps import StepLedger

from .conftest import LOAD


def header(step_id: int) -> StepHeader:
    return StepHeader(step_id, 0, 0, 0, 0, 1, 1, LOAD)


def test_a_step_whose_tokens_leave_at_two_times_appears_in_both_deltas() -> None:
    ledger = StepLedger()
    ledger.add(header(1), 1, 0, 0, 3, 100)
    ledger.release(2, 100)
    ledger.hand_over(110)
    [share] = ledger.take()
    assert (share.num_tokens, share.hold_ns, share.emit_ns - share.release_ns) == (2, 0, 10)
    ledger.add(header(2), 2, 0, 0, 1, 200)
    ledger.release(2, 205)
    ledger.hand_over(220)
    first, second = ledger.take()
    assert (first.header.step_id, first.num_tokens, first.hold_ns) == (1, 1, 105)
    assert (second.header.step_id, second.num_tokens, second.hold_ns) == (2, 1, 5)


def test_releases_of_one_step_in_one_delta_are_one_share() -> None:
    ledger = StepLedger()
    ledger.add(header(1), 1, 0, 0, 3, 100)
    ledger.release(1, 100)
    ledger.release(2, 150)
    ledger.hand_over(170)
    [share] = ledger.take()
    assert (share.num_tokens, share.hold_ns, share.release_ns, share.emit_ns) == (3, 50, 100, 170)


def test_steps_without_tokens_do_not_appear() -> None:
    ledger = StepLedger()
    ledger.add(header(1), 1, 0, 0, 0, 100)
    ledger.hand_over(100)
    assert ledger.take() == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=30))
def test_shares_account_for_every_token_in_order(moves: list[tuple[int, int, bool]]) -> None:
    ledger, held, sources, seen = StepLedger(), 0, [], []
    for step_id, (num_added, num_released, is_taken) in enumerate(moves):
        ledger.add(header(step_id), 2, 0, 0, num_added, step_id)
        sources += [step_id] * num_added
        held += num_added
        num_released = min(num_released, held)
        held -= num_released
        ledger.release(num_released, step_id)
        if is_taken:
            ledger.hand_over(step_id)
            shares = ledger.take()
            assert len({share.header.step_id for share in shares}) == len(shares)
            seen += [share.header.step_id for share in shares for _ in range(share.num_tokens)]
    assert seen == sources[: len(seen)]
