"""vLLM's engine in this process, in bfloat16: on a CPU it cannot compute with the GGUF file's own format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.peers.adapters import worker

KV_GIB = "1"
"""Its smallest KV cache: more tokens than the other systems have room for."""


class Engine:
    """vLLM's engine as a `StepEngine`."""

    def __init__(self, settings: worker.Settings) -> None:
        from vllm import EngineArgs, LLMEngine

        lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        arguments = EngineArgs(
            model=settings.bfloat16_model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=32,
            disable_log_stats=True,
            speculative_config=lookup if settings.speculates else None,
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.indices: dict[str, int] = {}
        self.num_seen: dict[str, int] = {}
        self.next_id = 0

    def add(self, index: int, prompt: list[int], num_tokens: int) -> None:
        """Start a prompt of the job."""
        from vllm import SamplingParams

        request_id = str(self.next_id)
        self.next_id += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        self.indices[request_id] = index
        self.num_seen[request_id] = 0

    def step(self) -> Iterator[tuple[int, int]]:
        """Compute; yields the prompt and its number of new tokens."""
        for output in self.engine.step():
            request_id = output.request_id
            num_tokens = len(output.outputs[0].token_ids)
            yield self.indices[request_id], num_tokens - self.num_seen[request_id]
            self.num_seen[request_id] = num_tokens
            if output.finished:
                del self.indices[request_id], self.num_seen[request_id]


@contextmanager
def open_system(settings: worker.Settings) -> Iterator[tuple[worker.Ready, worker.Run]]:
    """Load the model."""
    os.environ |= {
        "OMP_NUM_THREADS": str(settings.num_threads),
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm

    engine = Engine(settings)
    ready = worker.Ready(vllm.__version__, worker.seconds_since_start(), [os.getpid()])
    yield ready, partial(worker.run_steps, engine)


if __name__ == "__main__":
    worker.main(open_system)
