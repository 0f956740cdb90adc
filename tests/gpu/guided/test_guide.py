from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from foreword.gpu.backends.acceptance import accept
from foreword.gpu.backends.sampling import Samples, SamplingBatch
from foreword.gpu.backends.sampling_state import SamplingState
from foreword.gpu.guided.grammar import GrammarCompiler
from foreword.gpu.guided.guide import GuidedRows
from foreword.scheduler.request import Request, SamplingParams, StoppingParams
from foreword.scheduler.step import FinishReason, StepPlan
from tests.gpu.guided.conftest import EOS, TURN, VOCAB_SIZE, encode

AB = 131
STAR = "start: /a*b?/"
JSON = (
    '{"grammars": [{"json_schema": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}}]}'
)


class Rows:
    """Guided rows with the plans of one sequence a row, each decoding with drafts."""

    def __init__(self, compiler: GrammarCompiler, plan_writer: Callable[..., Any]) -> None:
        self.writer = plan_writer()
        self.state = SamplingState(8, VOCAB_SIZE)
        self.guided = GuidedRows(compiler, 1)

    def step(
        self,
        work: Mapping[int, Sequence[int]],
        admitted: Sequence[tuple[int, Request]] = (),
        outputs: Mapping[int, Sequence[int]] | None = None,
    ) -> tuple[StepPlan, SamplingBatch]:
        """Plan a token and drafts for rows; the plan and what may be drawn."""
        plan = self.writer.plan([(row, ids, len(ids)) for row, ids in work.items()], admitted, outputs)
        for i, (row, request) in enumerate(plan.admitted):
            self.state.admit(row, request, plan.output_token_ids[plan.output_offsets[i] : plan.output_offsets[i + 1]])
        self.guided.admit(plan)
        return plan, self.guided.restrict(plan, self.state.select(plan))

    def draw(
        self, plan: StepPlan, params: SamplingBatch, token_ids: Sequence[int], failed: Sequence[int] = ()
    ) -> tuple[list[bool], list[int]]:
        """What is accepted of drawn tokens that equal their drafts, and the constraint reasons."""
        has_failed = np.isin(np.arange(len(token_ids)), failed)
        samples = Samples(np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32), has_failed)
        tokens, reasons = self.guided.follow(
            plan, params, accept(samples, np.roll(samples.token_ids, 1), plan.logits_offsets)
        )
        assert reasons is not None
        return np.isin(np.arange(len(token_ids)), tokens.logits_rows).tolist(), reasons.tolist()


@pytest.fixture
def rows(compiler: GrammarCompiler, plan_writer: Callable[..., Any]) -> Rows:
    return Rows(compiler, plan_writer)


def request(grammar: str, **fields: Any) -> Request:
    sampling = {name: fields.pop(name) for name in ("allowed_token_ids", "banned_token_ids") if name in fields}
    stopping = StoppingParams(**({"max_output_tokens": 32, "eos_token_ids": (EOS,)} | fields))
    return Request(0, np.array([1], np.int32), stopping, SamplingParams(**sampling), grammar=grammar)


def allowed(params: SamplingBatch, position: int) -> set[int] | None:
    index = params.masks.index[position]
    if index < 0:
        return None
    bits = np.unpackbits(params.masks.words[index].view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(np.flatnonzero(bits).tolist())


def test_only_rows_with_a_grammar_are_restricted(rows: Rows) -> None:
    plan, params = rows.step({0: [1], 1: [1], 2: [1]}, [(0, request("")), (1, request(STAR)), (2, request(""))])
    assert [allowed(params, i) for i in range(3)] == [None, {*encode("ab"), AB, EOS}, None]
    assert params.temperature.shape == (3,)
    assert plan.num_sequences == 3


def test_every_draft_position_has_the_mask_of_the_tokens_before_it(rows: Rows) -> None:
    plan, params = rows.step({0: [1, *encode("aab")]}, [(0, request(STAR))])
    everything = {*encode("ab"), AB, EOS}
    assert [allowed(params, i) for i in range(4)] == [everything, everything, everything, {EOS}]
    rows.draw(plan, params, [*encode("aa"), 0, 0], failed=[2, 3])
    _, params = rows.step({0: [97]})
    assert allowed(params, 0) == everything  # behind "aa", as if the other drafts had never been


def test_positions_behind_a_draft_that_breaks_the_grammar_allow_nothing(rows: Rows) -> None:
    rows.step({1: [1, *encode("aaa")]}, [(1, request(STAR))])  # leaves its masks behind
    _, params = rows.step({0: [1, *encode("ba")]}, [(0, request(STAR))])
    assert [allowed(params, i) for i in range(3)] == [{*encode("ab"), AB, EOS}, {EOS}, set()]


def test_an_end_token_may_be_drawn_only_where_the_grammar_may_end(rows: Rows) -> None:
    _, params = rows.step({0: [1, *encode("ab")]}, [(0, request("start: /a+b/"))])
    assert [EOS in (allowed(params, i) or ()) for i in range(3)] == [False, False, True]


def test_end_tokens_are_those_of_the_request(rows: Rows) -> None:
    requests = [(0, request(STAR, eos_token_ids=(), stop_token_ids=(TURN, 99))), (1, request(STAR, eos_token_ids=()))]
    _, params = rows.step({0: [1], 1: [1]}, requests)
    assert allowed(params, 0) == {*encode("ab"), AB, TURN}  # 99 is text, which the grammar does not allow
    assert allowed(params, 1) == {*encode("ab"), AB}


def test_a_grammar_mask_and_the_requests_own_are_both_in_effect(rows: Rows) -> None:
    _, params = rows.step(
        {0: [1], 1: [1]}, [(0, request(STAR, banned_token_ids=(97,))), (1, request("", banned_token_ids=(5,)))]
    )
    assert allowed(params, 0) == {98, AB, EOS}
    assert allowed(params, 1) == set(range(VOCAB_SIZE)) - {5}


def test_a_complete_grammar_ends_the_output_and_takes_back_what_follows(rows: Rows) -> None:
    plan, params = rows.step({0: [1, *encode("ab")]}, [(0, request("start: /ab/"))])
    accepted, reasons = rows.draw(plan, params, [*encode("ab"), EOS])
    assert accepted == [True, True, False]
    assert reasons == [FinishReason.CONSTRAINT_COMPLETE]


def test_what_comes_out_of_neighbours_stays(rows: Rows) -> None:
    """One without a grammar before, one that fails behind."""
    requests = [(0, request("")), (1, request("start: /ab/")), (2, request("start: /ab/", allowed_token_ids=(99,)))]
    plan, params = rows.step({0: [1, 97], 1: [1, *encode("ab")], 2: [1]}, requests)
    accepted, reasons = rows.draw(plan, params, [97, 98, *encode("ab"), EOS, 0], failed=[5])
    assert accepted == [True, True, True, True, False, False]
    assert reasons == [FinishReason.NONE, FinishReason.CONSTRAINT_COMPLETE, FinishReason.CONSTRAINT_STUCK]


def test_no_mask_is_asked_for_after_the_finish(rows: Rows) -> None:
    plan, params = rows.step({0: [1]}, [(0, request("start: /a/"))])
    assert rows.draw(plan, params, [97])[1] == [FinishReason.CONSTRAINT_COMPLETE]
    _, params = rows.step({0: [97]})
    assert allowed(params, 0) is None


def test_an_end_token_is_the_schedulers_to_judge(rows: Rows) -> None:
    plan, params = rows.step({0: [1]}, [(0, request(STAR))])
    assert rows.draw(plan, params, [EOS]) == ([True], [FinishReason.NONE])


def test_conflicting_constraints_are_told_apart_from_bad_logits(rows: Rows) -> None:
    plan, params = rows.step(
        {0: [1], 1: [1], 2: [1]},
        [
            (0, request("start: /ab/", allowed_token_ids=(99,))),
            (1, request("start: /ab/")),
            (2, request("start: /a*/", allowed_token_ids=(98,), eos_token_ids=())),
        ],
    )
    assert allowed(params, 0) == set()
    _, reasons = rows.draw(plan, params, [0, 0, 0], failed=[0, 1, 2])
    assert reasons == [FinishReason.CONSTRAINT_STUCK, FinishReason.NONE, FinishReason.CONSTRAINT_COMPLETE]


def test_min_output_tokens_do_not_hold_up_a_complete_grammar(rows: Rows) -> None:
    plan, params = rows.step({0: [1]}, [(0, request("start: /a/", min_output_tokens=5))])
    assert rows.draw(plan, params, [97])[1] == [FinishReason.CONSTRAINT_COMPLETE]


def test_a_sequence_that_resumes_stands_behind_its_output(rows: Rows) -> None:
    _, params = rows.step({0: [1]}, [(0, request(JSON))], {0: encode('{"x": tr')})
    assert allowed(params, 0) == {ord("u")}


def amended(rows: Rows, plan: StepPlan, *drafts: list[int], limit: int = 8) -> tuple[list[list[int]], list[int]]:
    """Drafts of the plan's sequences after the grammars have seen them, and the rows that were given some."""
    offsets = np.cumsum([0, *map(len, drafts)]).astype(np.int32)
    proposed = np.array([token_id for each in drafts for token_id in each], np.int32)
    limits = np.full(plan.num_sequences, limit, np.int32)
    offsets, token_ids, is_forced = rows.guided.amend(plan.rows, limits, offsets, proposed)
    assert offsets.dtype == token_ids.dtype == np.int32
    assert offsets[-1] == len(token_ids)
    return [token_ids[i:j].tolist() for i, j in itertools.pairwise(offsets)], plan.rows[is_forced].tolist()


@pytest.mark.parametrize(
    ("draft", "kept"),
    [("ab", 2), ("aab", 3), ("aba", 2), ("b", 1), ("ba", 1), ("x", 0), ("axb", 1)],
)
def test_drafts_are_cut_where_the_grammar_forbids_them(rows: Rows, draft: str, kept: int) -> None:
    plan, params = rows.step({0: [1], 1: [1]}, [(0, request(STAR)), (1, request(""))])
    rows.draw(plan, params, [97, 97])
    drafts = encode(draft)
    assert amended(rows, plan, drafts, [7, 8]) == ([drafts[:kept], [7, 8]], [])
    assert allowed(rows.step({0: [97]})[1], 0) == {*encode("ab"), AB, EOS}  # cutting moves nothing


def test_drafts_stop_before_an_end_token(rows: Rows) -> None:
    plan, params = rows.step({0: [1]}, [(0, request(STAR))])
    rows.draw(plan, params, [97])
    assert amended(rows, plan, [97, EOS, EOS]) == ([[97]], [])
    assert amended(rows, plan, [EOS]) == ([[]], [])


def test_where_one_text_is_left_its_tokens_become_drafts(rows: Rows) -> None:
    plan, params = rows.step(
        {0: [1], 1: [1], 2: [1], 3: [1]},
        [(0, request(JSON)), (1, request("")), (2, request("start: /xy+z/")), (3, request(STAR))],
    )
    rows.draw(plan, params, [ord("{"), 5, ord("x"), 97])
    assert amended(rows, plan, [], [7], [], []) == ([[], [7], [ord("y")], []], [2])
    plan, params = rows.step({0: [ord("{")]})
    rows.draw(plan, params, [ord('"')])
    assert amended(rows, plan, []) == ([[ord("x")]], [0])  # a longer token may begin with the quote
    assert amended(rows, plan, encode('x"}')) == ([encode('x"')], [])  # a draft that is allowed stays
    assert amended(rows, plan, encode("}")) == ([encode("x")], [0])


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (3, 3), (16, 9)])
def test_forced_drafts_keep_to_the_rows_bound(rows: Rows, limit: int, count: int) -> None:
    plan, params = rows.step({0: [1]}, [(0, request("start: /a(bcdefghij|kk)/"))])
    rows.draw(plan, params, [97])
    plan, params = rows.step({0: [97]})
    rows.draw(plan, params, [98])
    drafts, forced_rows = amended(rows, plan, [], limit=limit)
    assert drafts == [encode("cdefghij")[:count]]
    assert forced_rows == ([0] if count else [])


def test_what_has_ended_gets_no_drafts(rows: Rows) -> None:
    plan, params = rows.step({0: [1], 1: [1]}, [(0, request("start: /a/")), (1, request("start: /ab/"))])
    rows.draw(plan, params, [97, 0], failed=[1])
    assert amended(rows, plan, [], []) == ([[], []], [])


@pytest.mark.parametrize(
    "grammar", [JSON, "start: /(foo|bar|bazaar){2}-fixed/", "start: word\nword: /[(]/ word? /[)]/"]
)
def test_looking_for_forced_tokens_changes_no_mask(compiler: GrammarCompiler, grammar: str) -> None:
    looking, plain = compiler.matcher_of_its_own(grammar), compiler.matcher_of_its_own(grammar)
    text = {"{": '{"x": true}', "s": "bazaarfoo-fixed"}[grammar[0]] if "word" not in grammar else "((()))"
    for token_id in encode(text):
        looking.compute_ff_tokens()
        assert looking.compute_bitmask() == plain.compute_bitmask()
        assert looking.consume_token(token_id)
        assert plain.consume_token(token_id)
    assert looking.is_accepting()
    assert plain.is_accepting()


TOO_COMPLEX = "start: /((a{0,1000}){0,1000}){0,1000}/"  # once the output has 41 letters


def test_a_grammar_that_becomes_too_complex_behind_a_draft_fails_only_there(rows: Rows) -> None:
    plan, params = rows.step({0: [1, *encode("a" * 60)]}, [(0, request(TOO_COMPLEX))])
    masks = [allowed(params, i) for i in range(61)]
    assert masks[0] == {97, EOS}
    assert masks[60] == set()
    rows.draw(plan, params, [97] * 61, failed=range(1, 61))
    for _ in range(5):
        plan, params = rows.step({0: [97]})
        assert allowed(params, 0) == {97, EOS}
        rows.draw(plan, params, [97])


def test_a_grammar_that_became_too_complex_is_stuck_and_its_neighbours_go_on(rows: Rows) -> None:
    requests = [(0, request(TOO_COMPLEX)), (1, request(TOO_COMPLEX)), (2, request(STAR))]
    plan, params = rows.step({0: [1], 1: [1], 2: [1]}, requests)
    for _ in range(200):
        if not allowed(params, 0):
            break
        rows.draw(plan, params, [97, 97, 97][: plan.num_sequences])
        plan, params = rows.step({0: [97], 2: [97]})
    assert allowed(params, 0) == set()
    assert allowed(params, 1) == {*encode("ab"), AB, EOS}
    assert rows.draw(plan, params, [0, 97], failed=[0])[1] == [FinishReason.CONSTRAINT_STUCK, FinishReason.NONE]
    _, params = rows.step({1: [97]})
    assert allowed(params, 0) == {97, EOS}


def tokens_until_stuck(rows: Rows, num_drafts: int, num_neighbours: int) -> int:
    """How long a sequence follows a grammar that becomes too complex, with drafts in every step."""
    everyone = range(1 + num_neighbours)
    work = {row: [97] * (1 + num_drafts) for row in everyone}
    plan, params = rows.step(work, [(row, request(TOO_COMPLEX)) for row in everyone])
    num_tokens = 0
    while allowed(params, 0):
        positions = range(plan.num_sequences * (1 + num_drafts))
        is_drawn, _ = rows.draw(plan, params, [97] * len(positions), [i for i in positions if not allowed(params, i)])
        num_tokens += sum(is_drawn[: 1 + num_drafts])
        plan, params = rows.step(work)
    return num_tokens


@pytest.mark.parametrize(("num_drafts", "num_neighbours"), [(1, 0), (3, 0), (0, 2), (3, 2)])
def test_drafts_and_neighbours_do_not_make_a_grammar_too_complex(
    compiler: GrammarCompiler, plan_writer: Callable[..., Any], num_drafts: int, num_neighbours: int
) -> None:
    """To a token: the library's budget counts what it has looked at."""
    expected = tokens_until_stuck(Rows(compiler, plan_writer), 0, 0)
    assert expected > 20
    assert abs(tokens_until_stuck(Rows(compiler, plan_writer), num_drafts, num_neighbours) - expected) <= 1


def test_masks_are_written_into_one_buffer(rows: Rows) -> None:
    """What a step was given stays as it was, and no step's masks are kept."""
    _, params = rows.step({0: [1, *encode("aa")], 1: [1]}, [(0, request(STAR)), (1, request("start: /b/"))])
    buffer, before = rows.guided._words, params.masks.words.copy()
    for _ in range(3):
        rows.step({0: [97], 1: [97]})
    assert rows.guided._words is buffer
    assert np.array_equal(params.masks.words, before)
