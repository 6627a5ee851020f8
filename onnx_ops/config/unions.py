"""Unions of the domain as pydantic validates them, and what their problems say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic as pd
from pydantic_core import PydanticCustomError

from onnx_ops.config.words import describe, did_you_mean, listing

Annotate = Callable[[Any], Any]
"""Turns a type of the domain into one that pydantic validates."""

CUSTOM = "onnx_ops"
"""Type of the errors that carry their final message (`message`) and the key they are about (`below`)."""


def refuse(message: str, *, below: str = "") -> PydanticCustomError:
    return PydanticCustomError(CUSTOM, "{message}", {"message": message, "below": below})


def annotated_with(kind: Any, *metadata: Any) -> Any:
    return functools.reduce(lambda inner, one: Annotated[inner, one], metadata, kind)


def yaml_key(name: str) -> str:
    """A field's name in YAML: `with_` is written `with`."""
    return name.removesuffix("_")


def tag_of(kind: type) -> str | None:
    """The one value of a literal `kind`, or None."""
    hint = get_type_hints(kind).get("kind")
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else None


def union(members: tuple[Any, ...], annotate: Annotate) -> Any:
    """What pydantic validates for a union: optional values, free JSON, plain scalars, or dataclasses."""
    if {get_origin(member) for member in members} >= {Sequence, Mapping}:
        return annotated_with(Any, pd.AfterValidator(_json))
    present = [member for member in members if member is not type(None)]
    if all(is_dataclass(member) for member in present) and len(present) > 1:
        inner = _told_apart(present, annotate)
    elif len(present) == 1:
        inner = annotate(present[0])
    else:
        inner = _scalars(tuple(present))
    return inner if len(present) == len(members) else inner | None


def _json(value: Any) -> Any:
    """Free settings: anything that JSON can say, so every key is a text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise refuse(f"expected a text as key, got {describe(key)}; put it in quotes: '{key}'")
            _json(item)
    elif isinstance(value, list):
        for item in value:
            _json(item)
    return value


def _scalars(members: tuple[type, ...]) -> Any:
    def check(value: Any) -> Any:
        if type(value) not in members:
            raise refuse(f"expected one plain value, got {describe(value)}")
        return value

    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return annotated_with(Any, pd.AfterValidator(check), pd.WithJsonSchema({"type": [names[m] for m in members]}))


def _told_apart(members: Sequence[type], annotate: Annotate) -> Any:
    """A union whose member is chosen before anything is validated, so that only one member's problems are shown.

    Members with a literal `kind` are told apart by it, others by the required key that no other member has.
    """
    tags = {tag_of(member): member for member in members}
    check, choose = (_by_key(members), None) if None in tags else (_by_kind(tags), "kind")
    chosen = {member: f"<{member.__name__}>" for member in members}

    def discriminate(value: Any) -> str:
        if choose:
            return chosen[tags[value[choose]]]
        return next(chosen[member] for member in members if _own_key(member, members) in value)

    tagged = tuple(annotated_with(annotate(member), pd.Tag(tag)) for member, tag in chosen.items())
    return annotated_with(Union.__getitem__(tagged), pd.Discriminator(discriminate), pd.BeforeValidator(check))


def _by_kind(tags: Mapping[str | None, type]) -> Callable[[Any], Any]:
    known = [str(tag) for tag in tags]

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise refuse(f"expected a mapping, got {describe(value)}")
        if "kind" not in value:
            raise refuse(f"missing key 'kind', one of {listing(known)}", below="kind")
        kind = value["kind"]
        if not isinstance(kind, str) or kind not in known:
            hint = did_you_mean(kind, known) if isinstance(kind, str) else ""
            raise refuse(f"expected one of {listing(known)}, got {describe(kind)}{hint}", below="kind")
        return value

    return check


def _by_key(members: Sequence[type]) -> Callable[[Any], Any]:
    own = [_own_key(member, members) for member in members]

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise refuse(f"expected a mapping, got {describe(value)}")
        present = [key for key in own if key in value]
        if len(present) > 1:
            raise refuse(f"{listing(present)} exclude each other; keep one", below=present[1])
        if not present:
            hint = next((h for key in value if isinstance(key, str) and (h := did_you_mean(key, own))), "")
            raise refuse(f"needs one of the keys {listing(own)}{hint}")
        return value

    return check


def _own_key(member: type, members: Sequence[type]) -> str:
    """The required key that tells this member from the others."""
    others = {name for other in members if other is not member for name in _required(other)}
    return next(yaml_key(name) for name in _required(member) if name not in others)


def _required(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
