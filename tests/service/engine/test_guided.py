"""Scheduler, default model and guides together: outputs have the form that was asked for, whatever is drafted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.speculator import Speculator
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason
from foreword.service.text.grammar_process import grammar_of
from foreword.service.text.tokenizer import Tokenizer

NUM_ROWS = 8
MAX_LEN = 512
EOS = 2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["poet", "engineer", "painter"]}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "married"],
    "additionalProperties": False,
}
SUM = 'root ::= term ("+" term){0,6} "=" digit+\nterm ::= digit{1,3} | "(" root ")"\ndigit ::= [0-9]'
CHOICES = ["yes", "no", "maybe", "maybe not", "I cannot say"]
SOURCES = {
    "json_schema": json.dumps(PERSON),
    "json_object": "",
    "regex": r"(Mon|Tue|Wednes)day, [0-9]{1,2} (May|June)( [0-9]{4})?",
    "grammar": SUM,
    "choices": json.dumps(CHOICES),
}


class Output:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason = FinishReason.NONE
        self.num_accepted = self.num_preemptions = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    checkpoint = open_checkpoint(default_model_path())
    return Tokenizer(checkpoint.tokenizer_json(), checkpoint.config["vocab_size"])


@pytest.fixture(scope="module")
def runner(tokenizer: Tokenizer) -> ModelRunner:
    config = DeviceConfig(num_blocks=256, num_threads=1, max_num_sequences=NUM_ROWS, max_model_len=MAX_LEN)
    checkpoint = open_checkpoint(default_model_path())
    return load_runner(config, checkpoint, vocabulary=tokenizer.grammar_vocabulary())


def generate(
    runner: ModelRunner, requests: Sequence[Request], num_drafts: int = 0, num_blocks: int = 256
) -> list[Output]:
    size = runner.vocab_size
    drafter = NgramDrafter(NUM_ROWS, MAX_LEN, max(num_drafts, 1), size)
    runner.speculator = (
        Speculator(drafter, None, max_num_sequences=NUM_ROWS, max_draft_tokens=num_drafts, vocab_size=size)
        if num_drafts
        else None
    )
    scheduler = Scheduler(SchedulerConfig(num_blocks, 16, NUM_ROWS, 256, MAX_LEN))
    outputs = {request.request_key: Output() for request in requests}
    for request in requests:
        scheduler.add(request, 0)
    while scheduler.has_work:
        update = scheduler.apply(runner.execute(scheduler.schedule(0)))
        start = 0
        for record in update.sequences:
            output, end = outputs[int(record["request_key"])], start + int(record["num_tokens"])
            output.tokens += update.token_ids[start:end].tolist()
            output.reason = FinishReason(int(record["finish_reason"]))
            output.num_accepted += int(record["num_accepted"])
            output.num_preemptions = int(record["num_preemptions"])
            start = end
    runner.speculator = None
    return list(outputs.values())


PROMPTS = (
    "Describe a person as JSON.",
    "The weather is fine today.",
    'Repeat: {"name": "Ada", "age": 36, "tags": ["poet"], "married": true}',
    "1+2=3, 4+5=9. The sum of (1+2)+(3+4) is",
)


def request(tokenizer: Tokenizer, key: int, kind: str, **fields: Any) -> Request:
    """Prompts in turn, every other one drawn at a high temperature."""
    text = f"<|im_start|>user\n{PROMPTS[key % len(PROMPTS)]}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, parse_special_tokens=True)
    temperature = fields.pop("temperature", (0.0, 1.2)[key // 4 % 2])
    sampling = SamplingParams(temperature=temperature, seed=key)
    grammar = grammar_of(kind, SOURCES[kind]) if kind in SOURCES else kind
    stopping = StoppingParams(**({"max_output_tokens": 160, "eos_token_ids": (EOS,)} | fields))
    return Request(key, prompt, stopping, sampling, grammar=grammar)


def text_of(tokenizer: Tokenizer, output: Output) -> str:
    tokens = output.tokens[:-1] if output.reason is FinishReason.EOS else output.tokens
    return tokenizer.decode(tokens)


def has_form(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(SOURCES["regex"], text) is not None
    if kind == "choices":
        return text in CHOICES
    if kind == "grammar":
        while re.search(r"\([0-9+]+=[0-9]+\)", text):
            text = re.sub(r"\([0-9+]+=[0-9]+\)", "1", text)
        return re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){0,6}=[0-9]+", text) is not None
    value = json.loads(text)
    if kind == "json_object":
        return isinstance(value, dict)
    return (
        list(value) == ["name", "age", "tags", "married"]
        and 1 <= len(value["name"]) <= 24
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"poet", "engineer", "painter"}
        and type(value["married"]) is bool
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_every_output_that_ends_has_its_form(runner: ModelRunner, tokenizer: Tokenizer, kind: str) -> None:
    max_output_tokens = 100 if kind == "json_schema" else 48
    requests = [request(tokenizer, key, kind, max_output_tokens=max_output_tokens) for key in range(24)]
    outputs = generate(runner, requests, num_drafts=4)
    ends = (FinishReason.EOS, FinishReason.CONSTRAINT_COMPLETE)
    finished = [output for output in outputs if output.reason in ends]
    assert [text for output in finished if not has_form(kind, text := text_of(tokenizer, output))] == []
    # Only a form without an end of its own may run into the length limit.
    assert len(finished) == 24 if kind in ("json_schema", "regex", "choices") else len(finished) >= 4


@pytest.fixture(scope="module")
def plain(runner: ModelRunner, tokenizer: Tokenizer) -> list[Output]:
    """One output of each kind, generated alone and without drafts."""
    return [generate(runner, [mixed(tokenizer, key)])[0] for key in range(10)]


def mixed(tokenizer: Tokenizer, key: int) -> Request:
    kind = ("json_schema", "json_object", "regex", "grammar", "")[key % 5]
    return request(tokenizer, key, kind, max_output_tokens=48)


@pytest.mark.parametrize("num_drafts", range(6))
def test_drafts_and_neighbours_change_no_token(
    runner: ModelRunner, tokenizer: Tokenizer, plain: list[Output], num_drafts: int
) -> None:
    outputs = generate(runner, [mixed(tokenizer, key) for key in range(10)], num_drafts)
    assert [(o.tokens, o.reason) for o in outputs] == [(o.tokens, o.reason) for o in plain]
    assert bool(num_drafts) == bool(sum(output.num_accepted for output in outputs))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_preemption_changes_no_token(
    runner: ModelRunner, tokenizer: Tokenizer, plain: list[Output], num_drafts: int
) -> None:
    outputs = generate(runner, [mixed(tokenizer, key) for key in range(10)], num_drafts, num_blocks=9)
    assert any(outputs[key].num_preemptions and mixed(tokenizer, key).grammar for key in range(10))
    assert [(o.tokens, o.reason) for o in outputs] == [(o.tokens, o.reason) for o in plain]


@pytest.mark.parametrize("num_drafts", range(4))
def test_a_grammar_that_ends_needs_no_end_token(runner: ModelRunner, tokenizer: Tokenizer, num_drafts: int) -> None:
    """Grammar end, end tokens, length: the first in token order, for every number of drafts."""
    [output] = generate(runner, [request(tokenizer, 2, "choices", min_output_tokens=100)], num_drafts)
    assert output.reason is FinishReason.CONSTRAINT_COMPLETE
    assert has_form("choices", text_of(tokenizer, output))
    num_tokens = len(output.tokens)
    for limit, reason in [(num_tokens, FinishReason.CONSTRAINT_COMPLETE), (num_tokens - 1, FinishReason.LENGTH)]:
        [cut] = generate(runner, [request(tokenizer, 2, "choices", max_output_tokens=limit)], num_drafts)
        assert (cut.tokens, cut.reason) == (output.tokens[:limit], reason)


def test_without_end_tokens_only_the_grammar_ends_the_output(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    requests = [request(tokenizer, key, "choices", eos_token_ids=()) for key in range(8)]
    outputs = generate(runner, requests)
    assert {output.reason for output in outputs} <= {FinishReason.CONSTRAINT_COMPLETE}
    assert all(text_of(tokenizer, output) in CHOICES for output in outputs)


def test_conflicting_constraints_fail_their_own_sequence_alone(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    stuck = Request(
        1,
        np.array([1, 2, 3], np.int32),
        StoppingParams(20, eos_token_ids=(EOS,)),
        SamplingParams(allowed_token_ids=(100,)),
        grammar=grammar_of("regex", "[0-9]+"),
    )
    outputs = generate(
        runner, [request(tokenizer, 0, "choices"), stuck, request(tokenizer, 4, "", max_output_tokens=9)], num_drafts=2
    )
    assert [output.reason for output in outputs][1] is FinishReason.CONSTRAINT_STUCK
    assert text_of(tokenizer, outputs[0]) in CHOICES
    assert outputs[2].reason in (FinishReason.EOS, FinishReason.LENGTH)
