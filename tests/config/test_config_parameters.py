"""Values of `params.yaml` in a pipeline file.

They are inserted unchanged, and problems name their place in `params.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_ops.config.targets import TargetFiles
from onnx_ops.pipeline import plan
from tests.pipeline.plan_parts import TableProbe
from tests.support.golden import Golden

PARAMS = """\
train:
  epochs: 12
  rates: [0.1, 0.2]
  nested: {a: 1, b: [x, y]}
opset: 17
drop: 2%
name: toy
wide: nonsense
bad: 012
yes: true
"""

Load = Callable[..., Any]
Problems = Callable[..., list[str]]


@pytest.fixture
def params(project: Path) -> Path:
    path = project / "params.yaml"
    path.write_text(PARAMS)
    return path


def test_parameter_as_whole_value_keeps_its_type(
    load: Load, params: Path, pipeline_text: str
) -> None:
    text = pipeline_text.replace(
        "epochs: 3", "epochs: '${params:train.epochs}', all: '${params:train}'"
    )
    text = text.replace("max_drop: 1%", "max_drop: '${params:drop}'")
    text = text.replace("framework: sklearn", "framework: sklearn\n  opset: ${params:opset}")
    pipeline = load(text)
    assert pipeline.train.with_ == {
        "epochs": 12,
        "all": {"epochs": 12, "rates": [0.1, 0.2], "nested": {"a": 1, "b": ["x", "y"]}},
    }
    assert pipeline.export.opset == 17
    assert pipeline.gates[1].max_drop == 0.02
    assert pipeline.parameters["train.epochs"] == 12
    assert set(pipeline.parameters) == {"train.epochs", "train", "opset", "drop"}


def test_parameter_within_text_is_converted_to_text(
    load: Load, params: Path, pipeline_text: str
) -> None:
    text = pipeline_text.replace(
        "epochs: 3",
        "tag: 'v${params:train.epochs}-${params:train.rates[1]}-${params:yes}', other: '${x}'",
    )
    pipeline = load(text)
    assert pipeline.train.with_ == {"tag": "v12-0.2-true", "other": "${x}"}
    assert pipeline.parameters == {"train.epochs": 12, "train.rates[1]": 0.2, "yes": True}


def test_invalid_parameters_file_is_ignored_for_pipeline_without_references(
    load: Load, project: Path, pipeline_text: str
) -> None:
    (project / "params.yaml").write_text("[")
    assert load(pipeline_text).parameters == {}


def test_override_replaces_parameter_reference_and_can_contain_one(
    load: Load, params: Path, pipeline_text: str
) -> None:
    text = pipeline_text.replace("epochs: 3", "epochs: '${params:train.epochs}'")
    assert load(text, overrides=["train.with.epochs=5"]).train.with_ == {"epochs": 5}
    assert load(pipeline_text, overrides=["train.with.epochs=${params:opset}"]).train.with_ == {
        "epochs": 17
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epochs: 3", "epochs: '${params:train.epoch}'",
         ("toy.yaml:7:18: train.with.epochs: params.yaml has no 'train.epoch'; "
          "did you mean 'train.epochs'?")),
        ("epochs: 3", "epochs: '${params:train.rates[2]}'",
         ("toy.yaml:7:18: train.with.epochs: params.yaml has no 'train.rates[2]'; "
          "did you mean 'train.rates[1]'?")),
        ("epochs: 3", "epochs: '${params:}'",
         ("toy.yaml:7:18: train.with.epochs: '${params:}' is not of the form "
          "${params:path.to.value}")),
        ("epochs: 3", "epochs: '${params:train'",
         ("toy.yaml:7:18: train.with.epochs: '${params:train' is not of the form "
          "${params:path.to.value}")),
        ("epochs: 3", "'${params:opset}': 3",
         "toy.yaml:7:10: train.with: ${params:…} is not allowed for a key; write a literal"),
        ("pipeline: toy", "pipeline: '${params:name}'",
         "toy.yaml:1:11: pipeline: ${params:…} is not allowed for pipeline; write a literal"),
        ("endpoint: toy", "endpoint: '${params:name}'",
         ("toy.yaml:20:16: deploy[0].endpoint: ${params:…} is not allowed for deploy.endpoint; "
          "write a literal")),
        ("epochs: 3", "epochs: 'n${params:train.nested}'",
         ("params.yaml:4:11: train.with.epochs: 'train.nested' is a mapping, "
          "which cannot be part of a string")),
        ("epochs: 3", "epochs: '${params:bad}'",
         ("params.yaml:9:6: train.with.epochs: '012' is ambiguous: "
          "some YAML parsers read a leading zero as octal; "
           "write 12, or quote it to make it a string")),
        ("max_drop: 1%", "max_drop: '${params:wide}'", "params.yaml:8:7: gates[1].max_drop: "),
    ],
)  # fmt: skip
def test_parameter_with_wrong_reference_or_value_reports_its_place(
    params: Path, problems: Problems, pipeline_text: str, old: str, new: str, said: str
) -> None:
    assert pipeline_text.count(old) == 1
    found = problems(pipeline_text.replace(old, new))
    assert [one for one in found if one.startswith(said)], found


def test_parameters_file_that_is_missing_or_invalid_reports_problem(
    project: Path, problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    text = pipeline_text.replace("epochs: 3", "epochs: '${params:train.epochs}'")
    golden("errors", "\n".join(problems(text)))
    (project / "params.yaml").write_text("train: [")
    (said,) = problems(text)
    assert said.startswith("params.yaml:1:9: not valid YAML")
    (project / "params.yaml").write_text("")
    assert problems(text) == ["toy.yaml:7:18: train.with.epochs: params.yaml has no 'train.epochs'"]


def test_pipeline_with_parameters_key_reports_unknown_key(
    problems: Problems, pipeline_text: str
) -> None:
    (said,) = problems(pipeline_text + "parameters: {a: 1}\n")
    assert "unknown key 'parameters'" in said


def test_parameter_change_updates_settings_of_stages_that_use_it(
    load: Load, project: Path, params: Path, pipeline_text: str
) -> None:
    text = pipeline_text.replace(
        "epochs: 3", "epochs: '${params:train.epochs}', rate: '${params:train.rates[1]}'"
    )
    targets = {"cpu-1t": TargetFiles(project).load("cpu-1t")}
    before = plan(load(text), targets, TableProbe())
    params.write_text(PARAMS.replace("epochs: 12", "epochs: 13").replace("opset: 17", "opset: 16"))
    after = plan(load(text), targets, TableProbe())
    changed = {stage.id for stage in before.stages if stage.settings != after[stage.id].settings}
    assert changed == {"train", "register"}
    assert after["train"].settings["with_"] == {"epochs": 13, "rate": 0.2}
    recorded: Any = after["register"].settings["parameters"]
    assert recorded["params.train.epochs"] == "13"
    assert recorded["params.train.rates.1"] == "0.2", "registries take no brackets in names"
    assert recorded["train.epochs"] == "13"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text("abc xyz:#-", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(value=_VALUES)
def test_parameter_of_any_value_is_loaded_unchanged(
    load: Load, project: Path, pipeline_text: str, value: object
) -> None:
    (project / "params.yaml").write_text(
        yaml.safe_dump({"a": {"b": value}}, default_style='"' if isinstance(value, str) else None)
    )
    text = pipeline_text.replace("epochs: 3", "epochs: '${params:a.b}', again: '${params:a.b}'")
    assert load(text).train.with_ == {"epochs": value, "again": value}
