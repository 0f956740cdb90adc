"""The version of Foreword."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """Version of the installed distribution; `0+source` where Foreword runs from its source tree."""
    try:
        return metadata.version("foreword")
    except metadata.PackageNotFoundError:
        return "0+source"
