import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.scheduler.block_pool import BlockPool
from foreword.scheduler.prefix_cache import PrefixCache


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(PrefixCache(num_blocks, 16, bytes(16)))


def test_the_block_freed_last_is_given_out_first() -> None:
    pool = new_pool(3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, -1]
    assert pool.num_free == 0
    assert pool.release(0) == 0
    assert pool.release(2) == 0
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [2, 0, -1]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = new_pool(1)
    block = pool.allocate()
    assert pool.retain(block) == 2
    assert pool.release(block) == 1
    assert pool.allocate() == -1
    assert pool.release(block) == 0
    assert pool.allocate() == block


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = new_pool(2)
    block = pool.allocate()
    pool.release(block)
    for misuse in (pool.release, pool.retain):
        with pytest.raises(ValueError, match="block 0 is free"):
            misuse(block)
        for outside in (-1, 2):
            with pytest.raises(IndexError, match="outside the pool of 2"):
                misuse(outside)
    assert pool.num_free == 2
    assert sorted([pool.allocate(), pool.allocate()]) == [0, 1]


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 4))))
def test_counts_match_a_dictionary(calls: list[tuple[str, int]]) -> None:
    pool = new_pool(5)
    held: dict[int, int] = {}
    for name, block in calls:
        if name == "allocate":
            got = pool.allocate()
            assert (got == -1) == (len(held) == 5)
            assert got not in held
            if got >= 0:
                held[got] = 1
        elif block in held:
            held[block] += 1 if name == "retain" else -1
            assert getattr(pool, name)(block) == held[block]
            if held[block] == 0:
                del held[block]
        else:
            with pytest.raises(ValueError, match="is free"):
                getattr(pool, name)(block)
        assert pool.num_free == 5 - len(held)
        assert [pool.ref_count(b) for b in range(5)] == [held.get(b, 0) for b in range(5)]
