from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foreword.scheduler.errors import DuplicateRequest, EngineUnavailable, UnknownRequest
from foreword.service.frontend import registry
from foreword.service.frontend.registry import GenerationRegistry


def generation(request_id: str) -> Any:
    """As much of a generation as the registry looks at."""
    return SimpleNamespace(settings=SimpleNamespace(request_id=request_id), is_over=False, cancel=lambda: None)


async def test_ids_of_ended_generations_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_RECENT", 3)
    generations = GenerationRegistry()
    for index in range(5):
        each = generation(f"r{index}")
        generations.add(each)
        assert generations.cancel(f"r{index}")
        generations.remove(each, remember=True)
        assert not generations.cancel(f"r{index}")
    assert not generations.cancel("r2")
    with pytest.raises(UnknownRequest):
        generations.cancel("r1")


async def test_a_generation_that_was_never_admitted_is_not_remembered() -> None:
    generations = GenerationRegistry()
    each = generation("r")
    generations.add(each)
    with pytest.raises(DuplicateRequest):
        generations.check_free("r")
    generations.remove(each, remember=False)
    generations.check_free("r")
    with pytest.raises(UnknownRequest):
        generations.cancel("r")


async def test_a_closed_registry_lets_nobody_in() -> None:
    generations = GenerationRegistry()
    generations.is_closed = True
    with pytest.raises(EngineUnavailable):
        generations.check_free("r")
    await generations.wait_until_empty()
