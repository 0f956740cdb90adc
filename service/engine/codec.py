"""Messages to frames and back.

A message is a list of frames: the name of its class, its fields in MessagePack, then one raw frame per array, in the
order of the fields. Among the fields an array is the character of its element type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np

from foreword.scheduler.step import SEQUENCE_UPDATE
from foreword.service.engine.messages import MalformedMessage, Message

_ELEMENT_TYPES = (np.dtype(np.int32), np.dtype(np.float32), SEQUENCE_UPDATE)


class Codec:
    """One end's encoder and decoder; belongs to one thread."""

    def __init__(self) -> None:
        self._arrays: list[bytes] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._decoders: dict[bytes, msgspec.msgpack.Decoder[Message]] = {
            kind.__name__.encode(): msgspec.msgpack.Decoder(kind, dec_hook=self._decode_array)
            for kind in get_args(Message)
        }

    def encode(self, message: Message) -> list[bytes]:
        """Copy a message into frames.

        Raises:
            TypeError: an array is not one-dimensional of int32, float32 or `SEQUENCE_UPDATE`.
        """
        self._arrays = []
        fields = self._encoder.encode(message)
        return [type(message).__name__.encode(), fields, *self._arrays]

    def decode(self, frames: Sequence[bytes]) -> Message:
        """Read a message; its arrays are read-only views of the frames.

        Raises:
            MalformedMessage: unknown kind, missing or superfluous frames, fields or values of the wrong type.
        """
        if len(frames) < 2 or frames[0] not in self._decoders:
            raise MalformedMessage(f"{len(frames)} frames of kind {frames[0][:32] if frames else b''!r}")
        self._arrays = list(frames[2:])
        try:
            message = self._decoders[frames[0]].decode(frames[1])
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"{frames[0].decode()}: {error}") from None
        if self._arrays:
            raise MalformedMessage(f"{frames[0].decode()}: {len(self._arrays)} frames too many")
        return message

    def _encode_array(self, array: object) -> str:
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in _ELEMENT_TYPES:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(
                f"cannot send {kind}: an array must be one-dimensional of int32, float32 or SEQUENCE_UPDATE"
            )
        self._arrays.append(array.tobytes())
        return str(array.dtype.char)

    def _decode_array(self, annotation: Any, element_type: object) -> Any:
        dtype = _element_type(annotation)
        if element_type != dtype.char:
            raise ValueError(f"elements are of type {element_type!r}, not {dtype.char!r}")
        if not self._arrays:
            raise ValueError("no frame is left for this array")
        return np.frombuffer(self._arrays.pop(0), dtype)


@cache
def _element_type(annotation: Any) -> np.dtype[Any]:
    """Of `NDArray[scalar]`; `NDArray[np.void]` means `SEQUENCE_UPDATE`."""
    scalar = get_args(get_args(annotation)[1])[0]
    return SEQUENCE_UPDATE if scalar is np.void else np.dtype(scalar)
