"""OpenVINO GenAI's `ContinuousBatchingPipeline` on the GGUF file, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.adapters import worker

KV_BLOCK_SIZE = 32


class Engine:
    """The pipeline as a `StepEngine`."""

    def __init__(self, settings: worker.Settings) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.num_kv_tokens // KV_BLOCK_SIZE
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 512
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": settings.num_threads}
        if settings.speculates:
            properties["prompt_lookup"] = True
        self.speculates = settings.speculates
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
        self.handles: dict[int, Any] = {}
        self.remaining: dict[int, int] = {}
        self.next_id = 0

    def add(self, index: int, prompt: list[int], num_tokens: int) -> None:
        """Start a prompt of the job."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self.speculates:
            config.num_assistant_tokens = 5  # the values of OpenVINO's own sample
            config.max_ngram_size = 3
        tensor = openvino.Tensor(np.array([prompt], np.int64))
        self.handles[index] = self.pipeline.add_request(self.next_id, tensor, config)
        self.remaining[index] = num_tokens
        self.next_id += 1

    def step(self) -> Iterator[tuple[int, int]]:
        """Compute; yields the prompt and its number of new tokens."""
        self.pipeline.step()
        for index, handle in list(self.handles.items()):
            while handle.can_read():
                num_tokens = sum(len(output.generated_ids) for output in handle.read().values())
                # Lookup may run over the end; what was not asked for does not count.
                num_tokens = min(num_tokens, self.remaining[index])
                self.remaining[index] -= num_tokens
                yield index, num_tokens
            if not self.remaining[index]:
                del self.handles[index]


@contextmanager
def open_system(settings: worker.Settings) -> Iterator[tuple[worker.Ready, worker.Run]]:
    """Load the model."""
    engine = Engine(settings)
    ready = worker.Ready(openvino_genai.__version__, worker.seconds_since_start(), [os.getpid()])
    yield ready, partial(worker.run_steps, engine)


if __name__ == "__main__":
    worker.main(open_system)
