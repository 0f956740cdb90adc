"""What a step of the CPU device takes, and which kernel takes it: `make bench-cpu`.

Runs the default model without scheduler and server on sequences of one length: one token each for 1, 4, 16 and 32 of
them, and one prompt chunk. Prints a JSON line for each case, medians of its steps in milliseconds:

    {"case": "decode", "sequences": 16, "tokens": 1, "context": 300, "dtype": "int8", "threads": 2, "step_ms": ...,
     "outside_kernels_ms": ..., "kernels_ms": {"linear_int8": ..., "attention": ..., ...}}

`outside_kernels_ms` is what Python and PyTorch take between the kernels, caches as cold as in service. In other number
formats than int8 it holds the matrix products as well, for they are PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the runner does, before anything imports torch

import numpy as np
from device_workload import BLOCK_SIZE, step_plan

from foreword.gpu.backends import cpu_kernels
from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DTYPE_BYTES, DeviceConfig, available_cpus
from foreword.gpu.runner import ModelRunner, load_runner

KERNELS = ("rms_norm", "linear_int8", "rotate_and_store", "attention", "silu_and_mul", "sample")


class KernelClock:
    """Adds up the time inside kernels, by name, while it is installed in their module."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        for name in KERNELS:
            setattr(cpu_kernels, name, self._timed(name, getattr(cpu_kernels, name)))

    def _timed(self, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            start = time.perf_counter()
            kernel(*args)
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3

        return run


def measure(runner: ModelRunner, clock: KernelClock, sequences: int, tokens: int, context: int, steps: int) -> None:
    """Print the line of one case."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, runner.vocab_size, (sequences, tokens)).tolist()
    plan = step_plan(context - tokens, prompt, -(-context // BLOCK_SIZE), 1)
    whole, inside = [], []
    for _ in range(steps):
        clock.ms.clear()
        start = time.perf_counter()
        runner.execute(plan)
        whole.append((time.perf_counter() - start) * 1e3)
        inside.append(dict(clock.ms))
    outside = statistics.median(total - sum(parts.values()) for total, parts in zip(whole, inside, strict=True))
    line = {
        "case": "decode" if tokens == 1 else "prefill",
        "sequences": sequences,
        "tokens": tokens,
        "context": context,
        "dtype": runner.dtype,
        "threads": runner.config.num_threads,
        "step_ms": round(statistics.median(whole), 3),
        "outside_kernels_ms": round(outside, 3),
        "kernels_ms": {name: round(statistics.median(p[name] for p in inside), 3) for name in inside[0]},
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="int8", choices=sorted(DTYPE_BYTES))
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 32], help="sequences that decode")
    parser.add_argument("--context", type=int, default=300, help="tokens of each of them")
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[512], help="lengths; their last 512 tokens are a step"
    )
    parser.add_argument("--steps", type=int, default=40, help="of a case")
    args = parser.parse_args()
    decoding, prompts = args.streams or [0], args.prompts or [0]
    blocks = max(max(decoding) * -(-args.context // BLOCK_SIZE), -(-max(prompts) // BLOCK_SIZE))
    config = DeviceConfig(
        num_blocks=blocks,
        dtype=args.dtype,
        num_threads=args.threads,
        max_num_sequences=max(*decoding, 1),
        max_model_len=max(args.context, *prompts),
    )
    runner = load_runner(config, open_checkpoint(default_model_path()))
    runner.cache.keys.normal_()
    runner.cache.values.normal_()
    clock = KernelClock()
    for sequences in args.streams:
        measure(runner, clock, sequences, 1, args.context, args.steps)
    for length in args.prompts:
        measure(runner, clock, 1, min(length, 512), length, max(3, args.steps // 10))


if __name__ == "__main__":
    main()
