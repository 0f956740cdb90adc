"""Makes the speculator that a configuration asks for."""

from __future__ import annotations

from foreword.gpu.config import DeviceConfig
from foreword.gpu.speculative.controller import DraftController
from foreword.gpu.speculative.drafter import Drafter
from foreword.gpu.speculative.hybrid_drafter import HybridDrafter
from foreword.gpu.speculative.ngram_drafter import NgramDrafter
from foreword.gpu.speculative.speculator import Speculator
from foreword.gpu.speculative.suffix_drafter import SuffixDrafter
from foreword.scheduler.errors import ConfigError


def open_speculator(config: DeviceConfig, vocab_size: int, draft_model: Drafter | None = None) -> Speculator | None:
    """The speculator of a device; `None` when speculation is off.

    Args:
        config: whether to speculate, and how.
        vocab_size: token ids are below it.
        draft_model: the drafter "draft-model".

    Raises:
        ConfigError: that drafter is asked for and not there.
    """
    if config.speculation == "off":
        return None
    if config.speculation == "draft-model" and draft_model is None:
        raise ConfigError("speculation: 'draft-model' needs a draft model")
    drafter = draft_model or _open_drafter(config, vocab_size)
    controller = None
    if config.speculation == "auto":
        max_confidence = drafter.max_confidence + 1  # that of grammars
        controller = DraftController(config.max_num_sequences, config.max_num_batched_tokens, max_confidence)
    return Speculator(
        drafter,
        controller,
        max_num_sequences=config.max_num_sequences,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=vocab_size,
    )


def _open_drafter(config: DeviceConfig, vocab_size: int) -> Drafter:
    num_rows, num_drafts = config.max_num_sequences, config.max_draft_tokens
    if config.speculation == "ngram":
        return NgramDrafter(num_rows, config.max_model_len, num_drafts, vocab_size)
    suffix = SuffixDrafter(num_rows, config.max_model_len, num_drafts, vocab_size)
    if config.speculation != "hybrid":
        return suffix
    return HybridDrafter(
        (NgramDrafter(num_rows, config.max_model_len, num_drafts, vocab_size), suffix), num_rows, num_drafts
    )
