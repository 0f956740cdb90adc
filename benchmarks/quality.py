"""What a number format costs in quality, on the conversations of `benchmarks/prompts`.

Runs the default model, or the one that is named, in float32 and in each other format, on the same tokens, and prints
one JSON line per format:

    kl                mean Kullback-Leibler divergence of the next token's distribution from float32's, in nats
    top1              part of the positions at which both find the same token most likely
    perplexity_ratio  perplexity of the text divided by that in float32

Ends with status 1 when a format misses the bar: kl <= 0.005, top1 >= 0.96, perplexity_ratio within 0.5 % of 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the runner does, before anything imports torch

import numpy as np
import torch
from tokenizers import Tokenizer

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.scheduler.step import StepPlan

PROMPTS = Path(__file__).with_name("prompts")
BLOCK_SIZE = 16


def texts() -> Iterator[str]:
    """Every conversation as plain text."""
    for file in sorted(PROMPTS.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield "\n\n".join(turn["content"] for turn in json.loads(line))


def windows(tokenizer: Tokenizer, length: int, limit: int) -> list[list[int]]:
    """Texts in turn, joined and cut into windows of `length` tokens, `limit` at most."""
    ids = tokenizer.encode("\n\n".join(texts()), add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - length, min(limit, len(ids) // length)).astype(int)
    return [ids[start : start + length] for start in starts]


def log_probabilities(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Log probabilities `[T, V]` of the token after each position of a text that starts a sequence."""
    positions = np.arange(len(tokens), dtype=np.int32)
    blocks = np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)
    plan = StepPlan(
        step_id=1,
        rows=np.zeros(1, np.int32),
        generations=np.zeros(1, np.int32),
        query_offsets=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([len(tokens)], np.int32),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        slot_mapping=positions,
        logits_indices=positions,
        logits_offsets=np.array([0, len(tokens)], np.int32),
        block_table_updates=np.stack([np.zeros_like(blocks), blocks, blocks], axis=1),
        admitted=(),
    )
    batch = runner.decoder.backend.upload(plan, runner.cache)
    return torch.log_softmax(runner.decoder.logits(batch, runner.cache).float(), dim=-1)


def main() -> int:
    """Print the figures; 1 when one of them misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or folder (default: the default model)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"], help="formats to compare with float32")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=24, help="windows, spread evenly over the text")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.model or default_model_path())
    config = {"num_blocks": -(-args.length // BLOCK_SIZE), "block_size": BLOCK_SIZE, "max_model_len": args.length}
    runners = {
        dtype: load_runner(DeviceConfig(dtype=dtype, max_num_sequences=1, **config), checkpoint)
        for dtype in ["float32", *args.dtypes]
    }
    divergence, agreement, surprise = (dict.fromkeys(runners, 0.0) for _ in range(3))
    num_positions = 0
    for tokens in windows(Tokenizer.from_str(checkpoint.tokenizer_json()), args.length, args.windows):
        following = torch.tensor(tokens[1:])[:, None]
        num_positions += len(following)
        reference = log_probabilities(runners["float32"], tokens)[:-1]
        for dtype, runner in runners.items():
            actual = log_probabilities(runner, tokens)[:-1]
            divergence[dtype] += float((reference.exp() * (reference - actual)).sum())
            agreement[dtype] += int((reference.argmax(-1) == actual.argmax(-1)).sum())
            surprise[dtype] -= float(actual.gather(1, following).sum())

    met = True
    for dtype in args.dtypes:
        kl, top1 = divergence[dtype] / num_positions, agreement[dtype] / num_positions
        ratio = float(np.exp((surprise[dtype] - surprise["float32"]) / num_positions))
        met = met and kl <= 0.005 and top1 >= 0.96 and abs(ratio - 1) <= 0.005
        figures = {"kl": round(kl, 5), "top1": round(top1, 4), "perplexity_ratio": round(ratio, 5)}
        print(json.dumps({"dtype": dtype, "positions": num_positions, **figures}), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
