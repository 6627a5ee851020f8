"""JSON Schemas of the YAML files, for editors; generated from the same types that validate them.

`python -m onnx_ops.config.schema [FOLDER]` writes them, by default into `configs/schema`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from onnx_ops.config.binding import adapter
from onnx_ops.config.parameters import FILE as PARAMETERS
from onnx_ops.config.parameters import NOT_IN
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.target import Target

FOLDER = Path("configs") / "schema"

_PARAMETER = "Parameter"


class _Untitled(GenerateJsonSchema):
    """Without the titles that repeat every key in capitals."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def pipeline_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of pipeline files. Names that refer to each other are beyond it."""
    schema = _schema(Pipeline, "onnx-ops pipeline")
    for place in (schema, *schema["$defs"].values()):
        for name, found in place.get("properties", {}).items():
            if (place is schema and (name,) in NOT_IN) or (place.get("title"), name) == ("Deploy", "endpoint"):
                continue
            place["properties"][name] = _or_parameter(found)
    schema["$defs"][_PARAMETER] = {
        "description": f"A value of {PARAMETERS}.",
        "pattern": r"\$\{params:[^{}]+\}",
        "type": "string",
    }
    return schema


def target_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of target files."""
    return _schema(Target, "onnx-ops target")


def write_schemas(folder: Path) -> None:
    """Write both schemas as `pipeline.schema.json` and `target.schema.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in (("pipeline", pipeline_schema()), ("target", target_schema())):
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.schema.json").write_text(text, encoding="utf-8")


def _or_parameter(found: dict[str, Any]) -> dict[str, Any]:
    """A scalar may also be written as a reference; a text that may hold anything takes one as it is."""
    choices = found.get("anyOf", [found])
    if "$ref" in found or "const" in found or not any(_is_limited(one) for one in choices):
        return found
    said = {key: value for key, value in found.items() if key in ("description", "default", "examples", "anyOf")}
    own = {key: value for key, value in found.items() if key not in said}
    return {**said, "anyOf": [*found.get("anyOf", [own]), {"$ref": f"#/$defs/{_PARAMETER}"}]}


def _is_limited(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    return kind in ("integer", "number", "boolean") or (kind == "string" and bool({"enum", "pattern"} & set(schema)))


def _schema(kind: type, title: str) -> dict[str, Any]:
    schema = adapter(kind).json_schema(schema_generator=_Untitled)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": title}


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
