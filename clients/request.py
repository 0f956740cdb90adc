"""Builds requests from what a caller gave."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

Request = TypeVar("Request", bound=Message)


def build(kind: type[Request], **fields: Any) -> Request:
    """A message with these fields.

    Raises:
        ValueError: a value that its field cannot hold; names the field.
        TypeError: a value of the wrong type; names the field.
    """
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except UnicodeEncodeError:
                raise ValueError(f"{name}: not valid Unicode: it has a surrogate") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            except TypeError as error:
                raise TypeError(f"{name}: found {type(value).__name__}: {error}") from None
        raise
