"""From requests in rows to the parameters of each position to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from foreword.gpu.backends.sampling import SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.scheduler.request import Request
from foreword.scheduler.step import StepPlan

NOTHING = np.zeros(0, np.int32)


def test_state_fills_rows_of_the_plan(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, writer = SamplingState(8, 100), plan_writer()
    state.admit(2, new_request([1, 2, 3], temperature=0.5, top_k=7, seed=-1, want_logprobs=True), NOTHING)
    state.admit(5, new_request([1], top_p=0.25, min_p=0.125, seed=9), NOTHING)
    batch = state.select(writer.plan([(5, [1, 8, 9], 3), (7, [1, 2], 0), (2, [1, 2, 3], 1)]))
    assert batch.temperature.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.top_k.tolist() == [0, 0, 0, 7]
    assert batch.top_p.tolist() == [0.25, 0.25, 0.25, 1.0]
    assert batch.min_p.tolist() == [0.125, 0.125, 0.125, 0.0]
    assert batch.seed.tolist() == [9, 9, 9, 2**64 - 1]
    assert batch.position.tolist() == [1, 2, 3, 3]
    assert batch.want_logprob.tolist() == [False, False, False, True]


def test_parameters_stay_with_their_rows_where_others_have_drafts(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """Each row has its own kind of processor; the drafts of the ones before must not shift it."""
    state, writer = SamplingState(8, 70), plan_writer()
    state.admit(0, new_request([1], temperature=0.5), NOTHING)
    state.admit(1, new_request([1], banned_token_ids=(3,), seed=7), NOTHING)
    state.admit(2, new_request([1], logit_bias=((3, 1.0),), top_k=5), NOTHING)
    state.admit(3, new_request([1], presence_penalty=1.0, min_output_tokens=2, eos_token_ids=(0,)), NOTHING)
    batch = state.select(writer.plan([(0, [1, 8, 9], 3), (1, [1], 1), (2, [1, 6], 2), (3, [1, 4, 5], 3)]))
    assert batch.temperature.tolist() == [0.5] * 3 + [1.0] * 6
    assert (batch.masks.index >= 0).tolist() == [False] * 3 + [True] + [False] * 5
    assert batch.seed.tolist() == [0] * 3 + [7] + [0] * 5
    assert (batch.biases.index >= 0).tolist() == [False] * 4 + [True] * 2 + [False] * 3
    assert batch.top_k.tolist() == [0] * 4 + [5] * 2 + [0] * 3
    assert (batch.history.index >= 0).tolist() == [False] * 6 + [True] * 3
    assert batch.num_masked.tolist() == [0] * 6 + [1, 1, 0]  # the end token 0, before outputs 0 and 1
    assert batch.masked_ids[6:8, 0].tolist() == [0, 0]


def test_end_tokens_are_masked_until_the_minimum_is_reached(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 100), plan_writer()
    request = new_request([1, 2, 3], min_output_tokens=2, eos_token_ids=(4,), stop_token_ids=tuple(range(10, 30)))
    state.admit(0, request, NOTHING)
    masked = []
    for tokens in ([1, 2, 3], [7], [7], [7]):  # draws output tokens 0, 1, 2, 3
        batch = state.select(writer.plan([(0, tokens, 1)]))
        masked.append(batch.masked_ids[0, : batch.num_masked[0]].tolist())
    assert masked == [[4, *range(10, 30)], [4, *range(10, 30)], [], []]


def test_allowed_and_banned_ids_become_masks(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 70), plan_writer()
    state.admit(1, new_request([1], allowed_token_ids=(0, 33, 69), banned_token_ids=(33,)), NOTHING)
    state.admit(2, new_request([1]), NOTHING)
    state.admit(4, new_request([1], banned_token_ids=(0, 69)), NOTHING)
    masks = state.select(writer.plan([(4, [1], 1), (2, [1], 1), (1, [1, 2, 3], 2)])).masks
    assert masks.index.tolist() == [1, -1, 0, 0]
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [0, 69]
    assert np.flatnonzero(bits[1]).tolist() == list(range(1, 69))


def test_a_row_forgets_its_last_request(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, fresh = SamplingState(8, 100), SamplingState(8, 100)
    stopping = {"min_output_tokens": 9, "eos_token_ids": tuple(range(20))}
    sampling = {"banned_token_ids": (3,), "logit_bias": ((3, 1.0),), "presence_penalty": 1.0}
    state.admit(0, new_request([1], temperature=0.1, top_k=3, **sampling, **stopping), NOTHING)
    state.admit(0, new_request([1, 2], temperature=0.0), NOTHING)
    fresh.admit(0, new_request([1, 2], temperature=0.0), NOTHING)
    plan = plan_writer().plan([(0, [1, 2], 1)])
    for entry in fields(SamplingBatch):
        if entry.name in ("biases", "masks", "history"):
            assert getattr(state.select(plan), entry.name).index.tolist() == [-1]
        elif entry.name != "masked_ids":
            np.testing.assert_array_equal(
                getattr(state.select(plan), entry.name), getattr(fresh.select(plan), entry.name)
            )


def test_biases_go_with_their_rows(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, writer = SamplingState(8, 70), plan_writer()
    state.admit(1, new_request([1], logit_bias=((5, 1.5), (69, -2.0))), NOTHING)
    state.admit(2, new_request([1]), NOTHING)
    state.admit(3, new_request([1], logit_bias=((0, -100.0),)), NOTHING)
    biases = state.select(writer.plan([(3, [1, 2], 2), (2, [1], 1), (1, [1], 1)])).biases
    assert biases.index.tolist() == [1, 1, -1, 0]
    assert biases.offsets.tolist() == [0, 2, 3]
    assert biases.ids.tolist() == [5, 69, 0]
    assert biases.values.tolist() == [1.5, -2.0, -100.0]


def histories(state: SamplingState, plan: StepPlan) -> list[dict[int, int] | None]:
    """Of each position, how often an id is in the output before it."""
    history = state.select(plan).history
    parts = [slice(start, end) for start, end in pairwise(history.offsets)]
    return [
        None if m < 0 else dict(zip(history.ids[parts[m]].tolist(), history.counts[parts[m]].tolist(), strict=True))
        for m in history.index
    ]


def test_history_is_the_prompt_and_the_output(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 50), plan_writer()
    state.admit(0, new_request([7, 8, 7], repetition_penalty=1.2), NOTHING)
    state.admit(1, new_request([7, 8, 7], frequency_penalty=0.5), NOTHING)
    state.admit(2, new_request([7, 8, 7]), NOTHING)
    plan = writer.plan([(0, [7, 8, 7], 1), (1, [7, 8, 7], 1), (2, [7, 8, 7], 1)])
    assert histories(state, plan) == [{7: 0, 8: 0}, {}, None]
    state.append(plan, np.array([0, 1, 3, 4], np.int32), np.array([8, 9, 9, 5], np.int32))
    plan = writer.plan([(1, [9], 1), (0, [8], 1)])
    assert histories(state, plan) == [{9: 2}, {7: 0, 8: 1}]


def test_history_of_a_position_includes_the_drafts_before_it(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    """And rejected drafts leave no trace."""
    state, writer = SamplingState(8, 50), plan_writer()
    state.admit(3, new_request([7], repetition_penalty=1.2), NOTHING)
    state.append(writer.plan([(3, [7], 1)]), np.array([0, 1], np.int32), np.array([9], np.int32))
    plan = writer.plan([(3, [9, 9, 4, 4, 7], 5)])
    assert histories(state, plan) == [
        {7: 0, 9: 1},
        {7: 0, 9: 2},
        {7: 0, 9: 2, 4: 1},
        {7: 0, 9: 2, 4: 2},
        {7: 1, 9: 2, 4: 2},
    ]
    state.append(plan, np.array([0, 1], np.int32), np.array([6], np.int32))
    assert histories(state, writer.plan([(3, [6], 1)])) == [{7: 0, 9: 1, 6: 1}]


def test_a_resumed_row_counts_what_it_had_generated(
    plan_writer: Callable[..., Any], new_request: Callable[..., Request]
) -> None:
    state, writer = SamplingState(8, 50), plan_writer()
    request = new_request([7], frequency_penalty=1.2)
    state.admit(0, new_request([3, 4], repetition_penalty=2.0), NOTHING)
    state.admit(0, request, np.array([5, 5, 6], np.int32))
    assert histories(state, writer.plan([(0, [7, 5, 5, 6], 1)])) == [{5: 2, 6: 1}]


def test_a_history_holds_every_id(plan_writer: Callable[..., Any], new_request: Callable[..., Request]) -> None:
    state, writer = SamplingState(2, 5), plan_writer()
    state.admit(0, new_request([0, 1, 2, 3, 4] * 3, repetition_penalty=2.0, max_output_tokens=40), NOTHING)
    plan = writer.plan([(0, [0, 1, 2, 3, 4] * 3, 1)])
    state.append(plan, np.array([0, 30], np.int32), np.arange(30, dtype=np.int32) % 5)
    assert histories(state, writer.plan([(0, [4], 1)])) == [dict.fromkeys(range(5), 6)]
