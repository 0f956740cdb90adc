"""A checkpoint that drafts for another one: whether it can, and its tokens in the other's numbering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.gpu.checkpoint.checkpoint import Checkpoint
from foreword.gpu.config import DeviceConfig
from foreword.gpu.guided.grammar import GrammarVocabulary
from foreword.gpu.models.decoder import Decoder
from foreword.gpu.models.registry import family
from foreword.gpu.speculative.model_drafter import ModelDrafter
from foreword.scheduler.errors import ConfigError
from foreword.scheduler.step import Int32Array

MIN_SHARED = 0.5
"""Share of the target's tokens that a draft model must know."""
_TOKEN_TABLES = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts.

    Attributes:
        checkpoint: of it.
        vocabulary: of it; None for one that is the target's own.
    """

    checkpoint: Checkpoint
    vocabulary: GrammarVocabulary | None = None

    def load(self, config: DeviceConfig, target: Decoder[Any], vocabulary: GrammarVocabulary | None) -> ModelDrafter:
        """Put it on the target's device.

        Args:
            config: of the device.
            target: the model it drafts for.
            vocabulary: of the target.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: it cannot draft for this target.
        """
        model, backend = family(self.checkpoint), target.backend
        draft_config = model.read_config(self.checkpoint)
        if draft_config.max_position_embeddings < config.max_model_len:
            raise ConfigError(
                f"draft_model: was made for {draft_config.max_position_embeddings} positions, "
                f"sequences may have {config.max_model_len}; lower max_model_len"
            )
        checkpoint, is_mapped = self.checkpoint, None
        if self.vocabulary and vocabulary and self.vocabulary.tokens != vocabulary.tokens:
            token_ids = map_vocabulary(vocabulary, self.vocabulary)
            checkpoint, is_mapped = RenumberedCheckpoint(self.checkpoint, token_ids), token_ids >= 0
            draft_config = model.read_config(checkpoint)
        if draft_config.vocab_size != target.config.vocab_size:
            raise ConfigError(
                f"draft_model: has {draft_config.vocab_size} tokens, the model has {target.config.vocab_size}"
            )
        weights = model.load_weights(checkpoint, draft_config, backend, lambda loaded, total: None)
        return ModelDrafter(config, Decoder(draft_config, weights, backend, config.max_model_len), is_mapped)


def map_vocabulary(target: GrammarVocabulary, draft: GrammarVocabulary) -> Int32Array:
    """The draft model's token for each of the target's `[V]`, which is the one of the same text; -1 for none.

    Raises:
        ConfigError: they have too little in common.
    """
    special_ids = set(draft.special_token_ids)
    known = {(text, i in special_ids): i for i, text in reversed(list(enumerate(draft.tokens))) if text}
    special_ids = set(target.special_token_ids)
    token_ids = np.array([known.get((text, i in special_ids), -1) for i, text in enumerate(target.tokens)], np.int32)
    num_shared = int((token_ids >= 0).sum())
    if num_shared < MIN_SHARED * target.size:
        raise ConfigError(
            f"draft_model: knows {num_shared} of the model's {target.size} tokens; half of them are needed"
        )
    return token_ids


class RenumberedCheckpoint(Checkpoint):
    """A checkpoint whose tokens have other ids; rows of tokens that it does not have are zero."""

    def __init__(self, checkpoint: Checkpoint, token_ids: Int32Array) -> None:
        """Renumber: `token_ids[i]` is the checkpoint's token that becomes token i, -1 for none."""
        self.path = checkpoint.path
        self.architecture = checkpoint.architecture
        self.config = {**checkpoint.config, "vocab_size": len(token_ids)}
        self.eos_token_ids = ()
        self.chat_template = None
        self._checkpoint = checkpoint
        self._token_ids = token_ids

    def tensor_names(self) -> frozenset[str]:
        """Those of the checkpoint."""
        return self._checkpoint.tensor_names()

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor of the checkpoint, with its rows in the new order if they belong to tokens."""
        tensor = self._checkpoint.tensor(name)
        if name not in _TOKEN_TABLES:
            return tensor
        renumbered = tensor[np.maximum(self._token_ids, 0)]
        renumbered[self._token_ids < 0] = 0
        return renumbered

    def tokenizer_json(self) -> str:
        """The checkpoint's own, in its own numbering."""
        return self._checkpoint.tokenizer_json()
