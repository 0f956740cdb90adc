"""Scheduler, model and drafter together: drafts change the time, never a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.gpu.speculative.drafter import Proposals
from foreword.gpu.speculative.open import open_speculator
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import AcceptanceRule, Request, SamplingParams, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import DraftState, FinishReason, Int32Array

VOCAB = 49152
NUM_ROWS = 8
CONFIG = DeviceConfig(num_blocks=128, num_threads=1, max_num_sequences=NUM_ROWS, max_model_len=256)


class ScriptedDrafter:
    """Proposes, for every row, what a script says of its request: the true continuation, or anything else."""

    name = "scripted"
    names = ("scripted",)
    max_confidence = 1

    def __init__(self, scripts: dict[int, list[int]], wrong_by: int = 0, num_drafts: int = 16) -> None:
        self.scripts = scripts
        self.wrong_by = wrong_by
        self.num_drafts = num_drafts
        self.keys: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, row: int, request: Request, output_token_ids: Int32Array) -> None:
        self.keys[row] = request.request_key
        self.lengths[row] = 0

    def observe(
        self, rows: Int32Array, positions: Int32Array, token_ids: Int32Array, starts: Int32Array, ends: Int32Array
    ) -> None:
        for row, position, start, end in zip(rows, positions, starts, ends, strict=True):
            if end > start:
                self.lengths[int(row)] = max(self.lengths[int(row)], int(position + end - start))

    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        drafts = []
        for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
            script = self.scripts[self.keys[row]][self.lengths[row] :]
            drafts.append([(token + self.wrong_by) % VOCAB for token in script][: min(limit, self.num_drafts)])
        offsets = np.cumsum([0] + [len(ids) for ids in drafts]).astype(np.int32)
        token_ids = np.array([token for ids in drafts for token in ids], np.int32)
        return Proposals(offsets, token_ids, np.array([len(ids) > 0 for ids in drafts], np.int32))


class FailingDrafter(ScriptedDrafter):
    def propose(self, rows: Int32Array, limits: Int32Array) -> Proposals:
        raise RuntimeError("out of ideas")


class Output:
    """All that a sequence gave, and how its steps went."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason = FinishReason.NONE
        self.num_drafted = self.num_accepted = self.num_preemptions = self.num_steps = 0

    @property
    def text(self) -> tuple[list[int], list[float], FinishReason]:
        return self.tokens, self.logprobs, self.reason


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(CONFIG, open_checkpoint(default_model_path()))


def speculator(drafter: object, num_drafts: int = 16) -> Speculator:
    return Speculator(
        drafter,  # type: ignore[arg-type]
        None,
        max_num_sequences=NUM_ROWS,
        max_draft_tokens=num_drafts,
        vocab_size=VOCAB,
    )


def drafting(name: str, num_drafts: int) -> Speculator | None:
    """A speculator of this kind, without a controller: it drafts at every step."""
    config = replace(CONFIG, speculation=name, max_draft_tokens=num_drafts)
    return open_speculator(config, VOCAB)


def ngram(num_drafts: int) -> Speculator | None:
    return drafting("ngram", num_drafts) if num_drafts else None


def generate(
    runner: ModelRunner,
    requests: Sequence[Request],
    speculator: Speculator | None,
    num_blocks: int = 128,
    budget: int = 256,
) -> dict[int, Output]:
    runner.speculator = speculator
    scheduler = Scheduler(SchedulerConfig(num_blocks, 16, NUM_ROWS, budget, 256))
    outputs = {key: Output() for request in requests for key in request.output_keys}
    for request in requests:
        scheduler.add(request, 0)
    while scheduler.has_work:
        update = scheduler.apply(runner.execute(scheduler.schedule(0)))
        scheduler.check_invariants()
        start = 0
        for record in update.sequences:
            output, end = outputs[int(record["request_key"])], start + int(record["num_tokens"])
            output.tokens += update.token_ids[start:end].tolist()
            output.logprobs += update.logprobs[start:end].tolist()
            output.reason = FinishReason(int(record["finish_reason"]))
            output.num_drafted += int(record["num_drafted"])
            output.num_accepted += int(record["num_accepted"])
            output.num_preemptions = int(record["num_preemptions"])
            output.num_steps = int(record["num_steps"])
            start = end
    runner.speculator = None
    return outputs


def request(key: int, max_output: int = 24, **fields: object) -> Request:
    """A prompt that repeats itself, so that there is something to propose; every other one is random."""
    rng = np.random.default_rng(key)
    prompt = np.tile(rng.integers(100, 2000, 5 + key), 3).astype(np.int32)
    sampling = SamplingParams(temperature=(0.0, 0.7)[key % 2], top_p=(1.0, 0.95)[key // 2 % 2], seed=key)
    stopping = {name: fields.pop(name) for name in list(fields) if name.endswith(("tokens", "token_ids"))}
    limit = int(str(stopping.pop("max_draft_tokens", 16)))
    return Request(
        key,
        prompt,
        StoppingParams(max_output, **stopping),  # type: ignore[arg-type]
        sampling,
        want_logprobs=True,
        max_draft_tokens=limit,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> dict[int, Output]:
    """What eight requests give without drafts."""
    return generate(runner, [request(key) for key in range(8)], None)


def scripts(outputs: dict[int, Output]) -> dict[int, list[int]]:
    return {key: request(key).prompt_token_ids.tolist() + output.tokens for key, output in outputs.items()}


DRAFTERS = [("ngram", 1), ("suffix", 1), ("suffix", 2), ("hybrid", 3), ("suffix", 4), ("ngram", 5), ("hybrid", 5)]


@pytest.mark.parametrize(("name", "num_drafts"), DRAFTERS)
def test_tokens_are_the_same_for_every_draft_length(
    runner: ModelRunner, plain: dict[int, Output], name: str, num_drafts: int
) -> None:
    """Greedy and seeded, with logprobs, bit by bit; alone, among others, and preempted again and again."""
    requests = [request(key) for key in range(8)]
    speculation = drafting(name, num_drafts)
    together = generate(runner, requests, speculation)
    squeezed = generate(runner, requests, drafting(name, num_drafts), num_blocks=7, budget=40)
    assert sum(output.num_drafted for output in together.values()) > 8
    assert sum(output.num_accepted for output in together.values()) > 4
    assert sum(output.num_preemptions for output in squeezed.values()) > 0
    for key in range(8):
        assert together[key].text == squeezed[key].text == plain[key].text
    for key in (2, 5):  # what the drafter has learned from all of them included
        assert generate(runner, [request(key)], speculation)[key].text == plain[key].text


def test_an_answer_given_before_is_drafted_from_memory(runner: ModelRunner, plain: dict[int, Output]) -> None:
    """Unless it belongs to others."""
    speculation = drafting("suffix", 5)
    num_steps = []
    for salt in ("a", "a", "b"):
        output = generate(runner, [request(3, cache_salt=salt)], speculation)[3]
        assert output.text == plain[3].text
        num_steps.append(output.num_steps)
    assert num_steps[1] < num_steps[0]
    assert num_steps[2] == num_steps[0]


@pytest.mark.parametrize(("key", "num_drafts"), [(2, 0), (5, 3)], ids=["greedy", "random with drafts"])
def test_an_output_is_the_same_for_every_count_of_outputs(runner: ModelRunner, key: int, num_drafts: int) -> None:
    """Bit by bit: of four, of two, alone; with the prefix cache or, where there are drafts, without; preempted."""
    four = request(key, 16, num_outputs=4, bypass_prefix_cache=num_drafts > 0)
    expected = {}
    for index, each in enumerate(four.output_keys):
        expected[each] = generate(runner, [four.output(index)], None)[each].text
    assert len({str(text) for text in expected.values()}) == (1 if key == 2 else 4)
    assert {each: output.text for each, output in generate(runner, [four], ngram(num_drafts)).items()} == expected
    two = generate(runner, [request(key, 16, num_outputs=2)], ngram(num_drafts))
    assert [two[key].text, two[key + 1].text] == [expected[key], expected[key + 1]]
    num_preemptions = 0
    for num_blocks in (4, 5):
        squeezed = generate(runner, [four], ngram(num_drafts), num_blocks, budget=21)
        assert {each: output.text for each, output in squeezed.items()} == expected
        num_preemptions += sum(output.num_preemptions for output in squeezed.values())
    assert key == 2 or num_preemptions > 0


@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_rejection_keeps_greedy_tokens_and_repeats_random_ones_with_the_same_drafts(
    runner: ModelRunner, plain: dict[int, Output], rule: AcceptanceRule
) -> None:
    """Alone, among others and preempted; the random words are those of the request."""
    requests = [replace(request(key), acceptance=rule) for key in range(8)]
    drafter = ScriptedDrafter(scripts(plain), num_drafts=3)
    together = generate(runner, requests, speculator(drafter))
    squeezed = generate(runner, requests[:5], speculator(drafter), num_blocks=8)
    for key in (0, 2, 4, 6):
        assert together[key].text == plain[key].text
    random = (1, 3, 5, 7)
    assert any(together[key].tokens != plain[key].tokens for key in random)
    assert 0 < sum(together[key].num_accepted for key in random) < sum(together[key].num_drafted for key in random)
    for key in (1, 2):
        assert generate(runner, [requests[key]], speculator(drafter))[key].text == together[key].text
    assert [squeezed[key].text for key in (0, 2, 4)] == [plain[key].text for key in (0, 2, 4)]


PROCESSORS: list[dict[str, object]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"repetition_penalty": 0.8, "logit_bias": ((40, 6.0), (41, 6.0)), "typical_p": 0.9},
    {"banned_token_ids": tuple(range(0, 49152, 4)), "presence_penalty": -0.5, "min_p": 0.02},
]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_processors_give_the_same_tokens_for_every_draft_length(runner: ModelRunner, num_drafts: int) -> None:
    """Penalties count the drafts before a position, and no rejected ones, and none twice after a preemption."""
    requests = [request(key) for key in range(4)]
    requests = [
        replace(r, sampling=replace(r.sampling, **fields)) for r, fields in zip(requests, PROCESSORS, strict=True)
    ]
    expected = generate(runner, requests, None)
    right = scripts(expected)
    squeezed = generate(runner, requests, ngram(num_drafts), num_blocks=5, budget=24)
    for outputs in (
        squeezed,
        generate(runner, requests, ngram(num_drafts)),
        generate(runner, requests, speculator(ScriptedDrafter(right, num_drafts=num_drafts))),
        generate(runner, requests, speculator(ScriptedDrafter(right, wrong_by=1, num_drafts=num_drafts))),
    ):
        assert {key: output.text for key, output in outputs.items()} == {k: o.text for k, o in expected.items()}
    assert sum(output.num_preemptions for output in squeezed.values()) > 0


@pytest.mark.parametrize("num_drafts", range(6))
def test_a_right_drafter_is_always_accepted(runner: ModelRunner, plain: dict[int, Output], num_drafts: int) -> None:
    drafter = ScriptedDrafter(scripts(plain), num_drafts=num_drafts)
    for key, output in generate(runner, [request(key) for key in range(8)], speculator(drafter)).items():
        assert output.text == plain[key].text
        assert output.num_accepted == output.num_drafted
        assert output.num_drafted == len(output.tokens) - output.num_steps
        assert output.num_steps == 1 + -(-(len(output.tokens) - 1) // (num_drafts + 1))


def test_a_wrong_drafter_is_never_accepted(runner: ModelRunner, plain: dict[int, Output]) -> None:
    drafter = ScriptedDrafter(scripts(plain), wrong_by=1, num_drafts=3)
    for key, output in generate(runner, [request(key) for key in range(8)], speculator(drafter)).items():
        assert output.text == plain[key].text
        assert output.num_accepted == 0
        assert output.num_steps == len(output.tokens)
        # Every step after the first checks three, but fewer where fewer tokens may follow.
        assert output.num_drafted == 3 * (len(output.tokens) - 1) - (1 + 2 + 3)


@pytest.mark.parametrize("max_output", range(1, 8))
def test_a_limit_within_a_run_is_kept(runner: ModelRunner, plain: dict[int, Output], max_output: int) -> None:
    """1 to K + 2 tokens, with K = 5."""
    drafter = ScriptedDrafter(scripts(plain), num_drafts=5)
    for key, output in generate(runner, [request(key, max_output) for key in (2, 3)], speculator(drafter)).items():
        assert output.tokens == plain[key].tokens[:max_output]
        assert output.reason is FinishReason.LENGTH
        assert output.num_drafted == output.num_accepted == max(0, max_output - 2)


@pytest.mark.parametrize("kind", ["eos_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("position", range(7))
def test_an_end_within_a_run_cuts_it(runner: ModelRunner, plain: dict[int, Output], kind: str, position: int) -> None:
    tokens = plain[3].tokens
    end = tokens.index(tokens[position])
    output = generate(
        runner,
        [request(3, **{kind: (tokens[position],)})],
        speculator(ScriptedDrafter(scripts(plain), num_drafts=5)),
    )[3]
    assert output.tokens == tokens[: end + 1]
    assert output.reason is (FinishReason.EOS if kind == "eos_token_ids" else FinishReason.STOP_TOKEN)


@pytest.mark.parametrize("min_output", range(7))
def test_end_tokens_wait_for_the_minimum_with_drafts_too(
    runner: ModelRunner, plain: dict[int, Output], min_output: int
) -> None:
    """The mask of every draft position is that of its own position."""
    ends = tuple(sorted(set(plain[3].tokens)))[:6]
    held = request(3, min_output_tokens=min_output, eos_token_ids=ends)
    expected = generate(runner, [held], None)[3]
    for drafter in (ScriptedDrafter(scripts(plain), num_drafts=5), ScriptedDrafter(scripts({3: expected}))):
        assert generate(runner, [held], speculator(drafter))[3].text == expected.text


def test_a_request_bounds_its_own_drafts(runner: ModelRunner, plain: dict[int, Output]) -> None:
    drafter = ScriptedDrafter(scripts(plain))
    limits = (0, 1, 2, 16)
    requests = [request(key, max_draft_tokens=limit) for key, limit in enumerate(limits)]
    outputs = generate(runner, requests, speculator(drafter, num_drafts=4))
    for key, limit in enumerate(limits):
        assert outputs[key].text == plain[key].text
        assert outputs[key].num_steps == 1 + -(-(len(outputs[key].tokens) - 1) // (1 + min(limit, 4)))


@pytest.mark.parametrize("drafter", [FailingDrafter({}), ScriptedDrafter({0: [VOCAB - 1] * 99}, wrong_by=0)])
def test_a_drafter_that_fails_is_not_used_again(
    runner: ModelRunner, plain: dict[int, Output], drafter: ScriptedDrafter
) -> None:
    speculation = speculator(drafter)
    speculation._vocab_size = VOCAB - 1
    assert generate(runner, [request(0)], speculation)[0].text == plain[0].text
    assert speculation.state is DraftState.DRAFTER_FAILED


def test_steps_tell_the_time_of_drafting(runner: ModelRunner) -> None:
    scheduler = Scheduler(SchedulerConfig(128, 16, NUM_ROWS, 96, 256))
    scheduler.add(request(0), 0)
    runner.speculator = ngram(4)
    result = runner.execute(scheduler.schedule(0))
    runner.speculator = None
    assert result.draft_duration_ns > 0
    assert result.draft_state is DraftState.ACTIVE
    without = Scheduler(SchedulerConfig(128, 16, NUM_ROWS, 96, 256))
    without.add(request(0), 0)
    assert runner.execute(without.schedule(0)).draft_state is DraftState.DISABLED
