"""Forms that outputs must have, and their compilation into grammars for the engine."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from foreword.scheduler.errors import InvalidField
from foreword.service.text import grammar_process
from foreword.service.text.bounded_process import START_LIMIT_S, BoundedProcess, HelperFailed

MAX_CACHED = 256


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of an output.

    Attributes:
        kind: field of `foreword.v1.Constraint`.
        source: its text, of `choices` a JSON list.
    """

    kind: str
    source: str

    @property
    def path(self) -> str:
        """Of the field in a request."""
        return f"constraint.{self.kind}"


class ConstraintCompiler:
    """Compiles constraints for one model, in a process with limits; keeps those used last. One thread compiles."""

    def __init__(self, tokenizer_json: str, vocab_size: int, *, time_limit_s: float = 1.0) -> None:
        """Prepare; the process starts at the first constraint, or by `start`.

        Args:
            tokenizer_json: text of the model's tokenizer.json.
            vocab_size: rows of the model's output head.
            time_limit_s: a constraint that takes longer is refused.
        """
        setup = {"tokenizer": tokenizer_json, "vocab_size": vocab_size}
        self._process = BoundedProcess(grammar_process.__file__, setup, time_limit_s, START_LIMIT_S)
        self._grammars: OrderedDict[Constraint, str] = OrderedDict()
        self._lock = threading.Lock()  # of the grammars

    def start(self) -> None:
        """Start the process now. What keeps it from starting shows when a constraint is compiled."""
        with contextlib.suppress(HelperFailed):
            self._process.start()

    def known(self, constraint: Constraint) -> str | None:
        """The grammar of a constraint that was compiled before and is still kept; any thread may ask."""
        with self._lock:
            if constraint in self._grammars:
                self._grammars.move_to_end(constraint)
            return self._grammars.get(constraint)

    def compile(self, constraint: Constraint) -> str:
        """The grammar of a constraint, for `Request.grammar`.

        Raises:
            InvalidField: it cannot be read, no output can have this form, or it is too complex.
        """
        grammar = self.known(constraint)
        if grammar is not None:
            return grammar
        try:
            compiled: str = self._process.ask({"kind": constraint.kind, "source": constraint.source})["grammar"]
        except HelperFailed as failure:
            raise InvalidField(constraint.path, f"its compilation {failure}") from None
        with self._lock:
            self._grammars[constraint] = compiled
            if len(self._grammars) > MAX_CACHED:
                self._grammars.popitem(last=False)
        return compiled

    def close(self) -> None:
        """End the process."""
        self._process.stop()
