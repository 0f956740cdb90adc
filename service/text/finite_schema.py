"""JSON Schemas that only infinite values satisfy, such as a list node whose `next` is required."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SCALARS = {"string", "number", "integer", "boolean", "null"}


class FiniteSchema:
    """Finds out whether a schema has an instance, as far as its references to itself are concerned.

    The schemas that have one are the least fixed point of "has an instance if those it needs have one". Keywords that
    are no part of this are taken to be satisfiable; the grammar library judges them.
    """

    def __init__(self, root: Any) -> None:
        """Look at all schemas that `root`, parsed JSON, refers to."""
        self._root = root
        self._nodes: dict[int, Any] = {}
        self._finite: set[int] = set()
        self._discover(root)
        undecided = list(reversed(self._nodes.values()))  # what is needed before those that need it, mostly
        while True:
            left = [node for node in undecided if not self._decide(node)]
            if len(left) == len(undecided):
                break
            undecided = left

    @property
    def has_instance(self) -> bool:
        """False when every value that satisfies the schema would have to be infinite."""
        return id(self._root) in self._finite

    def _discover(self, root: Any) -> None:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if id(node) not in self._nodes:
                self._nodes[id(node)] = node
                waiting += self._needed(node)

    def _needed(self, node: Any) -> Iterator[Any]:
        """Schemas that decide about this one."""
        if not isinstance(node, dict):
            return
        if "$ref" in node:
            yield self._target(node["$ref"])
        for name in ("allOf", "anyOf", "oneOf"):
            yield from _list(node, name)
        yield from self._required(node)
        yield from _elements(node)

    def _decide(self, node: Any) -> bool:
        if self._is_finite(node):
            self._finite.add(id(node))
        return self._has(node)

    def _is_finite(self, node: Any) -> bool:
        if not isinstance(node, dict) or "const" in node or "enum" in node:
            return node is not False
        if "$ref" in node and not self._has(self._target(node["$ref"])):
            return False
        if not all(map(self._has, _list(node, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            if _list(node, name) and not any(map(self._has, _list(node, name))):
                return False
        kinds = node.get("type", "string")
        kinds = {kinds} if isinstance(kinds, str) else set(filter(lambda kind: isinstance(kind, str), kinds))
        if kinds & _SCALARS or not kinds <= {"object", "array"}:
            return True
        return ("object" in kinds and all(map(self._has, self._required(node)))) or (
            "array" in kinds and all(map(self._has, _elements(node)))
        )

    def _has(self, node: Any) -> bool:
        return id(node) in self._finite

    def _required(self, node: dict[str, Any]) -> Iterator[Any]:
        """Schemas of the properties that an object must have."""
        properties = node.get("properties", {})
        for name in _list(node, "required"):
            if isinstance(properties, dict) and isinstance(name, str):
                if name in properties:
                    yield properties[name]
                elif "patternProperties" not in node:
                    yield node.get("additionalProperties", True)

    def _target(self, reference: Any) -> Any:
        """The schema that a local reference (RFC 6901) names; one that has instances for any other."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        node = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                return True
        return node


def _list(node: dict[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []


def _elements(node: dict[str, Any]) -> Iterator[Any]:
    """Schemas of the elements that an array must have."""
    least = node.get("minItems", 0)
    if not isinstance(least, int | float):
        return
    first = _list(node, "prefixItems") or _list(node, "items")
    yield from first[: max(int(least), 0)]
    if least > len(first):
        rest = node.get("items", True)
        yield node.get("additionalItems", True) if isinstance(rest, list) else rest
