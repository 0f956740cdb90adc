"""Jobs of the cases."""

from __future__ import annotations

import pytest

from benchmarks.peers.workload import CASES, Prompts, job, poisson_arrivals

PROMPTS = Prompts(
    {kind: [[number] * (5 + number) for number in range(14)] for kind in ("chat", "copy", "edit")}, list(range(4000))
)


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_jobs(case: str) -> None:
    work = job(case, 1, PROMPTS, 0)

    assert len(work.prompts) == len(work.due_s) > 0
    assert work.num_tokens > 0
    assert job(case, 1, PROMPTS, 1).prompts != work.prompts, "a round repeats the prompts of the one before it"


@pytest.mark.parametrize("streams", [1, 4, 16, 32])
def test_a_decode_case_keeps_its_streams_busy(streams: int) -> None:
    work = job("decode-chat", streams, PROMPTS, 3)

    assert work.concurrency == streams <= len(work.prompts)


@pytest.mark.parametrize("length", [128, 512, 1024])
def test_prefill_prompts_have_their_length_and_no_common_beginning(length: int) -> None:
    prompts = [prompt for index in range(4) for prompt in job(f"prefill-{length}", 1, PROMPTS, index).prompts]

    assert {len(prompt) for prompt in prompts} == {length}
    assert len({prompt[0] for prompt in prompts}) == len(prompts)


def test_arrivals_are_the_same_for_every_system_and_come_at_the_rate() -> None:
    arrivals = poisson_arrivals(2000, 1)

    assert arrivals == poisson_arrivals(2000, 1) == sorted(arrivals)
    assert arrivals[-1] / 2000 == pytest.approx(1 / 2.0, rel=0.1)


def test_an_unknown_case_is_an_error() -> None:
    with pytest.raises(KeyError, match="other"):
        job("other", 1, PROMPTS, 0)
