"""The sections of a pipeline file that could be read, for rules that reach across them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx_ops.config.binding import Binding
from onnx_ops.config.document import Document, Loc
from onnx_ops.domain.decision import Objective
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
    prefer: Objective
    register: Register | None
    deploy: tuple[tuple[Loc, Deploy], ...]


def draft_of(document: Document, binding: Binding) -> Draft:
    """Return what the rules may look at, of a document that was bound as a pipeline."""
    root = document.value if isinstance(document.value, dict) else {}
    data: Any = root.get("data")

    def section(name: str) -> Any:
        return binding.objects.get((name,))

    def entries(name: str) -> tuple[tuple[Loc, Any], ...]:
        if (name,) in binding.objects:  # an entry that stands without its list
            return (((name,), section(name)),)
        return tuple((loc, value) for loc, value in binding.objects.items() if len(loc) == 2 and loc[0] == name)

    return Draft(
        keys=frozenset(key for key in root if isinstance(key, str)),
        sets=frozenset(str(name) for name in data) if isinstance(data, dict) else frozenset(),
        data={str(loc[-1]): value for loc, value in entries("data")},
        inputs={str(loc[-1]): value for loc, value in entries("inputs")},
        train=section("train"),
        model=root["model"] if isinstance(root.get("model"), str) else None,
        export=section("export"),
        validate=section("validate") if "validate" in root else Validate(),
        quantize=entries("quantize"),
        benchmark=section("benchmark"),
        gates=entries("gates"),
        prefer=section("prefer") or Objective(),
        register=section("register"),
        deploy=entries("deploy"),
    )
