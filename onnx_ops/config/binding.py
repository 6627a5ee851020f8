"""From the domain's dataclasses to validators: one generic mechanism, no section is written twice.

`annotation` turns any type of the domain into one that pydantic validates. A dataclass becomes a strict model with
the same fields and metadata, and what was validated becomes the dataclass again. What YAML adds to the types is in
the few tables below.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pydantic as pd
from annotated_types import DocInfo, Unit
from pydantic_core import ErrorDetails

from onnx_ops.config.quantities import SCALES, format_quantity, parse_quantity
from onnx_ops.config.unions import annotated_with, refuse, tag_of, union, yaml_key
from onnx_ops.domain.decision import Prefer
from onnx_ops.domain.execution import Provider
from onnx_ops.domain.pipeline import NAME_PATTERN, Benchmark, Deploy, Pipeline, Quantize
from onnx_ops.domain.rollout_policy import Guardrail, RolloutPolicy
from onnx_ops.domain.target import Target

LONGEST_NAME = 63
LONGEST_TARGET = 30
"""Names of targets become part of MLflow aliases, which its UI cuts short."""

_NAMES: Mapping[tuple[type, str], int] = {
    (Pipeline, "pipeline"): LONGEST_NAME,
    (Quantize, "name"): LONGEST_NAME,
    (Deploy, "endpoint"): LONGEST_NAME,
    (Deploy, "target"): LONGEST_TARGET,
    (Benchmark, "targets"): LONGEST_TARGET,
    (Target, "name"): LONGEST_TARGET,
}
"""Fields that hold a name (or a list of names), and how long each may be."""

_ONE_OR_MANY = frozenset({(Pipeline, "deploy"), (RolloutPolicy, "min_requests"), (Target, "custom_ops")})
"""Lists for which one entry may stand alone."""

_SHORT_FORMS: Mapping[type, str] = {Provider: "name", Guardrail: "name", Prefer: "default"}
"""Dataclasses for which a plain text may stand, and the field that it fills."""

_ATTRIBUTE = "x_"
"""Prefix of model attributes, so that no field of the domain hides a method of pydantic's models."""


@dataclass(slots=True, kw_only=True)
class Bound:
    """What became of a document's mappings, by the identity of the plain value.

    `objects` holds every dataclass that could be built, even where a part of it was wrong and a default stands in;
    `kinds` says which dataclass a mapping was read as. `result` is None if and only if there are `errors`.
    """

    result: Any = None
    errors: Sequence[ErrorDetails] = ()
    objects: dict[int, Any] = field(default_factory=dict)
    kinds: dict[int, type] = field(default_factory=dict)


def bind(value: Any, kind: type) -> Bound:
    """Validate plain values as the dataclass `kind`."""
    bound = Bound()
    try:
        bound.result = adapter(kind).validate_python(value, context=bound)
    except pd.ValidationError as error:
        bound.errors = error.errors(include_url=False)
    return bound


@functools.cache
def adapter(kind: type) -> pd.TypeAdapter[Any]:
    return pd.TypeAdapter(annotation(kind))


def yaml_keys(kind: type) -> tuple[str, ...]:
    """The keys that a dataclass has in YAML; `with_` is written `with`."""
    return tuple(yaml_key(f.name) for f in _written(kind))


def _written(kind: type) -> tuple[Field[Any], ...]:
    """The fields that a file has."""
    return tuple(f for f in fields(kind) if not f.metadata.get("found"))


def annotation(kind: Any, metadata: tuple[Any, ...] = ()) -> Any:
    """What pydantic validates for a type of the domain, with the metadata of an enclosing `Annotated`."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *own = get_args(kind)
        return annotation(inner, (*own, *metadata))
    constraints = [m for m in metadata if not isinstance(m, DocInfo | Unit)]
    unit = next((m.unit for m in metadata if isinstance(m, Unit)), None)
    if unit is not None:
        return annotated_with(kind, *constraints, *_quantity(unit))
    if origin in (Union, types.UnionType):
        return annotated_with(union(get_args(kind), annotation), *constraints)
    if origin is tuple:
        items: Any = list.__class_getitem__(annotation(get_args(kind)[0]))
        return annotated_with(items, *constraints, pd.AfterValidator(tuple))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = get_args(kind)
        return annotated_with(dict.__class_getitem__((annotation(key), annotation(value))), *constraints)
    if is_dataclass(kind):
        return _dataclass(kind)  # type: ignore[arg-type]
    return annotated_with(kind, *constraints)


def _quantity(unit: str) -> tuple[Any, ...]:
    def parse(written: object) -> float | int:
        try:
            return parse_quantity(written, unit)
        except ValueError as error:
            raise refuse(str(error)) from error

    scale = SCALES[unit]
    schema = {"type": "string", "pattern": scale.pattern, "examples": list(scale.examples)}
    return pd.BeforeValidator(parse), pd.WithJsonSchema(schema)


@functools.cache
def _dataclass(kind: type) -> Any:
    model = _model(kind)

    def build(value: Any, handler: pd.ValidatorFunctionWrapHandler, info: pd.ValidationInfo) -> Any:
        if isinstance(value, kind):
            return value
        bound: Bound = info.context  # type: ignore[assignment]
        bound.kinds[id(value)] = kind
        try:
            built = _construct(kind, handler(value))
        except pd.ValidationError as error:
            _salvage(kind, value, error, handler, bound)
            raise
        bound.objects[id(value)] = built
        return built

    wrapped = annotated_with(model, pd.WrapValidator(build))
    if short := _SHORT_FORMS.get(kind):
        expand = pd.BeforeValidator(
            lambda value: {short: value} if isinstance(value, str) else value, json_schema_input_type=str | model
        )
        return annotated_with(wrapped, expand)
    return wrapped


def _construct(kind: type, model: pd.BaseModel) -> Any:
    return kind(**{name.removeprefix(_ATTRIBUTE): getattr(model, name) for name in model.model_fields_set})


def _salvage(
    kind: type, value: Any, error: pd.ValidationError, handler: pd.ValidatorFunctionWrapHandler, bound: Bound
) -> None:
    """Build the dataclass without its wrong parts, so that what refers to the right ones can still be checked."""
    if not isinstance(value, dict):
        return
    wrong = {details["loc"][0] for details in error.errors(include_url=False) if details["loc"]}
    kept = {key: item for key, item in value.items() if key not in wrong}
    kept |= {key: bound.objects[id(value[key])] for key in wrong if id(value.get(key)) in bound.objects}
    try:
        bound.objects[id(value)] = _construct(kind, handler(kept))
    except pd.ValidationError:
        return


def _model(kind: type) -> type[pd.BaseModel]:
    hints = get_type_hints(kind, include_extras=True)
    definitions: dict[str, Any] = {_ATTRIBUTE + f.name: _model_field(kind, f, hints[f.name]) for f in _written(kind)}
    return pd.create_model(
        kind.__name__,
        __config__=pd.ConfigDict(extra="forbid", strict=True),
        __doc__=_summary(kind),
        **definitions,
    )


def _model_field(kind: type, f: Field[Any], hint: Any) -> tuple[Any, Any]:
    if longest := _NAMES.get((kind, f.name)):
        hint = _with_name(hint, longest)
    annotated = annotation(hint)
    default = f.default_factory() if f.default_factory is not MISSING else f.default
    if _bare(hint, tuple) is not None and default == ():
        annotated = _lenient_list(annotated, one=(kind, f.name) in _ONE_OR_MANY, item=get_args(_bare(hint, tuple))[0])
    description = next((m.documentation for m in _metadata(hint) if isinstance(m, DocInfo)), None)
    if default is MISSING or (tag_of(kind) and f.name == "kind"):
        return annotated, pd.Field(alias=yaml_key(f.name), description=description)
    return annotated, pd.Field(
        default=None, alias=yaml_key(f.name), description=description, json_schema_extra=_show_default(default, hint)
    )


def _summary(kind: type) -> str | None:
    """The docstring, unless it is the signature that `dataclass` writes where there is none."""
    text = kind.__doc__ or ""
    return None if text.startswith(f"{kind.__name__}(") else text


def _metadata(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _bare(hint: Any, origin: type) -> Any:
    """The hint without `Annotated` if it is of that generic type, else None."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return inner if get_origin(inner) is origin else None


def _with_name(hint: Any, longest: int) -> Any:
    rule = pd.StringConstraints(pattern=f"^{NAME_PATTERN}$", max_length=longest)
    if _bare(hint, tuple) is None:
        return annotated_with(hint, rule)
    return annotated_with(tuple.__class_getitem__((annotated_with(str, rule), ...)), *_metadata(hint))


def _lenient_list(annotated: Any, *, one: bool, item: Any) -> Any:
    """A list that may be empty may also be left blank and, if `one`, be a single entry."""

    def listed(value: Any) -> Any:
        if value is None:
            return []
        return [value] if one and not isinstance(value, list) else value

    items: Any = list.__class_getitem__(annotation(item))
    accepted = items | annotation(item) | None if one else items | None
    return annotated_with(annotated, pd.BeforeValidator(listed, json_schema_input_type=accepted))


def _show_default(default: Any, hint: Any) -> Callable[[dict[str, Any]], None]:
    """Puts the default into the JSON Schema as it would be written, where it is a scalar."""
    unit = next((m.unit for m in _metadata(hint) if isinstance(m, Unit)), None)

    def show(schema: dict[str, Any]) -> None:
        del schema["default"]
        if isinstance(default, str | int | float):
            schema["default"] = format_quantity(default, unit) if unit and not isinstance(default, str) else default

    return show
