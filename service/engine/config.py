"""What an engine is built from: plain values, so that they can cross to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Model, device and capacities of one engine.

    Attributes:
        model_path: a GGUF file or a Hugging Face folder.
        device: "cpu", "cuda", or "auto" for the CUDA device if there is one that can be used.
        dtype: number format, "int8", "bfloat16", "float16", "float32", or "auto" for the fastest one that does not
            depend on the batch on this processor.
        num_threads: threads of the CPU backend; 0 for the processors this process may use.
        block_size: tokens per KV cache block.
        kv_cache_bytes: memory of the KV cache; 0 for enough to hold 1,024 tokens of each of `max_num_sequences`
            sequences (or one sequence of `max_model_len` tokens, if that is more), but at most a quarter of the
            machine's memory; on the CUDA device, for nine tenths of what the weights leave.
        max_num_sequences: sequences that run at once.
        max_num_batched_tokens: token budget of one step.
        max_model_len: tokens (prompt and output) a sequence may have; 0 for the checkpoint's own limit, but at most
            8,192.
        max_num_waiting: requests that may wait.
        max_num_waiting_tokens: prompt tokens that may wait.
        tenant_weights: (tenant, weight) pairs; a tenant that is not listed weighs 1.
        speculation: "auto", "off" or the name of a drafter.
        draft_model_path: like `model_path`, of the model that drafts; empty for none.
        max_draft_tokens: drafts of a sequence that a step checks at most.
        log_level: of the engine process, "debug", "info", "warning" or "error".
        log_json: log records of the engine process are JSON.
    """

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"
    num_threads: int = 0
    block_size: int = 16
    kv_cache_bytes: int = 0
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 0
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = 1 << 20
    tenant_weights: tuple[tuple[str, int], ...] = ()
    speculation: str = "auto"
    draft_model_path: str = ""
    max_draft_tokens: int = 6
    log_level: str = "info"
    log_json: bool = True
