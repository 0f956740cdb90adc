"""The default model against the reference implementation on the same weights, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.runner import ModelRunner, load_runner

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List five uses for a paper clip.",
    "Translate 'good morning' into Spanish.",
    "How do I boil an egg?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me a plan for a day in London.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a short story about a lighthouse keeper.",
    "Why is the sky blue?",
    "Summarise the water cycle in three sentences.",
    "What should I cook with rice and tomatoes?",
    "Name the planets of the solar system.",
    "Write an email asking for a day off.",
    "How does a bicycle stay upright?",
    "What is 17 plus 25?",
    "Describe the colour red without naming it.",
    "Give three tips for better sleep.",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
NUM_OUTPUT = 128
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def reference(default_checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The reference's model with our tensors."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**default_checkpoint.config))
    model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(model.config)  # its buffers are computed, not loaded
    names = default_checkpoint.tensor_names()
    missing = model.load_state_dict(
        {name: torch.from_numpy(default_checkpoint.tensor(name)) for name in names}, strict=False
    ).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(default_checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(default_checkpoint.tokenizer_json())


@pytest.fixture(scope="module")
def runner(default_checkpoint: Checkpoint) -> ModelRunner:
    return load_runner(DeviceConfig(num_blocks=400, dtype="float32", max_model_len=1024), default_checkpoint)


def test_logits_of_512_positions_of_text(
    reference: LlamaForCausalLM, tokenizer: Tokenizer, runner: ModelRunner, plan_writer: Callable[..., Any]
) -> None:
    tokens = tokenizer.encode(topics["class"] + topics["exceptions"]).ids[:512]
    assert len(tokens) == 512
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    writer = plan_writer(num_blocks=400, max_model_len=1024)
    largest = 0.0
    for start in range(0, 512, 128):
        batch = runner.decoder.backend.upload(writer.plan([(0, tokens[start : start + 128], 128)]), runner.cache)
        logits = runner.decoder.logits(batch, runner.cache)
        largest = max(largest, float((logits - expected[start : start + 128]).abs().max()))
    assert largest <= 2e-3


def test_greedy_text_of_twenty_chats(
    reference: LlamaForCausalLM,
    tokenizer: Tokenizer,
    runner: ModelRunner,
    plan_writer: Callable[..., Any],
    new_request: Callable[..., Any],
) -> None:
    """The reference, shown our text, would have written it: its greatest logit is our next token at every position."""
    prompts = [
        tokenizer.encode(
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ).ids
        for question in QUESTIONS
    ]
    writer = plan_writer(num_blocks=400, max_num_sequences=len(prompts), max_model_len=1024)
    rows = range(len(prompts))
    plan = writer.plan(
        [(row, prompts[row], 1) for row in rows], [(row, new_request(prompts[row], temperature=0.0)) for row in rows]
    )
    texts = [list(prompt) for prompt in prompts]
    for _ in range(NUM_OUTPUT):
        result = runner.execute(plan)
        for row in rows:
            texts[row].append(int(result.token_ids[row]))
        plan = writer.plan([(row, texts[row][-1:], 1) for row in rows])

    end = tokenizer.token_to_id("<|im_end|>")
    gaps = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([text[:-1]])).logits[0, len(prompt) - 1 :]
        output = text[len(prompt) :]
        length = output.index(end) + 1 if end in output else NUM_OUTPUT
        behind = logits.max(dim=1).values - logits[torch.arange(NUM_OUTPUT), torch.tensor(output)]
        first_difference = torch.nonzero(behind[:length])[:1, 0]
        gaps += behind[first_difference].tolist()
    assert len(gaps) <= 1
    assert all(gap < NEAR_TIE for gap in gaps)
