"""The cases: which prompts a system answers, how many at a time, and how many tokens it writes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.adapters.worker import Job
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.service.text.chat_template import ChatMessage
from foreword.service.text.processor import TextProcessor

PROMPTS = Path(__file__).parents[1] / "prompts"
DECODE_TOKENS = {"chat": 128, "copy": 64, "edit": 64}
"""Output tokens by kind of prompt: about as many as the model's own answer has."""
PREFILL_LENGTHS = (128, 512, 1024)
STREAMS = (1, 4, 16, 32)
ARRIVALS_PER_S = 2.0
CASES = (
    *(f"decode-{kind}" for kind in DECODE_TOKENS),
    *(f"prefill-{length}" for length in PREFILL_LENGTHS),
    "ttft-idle",
    "ttft-poisson",
)


@dataclass(frozen=True)
class Prompts:
    """Token ids of the prompts.

    Attributes:
        kinds: conversations by the name of their file, as the model's chat template renders them.
        text: all conversations as one text, to cut prompts of a given length from.
    """

    kinds: dict[str, list[list[int]]]
    text: list[int]


def read_prompts(model: Path) -> Prompts:
    """Tokenize the files of `benchmarks/prompts`."""
    conversations = {
        path.stem: [
            [ChatMessage(turn["role"], turn["content"]) for turn in json.loads(line)]
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(PROMPTS.glob("*.jsonl"))
    }
    processor = TextProcessor(open_checkpoint(model))

    async def tokenize() -> Prompts:
        kinds = {
            kind: [(await processor.encode_chat(messages)).token_ids.tolist() for messages in group]
            for kind, group in conversations.items()
        }
        turns = itertools.chain.from_iterable(itertools.chain.from_iterable(conversations.values()))
        return Prompts(kinds, (await processor.encode("\n\n".join(turn.content for turn in turns))).tolist())

    try:
        return asyncio.run(tokenize())
    finally:
        processor.close()


def job(case: str, streams: int, prompts: Prompts, round_index: int) -> Job:
    """What every system does in a round of a case; other rounds have other prompts.

    Raises:
        KeyError: there is no such case.
    """
    family, _, kind = case.partition("-")
    if family == "decode":
        chosen = rotated(prompts.kinds[kind], max(streams, 4), round_index)
        return Job(chosen, DECODE_TOKENS[kind], streams, [0.0] * len(chosen))
    if family == "prefill":
        length, count = int(kind), 3
        starts = [(round_index * count + i) * 97 % (len(prompts.text) - length) for i in range(count)]
        return Job([prompts.text[start : start + length] for start in starts], 1, 1, [0.0] * count)
    if case == "ttft-idle":
        return Job(rotated(prompts.kinds["chat"], 8, round_index), 4, 1, [0.0] * 8)
    if case == "ttft-poisson":
        chosen = rotated(prompts.kinds["chat"], 24, round_index)
        return Job(chosen, 32, len(chosen), poisson_arrivals(len(chosen), round_index))
    raise KeyError(case)


def poisson_arrivals(count: int, seed: int) -> list[float]:
    """Times of a Poisson process with `ARRIVALS_PER_S`, in seconds."""
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(ARRIVALS_PER_S) for _ in range(count)))


def rotated(prompts: Sequence[list[int]], count: int, offset: int) -> list[list[int]]:
    """Take `count` prompts, again from the first one after the last."""
    return list(itertools.islice(itertools.cycle(prompts), offset, offset + count))
