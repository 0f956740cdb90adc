"""Checks of request fields. Every failure names the field's path."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from foreword.scheduler.errors import InvalidField

MAX_STOP_BYTES = 16_384
"""Bytes of all stop strings of a generation; an automaton of so many is built within about 20 ms."""

MAX_MASK_IDS = 16_384
"""Ids that a generation may name as allowed, and as banned."""

MAX_SCORED_PROMPT = 8192
"""Tokens of a prompt that is scored; with 20 most probable tokens at each and their bytes, an answer of 2.5 MiB."""

MAX_MESSAGES = 4096
"""Turns of a conversation."""


def check_supported(message: Message, supported: Collection[str]) -> None:
    """Refuse every field that is set and not known to be supported, so that none is ever ignored.

    Args:
        message: walked through all of its set fields.
        supported: paths of fields that may be set, without indices; a new field of the protocol is in it only once
            it is supported.

    Raises:
        InvalidField: a field is not supported, or not even known to this version.
    """
    _walk(message, "", "", supported)


def _walk(message: Message, path: str, shown: str, supported: Collection[str]) -> None:
    unknown_fields: Any = UnknownFieldSet(message)  # its stub lacks iteration
    for unknown in unknown_fields:
        raise InvalidField(f"{shown}<{unknown.field_number}>", "this server knows no field of this number")
    for field, value in message.ListFields():
        here = path + field.name
        if here in supported:
            continue
        if field.message_type is None or not any(entry.startswith(here + ".") for entry in supported):
            raise InvalidField(shown + field.name, "is not supported by this server")
        if field.is_repeated:
            for index, element in enumerate(value):
                _walk(element, here + ".", f"{shown}{field.name}[{index}].", supported)
        else:
            _walk(value, here + ".", f"{shown}{field.name}.", supported)


def check_number(path: str, value: float, low: float, high: float = math.inf, *, above_low: bool = False) -> None:
    """Require a finite number of at least `low` (above it if `above_low`) and at most `high`.

    Raises:
        InvalidField: it is not.
    """
    if math.isfinite(value) and low <= value <= high and not (above_low and value == low):
        return
    bound = f"{'above' if above_low else 'at least'} {low:g}"
    if high != math.inf:
        bound += f" and at most {high:g}"
    raise InvalidField(path, f"must be {bound}, got {value:g}")


def check_duration(path: str, duration: Duration, low_s: float, high_s: float, *, above_low: bool = False) -> float:
    """Require a well-formed duration of at least `low_s` (above it if `above_low`) and at most `high_s` seconds.

    Returns:
        The duration in seconds.

    Raises:
        InvalidField: it is not.
    """
    if not -1_000_000_000 < duration.nanos < 1_000_000_000:
        raise InvalidField(path, "must be a valid duration")
    seconds = duration.seconds + duration.nanos / 1e9
    check_number(path, seconds, low_s, high_s, above_low=above_low)
    return seconds


def check_request_id(path: str, request_id: str) -> None:
    """Require 1 to 64 characters of printable ASCII.

    Raises:
        InvalidField: it has others, or another number.
    """
    if not (1 <= len(request_id) <= 64 and request_id.isascii() and request_id.isprintable()):
        raise InvalidField(path, "must be 1 to 64 characters of printable ASCII")


def check_token_ids(path: str, token_ids: npt.NDArray[np.int32], vocab_size: int, first_index: int = 0) -> None:
    """Require ids of the vocabulary.

    Args:
        path: of the field.
        token_ids: a part of the field's ids.
        vocab_size: ids are below it.
        first_index: of the part in the field.

    Raises:
        InvalidField: one is not; names the first.
    """
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(outside):
        index = int(outside[0])
        raise InvalidField(
            f"{path}[{first_index + index}]", f"must be from 0 to {vocab_size - 1}, got {token_ids[index]}"
        )


def check_stop_strings(path: str, stop_strings: Collection[str]) -> None:
    """Require at most 1,024 strings of 1 to 1,024 bytes, and of 16,384 bytes in all.

    Raises:
        InvalidField: there are more, or one is empty or longer.
    """
    check_count(path, len(stop_strings))
    sizes = [len(text.encode()) for text in stop_strings]
    for index, size in enumerate(sizes):
        if not 1 <= size <= 1024:
            raise InvalidField(f"{path}[{index}]", f"must have 1 to 1,024 bytes, has {size}")
    if sum(sizes) > MAX_STOP_BYTES:
        raise InvalidField(path, f"must have at most {MAX_STOP_BYTES:,} bytes in all, have {sum(sizes):,}")


def check_scored_prompt(path: str, num_tokens: int) -> None:
    """Require a prompt of at most 8,192 tokens.

    Raises:
        InvalidField: it has more.
    """
    if num_tokens > MAX_SCORED_PROMPT:
        raise InvalidField(
            path, f"must be unset for prompts of more than {MAX_SCORED_PROMPT:,} tokens, this one has {num_tokens:,}"
        )


def check_cache_salt(path: str, salt: str) -> None:
    """Require at most 128 bytes.

    Raises:
        InvalidField: it has more.
    """
    if len(salt.encode()) > 128:
        raise InvalidField(path, f"must have at most 128 bytes, has {len(salt.encode())}")


def check_size(path: str, text: str, limit: int, *, is_empty_allowed: bool = False) -> None:
    """Require a text of at most `limit` bytes that is not empty, unless that is allowed.

    Raises:
        InvalidField: it is not.
    """
    size = len(text.encode())
    if size > limit or not (size or is_empty_allowed):
        bound = f"at most {limit:,}" if is_empty_allowed else f"1 to {limit:,}"
        raise InvalidField(path, f"must have {bound} bytes, has {size:,}")


def check_count(path: str, count: int, limit: int = 1024) -> None:
    """Require at most `limit` entries.

    Raises:
        InvalidField: there are more.
    """
    if count > limit:
        raise InvalidField(path, f"must have at most {limit:,} entries, has {count:,}")
