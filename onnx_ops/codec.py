"""Convert domain values to JSON and back with cattrs.

Unknown keys are refused. Dataclasses in a union are distinguished by `kind`. Values are written as
canonical JSON. cattrs is imported when the first value is converted, so that commands that convert
no value start sooner.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import TypeForm

from onnx_ops.domain.artifact import canonical_json
from onnx_ops.domain.quantities import OneOf, TaggedFamily
from onnx_ops.errors import CorruptStateError

if TYPE_CHECKING:
    from cattrs.preconf.json import JsonConverter

T = TypeVar("T")

_LONGEST = 300
"""Maximum length of the error about one value, in characters."""


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union or of a `TaggedFamily`.

    For other types, the result is empty.
    """
    if is_family(kind):
        return tuple(kind.members().values())
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()


def is_family(kind: Any) -> bool:
    """Return whether a type is the base class of a family, not one of its dataclasses."""
    return isinstance(kind, type) and issubclass(kind, TaggedFamily) and not is_dataclass(kind)


def is_json(kind: Any) -> bool:
    """Return whether a type is the recursive type `Json`.

    The members of the type are compared, since two resolved copies of a recursive type are unequal.
    """
    return {get_origin(member) for member in union_members(kind)} >= {Sequence, Mapping}


def tag_of(kind: Any) -> str | None:
    """Return the only value of a dataclass's literal field `kind`, or None.

    The value distinguishes the members of a union.
    """
    hint = get_type_hints(kind).get("kind") if is_dataclass(kind) else None
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else None


def to_json(value: object) -> Any:
    """Return the value as plain JSON types."""
    return _converter().unstructure(value)


def dumps(value: object) -> bytes:
    """Return the value as canonical JSON.

    Raises:
        ValueError: the value contains NaN, an infinity, or a string that UTF-8 cannot encode.
    """
    return canonical_json(to_json(value))


def from_json(value: object, kind: TypeForm[T], *, where: str = "") -> T:
    """Return the value of type `kind` that plain JSON describes.

    Raises:
        CorruptStateError: the JSON does not describe such a value.
    """
    # For such a value, cattrs raises AttributeError, which does not explain the problem.
    if is_dataclass(kind) and not isinstance(value, dict):
        raise CorruptStateError(
            f"not a {getattr(kind, '__name__', kind)}", where=where, why="it is not a JSON object"
        )
    # Without this check, cattrs would accept an object as the list of its keys.
    if get_origin(kind) is tuple and not isinstance(value, list | tuple):
        raise CorruptStateError(f"not a {kind}", where=where, why="it is not a JSON array")
    try:
        return _converter().structure(value, cast("type[T]", kind))
    # cattrs raises one exception group that contains all problems of a value.
    except (ExceptionGroup, ValueError, TypeError, KeyError, AttributeError) as error:
        what, why = f"not a {getattr(kind, '__name__', kind)}", _explain(error)
        raise CorruptStateError(what, where=where, why=why) from error


def loads(data: bytes, kind: TypeForm[T], *, where: str = "") -> T:
    """Return the value of type `kind` from a JSON text, as `from_json`.

    Raises:
        CorruptStateError: the text is not JSON, or describes another kind of value.
    """
    try:
        value = _converter().loads(data, Any, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptStateError("not JSON", where=where, why=str(error)) from error
    return from_json(value, kind, where=where)


def _explain(error: Exception) -> str:
    """Return one line that explains what is wrong with each value."""
    from cattrs import transform_error
    from cattrs.v import format_exception

    def describe(cause: BaseException, kind: type | None) -> str:
        text = format_exception(cause, kind)
        return f"{text} ({cause})"[:_LONGEST] if isinstance(cause, ValueError | TypeError) else text

    return "; ".join(transform_error(error, format_exception=describe))


@functools.cache
def _converter() -> JsonConverter:
    from cattrs.gen import make_dict_unstructure_fn, override
    from cattrs.preconf.json import make_converter

    def unstructure_grown(kind: Any) -> Callable[[Any], Any]:
        overrides: Any = {name: override(omit_if_default=True) for name in _later_fields(kind)}
        return make_dict_unstructure_fn(kind, converter, **overrides)

    converter = make_converter(
        forbid_extra_keys=True, unstruct_collection_overrides={frozenset: sorted}
    )
    converter.register_structure_hook_func(is_json, lambda value, _: value)
    converter.register_unstructure_hook_func(is_json, lambda value: value)
    converter.register_structure_hook_factory(
        lambda kind: bool(_tags(kind)), lambda kind: _tagged_hook(kind, converter)
    )
    converter.register_unstructure_hook_func(is_family, converter.unstructure)
    converter.register_structure_hook_func(_is_scalar_union, _scalar)
    converter.register_structure_hook_func(lambda kind: _choices_of(kind) is not None, _choice)
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(int, _int)
    converter.register_structure_hook(str, _exactly(str))
    converter.register_structure_hook(bool, _exactly(bool))
    converter.register_unstructure_hook_factory(
        lambda kind: bool(_later_fields(kind)), unstructure_grown
    )
    converter.register_unstructure_hook(Enum, lambda value: value.value)
    converter.register_unstructure_hook(StrEnum, lambda value: value.value)
    # Without this hook, cattrs would apply the hook of str to a StrEnum.
    converter.register_structure_hook(StrEnum, lambda value, kind: kind(value))
    converter.register_structure_hook(Path, lambda value, _: Path(value))
    converter.register_unstructure_hook(Path, str)
    return converter


def _later_fields(kind: Any) -> tuple[str, ...]:
    """Return the fields whose defaults are omitted.

    These fields were added after values were first stored, see `domain.quantities.OMIT_DEFAULT`.
    """
    return (
        tuple(f.name for f in fields(kind) if f.metadata.get("later")) if is_dataclass(kind) else ()
    )


def _tags(kind: Any) -> dict[str, Any]:
    """Return the members of a tagged union by their tags; empty for other types."""
    members = union_members(kind)
    tags = {tag: member for member in members if (tag := tag_of(member))}
    return tags if len(members) > 1 and len(tags) == len(members) else {}


def _tagged_hook(kind: Any, converter: JsonConverter) -> Callable[[Any, Any], Any]:
    of_union = None if is_family(kind) else _tags(kind)

    def structure(value: Any, _: Any) -> Any:
        by_tag: Mapping[Any, type] = kind.members() if of_union is None else of_union
        tag = value.get("kind") if isinstance(value, dict) else None
        if tag not in by_tag:
            raise ValueError(f"kind {tag!r} is not one of {sorted(by_tag)}")
        return converter.structure(value, by_tag[tag])

    return structure


def _is_scalar_union(kind: Any) -> bool:
    members = union_members(kind)
    return len(members) > 1 and set(members) <= {str, int, float, bool, type(None)}


def _scalar(value: Any, kind: Any) -> Any:
    if type(value) is float and not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    if type(value) in (members := union_members(kind)) or (type(value) is int and float in members):
        return value
    raise TypeError(f"{value!r} is not {kind}")


def _choices_of(kind: Any) -> OneOf | None:
    """Return the `OneOf` that lists the strings a type allows; None for other types."""
    metadata = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((entry for entry in metadata if isinstance(entry, OneOf)), None)


def _choice(value: Any, kind: Any) -> str:
    choices = _choices_of(kind)
    if type(value) is not str or choices is None or value not in choices.choices:
        raise ValueError(f"{value!r} is not one of {sorted(choices.choices if choices else ())}")
    return value


def _float(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


def _int(value: Any, _: Any) -> int:
    if type(value) is str and value.isdecimal():
        # The keys of a JSON object are always strings, so number keys arrive as strings.
        return int(value)
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _exactly(kind: type[T]) -> Callable[[Any, Any], T]:
    def structure(value: Any, _: Any) -> T:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is not a {kind.__name__}")
        return value

    return structure
