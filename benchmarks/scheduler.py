"""What the scheduler costs, without a device. Prints one JSON line per case; times are medians over the rounds.

decode      schedule + apply with every sequence decoding, plan and update arrays included; blocks fill up (and are
            hashed) as they would, each sequence at its own time; with --vllm-python the same of vLLM's V1 scheduler
verify      the same with 3 drafts a sequence, all accepted; `ns_per_row_over_decode` is what they add
            `instructions_per_row` of both: counted by valgrind, null without it; does not depend on what else runs
memory      what one more row of the batch allocates, its token of the budget and its block table entry included
admission   add + schedule + apply of one request whose prompt is cached, less an empty step: for a prompt without
            a full block, and for each block (hashed, found and held) beyond
cancel      of a decoding sequence, and for each block that it holds
eviction    what a block costs more when it is taken from 100,000 cached ones instead of from free ones
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import Drafts, StepPlan, StepResult

BLOCK_SIZE = 16
NUM_DRAFTS = 3
NUM_CACHED_BLOCKS = 100_000
NUM_PROMPT_BLOCKS = 1000
HERE = Path(__file__).parent


def new_scheduler(num_rows: int, num_blocks: int, budget: int, max_model_len: int) -> Scheduler:
    """A scheduler with a queue that takes all that is added."""
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_sequences=num_rows,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_num_waiting=num_rows,
            max_num_waiting_tokens=1 << 30,
        )
    )


def new_request(
    key: int, num_prompt: int, max_output: int, *, seed: int | None = None, bypass: bool = False
) -> Request:
    """A request whose prompt no other seed begins alike."""
    prompt = np.arange(num_prompt, dtype=np.int32)
    prompt[0] = key if seed is None else seed
    return Request(key, prompt, StoppingParams(max_output), bypass_prefix_cache=bypass)


def result_of(plan: StepPlan, drafts: Drafts | None = None) -> StepResult:
    """Every draft is accepted, and one token more; `drafts` are for the next step."""
    num_tokens = int(plan.logits_offsets[-1])
    return StepResult(
        plan.step_id,
        plan.logits_offsets.copy(),
        np.full(num_tokens, 7, np.int32),
        np.zeros(num_tokens, np.float32),
        np.zeros(plan.num_sequences, np.bool_),
        drafts=drafts,
    )


def step(scheduler: Scheduler, drafts: Drafts | None = None) -> int:
    """One step; nanoseconds in the scheduler."""
    start = time.perf_counter_ns()
    plan = scheduler.schedule(1)
    middle = time.perf_counter_ns()
    result = result_of(plan, drafts) if plan.num_sequences else None
    end = time.perf_counter_ns()
    scheduler.apply(result)
    return middle - start + time.perf_counter_ns() - end


def run_to_the_end(scheduler: Scheduler) -> None:
    """Serve what was added."""
    while scheduler.has_work:
        step(scheduler)


def decoding(num_rows: int, max_output: int) -> Scheduler:
    """A scheduler whose sequences all decode, evenly spread over the positions of a block."""
    max_model_len = 3 * BLOCK_SIZE + max_output
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 2)
    scheduler = new_scheduler(num_rows, num_blocks, 3 * BLOCK_SIZE * num_rows, max_model_len)
    for key in range(num_rows):
        scheduler.add(new_request(key, BLOCK_SIZE + key % BLOCK_SIZE, max_output), 1)
    step(scheduler)
    assert scheduler.load().num_running == num_rows
    return scheduler


def decode_ns(num_rows: int, num_rounds: int) -> float:
    """Mean of a round of BLOCK_SIZE steps, in which every sequence fills one block."""
    scheduler = decoding(num_rows, (num_rounds + 2) * BLOCK_SIZE)
    return median(sum(step(scheduler) for _ in range(BLOCK_SIZE)) / BLOCK_SIZE for _ in range(num_rounds))


def drafts_for(num_rows: int) -> Drafts:
    """The same for every sequence."""
    return Drafts(
        np.arange(0, NUM_DRAFTS * num_rows + 1, NUM_DRAFTS, np.int32), np.full(NUM_DRAFTS * num_rows, 7, np.int32)
    )


def verify_ns(num_rows: int, num_rounds: int) -> float:
    """Mean of a round of steps in which every sequence fills one block."""
    per_round = BLOCK_SIZE // (NUM_DRAFTS + 1)
    scheduler = decoding(num_rows, (num_rounds + 2) * BLOCK_SIZE)
    drafts = drafts_for(num_rows)

    def verification() -> int:
        return step(scheduler, drafts)

    return median(sum(verification() for _ in range(per_round)) / per_round for _ in range(num_rounds))


def admission_ns(num_prompt_blocks: int, num_rounds: int) -> float:
    """One request with a cached prompt, from `add` to its only token."""
    num_prompt = num_prompt_blocks * BLOCK_SIZE + 1
    scheduler = new_scheduler(1, num_prompt_blocks + 2, num_prompt, num_prompt + 1)
    scheduler.add(new_request(0, num_prompt, 1), 1)
    run_to_the_end(scheduler)
    empty = median(step(scheduler) for _ in range(num_rounds))

    def admission(key: int) -> int:
        request = new_request(key, num_prompt, 1, seed=0)
        return timed(lambda: scheduler.add(request, 1)) + step(scheduler)

    return median(map(admission, range(1, num_rounds + 1))) - empty


def cancel_ns(num_prompt_blocks: int, num_rounds: int) -> float:
    """One call of `cancel`."""
    num_prompt = num_prompt_blocks * BLOCK_SIZE
    scheduler = new_scheduler(1, num_prompt_blocks + 2, num_prompt, num_prompt + 8)

    def cancel(key: int) -> int:
        scheduler.add(new_request(key, num_prompt, 8, seed=0), 1)
        step(scheduler)
        duration = timed(lambda: scheduler.cancel(key))
        step(scheduler)
        return duration

    return median(map(cancel, range(num_rounds)))


def eviction_ns() -> float:
    """Schedules the same prompts in a pool of free blocks and in one that is full of cached ones."""
    num_prompt = NUM_PROMPT_BLOCKS * BLOCK_SIZE
    scheduler = new_scheduler(1, NUM_CACHED_BLOCKS, num_prompt, num_prompt + 1)

    def serve(key: int, bypass: bool) -> int:
        scheduler.add(new_request(key, num_prompt, 1, bypass=bypass), 1)
        start = time.perf_counter_ns()
        plan = scheduler.schedule(1)
        duration = time.perf_counter_ns() - start
        scheduler.apply(result_of(plan))
        return duration

    # What bypasses the cache leaves its blocks on the free stack, so a full cache is made anew for every measurement.
    num_prompts = NUM_CACHED_BLOCKS // NUM_PROMPT_BLOCKS
    free = median(serve(key, bypass=True) for key in range(num_prompts))
    keys = iter(range(num_prompts, 10 * num_prompts))
    for _ in range(num_prompts):
        serve(next(keys), bypass=False)
    assert scheduler.load().num_cached_blocks == NUM_CACHED_BLOCKS
    evicting = median(serve(next(keys), bypass=False) for _ in range(2 * num_prompts))
    return (evicting - free) / NUM_PROMPT_BLOCKS


def take_steps(case: str, num_rows: int, num_steps: int) -> None:
    """What `instructions_per_row` counts, in a process of its own."""
    scheduler = decoding(num_rows, 8 * BLOCK_SIZE)
    drafts = drafts_for(num_rows) if case == "verify" else None
    for _ in range(num_steps):
        step(scheduler, drafts)


def instructions_per_row(case: str, num_rows: int) -> float | None:
    """Instructions of a step, over steps in which every sequence fills a block; few of them make the result."""
    if shutil.which("valgrind") is None:
        return None
    few, many = 4, 4 + BLOCK_SIZE
    counts = []
    for num_steps in (few, many):
        code = f"import scheduler; scheduler.take_steps({case!r}, {num_rows}, {num_steps})"
        valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        # A random hash seed and idle threads would change what the imports cost by as much as the steps do.
        output = subprocess.run(
            [*valgrind, sys.executable, "-c", code],
            cwd=HERE,
            env={**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            check=True,
        )
        counts.append(int(re.search(rb"Collected : (\d+)", output.stderr)[1]))  # type: ignore[index]
    return (counts[1] - counts[0]) / (many - few) / num_rows


def bytes_per_row() -> float | None:
    """By the C library's own count; null where it keeps none."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        ]

    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = Mallinfo2

    def allocated(num_rows: int) -> int:
        before = mallinfo2()
        scheduler = Scheduler(SchedulerConfig(1, BLOCK_SIZE, num_rows, num_rows, BLOCK_SIZE, 1))
        after = mallinfo2()
        assert scheduler.load().num_running == 0
        return after.uordblks + after.hblkhd - before.uordblks - before.hblkhd

    few, many = 1 << 14, 1 << 16
    return (allocated(many) - allocated(few)) / (many - few)


def timed(call: Callable[[], object]) -> int:
    """Nanoseconds of a call."""
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def median(durations: Iterable[float]) -> float:
    """Of what a generator measures."""
    return statistics.median(durations)


def show(**line: object) -> None:
    """Print a line."""
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}))


def vllm_us_per_step(python: str, rows: list[int], num_rounds: int) -> dict[int, float]:
    """The V1 scheduler of vLLM at the same work, run by the interpreter that it is installed for."""
    command = [python, str(HERE / "vllm_scheduler.py"), "--rounds", str(num_rounds), "--rows", *map(str, rows)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    return {line["rows"]: line["us_per_step"] for line in map(json.loads, output)}


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM, to measure its scheduler too")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    vllm = vllm_us_per_step(arguments.vllm_python, arguments.rows, rounds) if arguments.vllm_python else {}
    for num_rows in arguments.rows:
        decode, verify = decode_ns(num_rows, rounds), verify_ns(num_rows, rounds)
        show(
            case="decode",
            rows=num_rows,
            us_per_step=decode / 1000,
            ns_per_row=decode / num_rows,
            instructions_per_row=instructions_per_row("decode", num_rows),
            vllm_us_per_step=vllm.get(num_rows),
            ratio=1000 * vllm[num_rows] / decode if vllm else None,
        )
        show(
            case="verify",
            rows=num_rows,
            drafts=NUM_DRAFTS,
            ns_per_row_over_decode=(verify - decode) / num_rows,
            instructions_per_row=instructions_per_row("verify", num_rows),
        )
    show(case="memory", bytes_per_row=bytes_per_row())
    few, many = admission_ns(0, 50 * rounds), admission_ns(256, 50 * rounds)
    show(case="admission", us=few / 1000, us_per_block=(many - few) / 256 / 1000)
    few, many = cancel_ns(1, 50 * rounds), cancel_ns(257, 50 * rounds)
    show(case="cancel", us=few / 1000, ns_per_block=(many - few) / 256)
    show(case="eviction", cached_blocks=NUM_CACHED_BLOCKS, ns_per_block=eviction_ns())


if __name__ == "__main__":
    main()
