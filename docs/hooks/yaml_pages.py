"""Reference pages of the YAML files.

They are generated from the JSON Schemas and the tested example files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from keys import Json, choices_of, entries_of, kinds_of, resolved, section_of, sections

from onnx_ops.config.schema import pipeline_schema, target_schema

ROOT = Path(__file__).parents[2]
_WORDS = {"string": "text", "object": "mapping", "integer": "whole number"}

PIPELINE_HEAD = """# The pipeline file

Every key of `configs/pipelines/*.yaml`. This page is generated from the schema by which editors complete the file and
`onnx-ops check` validates it. The examples are taken from tested files.

Percentages, times and sizes have units: `5%`, `5 ms`, `24h`, `2 MB`. Paths and names may contain `${env:NAME}`, which
is replaced by the environment variable, if the [settings](../settings.md#what-a-pipeline-file-may-reach) allow it. A
section that names a plugin holds [the options of the plugin](../ports.md#options-in-files) under `options`.
"""  # noqa: E501
TARGET_HEAD = """# The target file

Every key of `configs/targets/*.yaml` and of the [shipped profiles](../target-profiles.md). This page is generated from
the schema.
"""  # noqa: E501
TITLES = {
    "": "Top level",
    "PluginData": "Data of a plugin",
    "SklearnData": "Data of scikit-learn",
    "FileData": "Data of a file",
}
SECTIONS = {
    "description": "Free text that describes the file.",
    "export": "Export of the trained model to ONNX.",
    "validate": "Rows on which the export is compared with its source.",
    "system": "The project's own code, with which the export and its steps must agree.",
    "quantize": "Variants derived from the export, one for each entry.",
    "benchmark": "Targets on which each variant is measured.",
    "gates": "Limits that a variant must meet on each target.",
    "deploy": "Endpoints that serve the release.",
    "rollout": "How traffic moves to a release.",
    "samples": "Rows to use.",
    "kind": "Kind of the gate.",
    "session": "Options of the ONNX Runtime session.",
    "schema": "Version of the file format.",
    "name": "Name.",
}
"""Descriptions of keys that have none in the schema."""
EXAMPLES: Mapping[str, Any] = {
    "ab_test": {"duration": "7 d"},
    "accelerator": "H100",
    "annotations": "data/instances.json",
    "approval_steps": ["50%"],
    "batch": 8,
    "bins": 15,
    "columns": ["age", "city"],
    "config": {"session.intra_op.allow_spinning": "0"},
    "dedicated": True,
    "decode": "shop.speech:transcribe",
    "depends": ["models/rules.csv"],
    "driver": "550.54",
    "duration": "7 d",
    "env": {"requirements": ["lightgbm==4.6.0"]},
    "epoch": "5 min",
    "ignore": -100,
    "inputs": {"x": "data"},
    "iou": 0.5,
    "label": "target",
    "group": "patient",
    "logits": True,
    "max_detections": 100,
    "memory": "4 GB",
    "min_step_duration": "10 min",
    "min_rows": 100,
    "odds_ratio": 1.5,
    "output": "probabilities",
    "price_per_hour": 0.5,
    "python": "3.12",
    "q": 0.9,
    "retries": 2,
    "sigmas": [0.05, 0.08, 0.05],
    "step_timeout": "12 h",
    "strategy": "canary",
    "timeout": "10 min",
    "values": {"sr": 16000},
    "variants": ["fast"],
}
"""Examples of keys that occur in no file or page and have none in the schema."""


def pipeline_page() -> str:
    """Return the page of pipeline files as Markdown."""
    schema = pipeline_schema()
    return _page(PIPELINE_HEAD, schema, [*_files("configs/pipelines"), *_shown(schema)])


def target_page() -> str:
    """Return the page of target files as Markdown."""
    schema = target_schema()
    files = [*_files("configs/targets"), *_files("onnx_ops/config/profiles")]
    return _page(TARGET_HEAD, schema, [*files, *_shown(schema)])


def _files(folder: str) -> list[Any]:
    return [
        yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).glob("*.yaml"))
    ]


def _shown(schema: Json) -> list[Any]:
    """Return the YAML blocks of other pages that belong to this kind of file.

    Tests load these blocks with the program.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    parts = [
        yaml.safe_load(part)
        for text in texts
        for part in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    ]
    return [
        part for part in parts if isinstance(part, dict) and set(part) <= set(schema["properties"])
    ]


def _page(head: str, schema: Json, documents: list[Any]) -> str:
    seen: dict[tuple[str, str], str] = {}
    for document in documents:
        for place, written in _written(document, schema, "", schema):
            seen[place] = min(written, seen.get(place, written), key=len)
    # The gate on slices has the keys of a metric gate, whose examples fit it too.
    metric = {key: text for (name, key), text in seen.items() if name == "MetricGate"}
    seen = {("SlicesGate", key): text for key, text in metric.items()} | seen
    return head + "\n".join(
        _section(name, section, schema, seen) for name, section in sections(schema)
    )


def _section(name: str, section: Json, schema: Json, seen: Mapping[tuple[str, str], str]) -> str:
    lines = [f"\n## {_title(name)}\n"]
    if name and "description" in section:
        lines.append(f"{section['description']}\n")
    lines += ["| key | type | default | example | description |", "|---|---|---|---|---|"]
    for key, value in section["properties"].items():
        default = "required" if key in section.get("required", ()) else _default(value)
        example = seen.get((name, key)) or _example(key, value, schema)
        meaning = value.get("description") or SECTIONS.get(key, "")
        lines.append(
            f"| `{key}` | {_takes(value, schema)} | {default} | `{_cell(example)}` | "
            f"{_cell(meaning)} |"
        )
    return "\n".join(lines)


def _written(
    value: Any, schema: Json, name: str, root: Json
) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield section, key and text of every key in a document."""
    section = section_of(schema, value, root)
    if isinstance(value, list):
        for item in value:
            yield from _written(item, section.get("items", {}), name, root)
    elif isinstance(value, dict):
        name = section.get("title", name) if section is not root else ""
        for key, item in value.items():
            if key in section.get("properties", {}):
                yield (name, key), _text(key, item)
                yield from _written(item, section["properties"][key], name, root)
            else:
                yield from _written(item, entries_of(section), name, root)


def _text(key: str, value: Any) -> str:
    return f"{key}: {_flow(value)}"


def _flow(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
        .strip()
        .removesuffix("\n...")
    )


def _default(value: Json) -> str:
    return (
        ""
        if value.get("default") is None
        else f"`{json.dumps(value['default'], ensure_ascii=False)}`"
    )


def _example(key: str, value: Json, schema: Json) -> str:
    """Return an example of a key that occurs in no file.

    It comes from `EXAMPLES`, else from the schema.
    """
    found = [EXAMPLES[key]] if key in EXAMPLES else []
    choices = _choices(value, schema)
    found += [example for one in choices for example in one.get("examples", ())]
    found += [value["default"]] if value.get("default") is not None else []
    found += [
        choice
        for one in choices
        for choice in (*one.get("enum", ()), *([one["const"]] if "const" in one else ()))
    ]
    return _text(key, found[0])


def _choices(value: Json, schema: Json) -> list[Json]:
    value = resolved(value, schema)
    found = [choice for one in choices_of(value) for choice in _choices(one, schema)]
    return found or [value]


def _takes(value: Json, schema: Json) -> str:
    words = []
    for one in choices_of(value) or [value]:
        if "$ref" in one and not resolved(one, schema).get("properties"):
            words.append("`${params:NAME}`")
        elif "$ref" in one:
            title = _title(one["$ref"].rpartition("/")[2])
            words.append(f"[{title}](#{title.lower().replace(' ', '-')})")
        elif "enum" in one:
            words.append(", ".join(f"`{choice}`" for choice in one["enum"]))
        elif "const" in one:
            words.append(f"`{one['const']}`")
        elif "array" in kinds_of(one):
            words.append(f"list of {_takes(one.get('items', {}), schema)}")
        elif entries := entries_of(one):
            words.append(f"mapping of names to {_takes(entries, schema)}")
        else:
            words += [
                _WORDS.get(kind, kind) + _bounds(one) for kind in kinds_of(one) if kind != "null"
            ]
    return ", or ".join(dict.fromkeys(words)) or "anything"


def _title(name: str) -> str:
    """Return the heading of a section: `ColdStartGate` becomes "Cold start gate"."""
    return TITLES.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize()


def _bounds(one: Json) -> str:
    low, high = one.get("minimum", one.get("exclusiveMinimum")), one.get("maximum")
    if low is None and high is None:
        return ""
    return (
        f" {low} to {high}"
        if None not in (low, high)
        else f" from {low}"
        if high is None
        else f" up to {high}"
    )


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
