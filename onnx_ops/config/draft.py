"""The sections of a pipeline file that could be read, for rules that reach across them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from onnx_ops.config.binding import Bound
from onnx_ops.config.document import Document, Loc
from onnx_ops.domain.decision import Prefer, Preference
from onnx_ops.domain.gate import Gate
from onnx_ops.domain.pipeline import (
    Benchmark,
    DataSection,
    Deploy,
    Export,
    InputValues,
    Quantize,
    Register,
    Train,
    Validate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A pipeline with holes. A section is None if it is missing or could not be read at all.

    `keys` are the sections that the file has, readable or not; `sets` the names of all its data sets. Entries of
    lists carry their location. Where a part of a section was wrong its default stands in; findings that come of
    that are dropped by the loader.
    """

    keys: frozenset[str]
    sets: frozenset[str]
    data: Mapping[str, DataSection]
    inputs: Mapping[str, InputValues]
    train: Train | None
    model: str | None
    export: Export | None
    validate: Validate | None
    quantize: tuple[tuple[Loc, Quantize], ...]
    benchmark: Benchmark | None
    gates: tuple[tuple[Loc, Gate], ...]
    prefer: Prefer
    register: Register | None
    deploy: tuple[tuple[Loc, Deploy], ...]


def draft_of(document: Document, bound: Bound) -> Draft:
    """What the rules may look at, from a document that was bound as a pipeline."""
    root = document.value if isinstance(document.value, dict) else {}

    def section(name: str) -> Any:
        return bound.objects.get(id(root.get(name)))

    def entries(name: str) -> tuple[tuple[Loc, Any], ...]:
        value = root.get(name)
        items: list[tuple[Loc, Any]] = []
        if isinstance(value, dict):
            items = [((name,), value)]
        elif isinstance(value, list):
            items = [((name, index), item) for index, item in enumerate(value)]
        return tuple((loc, bound.objects[id(item)]) for loc, item in items if id(item) in bound.objects)

    def named(name: str) -> dict[str, Any]:
        value = root.get(name)
        items = value.items() if isinstance(value, dict) else ()
        return {str(key): bound.objects[id(item)] for key, item in items if id(item) in bound.objects}

    data: Any = root.get("data")
    data = data if isinstance(data, dict) else {}
    return Draft(
        keys=frozenset(key for key in root if isinstance(key, str)),
        sets=frozenset(str(name) for name in data),
        data=named("data"),
        inputs=named("inputs"),
        train=section("train"),
        model=root["model"] if isinstance(root.get("model"), str) else None,
        export=section("export"),
        validate=section("validate") if "validate" in root else Validate(),
        quantize=entries("quantize"),
        benchmark=section("benchmark"),
        gates=entries("gates"),
        prefer=_prefer(section("prefer"), root.get("prefer")),
        register=section("register"),
        deploy=entries("deploy"),
    )


def _prefer(section: Prefer | None, written: Any) -> Prefer:
    """What is preferred, also in the short form; the default stands in for what is wrong."""
    if section is not None:
        return section
    found = next((one for one in get_args(Preference) if one == written), None)
    return Prefer() if found is None else Prefer(default=found)
