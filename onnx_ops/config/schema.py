"""Generate JSON Schemas of pipeline and target files, for editors.

The schemas are generated from the types that validate the files.

`python -m onnx_ops.config.schema [FOLDER]` writes them, by default into `configs/schema`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import DocInfo, Ge, Gt, Le, Lt, MaxLen, MinLen, Unit

from onnx_ops.codec import is_json, union_members
from onnx_ops.config.binding import (
    default_of,
    file_fields,
    is_required,
    metadata_of,
    short_field,
    unwrap,
    without_none,
)
from onnx_ops.config.quantities import SCALES, format_quantity
from onnx_ops.config.substitution import PARAMETERS_FILE, WITHOUT_PARAMETERS
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.quantities import Notation, OneOf, Pattern
from onnx_ops.domain.target import Target

FOLDER = Path("configs") / "schema"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PARAMETER = "Parameter"
_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_LIMITS: Mapping[type, tuple[str, str]] = {
    Ge: ("ge", "minimum"),
    Gt: ("gt", "exclusiveMinimum"),
    Le: ("le", "maximum"),
    Lt: ("lt", "exclusiveMaximum"),
}

Schema = dict[str, Any]


def pipeline_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of pipeline files.

    The schema does not check whether a name that refers to another part of the file exists there.
    """
    schema = _schema(Pipeline, "onnx-ops pipeline")
    for section in (schema, *schema["$defs"].values()):
        for name, value in section.get("properties", {}).items():
            if (section is schema and (name,) in WITHOUT_PARAMETERS) or (
                section.get("title"),
                name,
            ) == (
                "Deploy",
                "endpoint",
            ):
                continue
            section["properties"][name] = _or_parameter(value)
    schema["$defs"][_PARAMETER] = {
        "description": f"A value of {PARAMETERS_FILE}.",
        "pattern": r"\$\{params:[^{}]+\}",
        "type": "string",
    }
    return schema


def target_schema() -> Schema:
    """Return the JSON Schema (draft 2020-12) of target files."""
    return _schema(Target, "onnx-ops target")


def write_schemas(folder: Path) -> None:
    """Write both schemas as `pipeline.schema.json` and `target.schema.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in (("pipeline", pipeline_schema()), ("target", target_schema())):
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.schema.json").write_text(text, encoding="utf-8")


def _schema(kind: type, title: str) -> Schema:
    definitions: dict[str, Schema] = {}
    root = _object(kind, definitions)
    return {"$schema": _DIALECT, "$defs": dict(sorted(definitions.items())), **root, "title": title}


def _of(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a type; add those of dataclasses to `definitions`."""
    kind, metadata = unwrap(hint)
    members, origin = union_members(kind), get_origin(kind)
    if is_json(kind):
        return {}
    if NoneType in members:
        return _any_of(_of(without_none(kind, metadata), definitions), {"type": "null"})
    if members:
        return _union(members, definitions)
    if origin is Literal:
        return _choice(get_args(kind))
    if origin is tuple:
        return _list(get_args(kind)[0], metadata, definitions)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = get_args(kind)
        return _mapping(key, item, definitions)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return _scalar(kind, metadata)
    if kind.__name__ not in definitions:
        # If the type refers to itself, this entry ends the recursion.
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _object(kind, definitions)
    reference = {"$ref": f"#/$defs/{kind.__name__}"}
    return _any_of({"type": "string"}, reference) if short_field(kind) else reference


def _union(members: Sequence[Any], definitions: dict[str, Schema]) -> Schema:
    if all(map(is_dataclass, members)):
        return {"oneOf": [_of(member, definitions) for member in members]}
    return {"type": [_TYPES[member] for member in members]}


def _list(item: Any, metadata: tuple[Any, ...], definitions: dict[str, Schema]) -> Schema:
    least = metadata_of(metadata, MinLen)
    return {
        "items": _of(item, definitions),
        **({"minItems": least.min_length} if least else {}),
        "type": "array",
    }


def _choice(choices: tuple[str, ...]) -> Schema:
    values = {"enum": list(choices)} if len(choices) > 1 else {"const": choices[0]}
    return {**values, "type": "string"}


def _mapping(key: Any, item: Any, definitions: dict[str, Schema]) -> Schema:
    names = {"propertyNames": {"enum": list(get_args(key))}} if get_origin(key) is Literal else {}
    return {"additionalProperties": _of(item, definitions) or True, **names, "type": "object"}


def _scalar(kind: Any, metadata: tuple[Any, ...]) -> Schema:
    if unit := metadata_of(metadata, Unit):
        scale = SCALES[unit.unit]
        return {"examples": list(scale.examples), "pattern": scale.pattern, "type": "string"}
    if choices := metadata_of(metadata, OneOf):
        return _choice(tuple(choices.choices))
    schema: Schema = {"type": _TYPES[kind]}
    for limit in metadata:
        if type(limit) in _LIMITS:
            name, key = _LIMITS[type(limit)]
            schema[key] = getattr(limit, name)
        elif isinstance(limit, Pattern):
            schema["pattern"] = f"^{limit.regex}$"
        elif isinstance(limit, MaxLen):
            schema["maxLength"] = limit.max_length
        elif isinstance(limit, MinLen):
            schema["minLength"] = limit.min_length
    return schema


def _object(kind: type, definitions: dict[str, Schema]) -> Schema:
    properties, required = {}, []
    for key, (f, hint) in file_fields(kind).items():
        schema = _field(f, hint, definitions)
        if is_required(f, kind):
            required.append(key)
        elif isinstance(default := default_of(f), str | int | float):
            unit = metadata_of(unwrap(hint)[1], Unit)
            shown = (
                format_quantity(default, unit.unit)
                if unit and not isinstance(default, str)
                else default
            )
            schema = {**schema, "default": shown}
        properties[key] = schema
    text = inspect.cleandoc(kind.__doc__ or "")
    return {
        "additionalProperties": False,
        **({} if text.startswith(f"{kind.__name__}(") else {"description": text}),
        "properties": properties,
        **({"required": required} if required else {}),
        "title": kind.__name__,
        "type": "object",
    }


def _field(f: Field[Any], hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a field with its description.

    The schema accepts the same values as `_Binder._field`: a list can be left blank.
    """
    kind, metadata = unwrap(hint)
    schema = _of(hint, definitions)
    if get_origin(kind) is tuple and default_of(f) == ():
        single = _of(get_args(kind)[0], definitions) if Notation.SINGLE_ENTRY in metadata else {}
        schema = _any_of(schema, *([single] if single else []), {"type": "null"})
    if documentation := metadata_of(metadata, DocInfo):
        schema = {**schema, "description": documentation.documentation}
    return schema


def _any_of(*schemas: Schema) -> Schema:
    return {"anyOf": [choice for schema in schemas for choice in schema.get("anyOf", [schema])]}


def _or_parameter(schema: Schema) -> Schema:
    """Return the schema of a scalar that also accepts a reference to a parameter.

    The schema of a string without `enum` and `pattern` is unchanged, since a reference is such a
    string. Schemas of constants and of values that are not scalars are also unchanged.
    """
    choices = schema.get("anyOf", [schema])
    is_limited = any(
        choice.get("type") in ("integer", "number", "boolean")
        or (choice.get("type") == "string" and not choice.keys().isdisjoint(("enum", "pattern")))
        for choice in choices
    )
    if "$ref" in schema or "const" in schema or not is_limited:
        return schema
    shared = {
        key: value
        for key, value in schema.items()
        if key in ("description", "default", "examples", "anyOf")
    }
    own = {key: value for key, value in schema.items() if key not in shared}
    return {**shared, "anyOf": [*schema.get("anyOf", [own]), {"$ref": f"#/$defs/{_PARAMETER}"}]}


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
