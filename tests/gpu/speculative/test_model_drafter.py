"""A draft model beside a target, both tiny and random, behind a real scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt.driver import CheckerDriver

from foreword.gpu.backends.cuda_backend import CudaBackend
from foreword.gpu.config import DeviceConfig
from foreword.gpu.guided.grammar import GrammarVocabulary
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.runner import ModelRunner, load_runner
from foreword.gpu.speculative.draft_model import DraftModel, RenumberedCheckpoint, map_vocabulary
from foreword.gpu.speculative.open import open_speculator
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.errors import CheckpointError, ConfigError
from foreword.scheduler.request import AcceptanceRule, Request
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import DraftState, StepPlan, StepResult

VOCAB = 131
SMALLER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
NewRunner = Callable[..., ModelRunner]


def config(num_drafts: int, **changes: Any) -> DeviceConfig:
    fields = {"num_blocks": 64, "dtype": "float32", "num_threads": 1, "max_num_sequences": 8, "max_model_len": 256}
    return DeviceConfig(**fields | {"speculation": "draft-model", "max_draft_tokens": num_drafts} | changes)


@pytest.fixture
def drafting(tiny_checkpoint: Callable[..., Any]) -> NewRunner:
    """A target with a draft model; `draft` overrides its hyper-parameters, the target's own if there are none."""

    def build(num_drafts: int, seed: int = 0, draft: dict[str, Any] | None = None, **changes: Any) -> ModelRunner:
        model = DraftModel(tiny_checkpoint(seed, **(draft or {})))
        return load_runner(config(num_drafts, **changes), tiny_checkpoint(0), draft_model=model)

    return build


def generate(
    runner: Any, requests: Sequence[Request], num_blocks: int = 64, budget: int = 256
) -> tuple[dict[int, list[int]], dict[str, int]]:
    """Tokens of each request, and sums over all."""
    scheduler = Scheduler(SchedulerConfig(num_blocks, 16, 8, budget, 256))
    outputs: dict[int, list[int]] = {request.request_key: [] for request in requests}
    sums = {"num_drafted": 0, "num_accepted": 0}
    preemptions: dict[int, int] = {}
    for request in requests:
        scheduler.add(request, 0)
    while scheduler.has_work:
        update = scheduler.apply(runner.execute(scheduler.schedule(0)))
        start = 0
        for record in update.sequences:
            end = start + int(record["num_tokens"])
            outputs[int(record["request_key"])] += update.token_ids[start:end].tolist()
            preemptions[int(record["request_key"])] = int(record["num_preemptions"])
            for name in sums:
                sums[name] += int(record[name])
            start = end
    return outputs, sums | {"num_preemptions": sum(preemptions.values())}


@pytest.fixture
def requests(new_request: Callable[..., Request]) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length) for length in (1, 5, 15, 16, 17, 30, 33, 47)]
    return [
        new_request(prompt, key=i, temperature=(0.0, 0.8)[i % 2], top_k=(0, 20)[i // 2 % 2], seed=i)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def plain(tiny_checkpoint: Callable[..., Any], requests: list[Request]) -> dict[int, list[int]]:
    """What the requests give without drafts."""
    return generate(load_runner(config(1, speculation="off"), tiny_checkpoint(0)), requests)[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_target_as_its_own_drafter_is_always_accepted(
    drafting: NewRunner, new_request: Callable[..., Request], temperature: float
) -> None:
    """200 tokens, across many blocks, with the noise of seeded sampling."""
    request = new_request([1, 2, 3], temperature=temperature, seed=7, max_output_tokens=200)
    outputs, sums = generate(drafting(5), [request])
    assert len(outputs[0]) == 200
    assert sums["num_accepted"] == sums["num_drafted"]
    assert sums["num_accepted"] == 200 - 1 - -(-199 // 6)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("draft", [{}, SMALLER], ids=["right", "mostly wrong"])
def test_tokens_are_the_same_for_every_draft_length(
    drafting: NewRunner,
    requests: list[Request],
    plain: dict[int, list[int]],
    num_drafts: int,
    draft: dict[str, Any],
) -> None:
    """Together, with prompts in chunks and sequences preempted, and from the prefix cache."""
    runner = drafting(num_drafts, seed=len(draft), draft=draft)
    together, sums = generate(runner, requests)
    assert together == plain
    assert sums["num_drafted"] > 0
    assert (sums["num_accepted"] == sums["num_drafted"]) == (not draft)
    squeezed, sums = generate(runner, requests, num_blocks=9, budget=24)
    assert squeezed == plain
    assert sums["num_preemptions"] > 0
    assert (sums["num_accepted"] == sums["num_drafted"]) == (not draft)
    assert runner.speculator is not None
    assert runner.speculator.state is DraftState.ACTIVE


@pytest.mark.parametrize("length", [10, 16, 31])
def test_drafts_are_what_the_draft_model_generates(
    drafting: NewRunner, tiny_checkpoint: Callable[..., Any], new_request: Callable[..., Request], length: int
) -> None:
    """Whatever it was wrong about before, or was not asked, and on whichever side of the end of a block."""
    draft_only = load_runner(config(1, speculation="off"), tiny_checkpoint(4, **SMALLER))
    runner = drafting(5, seed=4, draft=SMALLER)
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    scheduler = Scheduler(SchedulerConfig(64, 16, 8, 256, 256))
    scheduler.add(new_request(tokens, temperature=0.0), 0)
    num_rejected = 0
    while scheduler.has_work:
        result = runner.execute(scheduler.schedule(0))
        drafts = result.drafts.token_ids.tolist() if result.drafts else []
        update = scheduler.apply(replace(result, drafts=None) if result.step_id % 2 else result)
        tokens += update.token_ids.tolist()
        num_rejected += int((update.sequences["num_drafted"] - update.sequences["num_accepted"]).sum())
        if drafts:
            alone = new_request(tokens, temperature=0.0, max_output_tokens=len(drafts))
            assert generate(draft_only, [alone])[0][0] == drafts
    assert num_rejected > 20


@pytest.mark.parametrize("rule", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_drafts_know_nothing_of_the_noise_that_decides_about_them(
    drafting: NewRunner, new_request: Callable[..., Request], rule: AcceptanceRule
) -> None:
    drafts = []
    for acceptance in (AcceptanceRule.EXACT_MATCH, rule):
        request = replace(new_request([1, 2, 3], temperature=1.0, seed=5), acceptance=acceptance)
        scheduler = Scheduler(SchedulerConfig(64, 16, 8, 256, 256))
        scheduler.add(request, 0)
        drafter: Any = drafting(5).speculator._drafter  # type: ignore[union-attr]
        plan = scheduler.schedule(0)
        for row, admitted in plan.admitted:
            drafter.admit(row, admitted, np.zeros(0, np.int32))
        drafter.see(plan)
        one = np.array([1], np.int32)
        drafter.observe(plan.rows, 3 * one, one, 0 * one, one)
        drafts.append(drafter.propose(plan.rows, 5 * one).token_ids.tolist())
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 5


def test_a_row_whose_draft_cannot_be_drawn_leaves_the_others_alone(
    tiny_checkpoint: Callable[..., Any], requests: list[Request], plain: dict[int, list[int]]
) -> None:
    """Weights that are not numbers, of some tokens only: what follows those has no logits to draw from."""
    checkpoint = tiny_checkpoint(0)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].copy()
    checkpoint.config["tie_word_embeddings"] = False
    often = Counter(token_id for token_ids in plain.values() for token_id in token_ids[:-1]).most_common(3)
    checkpoint.tensors["model.embed_tokens.weight"][[token_id for token_id, _ in often]] = np.nan
    runner = load_runner(config(5), tiny_checkpoint(0), draft_model=DraftModel(checkpoint))
    outputs, sums = generate(runner, requests)
    assert outputs == plain
    assert sums["num_accepted"] > 0
    assert runner.speculator is not None
    assert runner.speculator.state is DraftState.ACTIVE


def test_cached_prefixes_are_there_for_the_draft_model_too(
    drafting: NewRunner, new_request: Callable[..., Request]
) -> None:
    runner = drafting(4)
    prompt = np.random.default_rng(5).integers(0, VOCAB, 50)
    first, second = (new_request(prompt, key=key, temperature=0.0) for key in (1, 2))
    scheduler = Scheduler(SchedulerConfig(64, 16, 8, 256, 256))
    sums = np.zeros(3, np.int64)
    for request in (first, second):
        scheduler.add(request, 0)
        while scheduler.has_work:
            sequences = scheduler.apply(runner.execute(scheduler.schedule(0))).sequences
            sums += [int(sequences[name].sum()) for name in ("num_drafted", "num_accepted", "num_cached")]
    assert sums[2] > 0
    assert sums[0] == sums[1]


def test_it_drafts_on_the_cuda_device(
    tiny_checkpoint: Callable[..., Any], new_request: Callable[..., Request], checker: CheckerDriver
) -> None:
    backend = CudaBackend("float32", checker, device="cpu")
    checkpoint = tiny_checkpoint(0)
    model = family(checkpoint)
    model_config = model.read_config(checkpoint)
    weights = model.load_weights(checkpoint, model_config, backend, lambda loaded, total: None)
    decoder = Decoder(model_config, weights, backend, 256)
    drafter = DraftModel(checkpoint).load(config(3), decoder, None)
    runner = ModelRunner(config(3), decoder, open_speculator(config(3), VOCAB, drafter))
    requests = [new_request(range(n), key=n, temperature=0.0, max_output_tokens=8) for n in (14, 20)]
    outputs, sums = generate(runner, requests)
    assert sums["num_accepted"] == sums["num_drafted"] > 0
    assert [len(output) for output in outputs.values()] == [8, 8]


# Vocabularies


def vocabulary(texts: Sequence[bytes], special_ids: Sequence[int] = (0,)) -> GrammarVocabulary:
    return GrammarVocabulary(texts, special_ids, lambda text: list(text.encode()))


TEXTS = [b"<end>", *(bytes([i]) for i in range(1, VOCAB))]


def test_tokens_are_matched_by_their_text(tiny_checkpoint: Callable[..., Any]) -> None:
    draft = vocabulary([b"<end>", b"b", b"a", b"ab", b"b"])
    target = vocabulary([b"<end>", b"a", b"b", b"c", b"<end>"])
    assert map_vocabulary(target, draft).tolist() == [0, 2, 1, -1, -1]
    table = RenumberedCheckpoint(tiny_checkpoint(0), map_vocabulary(target, draft))
    embedding, renumbered = (each.tensor("model.embed_tokens.weight") for each in (tiny_checkpoint(0), table))
    assert (renumbered[:3] == embedding[[0, 2, 1]]).all()
    assert not renumbered[3:].any()
    with pytest.raises(ConfigError, match="draft_model: knows 2 of the model's 5 tokens"):
        map_vocabulary(vocabulary([b"<end>", b"a", b"x", b"y", b"z"]), draft)


@pytest.mark.parametrize("num_known", [131, 120])
def test_a_model_with_other_ids_drafts_as_well(
    tiny_checkpoint: Callable[..., Any], requests: list[Request], plain: dict[int, list[int]], num_known: int
) -> None:
    """The target itself, its tokens in another order; of those it does not know it drafts none."""
    order = np.random.default_rng(3).permutation(VOCAB)[:num_known]
    shuffled = RenumberedCheckpoint(tiny_checkpoint(0), order.astype(np.int32))
    model = DraftModel(shuffled, vocabulary([TEXTS[i] for i in order], np.flatnonzero(order == 0).tolist()))
    runner = load_runner(config(4), tiny_checkpoint(0), vocabulary=vocabulary(TEXTS), draft_model=model)
    drafted: set[int] = set()

    class Recorder:
        def execute(self, plan: StepPlan) -> StepResult:
            result = runner.execute(plan)
            drafted.update(result.drafts.token_ids.tolist() if result.drafts else ())
            return result

    outputs, sums = generate(Recorder(), requests)
    assert outputs == plain
    assert drafted <= set(order.tolist())
    assert (sums["num_accepted"] == sums["num_drafted"]) == (num_known == VOCAB)
    assert runner.speculator is not None
    assert runner.speculator.state is DraftState.ACTIVE


def test_a_model_that_cannot_draft_is_refused(tiny_checkpoint: Callable[..., Any]) -> None:
    target = tiny_checkpoint(0)
    for draft, message in (
        ({"max_position_embeddings": 128}, "draft_model: was made for 128 positions.*256"),
        ({"vocab_size": 100}, "draft_model: has 100 tokens, the model has 131"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_runner(config(4), target, draft_model=DraftModel(tiny_checkpoint(1, **draft)))
    broken = tiny_checkpoint(1)
    del broken.tensors["model.norm.weight"]
    with pytest.raises((CheckpointError, KeyError)):
        load_runner(config(4), target, draft_model=DraftModel(broken))
    with pytest.raises(ConfigError, match="needs a draft model"):
        load_runner(config(4), target)
