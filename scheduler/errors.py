"""Errors of the domain: what can be wrong with a request or with the engine.

Every error carries what a caller needs to act on (field, limit, count) as attributes; `service.status` holds the one
table that maps them to gRPC codes.
"""

from __future__ import annotations


class ForewordError(Exception):
    """Base of all errors of the domain.

    Attributes:
        reason: UPPER_SNAKE_CASE identifier of the kind of error, stable across releases (AIP-193 `ErrorInfo.reason`).
        metadata: facts about this occurrence, for machines; values are strings.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(ForewordError):
    """A request field has a value that cannot be used, or asks for something that is not supported."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)
        self.field = field
        self.description = message


class ContextLengthExceeded(ForewordError):
    """The prompt and the requested output do not fit the context window, or could never fit the KV cache."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class QueueFull(ForewordError):
    """The waiting queue is at its bound in requests or in tokens; try again later."""

    reason = "QUEUE_FULL"


class DeadlineInfeasible(ForewordError):
    """The deadline has passed, or would pass before the first token."""

    reason = "DEADLINE_INFEASIBLE"


class DuplicateRequest(ForewordError):
    """A request with this id is active."""

    reason = "REQUEST_ID_ACTIVE"


class UnknownRequest(ForewordError):
    """No active or recently finished request has this id."""

    reason = "REQUEST_NOT_FOUND"


class UnknownModel(ForewordError):
    """No served model has this name."""

    reason = "MODEL_NOT_FOUND"


class ClientStalled(ForewordError):
    """The client did not read its stream for longer than the stall budget; the generation was ended."""

    reason = "CLIENT_STALLED"


class EngineUnavailable(ForewordError):
    """The engine is loading, draining or restarting."""

    reason = "ENGINE_UNAVAILABLE"


class EngineFault(ForewordError):
    """The engine failed while it worked on this request."""

    reason = "ENGINE_ERROR"


class CheckpointError(ForewordError):
    """A model file is missing, damaged or of a kind that cannot be loaded."""

    reason = "CHECKPOINT_ERROR"


class ConfigError(ForewordError):
    """A setting is unknown or has a value that cannot be used."""

    reason = "CONFIG_ERROR"


class DeviceError(ForewordError):
    """A device is not there, cannot run its kernels, or has too little memory."""

    reason = "DEVICE_ERROR"
