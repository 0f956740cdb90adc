"""What the command line shows."""

from __future__ import annotations

import sys

from foreword.clients import Generation


def write_line(text: str = "") -> None:
    """Write a line of output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_piece(text: str) -> None:
    """Write a piece of generated text as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_note(text: str) -> None:
    """Write a line for people, next to the output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class LoadProgress:
    """Shows how far the model is loaded: one line that changes on a terminal, one line per stage elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `stage` are complete."""
        if self._is_terminal:
            share = f" {100 * done // total:3d} %" if total > 1 else ""
            sys.stderr.write(f"\r\x1b[Kloading: {stage}{share}")
        elif stage != self._stage:
            sys.stderr.write(f"loading: {stage}\n")
        self._stage = stage
        sys.stderr.flush()

    def finish(self) -> None:
        """Remove the line from a terminal."""
        if self._is_terminal and self._stage:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._stage = ""


def timing_summary(generation: Generation) -> str:
    """One line about a generation's tokens and times."""
    timing, usage = generation.timing, generation.usage
    latency = timing.inter_token_latency
    return (
        f"TTFT {timing.first_token_duration_micros / 1000:.1f} ms "
        f"(queue {timing.queue_duration_micros / 1000:.1f}, prefill {timing.prefill_duration_micros / 1000:.1f}) | "
        f"{timing.output_tokens_per_second:.1f} tokens/s | "
        f"ITL p50 {latency.p50_micros / 1000:.1f} ms, p99 {latency.p99_micros / 1000:.1f} ms | "
        f"{usage.prompt_token_count} tokens in, {usage.output_token_count} out, {generation.finish_reason}"
    )
