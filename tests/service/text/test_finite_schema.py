from __future__ import annotations

import json
import time
from typing import Any

import pytest

from foreword.service.text.finite_schema import FiniteSchema

SELF = {"$ref": "#"}
NODE = {"type": "object", "properties": {"next": SELF}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        NODE,
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "items": [SELF], "minItems": 1},
        {"type": "array", "prefixItems": [{}, SELF], "items": {}, "minItems": 2},
        {"type": ["object", "array"], "required": ["next"], "properties": {"next": SELF}, "items": SELF, "minItems": 1},
        {"type": "object", "required": ["x"], "additionalProperties": SELF},
        {"type": "object", "required": ["x"], "properties": {}, "additionalProperties": SELF},
        {"anyOf": [NODE, {"type": "array", "items": SELF, "minItems": 3}]},
        {"allOf": [{"type": "string"}, SELF]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"oneOf": [{"$ref": "#/$defs/a"}]}}},
        {"$ref": "#/$defs/a~1b/anyOf/0", "$defs": {"a/b": {"anyOf": [NODE]}}},
        False,
    ],
)
def test_without_an_end(schema: Any) -> None:
    assert not FiniteSchema(schema).has_instance


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {**NODE, "required": []},
        {**NODE, "type": ["object", "null"]},
        {"properties": {"next": SELF}, "required": ["next"]},  # a string satisfies it
        {"anyOf": [NODE, {"type": "null"}]},
        {"type": "object", "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 1},
        {"type": "object", "properties": {"next": SELF}, "required": ["other"]},
        {"type": "object", "patternProperties": {"x": {}}, "additionalProperties": SELF, "required": ["x"]},
        {"type": "object", "properties": {"next": {"enum": [1]}}, "required": ["next"]},
        {"$ref": "http://localhost/other.json"},
        {"$ref": "#/nowhere"},
        {"$ref": 7, "type": "object", "required": 3, "properties": [], "minItems": "x", "anyOf": {}, "allOf": 1},
    ],
)
def test_with_an_end(schema: Any) -> None:
    assert FiniteSchema(schema).has_instance


@pytest.mark.parametrize(("last", "is_finite"), [({"type": "null"}, True), ({"$ref": "#/$defs/d0"}, False)])
def test_a_long_chain_takes_milliseconds(last: Any, is_finite: bool) -> None:
    chain = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]}
        for i in range(690)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d690": last}}
    assert len(json.dumps(schema)) < 65_536
    start_s = time.process_time()
    assert FiniteSchema(schema).has_instance is is_finite
    assert time.process_time() - start_s < 0.5
