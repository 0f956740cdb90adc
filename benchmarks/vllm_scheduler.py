"""What the V1 scheduler of vLLM costs at the work of `scheduler.py`'s case decode. Run by an interpreter that has vLLM.

Prints {"rows": 1024, "us_per_step": ...} for each number of rows: medians over the rounds, a round being the steps in
which every sequence fills one block. Needs no model and no device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def new_scheduler(directory: str, num_rows: int, max_model_len: int) -> Scheduler:
    """A scheduler with prefix caching, as many rows as wanted and blocks for all of them."""
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 2)
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=3 * BLOCK_SIZE * num_rows,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache_config,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def step(scheduler: Scheduler) -> int:
    """One step; nanoseconds in the scheduler."""
    start = time.perf_counter_ns()
    plan = scheduler.schedule()
    middle = time.perf_counter_ns()
    keys = list(plan.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=keys,
        req_id_to_index={key: i for i, key in enumerate(keys)},
        sampled_token_ids=[[7] for _ in keys],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    end = time.perf_counter_ns()
    scheduler.update_from_output(plan, result)
    return middle - start + time.perf_counter_ns() - end


def us_per_step(directory: str, num_rows: int, num_rounds: int) -> float:
    """Every sequence decodes, evenly spread over the positions of a block."""
    max_output = (num_rounds + 2) * BLOCK_SIZE
    scheduler = new_scheduler(directory, num_rows, 3 * BLOCK_SIZE + max_output)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for key in range(num_rows):
        num_prompt = BLOCK_SIZE + key % BLOCK_SIZE
        prompt = [key % 1000, key // 1000, *range(2, num_prompt)]
        parameters = SamplingParams(max_tokens=max_output, ignore_eos=True)
        scheduler.add_request(Request(str(key), prompt, parameters, None, block_hasher=hasher))
    step(scheduler)
    assert len(scheduler.running) == num_rows
    rounds = [sum(step(scheduler) for _ in range(BLOCK_SIZE)) / BLOCK_SIZE for _ in range(num_rounds)]
    return statistics.median(rounds) / 1000


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for num_rows in arguments.rows:
            line = {"rows": num_rows, "us_per_step": round(us_per_step(directory, num_rows, arguments.rounds), 1)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
