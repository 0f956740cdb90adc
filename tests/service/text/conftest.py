"""The default model's text side, and a SentencePiece tokenizer small enough to read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.open import open_checkpoint
from foreword.service.text.tokenizer import Tokenizer

SENTENCEPIECE_PIECES = [*"▁helowrd<s>/x", "he", "ll", "hell", "▁hell", "▁w", "s>", "<s>x"]


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    return open_checkpoint(default_model_path())


@pytest.fixture(scope="session")
def default_json(default_checkpoint: Checkpoint) -> str:
    return default_checkpoint.tokenizer_json()


@pytest.fixture(scope="session")
def default_tokenizer(default_json: str) -> Tokenizer:
    return Tokenizer(default_json, 49152)


def sentencepiece_data() -> dict[str, Any]:
    """Llama 2's layout: prefix space by a normalizer, byte fallback, special tokens inside the model's vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_PIECES]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["▁", "hell"], ["▁", "w"], ["s", ">"], ["<", "s>"], ["<s>", "x"]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i], **flags} for i in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [m for m in merges if "".join(m) in vocab],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


@pytest.fixture(scope="session")
def sentencepiece_json() -> str:
    return json.dumps(sentencepiece_data())


@pytest.fixture
def sentencepiece_tokenizer(sentencepiece_json: str) -> Tokenizer:
    return Tokenizer(sentencepiece_json, 300)
