"""The child process of a system: jobs as lines, concurrency, due times."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator

from benchmarks.peers.adapters.worker import Answer, Job, reply, run_steps, run_streams


class CountingEngine:
    """Gives every sequence one token a step, and notes how many ran."""

    def __init__(self) -> None:
        self.remaining: dict[int, int] = {}
        self.most_running = 0

    def add(self, index: int, prompt: list[int], num_tokens: int) -> None:
        self.remaining[index] = num_tokens
        self.most_running = max(self.most_running, len(self.remaining))

    def step(self) -> Iterable[tuple[int, int]]:
        for index in list(self.remaining):
            self.remaining[index] -= 1
            if not self.remaining[index]:
                del self.remaining[index]
            yield index, 1


def test_an_engine_never_runs_more_than_the_concurrency() -> None:
    engine = CountingEngine()

    answers = run_steps(engine, Job([[1]] * 5, num_tokens=3, concurrency=2, due_s=[0.0] * 5))

    assert [answer.num_tokens for answer in answers] == [3] * 5
    assert engine.most_running == 2
    assert all(answer.start <= answer.first <= answer.last for answer in answers)


def test_waits_count_from_when_a_prompt_is_due() -> None:
    answers = run_steps(CountingEngine(), Job([[1]] * 2, num_tokens=1, concurrency=2, due_s=[0.0, 0.01]))

    assert answers[1].start == 0.01 <= answers[1].first


def test_streams_run_at_once_and_count_what_arrives() -> None:
    together = threading.Barrier(2, timeout=30)  # broken unless two run at the same time

    def generate(prompt: list[int], num_tokens: int) -> Iterator[int]:
        together.wait()
        yield 0
        yield num_tokens

    answers = run_streams(generate, Job([[1]] * 4, num_tokens=3, concurrency=2, due_s=[0.0] * 4))

    assert [answer.num_tokens for answer in answers] == [3] * 4


def test_an_answer_of_another_length_is_refused() -> None:
    line = json.dumps({"prompts": [[1], [2]], "num_tokens": 3, "concurrency": 1, "due_s": [0.0, 0.0]})

    assert reply(line, lambda job: [Answer(0.0, 1.0, 2.0, 3), Answer(0.0, 1.0, 2.0, 2)]) == {
        "refused": "[3, 2] tokens instead of 3 each"
    }
