from random import Random

import pytest

from foreword.scheduler.indexed_heap import IndexedHeap


def test_items_leave_in_order_of_their_keys() -> None:
    heap = IndexedHeap(4)
    for item, major, minor in [(0, 5, 1), (1, -5, 2), (2, 5, 0), (3, 2**62, 3)]:
        heap.push(item, major, minor)
    assert heap.top_major() == -5
    assert [heap.pop() for _ in range(5)] == [1, 2, 0, 3, -1]
    assert heap.top_major() == 0


def test_misuse_is_refused() -> None:
    heap = IndexedHeap(2)
    heap.push(0, 1, 1)
    for item in (0, -1, 2):
        with pytest.raises(ValueError, match=f"item {item} is a member or not below the capacity of 2"):
            heap.push(item, 1, 1)
    assert not heap.remove(1)
    assert not heap.remove(-1)
    assert not heap.remove(2)
    assert heap.size == 1
    with pytest.raises(ValueError, match="capacity"):
        IndexedHeap(0)


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_calls_matches_a_sorted_list(seed: int) -> None:
    random = Random(seed)
    heap = IndexedHeap(60)
    members: dict[int, tuple[int, int]] = {}
    for minor in range(3000):
        item, name = random.randrange(60), random.choice(["push", "push", "push", "remove", "pop"])
        if name == "push" and item not in members:
            members[item] = (random.randint(-9, 9), minor)
            heap.push(item, *members[item])
        elif name == "remove":
            assert heap.remove(item) == (members.pop(item, None) is not None)
        elif name == "pop":
            first = min(members, key=members.__getitem__, default=-1)
            assert heap.pop() == first
            members.pop(first, None)
        assert heap.size == len(members)
        assert heap.top_major() == min(members.values(), default=(0, 0))[0]
    assert [heap.pop() for _ in range(len(members))] == sorted(members, key=members.__getitem__)
