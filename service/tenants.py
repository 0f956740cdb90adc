"""Who shares the server: names that callers give, trusted as the network in front of the server is trusted."""

from __future__ import annotations

import re

TENANT_KEY = "foreword-tenant"
"""Metadata of an RPC that names its tenant."""

TENANT_NAMES = "1 to 64 of the characters A-Z a-z 0-9 . _ -"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_tenant_name(text: str) -> bool:
    """Whether a text is one of `TENANT_NAMES`."""
    return _NAME.fullmatch(text) is not None


def cache_scope(tenant: str, cache_salt: str) -> str:
    """Salt that neither another tenant nor another salt of this one leads to.

    Args:
        tenant: holds no NUL.
        cache_salt: any text.
    """
    return f"{tenant}\0{cache_salt}" if tenant or cache_salt else ""
