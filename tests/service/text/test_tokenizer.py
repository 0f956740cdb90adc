from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from foreword.gpu.checkpoint.default_model import default_model_path
from foreword.gpu.checkpoint.gguf_file import GgufFile
from foreword.scheduler.errors import CheckpointError, InvalidField
from foreword.service.text.tokenizer import Tokenizer, spelling_pattern

EMOJI = ["👋🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "😀😃", "\U0001faf1🏻‍\U0001faf2🏿"]
WORDS = [
    "the",
    "The",
    "naïve",
    "Übergröße",
    "don't",
    "we'LL",
    "hello_world",
    "中文字符",
    "日本語テキスト",
    "한국어",
    "العربية",
    "हिन्दी",
]
CODE = [
    "def f(x):\n    return x**2\n",
    "#include <stdio.h>\r\n",
    '{"a": [1, 2]}',
    "\t\tif (a<b) {}",
    "https://x.org/?q=1",
    "a;;b",
]
SPACE = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "   \n  ", ""]
SPECIAL = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|endoftext|>",
    "<|im_end",
    "|>",
    "<repo_name>",
    "<|IM_END|>",
    "<file_sep>",
]
DIGITS = ["0", "42", "2024", " 1", "  17", "3.14", "１２", "½", "٣"]  # noqa: RUF001


# Bytes for which SmolLM2's vocabulary has no token: some control characters and the first byte of planes 4 to 11. Its
# published tokenizer drops them, too.
UNKNOWN_BYTES = frozenset(b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff")


def random_character(rng: random.Random) -> str:
    """Any scalar value; every plane is as likely as another."""
    while True:
        point = rng.randrange(17) << 16 | rng.randrange(1 << 16)
        if not 0xD800 <= point < 0xE000:
            return chr(point)


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.choice([EMOJI, WORDS, CODE, SPACE, SPACE, SPECIAL, DIGITS, None])
        parts.append(random_character(rng) if kind is None else rng.choice(kind))
    return "".join(parts)


def texts(number: int) -> list[str]:
    rng = random.Random(11)
    return ["", *(random_text(rng) for _ in range(number - 1))]


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    """SmolLM2's published pipeline, put together with the library's own parts, its special tokens switched off."""
    metadata: dict[str, Any] = GgufFile(default_model_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


def test_same_ids_and_round_trip_as_the_reference(
    default_tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    reference.encode_special_tokens = True
    for text in texts(10_000):
        ids = default_tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == reference.encode(text).ids, repr(text)
        assert not any(map(default_tokenizer.is_special, ids.tolist()))
        assert default_tokenizer.decode(ids) == reference.decode(ids.tolist())
        assert default_tokenizer.decode(ids) == text or not UNKNOWN_BYTES.isdisjoint(text.encode())


def test_same_ids_as_transformers(default_tokenizer: Tokenizer) -> None:
    """Without digits: for this file transformers knows no rule for them."""
    path = default_model_path()
    auto = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in texts(2000):
        if any(character.isnumeric() for character in text):
            continue
        plain = auto(text, split_special_tokens=True, add_special_tokens=False).input_ids
        assert default_tokenizer.encode(text).tolist() == plain, repr(text)
        parsed = auto(text, split_special_tokens=False, add_special_tokens=False).input_ids
        assert default_tokenizer.encode(text, parse_special_tokens=True).tolist() == parsed, repr(text)


def test_special_tokens_are_parsed_only_when_asked_for(
    default_tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    reference.encode_special_tokens = False
    for text in texts(500):
        expected = reference.encode(text).ids
        assert default_tokenizer.encode(text, parse_special_tokens=True).tolist() == expected
    assert default_tokenizer.encode("<|im_end|>", parse_special_tokens=True).tolist() == [2]
    assert 2 not in default_tokenizer.encode("<|im_end|>")


def test_longest_spelling_wins() -> None:
    pattern = spelling_pattern(["<s>", "<s>x", "["])
    assert pattern.split("a<s>xy<s>[") == ["a", "<s>x", "y", "<s>", "", "[", ""]
    assert spelling_pattern([]).split("a") == ["a"]


def test_token_bytes_are_exact(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.token_bytes(2) == b"<|im_end|>"
    assert default_tokenizer.is_special(2)
    emoji = default_tokenizer.encode("👋")
    assert b"".join(map(default_tokenizer.token_bytes, emoji.tolist())) == "👋".encode()
    assert {default_tokenizer.token_bytes(i) for i in range(49152)} >= {bytes([b]) for b in b" abc\n\xf0\x9f"}


def test_every_id_decodes_as_the_library_decodes_it(
    default_tokenizer: Tokenizer, reference: tokenizers.Tokenizer
) -> None:
    for token_id in range(49152):
        expected = reference.decode([token_id])
        assert default_tokenizer.decode([token_id]) == expected
        if not default_tokenizer.is_special(token_id):
            assert default_tokenizer.token_bytes(token_id).decode(errors="replace") == expected


def test_decoding(default_tokenizer: Tokenizer) -> None:
    ids = [1, *default_tokenizer.encode("hi").tolist(), 2]
    assert default_tokenizer.decode(ids) == "hi"
    assert default_tokenizer.decode(ids, include_special_tokens=True) == "<|im_start|>hi<|im_end|>"
    assert default_tokenizer.decode([]) == ""
    first_byte = default_tokenizer.encode("👋").tolist()[:1]
    assert default_tokenizer.decode(first_byte) == "�"
    for outside in (-1, 49152):
        with pytest.raises(InvalidField, match=f"token_ids: {outside} is not a token; ids are 0 to 49151"):
            default_tokenizer.decode([outside])


@pytest.mark.parametrize("parse", [False, True])
def test_offsets_are_bytes_of_the_text(default_tokenizer: Tokenizer, parse: bool) -> None:
    for text in texts(500):
        data = text.encode()
        if not UNKNOWN_BYTES.isdisjoint(data):
            continue
        tokenized = default_tokenizer.tokenize(text, parse_special_tokens=parse)
        assert tokenized.token_ids.tolist() == default_tokenizer.encode(text, parse_special_tokens=parse).tolist()
        assert tokenized.offsets.shape == (len(tokenized.token_ids), 2)
        assert tokenized.offsets.dtype == np.int32
        covered = 0
        for token_id, (begin, end) in zip(tokenized.token_ids.tolist(), tokenized.offsets.tolist(), strict=True):
            assert default_tokenizer.token_bytes(token_id) in data[begin:end]
            data[begin:end].decode()  # whole characters
            assert begin <= covered <= end
            covered = end
        assert covered == len(data)


def test_sentencepiece(sentencepiece_tokenizer: Tokenizer) -> None:
    tokenizer = sentencepiece_tokenizer
    ids = tokenizer.encode("hello wé")
    assert [tokenizer.token_bytes(i) for i in ids.tolist()] == [b" hell", b"o", b" w", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "hello wé"
    assert tokenizer.decode(tokenizer.encode("  hello")) == "  hello"
    assert tokenizer.decode([1, *ids.tolist(), 2]) == "hello wé"
    assert tokenizer.encode("hello", add_special_tokens=True).tolist()[0] == 1
    assert tokenizer.token_bytes(299) == b""
    assert len(tokenizer.encode("hello" * 10)) > 4  # the file's truncation is not ours


def test_merges_cannot_build_a_special_token(sentencepiece_tokenizer: Tokenizer, sentencepiece_json: str) -> None:
    """The library's own switch does not prevent that."""
    library = tokenizers.Tokenizer.from_str(sentencepiece_json)
    library.no_truncation()
    library.encode_special_tokens = True
    assert 1 in library.encode("h<s>", add_special_tokens=False).ids
    for text in ("h<s>", "<s>", "<s>x", "hello</s>"):
        ids = sentencepiece_tokenizer.encode(text).tolist()
        assert not {0, 1, 2} & set(ids)
        assert sentencepiece_tokenizer.decode(ids) == text


def test_sentencepiece_special_tokens_are_found_inside_a_text(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode_pieces(["", "<s>", "hello", "</s>", ""]).tolist()
    assert ids[0] == 1
    assert ids[-1] == 2
    assert sentencepiece_tokenizer.decode(ids) == "hello"


def test_unigram_cannot_produce_a_special_token() -> None:
    data = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 1,
                "content": "</s>",
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        ],
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["<", -1.0], ["/", -1.0], ["s", -1.0], [">", -1.0]],
        },
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    library.encode_special_tokens = True
    assert library.encode("</s>").ids == [1]
    tokenizer = Tokenizer(json.dumps(data), 6)
    assert tokenizer.encode("</s>").tolist() == [2, 3, 4, 5]
    assert tokenizer.encode("</s>", parse_special_tokens=True).tolist() == [1]


def test_clones_share_the_vocabulary_and_work_side_by_side(default_tokenizer: Tokenizer) -> None:
    samples = texts(300)
    expected = [default_tokenizer.encode(text).tolist() for text in samples]
    results: list[list[list[int]]] = []

    def work(tokenizer: Tokenizer) -> None:
        results.append([tokenizer.encode(text).tolist() for text in samples])

    clones = [default_tokenizer.clone() for _ in range(3)]
    assert all(clone.vocabulary is default_tokenizer.vocabulary for clone in clones)
    threads = [threading.Thread(target=work, args=(clone,)) for clone in clones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data.pop("model"), "KeyError"),
        (lambda data: data["model"].update(type="Nonsense"), "damaged"),
        (lambda data: data["model"].update(vocab=7), "damaged"),
        (lambda data: data.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "WordPiece"),
        (lambda data: data.update(decoder=None), "decoder none is not supported"),
        (lambda data: data["post_processor"].update(special_tokens={}), "no entry found"),
        (lambda data: data["added_tokens"].append({**data["added_tokens"][0], "content": "<x>", "id": 5}), "'<x>'"),
    ],
)
def test_damage_is_named(sentencepiece_json: str, damage: Any, reason: str) -> None:
    data = json.loads(sentencepiece_json)
    damage(data)
    with pytest.raises(CheckpointError, match=reason):
        Tokenizer(json.dumps(data), 300)


def test_text_that_is_not_json() -> None:
    with pytest.raises(CheckpointError, match="tokenizer: damaged"):
        Tokenizer("{", 10)


def test_ids_must_fit_the_model(sentencepiece_json: str) -> None:
    with pytest.raises(CheckpointError, match="the model has only 100 tokens"):
        Tokenizer(sentencepiece_json, 100)
