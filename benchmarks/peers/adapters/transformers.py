"""Transformers' `generate` in bfloat16, in this process: prompts that run at the same time are one padded batch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import transformers

from benchmarks.peers.adapters import worker

PAD = 0


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when tokens come, the same number for each answer of a batch."""

    def __init__(self, begin: float, answers: list[worker.Answer]) -> None:
        self.begin = begin
        self.answers = answers
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take tokens; the first call brings the prompts."""
        now = time.perf_counter() - self.begin
        for answer in self.answers if self.prompt_seen else ():
            answer.receive(value.numel() // len(self.answers), now)
        self.prompt_seen = True

    def end(self) -> None:
        """Take note of the end."""


def generate(model: transformers.GenerationMixin, prompts: list[list[int]], job: worker.Job, clock: Clock) -> None:
    """Answer prompts as one batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, max_new_tokens=job.num_tokens, streamer=clock)


def run(model: transformers.GenerationMixin, job: worker.Job) -> list[worker.Answer]:
    """Do a job, as many prompts at a time as are due and may run together."""
    if job.concurrency > 1 and model.generation_config.prompt_lookup_num_tokens:
        raise worker.Refused("prompt lookup takes one prompt at a time")
    begin = time.perf_counter()
    answers: list[worker.Answer] = []
    while len(answers) < len(job.prompts):
        first = len(answers)
        time.sleep(max(job.due_s[first] - (time.perf_counter() - begin), 0.0))
        now = time.perf_counter() - begin
        size = sum(due <= now for due in job.due_s[first : first + job.concurrency])
        batch = [worker.Answer(start=due or now) for due in job.due_s[first : first + size]]
        generate(model, job.prompts[first : first + size], job, Clock(begin, batch))
        answers.extend(batch)
    return answers


@contextmanager
def open_system(settings: worker.Settings) -> Iterator[tuple[worker.Ready, worker.Run]]:
    """Load the model."""
    torch.set_num_threads(settings.num_threads)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(settings.bfloat16_model, dtype=torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        pad_token_id=PAD,
        prompt_lookup_num_tokens=5 if settings.speculates else None,
        max_matching_ngram_size=3 if settings.speculates else None,
    )
    ready = worker.Ready(transformers.__version__, worker.seconds_since_start(), [os.getpid()])
    yield ready, partial(run, model)


if __name__ == "__main__":
    worker.main(open_system)
