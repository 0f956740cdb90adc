from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreword.clients.channel import tenant_metadata
from foreword.service.tenants import TENANT_KEY, TENANT_NAMES, cache_scope, is_tenant_name

TENANTS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True) | st.just("")
SALTS = st.text(max_size=8) | st.sampled_from(["a\0b", "\0", "\0\0"])


@example([("a", "b"), ("", "a\0b")])
@given(st.lists(st.tuples(TENANTS | st.sampled_from(["a", "b"]), SALTS), min_size=2, max_size=2, unique=True))
def test_no_two_callers_with_different_tenants_or_salts_share_a_scope(pairs: list[tuple[str, str]]) -> None:
    one, other = (cache_scope(*pair) for pair in pairs)
    assert one != other


def test_who_names_neither_shares_with_all_others_like_that() -> None:
    assert cache_scope("", "") == ""


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        *((name, True) for name in ("a", "A-z_0.9", "x" * 64)),
        *((name, False) for name in ("", "x" * 65, "a b", "é", "a\n", "a=1", "a,b")),
    ],
)
def test_clients_and_server_agree_on_names(name: str, is_name: bool) -> None:
    assert is_tenant_name(name) is is_name
    if is_name:
        assert tenant_metadata(name) == ((TENANT_KEY, name),)
    elif name:
        with pytest.raises(ValueError, match="tenant must be") as caught:
            tenant_metadata(name)
        assert TENANT_NAMES in str(caught.value)


def test_no_tenant_is_no_metadata() -> None:
    assert tenant_metadata("") == ()
