"""Structured logs on standard error. They never hold a prompt or generated text."""

from __future__ import annotations

import logging
import sys
import traceback

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_QUIET_LOGGERS = ("grpc", "asyncio")
"""Tell of every call and callback at their own debug level."""


def configure_logging(level: str, json: bool) -> None:
    """Send structlog's and the standard library's records to standard error, one line each.

    Args:
        level: "debug", "info", "warning" or "error".
        json: one JSON object a line; otherwise lines for people.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _describe_exception,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.PositionalArgumentsFormatter()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _describe_exception(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """Replace an exception by its type and frames: its message may quote what a caller sent."""
    exc_info = event.pop("exc_info", None)
    if not exc_info:
        return event
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
    if isinstance(exc_info, tuple):
        error = exc_info[1]
    if error is not None:
        event["error_type"] = type(error).__qualname__
        event["error_frames"] = [
            f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
        ]
    return event
