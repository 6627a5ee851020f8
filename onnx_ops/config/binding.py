"""Bind plain values to frozen dataclasses.

One binder serves sections of files, and options of plugins and of the endpoint server. A dataclass
declares its fields by annotations: types, limits (`annotated_types`), units and notations
(`domain.quantities`). The binder collects the problems of all fields, with their locations. It
imports no validation library: the endpoint server and the rollback command use the binder too, and
must start fast.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Unit

from onnx_ops.codec import is_json, tag_of, union_members
from onnx_ops.config.document import BROKEN, Document, Issue, Loc, path_text
from onnx_ops.config.messages import describe, did_you_mean, quote_names
from onnx_ops.config.quantities import format_quantity, parse_quantity
from onnx_ops.domain.quantities import Json, Notation, OneOf, Pattern
from onnx_ops.errors import UserError

T = TypeVar("T")

_EXPECTED: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
}
_LIMITS: Mapping[type, tuple[str, str, Callable[[Any, Any], bool]]] = {
    Gt: ("gt", "greater than", lambda value, limit: value > limit),
    Ge: ("ge", "at least", lambda value, limit: value >= limit),
    Lt: ("lt", "less than", lambda value, limit: value < limit),
    Le: ("le", "at most", lambda value, limit: value <= limit),
}
_YAML_1_1 = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
REFUSED: Mapping[str, str] = {
    "distribution": "'distribution' derives ranges for 8-bit floats; with int8, models silently "
    "give wrong answers (a CNN agreed with fp32 on 10 % of the rows); choose minmax, entropy or "
    "percentile"
}
"""Choices that a library accepts but onnx-ops refuses, with the reason."""


@dataclass(slots=True, kw_only=True)
class Binding:
    """The result of binding: the value, every issue, and the dataclasses by location.

    The value is None if there are issues, or if a required part of it is BROKEN. In `objects`, an
    invalid part of a dataclass is replaced by its default. A dataclass with an invalid or missing
    part that has no default is left out.
    """

    value: Any = None
    issues: list[Issue] = field(default_factory=list)
    objects: dict[Loc, Any] = field(default_factory=dict)


class OptionsError(UserError):
    """Invalid options that `bind_options` or `refuse_options` found.

    `issues` has the location of each problem in the options.
    """

    def __init__(self, issues: Sequence[Issue], *, where: str = "", remedy: str = "") -> None:
        self.issues = tuple(issues)
        texts = [f"{path_text(i.shown)}: {i.message}" if i.shown else i.message for i in issues]
        super().__init__("; ".join(texts), where=where, remedy=remedy)


def bind(value: Any, kind: type) -> Binding:
    """Bind a plain value to the dataclass `kind`."""
    binder = _Binder()
    bound = binder.bind(value, kind, ())
    return Binding(
        value=None if binder.issues or bound is BROKEN else bound,
        issues=binder.issues,
        objects=binder.objects,
    )


def bind_options(
    given: Mapping[str, Json],
    kind: type[T],
    *,
    where: str = "",
    remedy: str = "",
    rules: Callable[[T], Iterable[tuple[str, str]]] = lambda _: (),
) -> T:
    """Return a mapping of options as the dataclass `kind`.

    If each option fits its type, `rules` yields further problems, each with the option concerned.

    Raises:
        OptionsError: The options have problems: those of types, or else those that `rules` yields.
    """
    binding = bind(dict(given), kind)
    issues = binding.issues or [Issue((name,), text) for name, text in rules(binding.value)]
    if issues:
        raise OptionsError(issues, where=where, remedy=remedy)
    bound: T = binding.value
    return bound


def refuse_options(given: Mapping[str, Json], plugin: str) -> None:
    """Raise OptionsError if there are options for a plugin that has none."""
    if given:
        issues = [
            Issue((name,), f"unknown key '{name}'; {plugin} has no options", on_key=True)
            for name in given
        ]
        raise OptionsError(issues, where=plugin, remedy="Leave out `options`.")


def bind_document(document: Document, kind: type) -> Binding:
    """Bind a document, and add the issues of the binding to those of the document.

    An issue of a value is left out if the document has an issue at the same location.
    """
    binding = bind(document.value, kind)
    known = {issue.loc for issue in document.issues if not issue.on_key}
    document.issues += [issue for issue in binding.issues if issue.on_key or issue.loc not in known]
    return binding


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without `Annotated` and `NewType`, and its metadata."""
    metadata: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *own = get_args(hint)
            metadata = (*own, *metadata)
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        else:
            return hint, metadata


def metadata_of(metadata: Iterable[Any], kind: type[T]) -> T | None:
    """Return the first entry of this kind, or None."""
    return next((entry for entry in metadata if isinstance(entry, kind)), None)


def without_none(kind: Any, metadata: tuple[Any, ...]) -> Any:
    """Return an optional type without None, annotated with the metadata."""
    present = tuple(member for member in union_members(kind) if member is not NoneType)
    return functools.reduce(lambda inner, entry: Annotated[inner, entry], metadata, Union[present])  # noqa: UP007


def yaml_key(name: str) -> str:
    """Return the YAML key of a field: `with` for the field `with_`."""
    return name.removesuffix("_")


@functools.cache
def file_fields(kind: type) -> Mapping[str, tuple[Field[Any], Any]]:
    """Return the fields that a file can set, by YAML key, each with its type."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        yaml_key(f.name): (f, hints[f.name]) for f in fields(kind) if not f.metadata.get("found")
    }


def default_of(f: Field[Any]) -> Any:
    """Return the default of a field, or MISSING."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def is_required(f: Field[Any], kind: type) -> bool:
    """Return whether a file must have a field.

    The tag of a union's member is required although it has a default.
    """
    return default_of(f) is MISSING or (f.name == "kind" and tag_of(kind) is not None)


def short_field(kind: type) -> str | None:
    """Return the key that a string in place of the mapping sets, or None."""
    keys = file_fields(kind).items()
    return next((key for key, (_, hint) in keys if Notation.SHORT_FORM in unwrap(hint)[1]), None)


class _Binder:
    """Binder of one value with all its parts, which collects the issues.

    If a value cannot be bound, the methods add an issue and return BROKEN. A value that is BROKEN
    already has an issue in its document, so none is added.
    """

    def __init__(self) -> None:
        self.issues: list[Issue] = []
        self.objects: dict[Loc, Any] = {}

    def bind(self, value: Any, hint: Any, loc: Loc) -> Any:
        """Bind one value to a type."""
        if value is BROKEN:
            return BROKEN
        kind, metadata = unwrap(hint)
        if is_json(kind):
            return self._json(value, loc)
        if NoneType in union_members(kind):
            return None if value is None else self.bind(value, without_none(kind, metadata), loc)
        if choices := metadata_of(metadata, OneOf):
            return self._choice(value, tuple(choices.choices), loc)
        bound = self._convert(value, kind, metadata_of(metadata, Unit), loc)
        problem = "" if bound is BROKEN else _limit_problem(bound, value, metadata)
        return self._refuse(loc, problem) if problem else bound

    def _convert(self, value: Any, kind: Any, unit: Unit | None, loc: Loc) -> Any:
        """Bind a value to a type, without the limits of its metadata.

        A unit takes precedence over the type.
        """
        members, origin = union_members(kind), get_origin(kind)
        if unit is not None:
            return self._quantity(value, unit, loc)
        if members and all(map(is_dataclass, members)):
            return self._member(value, members, loc)
        if members:
            expected = " or ".join(_EXPECTED[member] for member in members if member in _EXPECTED)
            return (
                value
                if type(value) in members
                else self._refuse(loc, f"expected {expected}, got {describe(value)}")
            )
        if origin is Literal:
            return self._choice(value, get_args(kind), loc)
        if origin is tuple:
            return self._list(value, get_args(kind)[0], loc)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(value, get_args(kind), loc)
        if is_dataclass(kind):
            return self._object(value, kind, loc)  # type: ignore[arg-type]
        return self._scalar(value, kind, loc)

    def _quantity(self, value: Any, unit: Unit, loc: Loc) -> Any:
        try:
            return parse_quantity(value, unit.unit)
        except ValueError as error:
            return self._refuse(loc, str(error))

    def _list(self, value: Any, hint: Any, loc: Loc) -> Any:
        if not isinstance(value, list | tuple):
            return self._refuse(loc, f"expected a list, got {describe(value)}")
        entries = [self.bind(entry, hint, (*loc, index)) for index, entry in enumerate(value)]
        return BROKEN if any(entry is BROKEN for entry in entries) else tuple(entries)

    def _refuse(self, loc: Loc, message: str, *, on_key: bool = False) -> Any:
        self.issues.append(Issue(loc, message, on_key=on_key))
        return BROKEN

    def _json(self, value: Any, loc: Loc) -> Any:
        """Accept any JSON value; refuse the first key that is not a string."""
        for part, item in (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        ):
            if not isinstance(part, str) and isinstance(value, dict):
                text = f"expected a string as key, got {describe(part)}; put it in quotes: '{part}'"
                return self._refuse((*loc, part), text, on_key=True)
            if self._json(item, (*loc, part)) is BROKEN:
                return BROKEN
        return value

    def _scalar(self, value: Any, kind: Any, loc: Loc) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        advice = ""
        if kind is str and isinstance(value, bool | int | float):
            advice = (
                f"; put it in quotes: '{str(value).lower() if isinstance(value, bool) else value}'"
            )
        elif (
            kind in (int, float)
            and isinstance(value, str)
            and re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", value)
        ):
            advice = "; leave out the quotes"
        elif kind is bool and isinstance(value, str) and (plain := _YAML_1_1.get(value.lower())):
            advice = f"; write {plain}"
        return self._refuse(loc, f"expected {_EXPECTED[kind]}, got {describe(value)}{advice}")

    def _choice(self, value: Any, choices: Sequence[Any], loc: Loc) -> Any:
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        if isinstance(value, str) and value in REFUSED:
            return self._refuse(loc, REFUSED[value])
        hint = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        among = "one of " if len(choices) > 1 else ""
        return self._refuse(
            loc, f"expected {among}{quote_names(map(str, choices))}, got {describe(value)}{hint}"
        )

    def _mapping(self, value: Any, arguments: tuple[Any, ...], loc: Loc) -> Any:
        if not isinstance(value, Mapping):
            return self._refuse(loc, f"expected a mapping, got {describe(value)}")
        key, item = arguments
        result = {}
        for name, entry in value.items():
            keys = _Binder()
            if keys.bind(name, key, ()) is BROKEN:
                message = keys.issues[0].message
                message = message.replace("expected", "a key here must be", 1).replace(
                    ", got ", ", not ", 1
                )
                self._refuse((*loc, name), message, on_key=True)
                result[name] = BROKEN
            else:
                result[name] = self.bind(entry, item, (*loc, name))
        return BROKEN if any(entry is BROKEN for entry in result.values()) else result

    def _member(self, value: Any, members: Sequence[type], loc: Loc) -> Any:
        """Choose the member of a union of dataclasses, and bind it.

        The member is chosen before its fields are bound, so that only problems of this member are
        reported.
        """
        if not isinstance(value, dict):
            return self._refuse(loc, f"expected a mapping, got {describe(value)}")
        tags = {tag_of(member): member for member in members}
        if None not in tags:
            return self._tagged_member(
                value, {str(tag): member for tag, member in tags.items()}, loc
            )
        own = {own_key(member, members): member for member in members}
        present = [key for key in own if key in value]
        if len(present) > 1:
            return self._refuse(
                (*loc, present[1]), f"{quote_names(present)} exclude each other; keep one"
            )
        if not present:
            hint = next(
                (h for key in value if isinstance(key, str) and (h := did_you_mean(key, own))), ""
            )
            return self._refuse(loc, f"expected one of the keys {quote_names(own)}{hint}")
        return self._object(value, own[present[0]], loc)

    def _tagged_member(self, value: Mapping[Any, Any], tags: Mapping[str, type], loc: Loc) -> Any:
        """Bind the value to the member of a union that its key `kind` names."""
        if "kind" not in value:
            message = f"missing key 'kind', one of {quote_names(list(tags))}"
            return self._refuse((*loc, "kind"), message, on_key=True)
        kind = value["kind"]
        member = tags.get(kind) if isinstance(kind, str) else None
        if member is None:
            return self._choice(kind, list(tags), (*loc, "kind"))
        return self._object(value, member, loc)

    def _object(self, value: Any, kind: type, loc: Loc) -> Any:
        known, short = file_fields(kind), short_field(kind)
        is_short = short is not None and isinstance(value, str)
        given: Any = {short: value} if is_short else value
        if not isinstance(given, Mapping):
            return self._refuse(loc, f"expected a mapping, got {describe(value)}")
        self._refuse_unknown_keys(given, known, loc)
        bound: dict[str, Any] = {}
        for key, (f, hint) in known.items():
            if key in given:
                bound[f.name] = self._field(given[key], f, hint, loc if is_short else (*loc, key))
            elif is_required(f, kind):
                bound[f.name] = self._refuse((*loc, key), f"missing key '{key}'", on_key=True)
        valid = {name: item for name, item in bound.items() if item is not BROKEN}
        # An invalid part is replaced by its default, so that the rules for the other parts are
        # still checked.
        if any(
            default_of(known[yaml_key(name)][0]) is MISSING for name in bound.keys() - valid.keys()
        ):
            return BROKEN
        self.objects[loc] = kind(**valid)
        return self.objects[loc]

    def _refuse_unknown_keys(self, given: Iterable[Any], known: Collection[str], loc: Loc) -> None:
        for key in given:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; known keys: {', '.join(known)}"
                self._refuse((*loc, key), f"unknown key '{key}'{hint}", on_key=True)

    def _field(self, value: Any, f: Field[Any], hint: Any, loc: Loc) -> Any:
        """Bind a field.

        A list that can be empty can be left blank. With `Notation.SINGLE_ENTRY`, a single entry can
        appear without its list.
        """
        kind, metadata = unwrap(hint)
        if get_origin(kind) is tuple and f.default == ():
            if value is None:
                return ()
            if Notation.SINGLE_ENTRY in metadata and not isinstance(value, list | tuple):
                entry = self.bind(value, get_args(kind)[0], loc)
                return BROKEN if entry is BROKEN else (entry,)
        return self.bind(value, hint, loc)


def own_key(member: type, members: Sequence[type]) -> str:
    """Return the first required key of a member that no other member requires."""

    def required(kind: type) -> list[str]:
        return [key for key, (f, _) in file_fields(kind).items() if default_of(f) is MISSING]

    others = {key for other in members if other is not member for key in required(other)}
    return next(key for key in required(member) if key not in others)


def _length_problem(value: Any, limit: MinLen | MaxLen) -> str:
    """Return why the length of a value breaks a limit; empty if it does not."""
    noun, size = ("characters" if isinstance(value, str) else "entries"), len(value)
    if isinstance(limit, MaxLen):
        too_long = size > limit.max_length
        return f"must have at most {limit.max_length} {noun}, got {size}" if too_long else ""
    if size >= limit.min_length:
        return ""
    if limit.min_length == 1:
        return "must not be empty" if isinstance(value, str) else "needs at least one entry"
    return f"needs at least {limit.min_length} {noun}"


def _limit_problem(value: Any, written: Any, metadata: Iterable[Any]) -> str:
    """Return the message on the first limit that a value breaks; empty if none."""
    unit = metadata_of(metadata, Unit)
    for limit in metadata:
        if isinstance(limit, MinLen | MaxLen) and (problem := _length_problem(value, limit)):
            return problem
        if isinstance(limit, Pattern) and not re.fullmatch(limit.regex, value):
            return f"'{written}' is not {limit.description}"
        if type(limit) in _LIMITS:
            name, text, holds = _LIMITS[type(limit)]
            bound = getattr(limit, name)
            if not holds(value, bound):
                shown = (
                    format_quantity(bound, unit.unit)
                    if unit and (bound or unit.unit == "1")
                    else f"{bound:g}"
                )
                return f"must be {text} {shown}, got {describe(written)}"
    return ""
