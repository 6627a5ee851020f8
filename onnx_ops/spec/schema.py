"""JSON Schemas of the YAML files, for editors; generated from the same types that validate them.

`python -m onnx_ops.spec.schema [FOLDER]` writes them, by default into `configs/schema`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.domain.target import Target
from onnx_ops.spec.binding import adapter

FOLDER = Path("configs") / "schema"


class _Untitled(GenerateJsonSchema):
    """Without the titles that repeat every key in capitals."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def pipeline_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of pipeline files. Names that refer to each other are beyond it."""
    return _schema(Pipeline, "onnx-ops pipeline")


def target_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of target files."""
    return _schema(Target, "onnx-ops target")


def write_schemas(folder: Path) -> None:
    """Write both schemas as `pipeline.schema.json` and `target.schema.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in (("pipeline", pipeline_schema()), ("target", target_schema())):
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.schema.json").write_text(text, encoding="utf-8")


def _schema(kind: type, title: str) -> dict[str, Any]:
    schema = adapter(kind).json_schema(schema_generator=_Untitled)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": title}


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
