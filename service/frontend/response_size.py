"""Sizes of responses: what a message may have, and what a generation's answer will."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from foreword.service.frontend.settings import GenerationSettings, TimingLevel
from foreword.service.status import ResponseTooLarge
from foreword.v1 import generation_pb2

MAX_PACKED_BYTES = 7 << 19
"""Events in one message of a stream: 3.5 MiB, below the 4 MiB that clients of gRPC take unless told otherwise."""

_EVENT_OVERHEAD = 6
_STEP_TIMING_BYTES = 160


def max_packed_bytes(max_send_message_bytes: int) -> int:
    """Bytes of events that one message of a stream holds, with room for what is around them."""
    return min(MAX_PACKED_BYTES, max_send_message_bytes * 7 // 8)


def max_part_tokens(settings: GenerationSettings, max_token_bytes: int, max_bytes: int) -> int:
    """Tokens in one event, so that it has at most `max_bytes` whatever the tokens are; at least 1."""
    num_top = settings.num_top_logprobs
    spelled = max_token_bytes + 3 if settings.return_token_bytes else 0
    most = 5 + 4 + 5 + spelled + num_top * (5 + 4 + spelled) + 16 + 3 * max_token_bytes
    if settings.timing_level is TimingLevel.STEP:
        most += _STEP_TIMING_BYTES
    return max(1, max_bytes // most)


def fill_parts(
    num_tokens: int, limit: int, num_released: int, move: Callable[[int], None], fill: Callable[[], None]
) -> int:
    """Distribute tokens that are released together over parts of at most `limit`; the text is that of the last one.

    Args:
        num_tokens: released now.
        limit: of a part.
        num_released: tokens in the part that is open.
        move: puts so many of the tokens into the open part.
        fill: ends the open part and opens another one.

    Returns:
        how many of the tokens are left for the part that is open then.
    """
    if num_released and num_released + num_tokens > limit:
        fill()
    while num_tokens > limit:  # tokens without bytes, mostly
        move(limit)
        fill()
        num_tokens -= limit
    return num_tokens


def packed(
    events: Iterable[generation_pb2.GenerationEvent], max_bytes: int
) -> Iterator[list[generation_pb2.GenerationEvent]]:
    """Split events, in their order, into lists for one message each: of at most `max_bytes`, or a single event."""
    pack: list[generation_pb2.GenerationEvent] = []
    size = 0
    for event in events:
        event_size = event.ByteSize() + _EVENT_OVERHEAD
        if pack and size + event_size > max_bytes:
            yield pack
            pack, size = [], 0
        pack.append(event)
        size += event_size
    if pack:
        yield pack


def check_message_size(size: int, limit: int, field: str = "output") -> None:
    """Require a message that gRPC can send.

    Args:
        size: bytes that it has, or at least will have.
        limit: bytes that the server sends in one message.
        field: of the request that fills it.

    Raises:
        ResponseTooLarge: it has more.
    """
    if size > limit:
        raise ResponseTooLarge(
            f"{field}: the answer would have {size:,} bytes or more in one message; this server sends up to {limit:,}",
            field=field,
            message_bytes=size,
            max_send_message_bytes=limit,
        )


def check_event_size(event: generation_pb2.GenerationEvent, limit: int) -> None:
    """Require an event that fits a message of its own.

    Raises:
        ResponseTooLarge: it does not.
    """
    check_message_size(event.ByteSize() + _EVENT_OVERHEAD, limit)


def check_response_size(size: int, limit: int, settings: GenerationSettings) -> None:
    """Require a response to a unary call that gRPC can send; names what fills it most.

    Raises:
        ResponseTooLarge: it has more.
    """
    if settings.num_top_logprobs:
        field = "output.top_logprob_count"
    elif settings.num_outputs > 1:
        field = "sampling.output_count"
    else:
        field = "stopping.max_output_token_count"
    check_message_size(size, limit, field)


def least_response_bytes(settings: GenerationSettings, num_prompt: int, max_output_tokens: int) -> int:
    """Bytes that the one message of a whole generation has at least, as far as that is known before it begins.

    Args:
        settings: of the generation.
        num_prompt: tokens of its prompt.
        max_output_tokens: in effect.
    """
    num_returned = num_prompt if settings.echo_prompt or settings.prompt_logprobs else 0
    prompt = num_returned * _least_token_bytes(settings, is_scored=settings.prompt_logprobs)
    is_endless = settings.ignore_eos and not (settings.stop_strings or settings.stop_token_ids)
    num_certain = max_output_tokens if is_endless else settings.min_output_tokens
    if settings.constraint is not None or settings.has_time_limit:  # whose end comes when it comes
        num_certain = 0
    return prompt + settings.num_outputs * num_certain * _least_token_bytes(settings, is_scored=True)


def _least_token_bytes(settings: GenerationSettings, *, is_scored: bool) -> int:
    spelled = 2 if settings.return_token_bytes else 0
    size = settings.return_token_ids + spelled
    if is_scored:
        size += 4 * settings.logprobs + settings.ranks + settings.num_top_logprobs * (5 + spelled)
    return size
