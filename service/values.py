"""Kinds of setting values: how each is read, described and shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

AUTO = "auto"
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Kind(Protocol):
    """What all kinds have in common."""

    @property
    def metavar(self) -> str:
        """Stands for a value in help texts."""

    @property
    def allowed(self) -> str:
        """The values allowed, to follow "is not"."""

    def parse(self, raw: Any) -> Any:
        """Turn the text of a flag or variable, or a TOML value, into a setting.

        Raises:
            ValueError: it is not one of the values allowed.
        """

    def show(self, value: Any) -> str:
        """Write a value as it can be given."""


class _Plain:
    def show(self, value: Any) -> str:
        return "none" if value is None else str(value)


class Text(_Plain):
    """Any text that is not empty."""

    allowed = "a text that is not empty"

    def __init__(self, metavar: str) -> None:
        self.metavar = metavar

    def parse(self, raw: Any) -> str:
        """Take the text as it is."""
        if not isinstance(raw, str) or not raw:
            raise ValueError
        return raw


class Choice(_Plain):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.metavar = "{" + ",".join(words) + "}"
        self.allowed = "one of " + ", ".join(words)

    def parse(self, raw: Any) -> str:
        """Take one of the words."""
        if raw not in self.words:
            raise ValueError
        return str(raw)


class Switch(_Plain):
    """Yes or no."""

    metavar = ""
    allowed = "true or false"

    def parse(self, raw: Any) -> bool:
        """Take a boolean or its name."""
        words = {True: True, False: False, "true": True, "1": True, "false": False, "0": False}
        try:
            return words[raw.lower() if isinstance(raw, str) else raw]
        except (KeyError, TypeError):
            raise ValueError from None

    def show(self, value: Any) -> str:
        """Write `true` or `false`."""
        return str(value).lower()


class Integer:
    """A whole number within bounds, or `auto` where the server may choose."""

    metavar = "N"

    def __init__(self, minimum: int, maximum: int = (1 << 31) - 1, auto: bool = False) -> None:
        self.minimum, self.maximum, self.auto = minimum, maximum, auto
        self.allowed = f"an integer from {minimum} to {maximum}" + (f" or {AUTO}" if auto else "")

    def parse(self, raw: Any) -> int | None:
        """Take decimal digits or `auto`, which is `None`."""
        if self.auto and raw == AUTO:
            return None
        value = int(raw) if isinstance(raw, str) else raw
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            raise ValueError
        return value

    def show(self, value: int | None) -> str:
        """Write the number or `auto`."""
        return AUTO if value is None else str(value)


class Float(_Plain):
    """A number within bounds."""

    metavar = "X"

    def __init__(self, minimum: float, maximum: float) -> None:
        self.minimum, self.maximum = minimum, maximum
        self.allowed = f"a number from {minimum:g} to {maximum:.12g}"

    def parse(self, raw: Any) -> float:
        """Take a number or its text."""
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        try:
            value = float(raw)
        except OverflowError:  # of a whole number with hundreds of digits
            raise ValueError from None
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value


class Size:
    """A number of bytes: a whole number with an optional unit, or `auto` where the server may choose."""

    metavar = "SIZE"

    def __init__(self, minimum: int, maximum: int, auto: bool = False) -> None:
        self.minimum, self.maximum, self.auto = minimum, maximum, auto
        self.allowed = f"a size from {self.show(minimum)} to {self.show(maximum)} such as 512MiB" + (
            f" or {AUTO}" if auto else ""
        )

    def parse(self, raw: Any) -> int | None:
        """Take bytes, or a number with unit B, KiB, MiB or GiB, or `auto`, which is `None`."""
        if self.auto and raw == AUTO:
            return None
        match = _SIZE.fullmatch(str(raw).strip())
        if match is None or isinstance(raw, bool):
            raise ValueError
        value = int(match[1]) * _UNITS[match[2]]
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value

    def show(self, value: int | None) -> str:
        """Write the size with the largest unit that divides it."""
        if value is None:
            return AUTO
        unit = next((unit for unit in ("GiB", "MiB", "KiB") if value % _UNITS[unit] == 0), "B")
        return f"{value // _UNITS[unit]}{unit}"


class Weights:
    """Whole numbers by name, as in `gold=4,free=1`; a table in TOML."""

    metavar = "NAME=N,..."

    def __init__(self, maximum: int, is_name: Callable[[str], bool], names: str) -> None:
        self.maximum, self.is_name = maximum, is_name
        self.allowed = f"NAME=N,... with names of {names} and numbers from 1 to {maximum}"

    def parse(self, raw: Any) -> tuple[tuple[str, int], ...]:
        """Take pairs with one number for each name."""
        pairs = raw.items() if isinstance(raw, dict) else [pair.split("=") for pair in str(raw).split(",")]
        weights = {}
        for name, number in pairs:
            weight = int(number) if isinstance(number, str) else number
            if name in weights or not self.is_name(name) or type(weight) is not int or not 1 <= weight <= self.maximum:
                raise ValueError
            weights[name] = weight
        return tuple(weights.items())

    def show(self, value: tuple[tuple[str, int], ...]) -> str:
        """Write pairs."""
        return ",".join(f"{name}={weight}" for name, weight in value) or "none"


class Address(_Plain):
    """Host and port, as in `127.0.0.1:50051`, `localhost:0` or `[::1]:50051`."""

    metavar = "HOST:PORT"
    allowed = "HOST:PORT with a port from 0 to 65535"

    def parse(self, raw: Any) -> str:
        """Take a host, a colon and a port."""
        host, _, port = str(raw).rpartition(":")
        if not re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[^:\s/]+", host) or not re.fullmatch(r"\d{1,5}", port):
            raise ValueError
        if int(port) > 65535:
            raise ValueError
        return str(raw)
