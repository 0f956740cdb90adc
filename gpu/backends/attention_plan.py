"""The work list of the attention kernels: who computes which rows over which part of their context.

A sequence with Q tokens in the step has Q * group query rows for each KV head, token-major. They are cut into tiles: of
`narrow_rows` rows, which one warp computes, or of `wide_rows` rows, which a block computes. A tile's context is cut
into splits of `SPLIT` tokens, always at multiples of it. A tile is one item that covers all its splits, or an item a
split with partial results that `merge_splits` folds. Each row's bits are the same in every case
(gpu/kernels/attention.cuh), so the plan may look at the whole batch: it decides how long a step takes, never what it
computes.

Sources: Ye et al., "FlashInfer" (2025); Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.scheduler.step import BoolArray, Int32Array, Int64Array

SPLIT = 256
"""Tokens in a split: kSplit of gpu/kernels/attention.cuh."""
ITEM_FIELDS = 8
"""query_begin, query_len, context_len, table_row, first_row, split_begin, split_end, partial."""
MERGE_FIELDS = 5
"""token, group_head, partial, stride, num_splits."""
_WIDE_FROM = 2  # a sequence with more rows than this many narrow tiles gets wide ones
_SHARE = 4  # a tile stays whole when it is at most 1 / _SHARE of what each worker has to do


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's attention, for every KV head and layer.

    Attributes:
        narrow: int32 `[N, ITEM_FIELDS]` tiles of `narrow_rows` rows, longest first.
        wide: int32 `[M, ITEM_FIELDS]` tiles of `wide_rows` rows, longest first.
        merges: int32 `[R, MERGE_FIELDS]` rows whose partial results are to be folded.
        num_partials: partial rows used.
    """

    narrow: Int32Array
    wide: Int32Array
    merges: Int32Array
    num_partials: int


@dataclass(frozen=True, slots=True)
class AttentionPlanner:
    """Plans for one model on one device.

    Attributes:
        group: query heads of a KV head, 1 or more.
        num_kv_heads: KV heads; each computes every item.
        window: keys a token sees, itself included; None for all.
        narrow_rows: rows of a narrow tile.
        wide_rows: rows of a wide tile; 0 if there are none.
        num_workers: warps that run at once on the device.
        max_partials: partial rows that its workspace has room for.
    """

    group: int
    num_kv_heads: int
    window: int | None
    narrow_rows: int
    wide_rows: int
    num_workers: int
    max_partials: int

    def plan(self, query_offsets: Int32Array, context_lens: Int32Array, rows: Int32Array) -> AttentionPlan:
        """Cut a step into work.

        Args:
            query_offsets: `[B + 1]` tokens of sequence b are `query_offsets[b]:query_offsets[b + 1]`.
            context_lens: `[B]` tokens of b in the cache, those of the step included.
            rows: `[B]` rows of the block table.
        """
        query_lens = np.diff(query_offsets)
        num_rows = query_lens * self.group
        is_wide = (num_rows > _WIDE_FROM * self.narrow_rows) & (self.wide_rows > 0)
        tile_rows = np.where(is_wide, self.wide_rows, self.narrow_rows)
        num_tiles = -(-num_rows // tile_rows)

        sequence = np.repeat(np.arange(len(rows)), num_tiles)  # of each tile
        first_row = _counts_up(num_tiles) * tile_rows[sequence]
        size = np.minimum(tile_rows[sequence], num_rows[sequence] - first_row)
        start = context_lens[sequence] - query_lens[sequence]
        split_end = (start + (first_row + size - 1) // self.group) // SPLIT + 1
        split_begin = np.zeros_like(split_end)
        if self.window is not None:
            split_begin = np.maximum(0, start + first_row // self.group - self.window + 1) // SPLIT
        num_splits = split_end - split_begin

        order = np.argsort(-num_splits, kind="stable")
        columns = [query_offsets[sequence], query_lens[sequence], context_lens[sequence], rows[sequence]]
        columns += [first_row, split_begin, split_end, size]
        return self._assign(np.stack(columns, axis=1).astype(np.int32)[order], is_wide[sequence][order])

    def _assign(self, tiles: Int32Array, is_wide: BoolArray) -> AttentionPlan:
        """Cut long tiles into splits as far as the workspace goes; `tiles` end with split_begin, split_end, size."""
        split_begin, split_end, size = tiles[:, 5], tiles[:, 6], tiles[:, 7]
        num_splits = split_end - split_begin
        share = num_splits.sum() * self.num_kv_heads / self.num_workers
        wanted = (num_splits > 1) & (num_splits * _SHARE > share)
        partials = np.where(wanted, num_splits * size, 0).astype(np.int64)
        cut = wanted & (np.cumsum(partials) <= self.max_partials)
        partials = np.where(cut, partials, 0)
        first_partial = np.cumsum(partials) - partials

        parts = np.where(cut, num_splits, 1)
        items = np.repeat(tiles, parts, axis=0)
        part = _counts_up(parts)
        is_cut = np.repeat(cut, parts)
        items[is_cut, 5] += part[is_cut]
        items[is_cut, 6] = items[is_cut, 5] + 1
        items[:, 7] = np.where(is_cut, np.repeat(first_partial, parts) + part * items[:, 7], -1)

        rows = np.where(cut, size, 0)
        tile = np.repeat(np.arange(len(tiles)), rows)
        row = _counts_up(rows)
        tile_row = tiles[tile, 4] + row
        merges = [tiles[tile, 0] + tile_row // self.group, tile_row % self.group, first_partial[tile] + row]
        merges += [size[tile], num_splits[tile]]
        wide = np.repeat(is_wide, parts)
        return AttentionPlan(
            narrow=items[~wide],
            wide=items[wide],
            merges=np.stack(merges, axis=1).astype(np.int32),
            num_partials=int(partials.sum()),
        )


def _counts_up(counts: Int64Array) -> Int64Array:
    """0, 1, .. count - 1 for each count, one after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(ends - counts, counts)
