from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from foreword.gpu.checkpoint.gguf_file import GgufFile
from foreword.gpu.checkpoint.gguf_tokenizer import GgufVocabulary
from foreword.scheduler.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

BYTE_SPELLINGS = "".join(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))


def write(path: Path, model: str, tokens: list[tuple[str, int]], **metadata: Any) -> GgufVocabulary:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufVocabulary(GgufFile(path))


def byte_level(
    path: Path, extra: tuple[tuple[str, int], ...] = (), merges: tuple[str, ...] = (), **metadata: Any
) -> Any:
    """A byte-level vocabulary: the bytes, then each merge's result, then extra tokens."""
    tokens = [*((c, NORMAL) for c in BYTE_SPELLINGS), *((m.replace(" ", ""), NORMAL) for m in merges), *extra]
    return write(path, "gpt2", tokens, merges=list(merges) or ["Ġ Ġ"], **metadata)


def load(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(vocabulary.tokenizer_json())


def split(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'m", " 2024", " years", "  ", " OK", "!!", "\n", "\n", "x"]),
        ("default", ["I", "'m", " 2024", " years", "  ", " OK", "!!", "\n", "\n", "x"]),
        ("smollm", ["I", "'m", " ", "2", "0", "2", "4", " years", "  ", " OK", "!!", "\n", "\n", "x"]),
        ("llama-bpe", ["I", "'m", " ", "202", "4", " years", "  ", " OK", "!!\n\n", "x"]),
        ("llama3", ["I", "'m", " ", "202", "4", " years", "  ", " OK", "!!\n\n", "x"]),
        ("qwen2", ["I", "'m", " ", "2", "0", "2", "4", " years", "  ", " OK", "!!\n\n", "x"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_were_trained(tmp_path: Path, name: str, pieces: list[str]) -> None:
    tokenizer = load(byte_level(tmp_path / "t.gguf", merges=("Ġ Ġ",), pre=name))
    assert split(tokenizer, "I'm 2024 years   OK!!\n\nx") == pieces


def test_llama3_takes_whole_words_from_the_vocabulary(tmp_path: Path) -> None:
    """Its published tokenizer ignores merges for a word that is a token, even one that no merge builds."""
    extra = (("zqz", NORMAL),)
    with_words = load(byte_level(tmp_path / "a.gguf", extra, ("Ġ Ġ",), pre="llama-bpe"))
    without = load(byte_level(tmp_path / "b.gguf", extra, ("Ġ Ġ",), pre="gpt-2"))
    assert with_words.encode("zqz").tokens == ["zqz"]
    assert without.encode("zqz").tokens == ["z", "q", "z"]


def test_special_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    extra = (("<|end|>", CONTROL), ("<think>", USER_DEFINED), ("[PAD]", UNUSED))
    tokenizer = load(byte_level(tmp_path / "t.gguf", extra, ("Ġ Ġ",), pre="gpt-2"))
    assert tokenizer.encode("a<think>b<|end|>").tokens == ["a", "<think>", "b", "<|end|>"]
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {"<|end|>": True, "<think>": False}
    assert tokenizer.decode(tokenizer.encode("a<think>b<|end|>").ids) == "a<think>b"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"pre": "gpt-2"}, ["x"]),
        ({"pre": "gpt-2", "add_bos_token": True}, ["<s>", "x"]),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, ["<s>", "x", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "x"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["x"]),
    ],
)
def test_begin_and_end_tokens(tmp_path: Path, metadata: dict[str, Any], expected: list[str]) -> None:
    extra = (("<s>", CONTROL), ("</s>", CONTROL))
    ids = {"bos_token_id": 257, "eos_token_id": 258}
    tokenizer = load(byte_level(tmp_path / "t.gguf", extra, ("Ġ Ġ",), **ids, **metadata))
    assert tokenizer.encode("x").tokens == expected
    assert tokenizer.encode("x", add_special_tokens=False).tokens == ["x"]


def test_end_tokens_named_by_metadata_or_by_spelling(tmp_path: Path) -> None:
    extra = (("</s>", CONTROL), ("<|eot_id|>", CONTROL), ("<|eom_id|>", CONTROL), ("<|im_end|>", NORMAL))
    vocabulary = byte_level(tmp_path / "t.gguf", extra, ("Ġ Ġ",), eos_token_id=257, eom_token_id=259)
    assert vocabulary.end_token_ids() == (257, 258, 259)


def test_token_zero_can_be_the_end_token(tmp_path: Path) -> None:
    vocabulary = byte_level(tmp_path / "t.gguf", eos_token_id=0)
    assert vocabulary.end_token_ids() == (0,)


def sentencepiece_reference(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's BPE as the paper has it: join the best-scored adjacent pair, the leftmost of equals."""
    symbols = list(text)
    while True:
        joins = [(-pieces[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not joins:
            return symbols
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def sentencepiece(path: Path, **metadata: Any) -> tuple[GgufVocabulary, dict[str, float]]:
    rng = random.Random(3)
    pieces: list[str] = []
    while len(pieces) < 300:
        left, right = (rng.choice([*"▁abcde", *pieces]) for _ in range(2))
        if len(left + right) <= 7 and left + right not in pieces:
            pieces.append(left + right)
    rng.shuffle(pieces)
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(piece, NORMAL) for piece in [*pieces, *"▁abcde"]]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1e6] * 6
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    vocabulary = write(path, "llama", tokens, scores=scores, **ids, **metadata)
    return vocabulary, {token: score for (token, kind), score in zip(tokens, scores, strict=True) if kind == NORMAL}


def test_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    vocabulary, scores = sentencepiece(tmp_path / "t.gguf")
    tokenizer = load(vocabulary)
    rng = random.Random(4)
    for _ in range(500):
        text = "".join(rng.choice("abcde ") for _ in range(rng.randrange(1, 40)))
        expected = sentencepiece_reference(scores, "▁" + text.replace(" ", "▁"))
        assert tokenizer.encode(text, add_special_tokens=False).tokens == expected
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece(tmp_path / "t.gguf")[0])
    encoding = tokenizer.encode("é")
    assert encoding.tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "é"


def test_sentencepiece_without_prefix_space(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece(tmp_path / "t.gguf", add_space_prefix=False, add_bos_token=False)[0])
    assert "".join(tokenizer.encode("é").tokens) == "<0xC3><0xA9>"
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre is 'unheard-of'; supported are default, gpt-2"),
        ({"merges": ["a"]}, "merges has 'a'"),
        ({"merges": ["a zz"]}, "merges has 'a zz'"),
        ({"merges": ["a b"]}, "merges has 'a b'"),
        ({"eos_token_id": 99999}, "eos_token_id = 99999 is not below"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, metadata: dict[str, Any], reason: str) -> None:
    tokens = [*((c, NORMAL) for c in BYTE_SPELLINGS), ("ĠĠ", NORMAL)]
    vocabulary = write(tmp_path / "t.gguf", "gpt2", tokens, **({"merges": ["Ġ Ġ"], "pre": "gpt-2"} | metadata))
    with pytest.raises(CheckpointError) as raised:
        (vocabulary.end_token_ids(), vocabulary.tokenizer_json())
    assert reason in raised.value.message
    assert "t.gguf" in raised.value.message


def test_unknown_kind_of_tokenizer(tmp_path: Path) -> None:
    vocabulary = write(tmp_path / "t.gguf", "bert", [("a", NORMAL)])
    with pytest.raises(CheckpointError, match="is 'bert'; supported are gpt2, llama"):
        vocabulary.tokenizer_json()


def test_token_that_appears_twice(tmp_path: Path) -> None:
    vocabulary = byte_level(tmp_path / "t.gguf", (("same", NORMAL), ("same", NORMAL)), ("Ġ Ġ",))
    with pytest.raises(CheckpointError, match="has 'same' twice, as 257 and 258"):
        vocabulary.tokenizer_json()


def test_scores_must_be_complete(tmp_path: Path) -> None:
    vocabulary = write(tmp_path / "t.gguf", "llama", [("a", NORMAL), ("b", NORMAL)], scores=[0.5])
    with pytest.raises(CheckpointError, match="scores does not have one entry"):
        vocabulary.tokenizer_json()


def test_json_is_plain_data(tmp_path: Path) -> None:
    data = json.loads(byte_level(tmp_path / "t.gguf", merges=("Ġ Ġ",)).tokenizer_json())
    assert data["model"]["type"] == "BPE"
    assert np.array_equal(sorted(data["model"]["vocab"].values()), range(257))
