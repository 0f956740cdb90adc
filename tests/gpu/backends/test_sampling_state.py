"""From requests in rows to the parameters of each position to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from foreword.gpu.backends.sampling import SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.scheduler.request import Request


def test_state_fills_rows_of_the_plan(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, writer = SamplingState(8, 100), plan_writer()
    state.admit(2, new_request([1, 2, 3], temperature=0.5, top_k=7, seed=-1, want_logprobs=True))
    state.admit(5, new_request([1], top_p=0.25, min_p=0.125, seed=9))
    batch = state.select(writer.plan([(5, [1, 8, 9], 3), (7, [1, 2], 0), (2, [1, 2, 3], 1)]))
    assert batch.temperature.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.top_k.tolist() == [0, 0, 0, 7]
    assert batch.top_p.tolist() == [0.25, 0.25, 0.25, 1.0]
    assert batch.min_p.tolist() == [0.125, 0.125, 0.125, 0.0]
    assert batch.seed.tolist() == [9, 9, 9, 2**64 - 1]
    assert batch.position.tolist() == [1, 2, 3, 3]
    assert batch.want_logprob.tolist() == [False, False, False, True]


def test_end_tokens_are_masked_until_the_minimum_is_reached(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 100), plan_writer()
    request = new_request([1, 2, 3], min_output_tokens=2, eos_token_ids=(4,), stop_token_ids=tuple(range(10, 30)))
    state.admit(0, request)
    masked = []
    for tokens in ([1, 2, 3], [7], [7], [7]):  # draws output tokens 0, 1, 2, 3
        batch = state.select(writer.plan([(0, tokens, 1)]))
        masked.append(batch.masked_ids[0, : batch.num_masked[0]].tolist())
    assert masked == [[4, *range(10, 30)], [4, *range(10, 30)], [], []]


def test_allowed_and_banned_ids_become_masks(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 70), plan_writer()
    state.admit(1, new_request([1], allowed_token_ids=(0, 33, 69), banned_token_ids=(33,)))
    state.admit(2, new_request([1]))
    state.admit(4, new_request([1], banned_token_ids=(0, 69)))
    masks = state.select(writer.plan([(4, [1], 1), (2, [1], 1), (1, [1, 2, 3], 2)])).masks
    assert masks.index.tolist() == [1, -1, 0, 0]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [0, 69]
    assert np.flatnonzero(bits[1]).tolist() == list(range(1, 69))


def test_a_row_forgets_its_last_request(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, fresh = SamplingState(8, 100), SamplingState(8, 100)
    stopping = {"min_output_tokens": 9, "eos_token_ids": tuple(range(20))}
    state.admit(0, new_request([1], temperature=0.1, top_k=3, banned_token_ids=(3,), **stopping))
    state.admit(0, new_request([1, 2], temperature=0.0))
    fresh.admit(0, new_request([1, 2], temperature=0.0))
    plan = plan_writer().plan([(0, [1, 2], 1)])
    for entry in fields(SamplingBatch):
        if entry.name == "masks":
            assert state.select(plan).masks.index.tolist() == [-1]
        elif entry.name != "masked_ids":
            np.testing.assert_array_equal(
                getattr(state.select(plan), entry.name), getattr(fresh.select(plan), entry.name)
            )
