from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.step import SEQUENCE_UPDATE, SchedulerLoad, TokenScores
from foreword.service.engine.codec import Codec
from foreword.service.engine.messages import (
    Admitted,
    Cancel,
    EngineInfo,
    ErrorRecord,
    Hello,
    MalformedMessage,
    Message,
    Pause,
    Refused,
    Resume,
    StepHeader,
    StepReport,
    Submit,
    Welcome,
)

int64s = st.integers(-(2**63), 2**63 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 2**31 - 1)
texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
loads = st.builds(SchedulerLoad, counts, counts, counts, counts, counts, counts, counts)
ids = st.lists(int32s, max_size=5).map(tuple)


def arrays(dtype: Any) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 40).flatmap(lambda size: npst.arrays(dtype, size))


requests = st.builds(
    Request,
    request_key=int64s,
    prompt_token_ids=arrays(np.int32),
    stopping=st.builds(StoppingParams, counts, counts, ids, ids),
    sampling=st.builds(
        SamplingParams,
        temperature=floats,
        top_k=counts,
        top_p=floats,
        min_p=floats,
        typical_p=floats,
        repetition_penalty=floats,
        frequency_penalty=floats,
        presence_penalty=floats,
        logit_bias=st.lists(st.tuples(int32s, floats), max_size=5).map(tuple),
        allowed_token_ids=ids,
        banned_token_ids=ids,
        seed=st.integers(0, 2**64 - 1),
    ),
    arrival_ns=int64s,
    deadline_ns=int64s,
    priority=int32s,
    tenant=texts,
    cache_salt=texts,
    bypass_prefix_cache=st.booleans(),
    want_logprobs=st.booleans(),
    grammar=texts,
    want_ranks=st.booleans(),
    want_prompt_logprobs=st.booleans(),
    num_top_logprobs=counts,
)
infos = st.builds(
    EngineInfo, texts, texts, texts, texts, counts, int64s, counts, counts, counts, counts, counts, floats
)
token_scores = st.builds(
    TokenScores, arrays(np.float32), arrays(np.int32), counts, arrays(np.int32), arrays(np.float32)
)
headers = st.builds(StepHeader, counts, int64s, int64s, int64s, int64s, counts, counts, loads)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello),
    st.builds(Welcome, infos, loads),
    st.builds(Submit, requests),
    st.builds(Cancel, int64s),
    st.builds(Pause, int64s),
    st.builds(Resume, int64s),
    st.builds(Admitted, int64s),
    st.builds(Refused, int64s, st.builds(ErrorRecord, texts, texts, st.dictionaries(texts, texts, max_size=3))),
    st.builds(
        StepReport,
        headers,
        arrays(SEQUENCE_UPDATE),
        arrays(np.int32),
        arrays(np.float32),
        st.none() | token_scores,
        st.none() | token_scores,
    ),
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


def test_the_strategy_covers_every_message() -> None:
    drawn = {kind.__name__ for kind in get_args(Message)}
    assert drawn == {
        "Hello",
        "Welcome",
        "Submit",
        "Cancel",
        "Pause",
        "Resume",
        "Admitted",
        "Refused",
        "StepReport",
    }


@given(messages)
def test_round_trip(message: Message) -> None:
    frames = Codec().encode(message)
    assert_same(Codec().decode(frames), message)


@given(messages, st.data())
def test_damaged_frames_are_refused_or_read_but_never_crash(message: Message, data: st.DataObject) -> None:
    frames = Codec().encode(message)
    index = data.draw(st.integers(0, len(frames) - 1))
    match data.draw(st.sampled_from(["drop", "cut", "flip", "random"])):
        case "drop":
            del frames[index]
        case "cut":
            frames[index] = frames[index][: len(frames[index]) // 2]
        case "flip" if frames[index]:
            place = data.draw(st.integers(0, len(frames[index]) - 1))
            flipped = bytes([frames[index][place] ^ data.draw(st.integers(1, 255))])
            frames[index] = frames[index][:place] + flipped + frames[index][place + 1 :]
        case _:
            frames[index] = data.draw(st.binary(max_size=50))
    with suppress(MalformedMessage):
        Codec().decode(frames)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"Cancel"],
        [b"Cancel", b""],
        [b"Cancel", b"\x81\xabrequest_key\xa3abc"],
        [b"Explode", b"\x80"],
        [b"Cancel", b"\x81\xabrequest_key\x01", b"surplus"],
    ],
)
def test_what_is_not_a_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        Codec().decode(frames)


def test_an_array_of_another_type_is_refused_by_the_sender() -> None:
    request = Request(1, np.arange(3), StoppingParams(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int64"):
        Codec().encode(Submit(request))


def test_an_array_of_another_type_is_refused_by_the_receiver() -> None:
    request = Request(1, np.ones(3, np.float32), StoppingParams(1))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage, match="elements"):
        Codec().decode(Codec().encode(Submit(request)))


def test_arrays_are_copied_when_they_are_encoded() -> None:
    tokens = np.arange(3, dtype=np.int32)
    frames = Codec().encode(Submit(Request(1, tokens, StoppingParams(1))))
    tokens[:] = 9
    message = Codec().decode(frames)
    assert isinstance(message, Submit)
    assert message.request.prompt_token_ids.tolist() == [0, 1, 2]
