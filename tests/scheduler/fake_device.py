"""A device that answers from a script and checks every plan against the KV cache that the plans before it describe."""

from __future__ import annotations

from random import Random
from zlib import crc32

import numpy as np

from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.request import Request
from foreword.scheduler.step import Drafts, FinishReason, StepPlan, StepResult

NUM_TOKEN_IDS = 40
UNKNOWN_TOKEN = -1  # in a plan made ahead: what the row has drawn last


def scripted_token(key: int, index: int) -> int:
    """What a sequence says as its output token `index`, whatever came before."""
    return hash((key, index)) % NUM_TOKEN_IDS


def script_of(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """All that a sequence says when nothing ends it early, and why it stops then."""
    tokens: list[int] = []
    stopping = request.stopping
    while True:
        tokens.append(scripted_token(request.request_key, len(tokens)))
        if len(tokens) > stopping.min_output_tokens:
            if tokens[-1] in stopping.eos_token_ids:
                return tokens, FinishReason.EOS
            if tokens[-1] in stopping.stop_token_ids:
                return tokens, FinishReason.STOP_TOKEN
        if len(request.prompt_token_ids) + len(tokens) == max_model_len:
            return tokens, FinishReason.CONTEXT_LIMIT
        if len(tokens) == stopping.max_output_tokens:
            return tokens, FinishReason.LENGTH


class FakeDevice:
    """Keeps for every slot a hash of all tokens up to it, so that one comparison tells whether a context is right.

    Attributes:
        failed: keys of sequences that it has reported as failed.
    """

    def __init__(self, config: SchedulerConfig, random: Random, acceptance: float, failure_rate: float) -> None:
        self.random = random
        self.acceptance = acceptance
        self.failure_rate = failure_rate
        self.block_size = config.block_size
        self.slots = [0] * (config.num_blocks * config.block_size)
        self.block_tables = [[-1] * config.max_blocks_per_sequence for _ in range(config.max_num_sequences)]
        self.requests: dict[int, Request] = {}
        self.drawn = [UNKNOWN_TOKEN] * config.max_num_sequences
        self.generations = [0] * config.max_num_sequences
        self.hashes: dict[int, list[int]] = {}
        self.failed: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a plan."""
        for row, index, block in plan.block_table_updates.tolist():
            self.block_tables[row][index] = block
        for row, request in plan.admitted:
            self.requests[row] = request
            self.generations[row] += 1
        slots = plan.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens share a slot"
        token_ids, positions = plan.token_ids.tolist(), plan.positions.tolist()
        offsets, logits_offsets = plan.query_offsets.tolist(), plan.logits_offsets.tolist()
        outputs: list[list[int]] = []
        drafts: list[list[int]] = []
        failed: list[bool] = []
        for b, row in enumerate(plan.rows.tolist()):
            assert plan.generations[b] == self.generations[row], "a row was given out without an admission"
            start, end = offsets[b], offsets[b + 1]
            assert positions[start:end] == list(range(plan.context_lens[b] - (end - start), plan.context_lens[b]))
            assert start < end, "a sequence takes part without a token"
            for token_id, position, slot in zip(
                token_ids[start:end], positions[start:end], slots[start:end], strict=True
            ):
                assert slot == self.slot(row, position), "a token goes elsewhere than its block table says"
                if token_id == UNKNOWN_TOKEN:
                    assert not self.requests[row].needs_last_token
                    token_id = self.drawn[row]
                before = self.slots[self.slot(row, position - 1)] if position else self.root(self.requests[row])
                self.slots[slot] = hash((before, token_id))
            num_logits = logits_offsets[b + 1] - logits_offsets[b]
            num_drafts = max(0, num_logits - 1)
            known = int(plan.context_lens[b]) - num_drafts
            key = self.requests[row].request_key
            if key not in self.failed:  # what has failed drew no token, for which a plan made ahead has room
                assert self.slots[self.slot(row, known - 1)] == self.hash_of(row, known), f"{key} lacks its context"
            is_failed = self.random.random() < self.failure_rate
            if is_failed:
                self.failed.add(key)
            failed.append(is_failed)
            outputs.append(
                [] if is_failed or not num_logits else self.verify(row, known, token_ids[end - num_drafts : end])
            )
            if outputs[-1]:
                self.drawn[row] = outputs[-1][-1]
            drafts.append(self.propose(row, known + len(outputs[-1])) if outputs[-1] else [])
        flat = np.array([token for tokens in outputs for token in tokens], np.int32)
        return StepResult(
            plan.step_id,
            offsets_of(outputs),
            flat,
            -flat.astype(np.float32),
            np.array(failed, np.bool_),
            drafts=Drafts(offsets_of(drafts), np.array([token for tokens in drafts for token in tokens], np.int32)),
        )

    def verify(self, row: int, known: int, drafts: list[int]) -> list[int]:
        """The next token after `known` ones, and one more for every draft that was right."""
        request = self.requests[row]
        first = known - len(request.prompt_token_ids)
        tokens = [scripted_token(request.request_key, first)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(scripted_token(request.request_key, first + len(tokens)))
        return tokens

    def propose(self, row: int, known: int) -> list[int]:
        """Some drafts behind `known` tokens, right until one is not."""
        request = self.requests[row]
        first = known - len(request.prompt_token_ids)
        drafts = [scripted_token(request.request_key, first + i) for i in range(self.random.choice([0, 0, 1, 3, 6]))]
        return [token if self.random.random() < self.acceptance else NUM_TOKEN_IDS for token in drafts]

    def slot(self, row: int, position: int) -> int:
        """Where a position of a row is."""
        return self.block_tables[row][position // self.block_size] * self.block_size + position % self.block_size

    def root(self, request: Request) -> int:
        """Hash of no tokens: nobody may share what another salt, or nobody, may see."""
        owner = request.request_key if request.bypass_prefix_cache else -1
        return hash((crc32(request.cache_salt.encode(errors="surrogateescape")), owner))

    def hash_of(self, row: int, known: int) -> int:
        """Hash of the first `known` tokens that the sequence should have."""
        request = self.requests[row]
        hashes = self.hashes.setdefault(request.request_key, [self.root(request)])
        num_prompt = len(request.prompt_token_ids)
        while len(hashes) <= known:
            i = len(hashes) - 1
            token = (
                int(request.prompt_token_ids[i])
                if i < num_prompt
                else scripted_token(request.request_key, i - num_prompt)
            )
            hashes.append(hash((hashes[-1], token)))
        return hashes[known]


def offsets_of(rows: list[list[int]]) -> np.ndarray:
    """Where each row begins, and the end."""
    return np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
