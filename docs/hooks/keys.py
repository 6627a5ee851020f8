"""Finding one's way in a JSON Schema: its sections, and which of them describes a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
_KINDS: dict[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "null": (type(None),)}


def resolved(schema: Json, root: Json) -> Json:
    """The section that a reference stands for."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def kinds_of(schema: Json) -> tuple[str, ...]:
    """The JSON types that a schema takes; none where it takes any."""
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def choices_of(schema: Json) -> list[Json]:
    """What a schema leaves to choose from; nothing where it is one thing."""
    return schema.get("anyOf") or schema.get("oneOf") or []


def entries_of(schema: Json) -> Json:
    """What stands under the names of a mapping that are free; empty if none are, or anything may."""
    entries = schema.get("additionalProperties")
    return entries if isinstance(entries, dict) else {}


def sections(root: Json) -> Iterator[tuple[str, Json]]:
    """The top level under the name "", then every section with keys, by its name."""
    yield "", root
    yield from ((name, section) for name, section in root.get("$defs", {}).items() if section.get("properties"))


def keys(root: Json) -> Iterator[tuple[str, str]]:
    """Section and name of every key."""
    yield from ((name, key) for name, section in sections(root) for key in section["properties"])


def section_of(schema: Json, value: Any, root: Json) -> Json:
    """Of the choices that a schema leaves, the one that describes a value; an empty one if none does."""
    schema = resolved(schema, root)
    if not (choices := choices_of(schema)):
        return schema
    candidates = [section_of(one, value, root) for one in choices]
    return max(candidates, key=lambda one: _fit(one, value, root), default={})


def _fit(section: Json, value: Any, root: Json) -> int:
    """How well a section describes a value: below 0 where it does not."""
    kinds = [kind for name in kinds_of(section) for kind in _KINDS.get(name, (int, float))]
    if kinds and not isinstance(value, tuple(kinds)):
        return -1
    if not isinstance(value, dict):
        return 1
    known = section.get("properties", {})
    constants = {key: one["const"] for key, one in known.items() if "const" in one}
    if any(value.get(key) != constant for key, constant in constants.items()):
        return -1
    return sum(1 if key in known else -10 for key in value) + len(constants)
