"""Heaps that share their items agree with sorted lists."""

from random import Random

import pytest

from foreword.scheduler.heap_forest import HeapForest

EMPTY = -1


def test_items_leave_in_order_of_their_keys() -> None:
    forest = HeapForest(4)
    root = EMPTY
    for item, major, minor in [(0, 5, 1), (1, -5, 2), (2, 5, 0), (3, 2**62, 3)]:
        root = forest.push(root, item, major, minor)
    order = []
    while root != EMPTY:
        order.append(root)
        root = forest.remove(root, root)
    assert order == [1, 2, 0, 3]
    assert forest.size == 0


def test_misuse_is_refused() -> None:
    forest = HeapForest(2)
    root = forest.push(EMPTY, 0, 1, 1)
    for item in (0, -1, 2):
        with pytest.raises(ValueError, match=f"item {item} is in a heap or not below the capacity of 2"):
            forest.push(root, item, 1, 1)
    assert forest.size == 1
    assert forest.is_member(0)
    assert not any(forest.is_member(item) for item in (-1, 1, 2))
    assert [forest.remove(root, item) for item in (-1, 1, 2)] == [root] * 3
    assert forest.size == 1
    with pytest.raises(ValueError, match="capacity"):
        HeapForest(0)


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_calls_matches_sorted_lists(seed: int) -> None:
    random = Random(seed)
    forest = HeapForest(60)
    roots = [EMPTY, EMPTY, EMPTY]
    heaps: list[dict[int, tuple[int, int]]] = [{}, {}, {}]
    for minor in range(3000):
        item, i = random.randrange(60), random.randrange(3)
        owner = next((j for j in range(3) if item in heaps[j]), None)
        assert forest.is_member(item) == (owner is not None)
        if owner is None:
            heaps[i][item] = (random.randint(-9, 9), minor)
            roots[i] = forest.push(roots[i], item, *heaps[i][item])
        elif random.random() < 0.5:
            del heaps[owner][item]
            roots[owner] = forest.remove(roots[owner], item)
        elif heaps[i]:
            first = roots[i]
            del heaps[i][first]
            roots[i] = forest.remove(first, first)
        assert forest.size == sum(map(len, heaps))
        assert roots == [min(heap, key=heap.__getitem__, default=EMPTY) for heap in heaps]
