from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.config.schema import pipeline_schema, target_schema
from onnx_ops.config.yaml_reader import read_text

ROOT = Path(__file__).parents[2]
COMMAND = "python -m onnx_ops.config.schema configs/schema"
EXAMPLES = [
    *(("pipeline", path) for path in sorted((ROOT / "configs/pipelines").glob("*.yaml"))),
    *(("target", path) for path in sorted((ROOT / "configs/targets").glob("*.yaml"))),
]


@cache
def schema_of(kind: str) -> dict[str, Any]:
    return {"pipeline": pipeline_schema, "target": target_schema}[kind]()


def accepts(schema: dict[str, Any], text: str) -> bool:
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(schema).is_valid(read_text(text, source="x").value))


def find_difference(stored: object, generated: object) -> str | None:
    """Return the path of the first difference between two documents; None if equal.

    An example of a path is `.$defs.Gate.enum[2]`.
    """
    if stored == generated:
        return None
    match stored, generated:
        case dict(), dict():
            keys = [*stored, *(key for key in generated if key not in stored)]
            pairs = [
                (f".{key}", stored.get(key, MISSING), generated.get(key, MISSING)) for key in keys
            ]
        case list(), list():
            values = zip_longest(stored, generated, fillvalue=MISSING)
            pairs = [(f"[{index}]", old, new) for index, (old, new) in enumerate(values)]
        case _:
            return ""
    return next(
        f"{step}{below}"
        for step, old, new in pairs
        if (below := find_difference(old, new)) is not None
    )


MISSING = object()


@pytest.mark.parametrize(
    ("stored", "generated", "path"),
    [
        ({"a": [1]}, {"a": [1]}, None),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ".b"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ".a.b[1]"),
        ({"a": [1]}, {"a": [1, 2]}, ".a[1]"),
        ({"a": 1}, {"a": 1, "b": None}, ".b"),
        ({"a": 1, "b": None}, {"a": 1}, ".b"),
        ({"a": [1]}, {"a": 1}, ".a"),
        ({"a": [1, 2], "b": 1}, {"a": [3, 4], "b": 2}, ".a[0]"),
    ],
)
def test_find_difference_of_documents_returns_first_path(
    stored: object, generated: object, path: str | None
) -> None:
    assert find_difference(stored, generated) == path


@pytest.mark.parametrize("name", ["pipeline", "target"])
def test_committed_schema_equals_generated_schema(name: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "onnx_ops.config.schema", str(tmp_path)], check=True, cwd=ROOT
    )
    file = f"{name}.schema.json"
    stored, written = (
        (folder / file).read_text() for folder in (ROOT / "configs/schema", tmp_path)
    )
    require_current(name, json.loads(stored), json.loads(written))
    # An assertion on the texts would print the whole schema.
    is_same_text = stored == written
    assert is_same_text, f"configs/schema/{file} differs in its layout; write it with: {COMMAND}"
    require_current(name, json.loads(written), schema_of(name))


def require_current(name: str, stored: object, generated: object) -> None:
    """Fail with the command and the first difference only.

    A schema has thousands of lines.
    """
    path = find_difference(stored, generated)
    if path is not None:
        text = f"configs/schema/{name}.schema.json is not current, first at {path.lstrip('.')}"
        pytest.fail(f"{text}; write it with: {COMMAND}", pytrace=False)


def test_require_current_with_changed_schema_names_command_and_first_path() -> None:
    changed = copy.deepcopy(schema_of("pipeline"))
    changed["$defs"]["MetricGate"]["properties"]["name"]["description"] = "another"
    with pytest.raises(pytest.fail.Exception) as caught:
        require_current("pipeline", schema_of("pipeline"), changed)
    assert str(caught.value) == (
        "configs/schema/pipeline.schema.json is not current, "
        "first at $defs.MetricGate.properties.name.description; write it with: "
        "python -m onnx_ops.config.schema configs/schema"
    )


@pytest.mark.parametrize("name", ["pipeline", "target"])
def test_generated_schema_is_valid_json_schema(name: str) -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize(("kind", "path"), EXAMPLES, ids=[path.stem for _, path in EXAMPLES])
def test_example_file_names_schema_and_conforms_to_it(kind: str, path: Path) -> None:
    from jsonschema import Draft202012Validator

    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema=../schema/{kind}.schema.json\n")
    Draft202012Validator(schema_of(kind)).validate(read_text(text, source=path.name).value)


def test_schema_accepts_valid_files(pipeline_text: str) -> None:
    schema = schema_of("pipeline")
    assert accepts(schema, pipeline_text)
    assert accepts(schema, pipeline_text.replace("  - {endpoint", "  {endpoint"))
    assert accepts(
        schema_of("target"),
        "name: gpu\nproviders: [A, {name: B, options: {c: d}}]\nrequires: {cpu_flags: "
        "[avx2], memory: 4 GB}\n",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_drop: 1%", "max_dorp: 1%"),
        ("max_drop: 1%", "max_drop: 1"),
        ("p99: 5 ms", "p99: 5"),
        ("p99: 5 ms", "p99: 5 MS"),
        ("{kind: parity}", "{noise_factor: 2}"),
        ("{kind: parity}", "{kind: size}"),
        ("targets: [cpu-1t]", "targets: []"),
        ("pipeline: toy", "pipeline: Toy"),
        ("split: train", "file: a"),
        ("framework: sklearn", "framework: sklearn\n  opset: '18'"),
        ("export:\n  framework: sklearn\n", ""),
    ],
)
def test_schema_rejects_invalid_files(pipeline_text: str, old: str, new: str) -> None:
    assert not accepts(schema_of("pipeline"), pipeline_text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        ("framework: sklearn", "framework: sklearn\n  opset: '${params:opset}'", True),
        ("max_drop: 1%", "max_drop: '${params:drop}'", True),
        ("promote: manual", "promote: '${params:promote}'", True),
        ("epochs: 3", "epochs: '${params:epochs}'", True),
        ("framework: sklearn", "framework: sklearn\n  opset: '${param:opset}'", False),
        ("pipeline: toy", "pipeline: '${params:name}'", False),
        ("endpoint: toy", "endpoint: '${params:name}'", False),
        ("kind: parity", "kind: '${params:kind}'", False),
    ],
)
def test_schema_accepts_parameter_reference_only_where_allowed(
    pipeline_text: str, old: str, new: str, fits: bool
) -> None:
    text = pipeline_text.replace(
        "register: {model: toy}", "register: {model: toy, promote: manual}"
    )
    assert text.count(old) == 1
    assert accepts(schema_of("pipeline"), text.replace(old, new)) is fits


def test_schema_contains_descriptions_units_and_defaults() -> None:
    definitions = schema_of("pipeline")["$defs"]
    assert definitions["Deploy"]["properties"]["target"]["description"].startswith(
        "Target whose champion is served"
    )
    assert definitions["RolloutPolicy"]["properties"]["scale_down_delay"]["default"] == "1 d"
    assert definitions["SklearnData"]["properties"]["test_size"]["default"] == "50%"
    assert definitions["SizeGate"]["properties"]["max"]["examples"] == ["2 MB", "512 KiB"]
    assert "with" in definitions["Train"]["properties"]
    assert definitions["ParityGate"]["required"] == ["kind"]
