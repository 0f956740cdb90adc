"""How long drawing a token takes, by what the request asks for: `make bench-sampling`.

One row of logits over a vocabulary of 49,152, on one core of the CPU device. Logits are random, spread like a language
model's: most of the mass on some hundred ids. Cases run interleaved. Prints a JSON line for each, with its best round:

    {"case": "top_p", "dtype": "bfloat16", "us_per_row": ...}
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch

from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.step import StepPlan

VOCAB = 49_152
ROWS = 16
ROUNDS = 60
NOTHING = np.zeros(0, np.int32)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "flat: top_p": {"top_p": 0.9, "temperature": 3.0},
    "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    "typical_p": {"typical_p": 0.9},
    "bias of 300 ids": {"temperature": 0.0, "logit_bias": tuple((i * 100, 1.0) for i in range(300))},
    "penalties after 900 tokens": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "banned ids": {"temperature": 0.0, "banned_token_ids": tuple(range(0, VOCAB, 7))},
}


def plan_of(rows: int) -> StepPlan:
    """One decoding token for each row."""
    ids, ranges = np.arange(rows, dtype=np.int32), np.arange(rows + 1, dtype=np.int32)
    return StepPlan(
        step_id=1,
        rows=ids,
        generations=ids,
        query_offsets=ranges,
        context_lens=ids + 1000,
        token_ids=ids,
        positions=ids + 999,
        slot_mapping=ids,
        logits_indices=ids,
        logits_offsets=ranges,
        scored_indices=NOTHING,
        scored_token_ids=NOTHING,
        scored_offsets=np.zeros(rows + 1, np.int32),
        block_table_updates=np.zeros((0, 3), np.int32),
        admitted=(),
        output_offsets=np.zeros(1, np.int32),
        output_token_ids=NOTHING,
    )


def logits_of(rows: int) -> np.ndarray:
    """Logits like a language model's: a bulk of improbable ids, and some hundred that stand out, ever fewer."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, VOCAB)).astype(np.float32) * 2
    for row in logits:
        row[rng.permutation(VOCAB)[:400]] += rng.exponential(3, 400).astype(np.float32) + 6
    return logits


def state_of(sampling: dict[str, Any]) -> SamplingState:
    """Rows that all ask for the same, with a prompt of 900 tokens."""
    state = SamplingState(ROWS, VOCAB)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 900).astype(np.int32)
    for row in range(ROWS):
        request = Request(row, prompt, StoppingParams(100), SamplingParams(seed=row, **sampling))
        state.admit(row, request, NOTHING)
    return state


def main() -> None:
    """Run all cases interleaved and print the best round of each."""
    plan, states = plan_of(ROWS), {name: state_of(sampling) for name, sampling in CASES.items()}
    logits = logits_of(ROWS)
    for dtype in ("bfloat16", "float32"):
        backend = CpuBackend(dtype, num_threads=1)
        rows = torch.from_numpy(logits).to(getattr(torch, dtype))
        times: dict[str, list[float]] = {name: [] for name in CASES}
        for _ in range(ROUNDS):
            for name, state in states.items():
                start = time.perf_counter()
                backend.sample(rows, state.select(plan))
                times[name].append((time.perf_counter() - start) / ROWS * 1e6)
        for name, values in times.items():
            print(json.dumps({"case": name, "dtype": dtype, "us_per_row": round(min(values), 1)}))


if __name__ == "__main__":
    main()
