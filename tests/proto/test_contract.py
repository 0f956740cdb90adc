"""The rules that every proto of `foreword.v1` keeps, read from the descriptors and comments of the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from foreword.v1 import generation_pb2

ROOT = Path(__file__).parents[2]
DESCRIPTORS = Path(generation_pb2.__file__).with_name("descriptors.binpb")
FILES = [
    file for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file if file.package.startswith("foreword")
]
MESSAGE, ENUM, BYTES_OR_TEXT = (
    FieldDescriptorProto.TYPE_MESSAGE,
    FieldDescriptorProto.TYPE_ENUM,
    (FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES),
)
ZERO_DEFAULTS = {"0", "false", "empty"}


@dataclass(frozen=True)
class Element:
    """Something that is declared in a proto: its full name, its kind, its comment and, for a field, its descriptor."""

    name: str
    kind: str
    comment: str
    field: FieldDescriptorProto | None = None


def elements_of(file: FileDescriptorProto) -> Iterator[Element]:
    comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}

    def element(name: str, kind: str, path: tuple[int, ...], field: FieldDescriptorProto | None = None) -> Element:
        return Element(name, kind, " ".join(comments.get(path, "").split()), field)

    def of_enum(prefix: str, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[Element]:
        yield element(f"{prefix}{enum.name}", "enum", path)
        for i, value in enumerate(enum.value):
            yield element(value.name, "zero" if value.number == 0 else "value", (*path, 2, i))

    def of_message(prefix: str, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[Element]:
        if message.options.map_entry:
            return
        name = f"{prefix}{message.name}"
        yield element(name, "message", path)
        for i, field in enumerate(message.field):
            yield element(f"{name}.{field.name}", "field", (*path, 2, i), field)
        synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
        for i, oneof in enumerate(message.oneof_decl):
            if i not in synthetic:
                yield element(f"{name}.{oneof.name}", "oneof", (*path, 8, i))
        for i, nested in enumerate(message.nested_type):
            yield from of_message(f"{name}.", nested, (*path, 3, i))
        for i, enum in enumerate(message.enum_type):
            yield from of_enum(f"{name}.", enum, (*path, 4, i))

    for i, message in enumerate(file.message_type):
        yield from of_message("", message, (4, i))
    for i, enum in enumerate(file.enum_type):
        yield from of_enum("", enum, (5, i))
    for i, service in enumerate(file.service):
        yield element(service.name, "service", (6, i))
        for j, method in enumerate(service.method):
            yield element(f"{service.name}.{method.name}", "rpc", (6, i, 2, j))


ELEMENTS = [element for file in FILES for element in elements_of(file)]
FIELDS = [(element, element.field) for element in ELEMENTS if element.field is not None]
KINDS = {"message", "field", "oneof", "enum", "zero", "value", "service", "rpc"}


def test_the_walk_sees_everything() -> None:
    assert len(FILES) == len(list((ROOT / "proto").rglob("*.proto")))
    assert {element.kind for element in ELEMENTS} == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_everything_is_documented(kind: str) -> None:
    elements = [element for element in ELEMENTS if element.kind == kind]
    assert [element.name for element in elements if not element.comment.endswith((".", ":"))] == []


def test_zero_values_are_unspecified() -> None:
    assert [
        element.name for element in ELEMENTS if element.kind == "zero" and element.name[-12:] != "_UNSPECIFIED"
    ] == []


def is_plain_scalar(field: FieldDescriptorProto) -> bool:
    """Whether zero and unset look the same on the wire, and zero is a value like any other."""
    return (
        field.label != FieldDescriptorProto.LABEL_REPEATED
        and not field.HasField("oneof_index")
        and field.type not in (MESSAGE, ENUM)
    )


def default_of(comment: str) -> str | None:
    """What the comment says about the default: "0", "true", ...; None when it says nothing."""
    match = re.search(r"\bDefault ([^\s,:.]+(?:\.\d+)?)", comment)
    return match[1] if match else None


def test_a_scalar_whose_default_is_not_zero_is_optional() -> None:
    wrong = [
        element.name
        for element, field in FIELDS
        if is_plain_scalar(field)
        and (default_of(element.comment) not in {None, *ZERO_DEFAULTS} or re.search(r"\bUnset\b", element.comment))
    ]
    assert wrong == []


def test_an_optional_scalar_says_what_unset_means() -> None:
    wrong = [
        element.name
        for element, field in FIELDS
        if field.proto3_optional and not re.search(r"\b(Default|Unset)\b", element.comment)
    ]
    assert wrong == []


def test_every_setting_of_a_generation_says_its_default_or_what_empty_means() -> None:
    settings = {"GenerationSpec", "SamplingConfig", "StoppingConfig", "OutputConfig", "CacheConfig"}
    settings |= {"SpeculationConfig"}
    wrong = [
        element.name
        for element, field in FIELDS
        if element.name.split(".")[0] in settings
        and not (field.HasField("oneof_index") and not field.proto3_optional)
        and not re.search(r"\b(Default|Unset|Empty|When not empty|cannot be drawn)\b", element.comment)
    ]
    assert wrong == []


def test_names_carry_counts_ids_and_units() -> None:
    integers = (FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_INT64)
    others = {"top_k", "seed", "priority", "ids", "ranks", "first_position", "token_budget", "vocabulary_size"}
    others |= {"output_index", "command_index", "page_size", "start_offsets", "end_offsets", "acceptance_histogram"}
    endings = ("_count", "_id", "_ids", "_micros", "_bytes")
    wrong = [
        element.name
        for element, field in FIELDS
        if field.type in integers and not field.name.endswith(endings) and field.name not in others
    ]
    wrong += [element.name for element, field in FIELDS if field.name.startswith(("num_", "n_"))]
    for element, field in FIELDS:
        if field.type_name == ".google.protobuf.Duration" and not field.name.endswith(("_duration", "interval")):
            wrong.append(element.name)
        if field.type_name == ".google.protobuf.Timestamp" and not field.name.endswith("_time"):
            wrong.append(element.name)
    assert wrong == []


def test_nothing_is_untyped() -> None:
    untyped = (".google.protobuf.Struct", ".google.protobuf.Value", ".google.protobuf.Any")
    assert [element.name for element, field in FIELDS if field.type_name in untyped] == []


def test_comments_name_messages_and_fields_that_exist() -> None:
    names = {name for element in ELEMENTS for name in (element.name, element.name.split(".")[-1])}
    wrong = [
        (element.name, reference)
        for element in ELEMENTS
        for reference in re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", element.comment)
        if reference not in names
    ]
    assert wrong == []


def test_comments_name_enum_values_that_exist() -> None:
    constants = {element.name for element in ELEMENTS if element.kind in ("value", "zero")}
    prefixes = tuple(name.removesuffix("UNSPECIFIED") for name in constants if name.endswith("_UNSPECIFIED"))
    wrong = [
        (element.name, constant)
        for element in ELEMENTS
        for constant in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", element.comment)
        if constant.startswith(prefixes) and constant not in constants
    ]
    assert wrong == []


def test_the_guide_names_every_rpc() -> None:
    guide = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rpcs = [element.name.split(".")[1] for element in ELEMENTS if element.kind == "rpc"]
    assert [rpc for rpc in rpcs if f"`{rpc}`" not in guide] == []


def test_buf_lint() -> None:
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    if buf is None:
        pytest.skip("buf is not installed")
    command = [buf, "lint", str(DESCRIPTORS), "--config", str(ROOT / "buf.yaml"), "--path", "foreword/v1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
