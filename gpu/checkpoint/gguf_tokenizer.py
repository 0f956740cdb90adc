"""Builds a tokenizer for the `tokenizers` library from the vocabulary inside a GGUF file.

Two kinds exist in Llama-like models. `gpt2` is byte-level BPE (Radford et al. 2019) whose merges are in the file and
whose pre-tokenizer is known by name. `llama` is SentencePiece BPE (Kudo & Richardson 2018): merges are not stored but
follow from the scores, since SentencePiece joins the adjacent pair whose result has the highest score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from foreword.gpu.checkpoint.gguf_file import GgufFile
from foreword.scheduler.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Ends of a turn that some files list as control tokens without naming them in the metadata.
END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>"})
END_KEYS = ("eos", "eot", "eom")

Json = dict[str, Any]


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(digits: str) -> Json:
    """The pattern of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


GPT2 = _byte_level(use_regex=True)
LLAMA3 = _split(r"\p{N}{1,3}")
QWEN2 = _split(r"\p{N}")
SMOLLM = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}

PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "smollm": SMOLLM,
}


class GgufVocabulary:
    """The vocabulary and special tokens of one file."""

    def __init__(self, file: GgufFile) -> None:
        """Read what every use needs.

        Raises:
            CheckpointError: there is no vocabulary, or its parts do not fit together.
        """
        self._path = file.path
        self._metadata = file.metadata
        self._tokens = self._strings("tokenizer.ggml.tokens")
        kinds = self._metadata.get("tokenizer.ggml.token_type", np.full(len(self._tokens), NORMAL, np.int32))
        if not isinstance(kinds, np.ndarray) or len(kinds) != len(self._tokens):
            raise self._error("tokenizer.ggml.token_type does not have one entry for each of tokenizer.ggml.tokens")
        self._kinds: list[int] = kinds.tolist()

    def id_of(self, role: str) -> int | None:
        """Id of a token that the metadata names ("bos", "eos", "unknown", ...), None when it does not."""
        key = f"tokenizer.ggml.{role}_token_id"
        token_id = self._metadata.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
            raise self._error(f"{key} = {token_id} is not below the vocabulary's size, {len(self._tokens)}")
        return token_id

    def text_of(self, role: str) -> str:
        """Text of a token that the metadata names, empty when it does not."""
        token_id = self.id_of(role)
        return "" if token_id is None else self._tokens[token_id]

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        ids = {token_id for key in END_KEYS if (token_id := self.id_of(key)) is not None}
        ids |= {i for i, kind in enumerate(self._kinds) if kind == CONTROL and self._tokens[i] in END_OF_TURN}
        return tuple(sorted(ids))

    def tokenizer_json(self) -> str:
        """The tokenizer in the `tokenizers` library's JSON format.

        Raises:
            CheckpointError: a kind of tokenizer or pre-tokenizer that is not supported, or a damaged vocabulary.
        """
        kind = self._metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer = self._byte_level_bpe()
        elif kind == "llama":
            tokenizer = self._sentencepiece_bpe()
        else:
            raise self._error(f"tokenizer.ggml.model is {kind!r}; supported are gpt2, llama")
        tokenizer["added_tokens"] = self._added_tokens()
        return json.dumps(tokenizer, ensure_ascii=False)

    def _byte_level_bpe(self) -> Json:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise self._error(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
        vocab = self._vocab()
        merges = [merge.split(" ") for merge in self._strings("tokenizer.ggml.merges")]
        for merge in merges:
            if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
                raise self._error(
                    f"tokenizer.ggml.merges has {' '.join(merge)!r}, which does not join two known tokens"
                )
        is_llama3 = PRE_TOKENIZERS[name] is LLAMA3
        return {
            "version": "1.0",
            "normalizer": None,
            "pre_tokenizer": PRE_TOKENIZERS[name],
            "post_processor": self._post_processor(add_bos=is_llama3),
            "decoder": _byte_level(use_regex=True),
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": is_llama3},
        }

    def _sentencepiece_bpe(self) -> Json:
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prefix = [{"type": "Prepend", "prepend": "▁"}] if self._flag("add_space_prefix", default=True) else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        return {
            "version": "1.0",
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, escape]},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(add_bos=True),
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    *strip,
                ],
            },
            "model": {
                "type": "BPE",
                "vocab": self._vocab(),
                "merges": list(self._merges_from_scores()),
                "unk_token": self.text_of("unknown") or None,
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _merges_from_scores(self) -> Iterator[tuple[str, str]]:
        """Every way to join two pieces to a normal piece, best score first."""
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(self._tokens):
            raise self._error("tokenizer.ggml.scores does not have one entry for each of tokenizer.ggml.tokens")
        pieces = {self._tokens[i]: i for i, kind in enumerate(self._kinds) if kind == NORMAL}
        for token_id in np.argsort(-scores.astype(np.float64), kind="stable").tolist():
            piece = self._tokens[token_id]
            if pieces.get(piece) != token_id:
                continue
            halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
            joins = [half for half in halves if half[0] in pieces and half[1] in pieces]
            yield from sorted(joins, key=lambda half: (pieces[half[0]], pieces[half[1]]))

    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = {}
        for token_id, token in enumerate(self._tokens):
            if vocab.setdefault(token, token_id) != token_id:
                raise self._error(f"tokenizer.ggml.tokens has {token!r} twice, as {vocab[token]} and {token_id}")
        return vocab

    def _added_tokens(self) -> list[Json]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token_id, "content": self._tokens[token_id], **flags, "special": kind != USER_DEFINED}
            for token_id, kind in enumerate(self._kinds)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED) and self._tokens[token_id]
        ]

    def _post_processor(self, *, add_bos: bool) -> Json | None:
        bos = self.text_of("bos") if self._flag("add_bos_token", default=add_bos) else ""
        eos = self.text_of("eos") if self._flag("add_eos_token", default=False) else ""
        if not bos and not eos:
            return None
        before = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
        after = [{"SpecialToken": {"id": eos, "type_id": 0}}] if eos else []
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        return {
            "type": "TemplateProcessing",
            "single": [*before, first, *after],
            "pair": [*before, first, second, *after],
            "special_tokens": {
                text: {"id": text, "ids": [self.id_of(role)], "tokens": [text]}
                for role, text in (("bos", bos), ("eos", eos))
                if text
            },
        }

    def _flag(self, key: str, *, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def _strings(self, key: str) -> list[str]:
        value = self._metadata.get(key)
        if not isinstance(value, list):
            raise self._error(f"{key} is missing or not a list of strings")
        return value

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}")
