"""Recorded steps of the CUDA device: a step of few tokens costs one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from foreword.gpu.backends.cuda_attention import CudaAttention, CudaBatch, Geometry
from foreword.gpu.batch import Batch
from foreword.gpu.kernels.launcher import Driver

SIZES = (8, 32, 128, 256)
"""Tokens that steps are padded to. Products are padded anyway, so more sizes would gain little."""

Model = Callable[[Batch[torch.Tensor]], torch.Tensor]


def padded_size(num_tokens: int) -> int:
    """The least of `SIZES` with room for so many tokens; 0 if there is none."""
    return next((size for size in SIZES if num_tokens <= size), 0)


class StepGraphs:
    """Recordings of a model, by the sizes of the arrays that it reads.

    Everything that changes from step to step lies in device memory: `StagingBuffer` puts arrays of equal sizes at equal
    addresses. A recording that the buffer has outgrown is recorded again.
    """

    def __init__(self, driver: Driver, attention: CudaAttention) -> None:
        self._driver = driver
        self._attention = attention
        self._geometries: list[Geometry] = []
        self._recordings: dict[tuple[int, ...], Callable[[], torch.Tensor]] = {}

    def run(self, model: Model, batch: CudaBatch, *inputs: int) -> torch.Tensor:
        """Run the model on a padded batch; see `Backend.compute`.

        Args:
            model: the same one for equal inputs.
            batch: from the last upload.
            inputs: sizes and addresses that the model depends on besides those of the batch.
        """
        for geometry in self._geometries:
            batch.work[geometry] = self._attention.plan(batch, geometry)
        recording = self._recordings.get(self._key(batch, inputs)) if self._geometries else None
        if recording is not None:
            return recording()
        logits = model(batch)  # also compiles, plans and allocates what a recording cannot
        self._geometries = list(batch.work)
        self._recordings[self._key(batch, inputs)] = self._driver.record(lambda: model(batch))
        return logits

    def _key(self, batch: CudaBatch, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Every size and address that a recording depends on; an empty tensor has no address."""
        key = [*inputs, batch.padded_to, batch.token_ids.data_ptr()]
        for geometry in self._geometries:
            work = batch.work[geometry]
            key += [len(work.narrow), len(work.wide), len(work.merges), work.num_narrow.data_ptr()]
        return tuple(key)
