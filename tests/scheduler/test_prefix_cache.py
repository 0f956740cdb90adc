"""Who finds whose blocks, and who must not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request, StoppingParams
from foreword.scheduler.scheduler import Scheduler
from foreword.scheduler.step import FinishReason, StepPlan, StepResult, StepUpdate

New = Callable[..., Scheduler]
Step = Callable[..., tuple[StepPlan, StepUpdate]]

BLOCK = 4


class Server:
    """A scheduler that gives each request a key; requests are lists of token ids."""

    def __init__(self, scheduler: Scheduler, step: Step) -> None:
        self.scheduler = scheduler
        self.step = step
        self.next_key = 0

    def add(self, tokens: list[int], max_output: int = 1, **fields: object) -> int:
        key = self.next_key
        self.next_key += 1
        prompt = np.array(tokens, np.int32)
        self.scheduler.add(Request(key, prompt, StoppingParams(max_output), **fields), 0)
        return key

    def run(self, tokens: list[int], max_output: int = 1, **fields: object) -> tuple[int, list[int]]:
        """Serve one request to its end; prompt tokens that were cached, and all positions that were computed."""
        self.add(tokens, max_output, **fields)
        positions: list[int] = []
        while self.scheduler.has_work:
            plan, update = self.step(self.scheduler)
            positions += plan.positions.tolist()
        return int(update.sequences["num_cached"][0]), positions

    def num_cached_blocks(self) -> int:
        return self.scheduler.load().num_cached_blocks


@pytest.fixture
def new_server(new_scheduler: New, step: Step) -> Callable[..., Server]:
    def build(**settings: int) -> Server:
        defaults = {"num_blocks": 16, "block_size": BLOCK, "max_num_sequences": 4, "max_num_batched_tokens": 64}
        return Server(new_scheduler(**defaults | settings), step)

    return build


NewServer = Callable[..., Server]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 7, 8, 9, 12])
def test_full_blocks_before_the_last_token_are_hits(new_server: NewServer, num_prompt: int) -> None:
    server = new_server()
    prompt = list(range(num_prompt))
    assert server.run(prompt) == (0, prompt)
    num_hits = (num_prompt - 1) // BLOCK * BLOCK  # the last token is computed in any case
    assert server.run(prompt) == (num_hits, prompt[num_hits:])
    assert server.num_cached_blocks() == num_prompt // BLOCK


@pytest.mark.parametrize("num_shared", range(14))
def test_a_hit_ends_with_the_last_block_that_is_equal(new_server: NewServer, num_shared: int) -> None:
    server = new_server()
    server.run(list(range(13)))
    other = list(range(num_shared)) + [50] * (13 - num_shared)
    assert server.run(other)[0] == min(num_shared // BLOCK * BLOCK, 12)


def test_equal_blocks_behind_different_ones_are_no_hits(new_server: NewServer) -> None:
    server = new_server()
    server.run([1, 1, 1, 1, 2, 2, 2, 2, 9])
    assert server.run([3, 3, 3, 3, 2, 2, 2, 2, 9])[0] == 0
    assert server.run([2, 2, 2, 2, 9])[0] == 0
    assert server.run([1, 1, 1, 1, 2, 2, 2, 2, 9])[0] == 8


def test_output_is_cached_as_far_as_it_was_fed_back(new_server: NewServer) -> None:
    server = new_server()
    server.run([1, 2, 3], max_output=6)  # drew 7 six times; the last one was never computed
    assert server.num_cached_blocks() == 2
    assert server.run([1, 2, 3] + [7] * 6)[0] == 8
    assert server.run([1, 2, 3] + [7] * 4 + [8, 8])[0] == 4


def test_salts_part_callers(new_server: NewServer) -> None:
    server = new_server()
    prompt = list(range(9))
    for salt in ("", "a", "b", "aa", "é" * 64):
        assert server.run(prompt, cache_salt=salt)[0] == 0
    for salt in ("", "a", "b", "aa", "é" * 64):
        assert server.run(prompt, cache_salt=salt)[0] == 8


def test_who_bypasses_neither_reads_nor_feeds(new_server: NewServer) -> None:
    server = new_server()
    prompt = list(range(9))
    assert server.run(prompt, max_output=4, bypass_prefix_cache=True)[0] == 0
    assert server.num_cached_blocks() == 0
    server.run(prompt)
    assert server.run(prompt, bypass_prefix_cache=True) == (0, prompt)
    assert server.num_cached_blocks() == 2
    assert server.run(prompt)[0] == 8


def test_rejected_drafts_are_never_cached(new_server: NewServer) -> None:
    server = new_server()
    key = server.add([1, 2], max_output=8)
    server.step(server.scheduler, drafts={0: [20, 21, 22, 23, 24]})
    server.step(server.scheduler, tokens={0: [20, 30]})  # computed 1 2 7 20 and, in vain, 21 22 23 24
    assert server.num_cached_blocks() == 1
    for _ in range(4):
        server.step(server.scheduler)
    assert server.num_cached_blocks() == 2
    server.scheduler.cancel(key)
    server.step(server.scheduler)
    assert server.run([1, 2, 7, 20, 21, 22, 23, 0, 0])[0] == 4
    assert server.run([1, 2, 7, 20, 30, 7, 7, 7, 0])[0] == 8


def test_tokens_of_a_failed_step_are_not_cached(new_server: NewServer) -> None:
    server = new_server(max_num_batched_tokens=4)
    server.add(list(range(8)), max_output=4)
    server.step(server.scheduler)
    assert server.num_cached_blocks() == 1
    update = server.step(server.scheduler, failed=(0,))[1]
    assert update.sequences["finish_reason"].tolist() == [FinishReason.FAILED]
    assert server.num_cached_blocks() == 1


def test_sequences_that_run_together_come_to_share_their_blocks(new_server: NewServer) -> None:
    server = new_server(num_blocks=8)
    prompt = list(range(9))
    for _ in range(2):
        server.add(prompt, max_output=4)
    plan, _ = server.step(server.scheduler)
    assert plan.num_tokens == 18  # nothing was known when they began
    assert server.scheduler.load().num_free_blocks == 8 - 4
    plan, _ = server.step(server.scheduler)
    assert plan.block_table_updates.tolist() == [[1, 0, 0], [1, 1, 1], [1, 2, 5]]  # row 1 holds row 0's blocks now
    assert plan.slot_mapping.tolist() == [2 * BLOCK + 1, 5 * BLOCK + 1]


def test_a_holder_that_ends_leaves_the_blocks_to_the_others(new_server: NewServer) -> None:
    server = new_server(num_blocks=5)
    prompt = list(range(9))
    first = server.add(prompt, max_output=4)
    server.step(server.scheduler)
    server.add([*prompt, 20], max_output=4)
    plan, update = server.step(server.scheduler)
    assert plan.context_lens.tolist() == [10, 10]
    assert update.sequences["num_cached"].tolist() == [0, 8]
    assert server.scheduler.load().num_free_blocks == 1
    server.scheduler.cancel(first)
    server.step(server.scheduler)
    assert server.scheduler.load().num_free_blocks == 2
    assert server.scheduler.load().num_cached_blocks == 2


def test_the_shortfall_is_evicted_oldest_first_and_leaves_before_parents(new_server: NewServer) -> None:
    server = new_server(num_blocks=6)
    old, new = list(range(8)), list(range(100, 108))
    server.run(old)
    server.run(new)
    assert server.num_cached_blocks() == 4
    server.run(list(range(200, 211)))  # three blocks: two that are free, one that is evicted
    assert server.num_cached_blocks() == 3 + 2
    assert server.run([*new, 0])[0] == 8
    server = new_server(num_blocks=6)
    server.run(old)
    server.run(new)
    server.run(list(range(200, 211)))
    assert server.run([*old, 0])[0] == 4  # its second block went, the first is still there


def test_a_hit_is_as_good_as_new(new_server: NewServer) -> None:
    server = new_server(num_blocks=4)
    a, b = [1] * BLOCK, [2] * BLOCK
    server.run(a)
    server.run(b)
    assert server.run([*a, 0])[0] == 4
    server.run([3] * (3 * BLOCK))  # needs three blocks, two are free: b is older than a now
    assert server.run([*a, 0])[0] == 4


def test_idle_hits_are_not_counted_as_room(new_server: NewServer) -> None:
    """A prompt whose cached blocks are the only free ones cannot have them twice."""
    server = new_server(num_blocks=4, max_num_sequences=3)
    prompt = list(range(2 * BLOCK))
    server.run(prompt)
    server.add([50, 51, 52, 53, 54], max_output=3)  # takes the two other blocks
    server.step(server.scheduler)
    assert server.scheduler.load().num_free_blocks == 2
    server.add([*prompt, 9], max_output=1)  # three blocks, of which two are cached and free
    plan, _ = server.step(server.scheduler)
    assert plan.num_sequences == 1
    while server.scheduler.has_work:
        update = server.step(server.scheduler)[1]
    assert update.sequences["num_cached"].tolist() == [8]


def test_held_hits_take_no_room(new_server: NewServer) -> None:
    server = new_server(num_blocks=6, max_num_sequences=3)
    prompt = list(range(3 * BLOCK))
    server.add([*prompt, 8], max_output=4)
    server.step(server.scheduler)
    assert server.scheduler.load().num_free_blocks == 2
    server.add([*prompt, 9], max_output=4)  # four blocks, three of them held: one must be free, and one for each runs
    plan, _ = server.step(server.scheduler)
    assert plan.num_sequences == 2
    assert server.scheduler.load().num_free_blocks == 1


def test_a_preempted_sequence_finds_its_own_blocks(new_server: NewServer) -> None:
    server = new_server(num_blocks=4, block_size=2, max_num_sequences=2)
    records = {}
    for start in (100, 200):
        server.add([start, start + 1], max_output=5)
    while server.scheduler.has_work:
        update = server.step(server.scheduler)[1]
        records |= {int(record["request_key"]): record.copy() for record in update.sequences}
    assert records[1]["num_preemptions"] == 1
    assert records[1]["num_cached"] == 0  # what it finds of its own was computed for it
    assert records[1]["num_recomputed"] == 2  # of four, of which two were cached still
    assert [record["num_prompt_computed"] for record in records.values()] == [2, 2]


def test_what_was_cached_is_counted_once(new_server: NewServer) -> None:
    server = new_server(num_blocks=5, block_size=2, max_num_sequences=2)
    server.run([200, 201, 0])
    server.add([100, 101, 102], max_output=6)
    server.add([200, 201, 202, 203], max_output=5)
    seen = []
    while server.scheduler.has_work:
        update = server.step(server.scheduler)[1]
        seen += [(int(r["num_cached"]), int(r["num_preemptions"])) for r in update.sequences if r["request_key"] == 2]
    assert {num_cached for num_cached, _ in seen} == {2}
    assert seen[-1] == (2, 1)


def test_progress_tells_of_hits_before_the_first_result(
    new_server: NewServer, result_of: Callable[..., StepResult]
) -> None:
    server = new_server()
    prompt = list(range(9))
    server.run(prompt)
    key = server.add(prompt)
    plan = server.scheduler.schedule(1)
    server.scheduler.cancel(key)
    assert plan.num_tokens == 1
    record = server.scheduler.apply(result_of(plan)).sequences[0]
    assert (record["num_cached"], record["num_prompt_computed"]) == (8, 8)
    server.scheduler.check_invariants()


def test_equal_hashes_of_different_prefixes_are_misses(step: Step) -> None:
    """All hashes collide; only salts, tokens and parents tell blocks apart."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=64, block_size=BLOCK))
    scheduler.prefix_cache.hash_mask = 0
    server = Server(scheduler, step)
    prompts = [
        ("", [1] * 4 + [2] * 4 + [9]),
        ("a", [1] * 4 + [2] * 4 + [9]),  # another salt
        ("", [3] * 4 + [2] * 4 + [9]),  # another parent
        ("", [1] * 4 + [4] * 4 + [9]),  # other tokens: only its second block is new
    ]
    assert [server.run(prompt, cache_salt=salt)[0] for salt, prompt in prompts] == [0, 0, 0, 4]
    assert scheduler.load().num_cached_blocks == 7
    assert [server.run(prompt, cache_salt=salt)[0] for salt, prompt in prompts] == [8] * 4


@pytest.mark.parametrize("hash_mask", [0, 3, 2**64 - 1])
def test_thousands_of_evictions_keep_the_table_exact(step: Step, hash_mask: int) -> None:
    """Insertion, deletion and wrap-around of the hash table under a few hash values only, and under all."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=13, block_size=2, max_num_sequences=3))
    scheduler.prefix_cache.hash_mask = hash_mask
    server = Server(scheduler, step)
    random = Random(hash_mask)
    num_cached = 0
    for _ in range(600):
        prompt = [random.randrange(2) for _ in range(random.randint(1, 12))]
        num_cached += server.run(prompt, cache_salt=random.choice(["", "a", "b"]))[0]
    assert num_cached > 300


def test_the_key_changes_every_hash_and_no_plan(step: Step) -> None:
    plans = []
    for key in (bytes(16), bytes(range(16))):
        server = Server(Scheduler(SchedulerConfig(num_blocks=8, block_size=BLOCK, hash_key=key)), step)
        server.run(list(range(9)))
        plans.append(server.run(list(range(9))))
    assert plans[0] == plans[1] == (8, [8])


def test_the_key_is_16_secret_bytes() -> None:
    with pytest.raises(ValueError, match="hash_key must have 16 bytes, has 3"):
        SchedulerConfig(num_blocks=1, hash_key=b"abc")
    assert "hash_key" not in repr(SchedulerConfig(num_blocks=1, hash_key=b"0123456789abcdef"))
