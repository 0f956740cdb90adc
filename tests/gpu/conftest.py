"""What the device's tests share: plans written by hand, small models, the default model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the runner does, before anything imports torch

import numpy as np
import pytest
import torch
from simt.driver import CheckerDriver

from foreword.gpu.backends.cpu_backend import CpuBackend
from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.backends.int8_backend import Int8Backend
from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.step import StepPlan

Work = tuple[int, Sequence[int], int]


@dataclass
class PlanWriter:
    """Lays sequences out in shuffled blocks and writes plans, as a scheduler would."""

    num_blocks: int = 64
    block_size: int = 16
    max_num_sequences: int = 8
    max_model_len: int = 256
    free: list[int] = field(init=False)
    lengths: list[int] = field(init=False)
    blocks: list[list[int]] = field(init=False)
    step_id: int = 0

    def __post_init__(self) -> None:
        self.free = np.random.default_rng(self.num_blocks).permutation(self.num_blocks).tolist()
        self.lengths = [0] * self.max_num_sequences
        self.blocks = [[] for _ in range(self.max_num_sequences)]

    def release(self, row: int) -> None:
        """End the sequence in a row; its blocks are the next to be used."""
        self.free += self.blocks[row]
        self.blocks[row], self.lengths[row] = [], 0

    def plan(
        self,
        work: Sequence[Work],
        admitted: Sequence[tuple[int, Request]] = (),
        outputs: Mapping[int, Sequence[int]] | None = None,
        prompts: Mapping[int, Sequence[int]] | None = None,
    ) -> StepPlan:
        """Append each (row, tokens, number of logits wanted at the end) to its row's sequence.

        `outputs` are the tokens that an admitted row had generated before, `prompts` those of rows to be scored.
        """
        output_ids = [(outputs or {}).get(row, ()) for row, _ in admitted]
        self.step_id += 1
        positions, slots, updates, logits_indices = [], [], [], []
        scored: list[tuple[int, int]] = []
        scored_offsets = [0]
        for row, tokens, num_logits in work:
            for _ in tokens:
                position = self.lengths[row]
                if position % self.block_size == 0:
                    self.blocks[row].append(self.free.pop())
                    updates.append((row, len(self.blocks[row]) - 1, self.blocks[row][-1]))
                slots.append(self.blocks[row][-1] * self.block_size + position % self.block_size)
                if position + 1 < len(prompt := (prompts or {}).get(row, ())):
                    scored.append((len(positions), prompt[position + 1]))
                positions.append(position)
                self.lengths[row] += 1
            logits_indices += range(len(positions) - num_logits, len(positions))
            scored_offsets.append(len(scored))
        return StepPlan(
            step_id=self.step_id,
            rows=int32([row for row, _, _ in work]),
            generations=int32([0] * len(work)),
            query_offsets=int32(np.cumsum([0] + [len(tokens) for _, tokens, _ in work])),
            context_lens=int32([self.lengths[row] for row, _, _ in work]),
            token_ids=int32([token for _, tokens, _ in work for token in tokens]),
            positions=int32(positions),
            slot_mapping=int32(slots),
            logits_indices=int32(logits_indices),
            logits_offsets=int32(np.cumsum([0] + [count for _, _, count in work])),
            scored_indices=int32([index for index, _ in scored]),
            scored_token_ids=int32([token for _, token in scored]),
            scored_offsets=int32(scored_offsets),
            block_table_updates=int32(updates).reshape(-1, 3),
            admitted=tuple(admitted),
            output_offsets=int32(np.cumsum([0] + [len(ids) for ids in output_ids])),
            output_token_ids=int32([token for ids in output_ids for token in ids]),
        )


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.fixture
def plan_writer() -> Callable[..., PlanWriter]:
    return PlanWriter


@pytest.fixture
def new_request() -> Callable[..., Request]:
    """Build a request: prompt, then any field of its sampling or stopping parameters."""

    def build(prompt: Sequence[int], key: int = 0, want_logprobs: bool = False, **fields: Any) -> Request:
        stopping = {
            name: fields.pop(name)
            for name in ("max_output_tokens", "min_output_tokens", "eos_token_ids", "stop_token_ids")
            if name in fields
        }
        stopping.setdefault("max_output_tokens", 32)
        wanted = {name: fields.pop(name) for name in ("want_ranks", "num_top_logprobs") if name in fields}
        return Request(
            key,
            int32(prompt),
            StoppingParams(**stopping),
            SamplingParams(**fields),
            want_logprobs=want_logprobs,
            **wanted,
        )

    return build


TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


class MemoryCheckpoint(Checkpoint):
    """A checkpoint of random tensors."""

    def __init__(self, tensors: dict[str, np.ndarray], architecture: str = "LlamaForCausalLM", **config: Any) -> None:
        self.path = Path("memory")
        self.architecture = architecture
        self.config = config
        self.eos_token_ids = ()
        self.chat_template = None
        self.tensors = tensors

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def tokenizer_json(self) -> str:
        raise NotImplementedError


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[..., MemoryCheckpoint]:
    """Build a checkpoint of random weights; keywords override `TINY_CONFIG`."""
    from foreword.gpu.models.config import ModelConfig
    from foreword.gpu.models.llama import tensor_shapes

    def build(seed: int = 0, **changes: Any) -> MemoryCheckpoint:
        checkpoint = MemoryCheckpoint({}, **(TINY_CONFIG | changes))
        rng = np.random.default_rng(seed)
        for name, shape in tensor_shapes(ModelConfig.from_checkpoint(checkpoint)).items():
            tensor = rng.standard_normal(shape, np.float32) * 0.3
            checkpoint.tensors[name] = tensor + 1 if name.endswith("norm.weight") else tensor
        return checkpoint

    return build


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cpu(dtype: str) -> CpuBackend:
    return Int8Backend(num_threads=2) if dtype == "int8" else CpuBackend(dtype, num_threads=2)


@pytest.fixture(scope="session")
def checker() -> CheckerDriver:
    return CheckerDriver()


@pytest.fixture(params=["cpu float32", "cpu bfloat16", "cpu int8", "cuda float32", "cuda bfloat16"])
def backend(request: pytest.FixtureRequest, checker: CheckerDriver) -> CpuBackend | CudaBackend:
    """Every device, in every number format; the CUDA device with its kernels on the CPU."""
    device, dtype = request.param.split()
    if device == "cuda":
        return CudaBackend(dtype, checker, device="cpu")
    return Int8Backend(num_threads=2) if dtype == "int8" else CpuBackend(dtype, num_threads=2)


@pytest.fixture
def new_runner(tiny_checkpoint: Callable[..., MemoryCheckpoint]) -> Callable[..., ModelRunner]:
    """Put a tiny model on the CPU device, or on the given backend, with room for a default `PlanWriter`."""

    def build(dtype: str = "float32", backend: Any = None, seed: int = 0, **changes: Any) -> ModelRunner:
        writer = PlanWriter()
        checkpoint = tiny_checkpoint(seed, **changes)
        config = DeviceConfig(
            num_blocks=writer.num_blocks,
            device="cuda" if isinstance(backend, CudaBackend) else "cpu",
            dtype=dtype,
            num_threads=2,
            max_num_sequences=writer.max_num_sequences,
            max_model_len=writer.max_model_len,
        )
        if backend is None:
            return load_runner(config, checkpoint)
        model = family(checkpoint)
        model_config = model.read_config(checkpoint)
        weights = model.load_weights(checkpoint, model_config, backend, lambda loaded, total: None)
        return ModelRunner(config, Decoder(model_config, weights, backend, config.max_model_len))

    return build


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    return open_checkpoint(default_model_path())


def to_numpy(x: Any) -> np.ndarray:
    """A backend's array as float32 or integers on the host."""
    if isinstance(x, torch.Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    return np.asarray(x)


@pytest.fixture(scope="session")
def host() -> Callable[[Any], np.ndarray]:
    return to_numpy
