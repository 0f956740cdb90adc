"""A finished generation, and how it is put together from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.clients.message import Message
from foreword.v1.generation_pb2 import GenerationEvent, GenerationFinished, GenerationStarted, Output, PromptDelta
from foreword.v1.generation_service_pb2 import GenerateTextResponse
from foreword.v1.stopping_pb2 import FinishReason
from foreword.v1.timing_pb2 import GenerationTiming
from foreword.v1.usage_pb2 import Usage


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that has ended.

    The properties without an index speak of the first output, the only one unless `output_count` asked for more.

    Attributes:
        started: what was in effect, the seed included.
        prompt: the prompt, when `echo_prompt` or `prompt_logprobs` asked for it.
        outputs: by output index.
        finished: usage and timing.
    """

    started: GenerationStarted
    prompt: PromptDelta
    outputs: tuple[Output, ...]
    finished: GenerationFinished

    @classmethod
    def from_response(cls, response: GenerateTextResponse) -> Generation:
        """The generation that a unary response holds."""
        return cls(response.started, response.prompt, tuple(response.outputs), response.finished)

    @property
    def request_id(self) -> str:
        """The caller's id, or the one that the server made."""
        return self.started.request_id

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.outputs[0].content.text

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of `text`."""
        return self.outputs[0].content.token_ids

    @property
    def logprobs(self) -> Sequence[float]:
        """Log probabilities parallel to `token_ids`, when `logprobs` asked for them."""
        return self.outputs[0].content.logprobs

    @property
    def finish_reason(self) -> str:
        """Why it ended, without the enum's prefix: "EOS", "LENGTH", ..."""
        return FinishReason.Name(self.outputs[0].finished.finish_reason).removeprefix("FINISH_REASON_")

    @property
    def message(self) -> Message:
        """`text` as the assistant's turn, to append to a conversation."""
        return Message("assistant", self.text)

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return self.finished.usage

    @property
    def timing(self) -> GenerationTiming:
        """Durations from receipt of the request."""
        return self.finished.timing


class GenerationBuilder:
    """Collects the events of one generation."""

    def __init__(self) -> None:
        self._started = GenerationStarted()
        self._prompt = PromptDelta()
        self._prompt_texts: list[str] = []
        self._outputs: defaultdict[int, Output] = defaultdict(Output)
        self._output_texts: defaultdict[int, list[str]] = defaultdict(list)
        self._finished = GenerationFinished()

    def add(self, event: GenerationEvent) -> None:
        """Take the next event."""
        match event.WhichOneof("event"):
            case "started":
                self._started = event.started
            case "prompt_delta":
                self._prompt_texts.append(event.prompt_delta.text)
                self._prompt.MergeFrom(event.prompt_delta)
                self._prompt.first_position = 0
            case "output_delta":
                delta = event.output_delta
                self._output_texts[delta.output_index].append(delta.text)
                self._outputs[delta.output_index].content.MergeFrom(delta)
            case "output_finished":
                self._outputs[event.output_finished.output_index].finished.CopyFrom(event.output_finished)
            case "finished":
                self._finished = event.finished

    def build(self) -> Generation:
        """The generation, once its `finished` event has been added."""
        self._prompt.text = "".join(self._prompt_texts)
        for index, output in self._outputs.items():
            output.content.output_index = index
            output.content.text = "".join(self._output_texts[index])
        outputs = tuple(output for _, output in sorted(self._outputs.items()))
        return Generation(self._started, self._prompt, outputs, self._finished)
