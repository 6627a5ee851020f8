"""Navigate a JSON Schema: its sections, and the section that describes a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "null": (type(None),),
}


def resolved(schema: Json, root: Json) -> Json:
    """Resolve the references of a section."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def kinds_of(schema: Json) -> tuple[str, ...]:
    """Return the JSON types that a schema names in `type`; empty if it names none."""
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def choices_of(schema: Json) -> list[Json]:
    """Return the alternatives of a schema, if any."""
    return schema.get("anyOf") or schema.get("oneOf") or []


def entries_of(schema: Json) -> Json:
    """Return the schema of the values of a mapping with free names.

    It is empty if the mapping has none, or accepts anything.
    """
    entries = schema.get("additionalProperties")
    return entries if isinstance(entries, dict) else {}


def sections(root: Json) -> Iterator[tuple[str, Json]]:
    """Yield the top level with the name "", then every section with keys."""
    yield "", root
    yield from (
        (name, section)
        for name, section in root.get("$defs", {}).items()
        if section.get("properties")
    )


def keys(root: Json) -> Iterator[tuple[str, str]]:
    """Yield section and name of every key."""
    yield from ((name, key) for name, section in sections(root) for key in section["properties"])


def section_of(schema: Json, value: Any, root: Json) -> Json:
    """Return the alternative of a schema that describes a value best."""
    schema = resolved(schema, root)
    if not (choices := choices_of(schema)):
        return schema
    candidates = [section_of(one, value, root) for one in choices]
    return max(candidates, key=lambda one: _fit(one, value, root), default={})


def _fit(section: Json, value: Any, root: Json) -> int:
    """Return how well a section describes a value: below 0 if it does not."""
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
