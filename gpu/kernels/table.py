"""Every kernel of the CUDA device: where it stands, what it takes, and for which types and sizes it is compiled.

A parameter is written `name: type`. A type is a NumPy name such as `int32`, or `T`, the first template argument; with
dimensions in brackets it is an array: `delta: T[rows, width]?`. A name among dimensions stands for one size within a
launch, wherever it occurs, scalar parameters included; `2*width` is twice that size, `2` is 2; `?` allows None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).parent
TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
"""Number formats as the kernels write them."""
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Dynamic shared memory that a block may ask for, by architecture; on each, one block of that size fits."""

TemplateArgument = str | int | bool
_PARAMETER = re.compile(r"(\w+): (\w+)(?:\[([^\]]*)\])?(\??)")


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size of an array: `factor` times the size called `name`, or `factor` alone if that is empty."""

    factor: int
    name: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as in the source.
        dtype: of the value or of the elements; "T" for the first template argument.
        dimensions: of an array; None for a value.
        is_optional: None may be passed, which is a null pointer.
    """

    name: str
    dtype: str
    dimensions: tuple[Dimension, ...] | None
    is_optional: bool


@dataclass(frozen=True)
class Kernel:
    """A function template, or a function, in a `.cu` file.

    Attributes:
        name: of the function.
        file: beside this module.
        threads: of a block, at most.
        signature: parameters in order, as the module's docstring says.
        instantiations: template arguments that it is checked with, none for a plain function; number formats by their
            Python names.
    """

    name: str
    file: str
    threads: int
    signature: tuple[str, ...]
    instantiations: tuple[tuple[TemplateArgument, ...], ...]

    @property
    def source(self) -> Path:
        """The file."""
        return FOLDER / self.file

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The signature, read."""
        return tuple(_read_parameter(text) for text in self.signature)

    def expression(self, template: tuple[TemplateArgument, ...]) -> str:
        """The instantiation as C++ writes it: `rms_norm<__nv_bfloat16>`, or the name of a plain function."""
        arguments = ", ".join(_cpp(argument) for argument in template)
        return f"{self.name}<{arguments}>" if template else self.name


def _read_parameter(text: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a parameter")
    name, dtype, sizes, optional = match.groups()
    dimensions = None if sizes is None else tuple(_read_dimension(size) for size in sizes.split(", "))
    return Parameter(name, dtype, dimensions, optional == "?")


def _read_dimension(text: str) -> Dimension:
    if text.isdigit():
        return Dimension(int(text), "")
    factor, _, name = text.rpartition("*")
    return Dimension(int(factor or 1), name)


def _cpp(argument: TemplateArgument) -> str:
    if isinstance(argument, bool):
        return str(argument).lower()
    return TYPES[argument] if isinstance(argument, str) else str(argument)


EVERY_TYPE: tuple[tuple[TemplateArgument, ...], ...] = tuple((name,) for name in TYPES)

EMBEDDING = Kernel(
    "embedding",
    "embedding.cu",
    256,
    ("token_ids: int32[rows]", "table: T[vocab, width]", "stream: float32[rows, width]", "width: int32"),
    EVERY_TYPE,
)
RMS_NORM = Kernel(
    "rms_norm",
    "rms_norm.cu",
    256,
    (
        "stream: float32[rows, width]",
        "delta: T[rows, width]?",
        "weight: float32[width]",
        "out: T[rows, width]",
        "width: int32",
        "eps: float32",
    ),
    EVERY_TYPE,
)
ROTATE_AND_STORE = Kernel(
    "rotate_and_store",
    "rotary.cu",
    128,
    (
        "qkv: T[tokens, qkv_width]",
        "cos: float32[max_model_len, half]",
        "sin: float32[max_model_len, half]",
        "positions: int32[tokens]",
        "slots: int32[tokens]",
        "queries: T[tokens, query_width]",
        "keys: T[num_blocks, num_kv_heads, block_size, 2*half]",
        "values: T[num_blocks, num_kv_heads, block_size, 2*half]",
        "num_heads: int32",
        "num_kv_heads: int32",
        "half: int32",
        "block_size: int32",
    ),
    EVERY_TYPE,
)
SILU_AND_MUL = Kernel(
    "silu_and_mul",
    "activation.cu",
    256,
    ("gate_up: T[rows, 2*width]", "out: T[rows, width]", "width: int32"),
    EVERY_TYPE,
)
GELU_AND_MUL = Kernel("gelu_and_mul", "activation.cu", 256, SILU_AND_MUL.signature, EVERY_TYPE)
PROCESS = Kernel(
    "process",
    "process.cu",
    1024,
    (
        "logits: T[rows, vocab]",
        "row: int32[processed_rows]",
        "mask_index: int32[rows]",
        "mask_words: uint32[masks, words]",
        "bias_index: int32[rows]",
        "bias_offsets: int32[biases]",
        "bias_ids: int32[num_bias_ids]",
        "bias_values: float32[num_bias_ids]",
        "masked_ids: int32[rows, masked_width]",
        "num_masked: int32[rows]",
        "history_index: int32[rows]",
        "history_offsets: int32[histories]",
        "history_ids: int32[num_history_ids]",
        "history_counts: int32[num_history_ids]",
        "repetition: float32[rows]",
        "frequency: float32[rows]",
        "presence: float32[rows]",
        "out: float32[processed_rows, vocab]",
        "vocab: int32",
        "words: int32",
        "masked_width: int32",
    ),
    EVERY_TYPE,
)
SAMPLE = Kernel(
    "sample",
    "sample.cu",
    1024,
    (
        "logits: T[rows, vocab]",
        "processed: float32[processed_rows, vocab]",
        "processed_index: int32[rows]",
        "temperature: float32[rows]",
        "top_k: int32[rows]",
        "top_p: float32[rows]",
        "min_p: float32[rows]",
        "typical_p: float32[rows]",
        "seed: uint64[rows]",
        "position: int64[rows]",
        "by_rejection: uint8[rows]",
        "draft_ids: int32[rows]",
        "want_logprob: uint8[rows]",
        "token_ids: int32[rows]",
        "logprobs: float32[rows]",
        "failed: int32[rows]",
        "vocab: int32",
    ),
    EVERY_TYPE,
)
ACCEPT = Kernel(
    "accept",
    "accept.cu",
    1024,
    (
        "token_ids: int32[rows]",
        "logprobs: float32[rows]",
        "failed: int32[rows]",
        "input_ids: int32[rows]",
        "logits_offsets: int32[offsets]",
        "token_offsets: int32[offsets]",
        "logits_rows: int32[rows]",
        "accepted_ids: int32[rows]",
        "accepted_logprobs: float32[rows]",
        "sequence_failed: int32[sequences]",
        "batch_rows: int32[sequences]?",
        "last_tokens: int32[num_rows]?",
        "sequences: int32",
    ),
    ((),),
)
REJECT = Kernel(
    "reject",
    "rejection.cu",
    1024,
    (
        "p: float32[rows, vocab]",
        "q: float32[rows, vocab]?",
        "draft_ids: int32[rows]",
        "seeds: uint64[rows]",
        "positions: int64[rows]",
        "token_ids: int32[rows]",
        "failed: int32[rows]",
        "vocab: int32",
    ),
    ((),),
)
WEIGH_BLOCKS = Kernel(
    "weigh_blocks",
    "rejection.cu",
    1024,
    (
        "p: float32[rows, vocab]",
        "q: float32[rows, vocab]?",
        "draft_ids: int32[rows]",
        "offsets: int32[offsets]",
        "seeds: uint64[rows]",
        "positions: int64[rows]",
        "stands: int32[rows]",
        "can_draw: int32[rows]",
        "vocab: int32",
    ),
    ((),),
)
DRAW_BLOCKS = Kernel(
    "draw_blocks",
    "rejection.cu",
    1024,
    (*WEIGH_BLOCKS.signature[:-1], "token_ids: int32[rows]", "failed: int32[rows]", "vocab: int32"),
    ((),),
)
NGRAM_OBSERVE = Kernel(
    "ngram_observe",
    "ngram.cu",
    1024,
    (
        "rows: int32[sequences]",
        "positions: int32[sequences]",
        "offsets: int32[offsets]",
        "token_ids: int32[tokens]",
        "history: int32[num_rows, max_model_len]",
        "lengths: int32[num_rows]",
        "max_model_len: int32",
        "vocab: int32",
    ),
    ((),),
)
NGRAM_PROPOSE = Kernel(
    "ngram_propose",
    "ngram.cu",
    1024,
    (
        "history: int32[num_rows, max_model_len]",
        "lengths: int32[num_rows]",
        "rows: int32[sequences]",
        "limits: int32[sequences]",
        "draft_ids: int32[sequences, max_draft_tokens]",
        "num_drafts: int32[sequences]",
        "confidences: int32[sequences]",
        "max_model_len: int32",
        "max_draft_tokens: int32",
    ),
    ((),),
)
SCORE = Kernel(
    "score",
    "score.cu",
    1024,
    (
        "logits: T[rows, vocab]",
        "row: int32[tokens]",
        "token_ids: int32[tokens]",
        "logprobs: float32[tokens]",
        "ranks: int32[tokens]",
        "top_ids: int32[tokens, num_top]",
        "top_logprobs: float32[tokens, num_top]",
        "vocab: int32",
        "num_top: int32",
    ),
    EVERY_TYPE,
)

ATTENTION_TYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)
WIDE_WARPS = 4
FMA_ROWS = 4
PAGED_ATTENTION = Kernel(
    "paged_attention",
    "paged_attention.cu",
    32,
    (
        "queries: T[tokens, query_stride]",
        "keys: T[num_blocks, num_kv_heads, block_size, head_dim]",
        "values: T[num_blocks, num_kv_heads, block_size, head_dim]",
        "block_table: int32[num_rows, max_blocks]",
        "items: int32[num_items, 8]",
        "count: int32[1]",
        "out: T[tokens, width]",
        "partial_out: float32[partial_rows, num_kv_heads, head_dim]",
        "partial_stats: float32[partial_rows, num_kv_heads, 2]",
        "num_kv_heads: int32",
        "group: int32",
        "max_blocks: int32",
        "query_stride: int32",
        "window: int32",
        "scale_log2: float32",
        "soft_cap: float32",
    ),
    tuple(product(ATTENTION_TYPES, HEAD_DIMS, BLOCK_SIZES, (1,))),
)
PAGED_ATTENTION_WIDE = replace(
    PAGED_ATTENTION,
    threads=32 * WIDE_WARPS,
    instantiations=tuple(product(ATTENTION_TYPES, HEAD_DIMS, BLOCK_SIZES, (WIDE_WARPS,))),
)
PAGED_ATTENTION_FMA = replace(
    PAGED_ATTENTION,
    name="paged_attention_fma",
    file="paged_attention_fma.cu",
    instantiations=tuple(product(("float32",), HEAD_DIMS, BLOCK_SIZES, (FMA_ROWS,))),
)
MERGE_SPLITS = Kernel(
    "merge_splits",
    "attention_merge.cu",
    128,
    (
        "partial_out: float32[partial_rows, num_kv_heads, head_dim]",
        "partial_stats: float32[partial_rows, num_kv_heads, 2]",
        "items: int32[max_items, item_fields]",
        "count: int32[1]",
        "out: T[tokens, width]",
        "num_kv_heads: int32",
        "group: int32",
    ),
    tuple(product(TYPES, HEAD_DIMS, (4,))),
)

KERNELS = (
    EMBEDDING,
    RMS_NORM,
    ROTATE_AND_STORE,
    SILU_AND_MUL,
    GELU_AND_MUL,
    PROCESS,
    SAMPLE,
    ACCEPT,
    REJECT,
    WEIGH_BLOCKS,
    DRAW_BLOCKS,
    NGRAM_OBSERVE,
    NGRAM_PROPOSE,
    SCORE,
    PAGED_ATTENTION,
    PAGED_ATTENTION_WIDE,
    PAGED_ATTENTION_FMA,
    MERGE_SPLITS,
)
