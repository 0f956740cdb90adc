"""The child process that holds one system: jobs in on standard input, times out on standard output, one JSON line each.

It runs in the system's own environment, with nothing but the standard library of Python here. The first line out is
`Ready`; every line in is a `Job` and is answered by a list of `Answer`, or by `{"refused": "why"}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Settings:
    """What every system is given.

    Attributes:
        model: GGUF file.
        bfloat16_model: Hugging Face folder with the same weights, for systems that cannot compute with the file's.
        num_threads: threads that compute.
        num_kv_tokens: tokens that the KV cache has room for.
        speculates: with the system's own speculation, or without any.
    """

    model: str
    bfloat16_model: str
    num_threads: int
    num_kv_tokens: int
    speculates: bool


@dataclass
class Job:
    """Prompts to answer greedily, each with exactly `num_tokens` tokens: the end token does not end an answer.

    Attributes:
        prompts: token ids.
        num_tokens: output tokens of each answer.
        concurrency: most answers at a time; the next prompt starts when one ends.
        due_s: earliest start of each prompt, in seconds after the job's start.
    """

    prompts: list[list[int]]
    num_tokens: int
    concurrency: int
    due_s: list[float]


@dataclass
class Answer:
    """When an answer started, had its first token and its last one, in seconds after the job's start."""

    start: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def receive(self, num_tokens: int, now: float) -> None:
        """Count tokens that arrived."""
        if num_tokens:
            self.first = self.first if self.num_tokens else now
            self.last = now
            self.num_tokens += num_tokens


@dataclass
class Ready:
    """A system that serves.

    Attributes:
        version: of the system.
        start_s: from the start of its process until it served.
        pids: its processes; those below them count too.
    """

    version: str
    start_s: float
    pids: list[int]


class Refused(Exception):
    """The system cannot do a job; the message says why."""


Run: TypeAlias = Callable[[Job], list[Answer]]


class StepEngine(Protocol):
    """An engine in this process that computes one token for each of its sequences at a time."""

    def add(self, index: int, prompt: list[int], num_tokens: int) -> None:
        """Start a prompt of the job."""

    def step(self) -> Iterable[tuple[int, int]]:
        """Compute; yields the prompt and its number of new tokens."""


def run_steps(engine: StepEngine, job: Job) -> list[Answer]:
    """Do a job on an engine in this process."""
    begin = time.perf_counter()
    answers: list[Answer] = []
    num_running = 0
    while num_running or len(answers) < len(job.prompts):
        now = time.perf_counter() - begin
        while len(answers) < len(job.prompts) and num_running < job.concurrency and job.due_s[len(answers)] <= now:
            index = len(answers)
            answers.append(Answer(start=job.due_s[index] or now))
            engine.add(index, job.prompts[index], job.num_tokens)
            num_running += 1
        if not num_running:
            time.sleep(max(job.due_s[len(answers)] - now, 0.0))
            continue
        for index, num_tokens in engine.step():
            answers[index].receive(num_tokens, time.perf_counter() - begin)
            num_running -= answers[index].num_tokens >= job.num_tokens
    return answers


def run_streams(generate: Callable[[list[int], int], Iterator[int]], job: Job) -> list[Answer]:
    """Do a job on a server: `generate` streams the numbers of tokens that arrive for a prompt."""
    begin = time.perf_counter()
    answers = [Answer(start=due) for due in job.due_s]
    waiting = iter(range(len(job.prompts)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            time.sleep(max(job.due_s[index] - (time.perf_counter() - begin), 0.0))
            answers[index].start = job.due_s[index] or time.perf_counter() - begin
            for num_tokens in generate(job.prompts[index], job.num_tokens):
                answers[index].receive(num_tokens, time.perf_counter() - begin)

    with ThreadPoolExecutor(job.concurrency) as pool:
        for worker in [pool.submit(work) for _ in range(job.concurrency)]:
            worker.result()
    return answers


def seconds_since_start() -> float:
    """How long this process has been running."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def reply(line: str, run: Run) -> object:
    """Do the job of a line; returns what answers it."""
    try:
        job = Job(**json.loads(line))
        answers = run(job)
        counts = [answer.num_tokens for answer in answers]
        if counts != [job.num_tokens] * len(job.prompts):
            raise Refused(f"{counts} tokens instead of {job.num_tokens} each")
        return [asdict(answer) for answer in answers]
    except Refused as error:
        return {"refused": str(error)}


def main(open_system: Callable[[Settings], AbstractContextManager[tuple[Ready, Run]]]) -> None:
    """Start the system that the command line describes and do jobs until standard input ends."""
    # What a library prints must not come between the answers: file descriptor 1 becomes standard error.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open_system(Settings(**json.loads(sys.argv[1]))) as (ready, run):
        print(json.dumps(asdict(ready)), file=lines, flush=True)
        for line in sys.stdin:
            print(json.dumps(reply(line, run)), file=lines, flush=True)
