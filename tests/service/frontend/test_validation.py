from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from foreword.scheduler.errors import InvalidField
from foreword.service.frontend.requests import SUPPORTED_FIELDS
from foreword.service.frontend.validation import check_supported
from foreword.v1 import generation_pb2


def leaves(descriptor: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all fields that hold a value, maps and well-known types included."""
    for field in descriptor.fields:
        below = field.message_type
        if below is None or below.GetOptions().map_entry or below.full_name.startswith("google."):
            yield (*path, field.name)
        else:
            yield from leaves(below, (*path, field.name))
            if not below.fields:
                yield (*path, field.name)


def set_field(message: Message, path: tuple[str, ...]) -> None:
    """Give the field at a path some value."""
    for name in path[:-1]:
        child = getattr(message, name)
        message = child.add() if message.DESCRIPTOR.fields_by_name[name].is_repeated else child
    field = message.DESCRIPTOR.fields_by_name[path[-1]]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[1] = 1
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).append(_value(field))
    else:
        setattr(message, field.name, _value(field))


def _value(field: FieldDescriptor) -> Any:
    return {
        FieldDescriptor.CPPTYPE_STRING: "x",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_ENUM: 2,
    }.get(field.cpp_type, 7)


PATHS = list(leaves(generation_pb2.GenerationSpec.DESCRIPTOR))


def test_the_walk_finds_all_fields() -> None:
    found = {".".join(path) for path in PATHS}
    assert found >= SUPPORTED_FIELDS


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_field_is_supported_or_refused(path: tuple[str, ...]) -> None:
    spec = generation_pb2.GenerationSpec()
    set_field(spec, path)
    name = ".".join(path)
    if name in SUPPORTED_FIELDS or name == "speculation.disabled":
        check_supported(spec, SUPPORTED_FIELDS)
    else:
        with pytest.raises(InvalidField) as caught:
            check_supported(spec, SUPPORTED_FIELDS)
        assert name.startswith(caught.value.field)


@pytest.mark.parametrize("path", sorted(SUPPORTED_FIELDS))
def test_a_field_that_no_table_knows_is_refused(path: str) -> None:
    spec = generation_pb2.GenerationSpec()
    set_field(spec, tuple(path.split(".")))
    with pytest.raises(InvalidField):
        check_supported(spec, SUPPORTED_FIELDS - {path})
