"""Blocks of the KV cache and the prefix cache once more in plain Python, for the reference scheduler."""

from __future__ import annotations

Prefix = tuple[str, tuple[int, ...]]
"""Cache salt, and all tokens up to the end of a block."""


class ReferenceBlocks:
    """Which blocks are free, held or cached.

    Attributes:
        block_size: tokens per block.
        free: blocks that hold nothing; the last one goes next.
        idle: cached blocks that no sequence holds; the first one is evicted next.
        num_holders: of each block.
        blocks: block of each cached prefix.
        prefixes: the other way round.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(reversed(range(num_blocks)))
        self.idle: list[int] = []
        self.num_holders = [0] * num_blocks
        self.blocks: dict[Prefix, int] = {}
        self.prefixes: dict[int, Prefix] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self.free) + len(self.idle)

    def take(self) -> int:
        """Hold a free block, evicting what is cached in it."""
        if self.free:
            block = self.free.pop()
        else:
            block = self.idle.pop(0)
            del self.blocks[self.prefixes.pop(block)]
        self.num_holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Hold a cached block."""
        if block in self.idle:
            self.idle.remove(block)
        self.num_holders[block] += 1

    def release(self, block: int) -> None:
        """Let go of a block."""
        self.num_holders[block] -= 1
        if self.num_holders[block] == 0:
            (self.idle if block in self.prefixes else self.free).append(block)

    def hits(self, salt: str, tokens: list[int]) -> list[int]:
        """Cached blocks that hold the first of these tokens, the last one never among them."""
        hits = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self.blocks.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            hits.append(block)
        return hits

    def cache(self, block: int, salt: str, tokens: list[int]) -> int:
        """Keep a held block, the last of these tokens; returns the block to hold from now on."""
        prefix = (salt, tuple(tokens))
        if prefix not in self.blocks:
            self.blocks[prefix] = block
            self.prefixes[block] = prefix
            return block
        self.hold(self.blocks[prefix])
        self.release(block)
        return self.blocks[prefix]

    def check_invariants(self, held: list[int]) -> None:
        """Every block is free, idle or held by the tables that `held` joins."""
        num_blocks = len(self.num_holders)
        assert sorted([*set(held), *self.free, *self.idle]) == list(range(num_blocks))
        assert self.num_holders == [held.count(block) for block in range(num_blocks)]
        assert {block: prefix for prefix, block in self.blocks.items()} == self.prefixes
        assert set(self.idle) <= set(self.prefixes)
        assert set(self.free).isdisjoint(self.prefixes)
        for salt, tokens in self.blocks:
            parent = tokens[: -self.block_size]
            assert not parent or (salt, parent) in self.blocks
