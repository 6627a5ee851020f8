from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.domain.pipeline import FileData, Pipeline
from onnx_ops.errors import SpecError
from onnx_ops.spec import load_pipeline
from onnx_ops.spec.document import path_text
from onnx_ops.spec.overrides import parse_path
from tests.support.golden import Golden

Problems = Callable[..., list[str]]
NOT_HERE = (
    "${env:…} is not allowed here; it is in deploy.settings.*, deploy.metrics.*, data.*.file, register.model, model"
)


def load(project: Path, *overrides: str) -> Pipeline:
    return load_pipeline(project / "toy.yaml", root=project, overrides=overrides, environ={})


def test_values_are_strict_yaml(project: Path) -> None:
    pipeline = load(
        project,
        "train.with.epochs=5",
        "train.with.lr=1e-3",
        "train.with.mode=no",
        "gates[1].max_drop=2%",
        "deploy[0].rollout.steps=[50%,100%]",
        "export.dynamic.x[0]=batch",
    )
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 5, "lr": 0.001, "mode": "no"}
    assert pipeline.gates[1].max_drop == 0.02  # type: ignore[union-attr]
    assert pipeline.deploy[0].rollout.steps == (0.5, 1.0)
    assert pipeline.export.dynamic == {"x": {0: "batch"}}


def test_later_overrides_win_and_blank_sections_are_filled(project: Path, pipeline_text: str) -> None:
    (project / "toy.yaml").write_text(pipeline_text.replace("with: {epochs: 3}", "with:"))
    pipeline = load(project, "train.with.epochs=5", "train.with.epochs=6", "validate.samples.limit=9")
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 6}
    assert pipeline.validate.samples.limit == 9


def test_index_0_of_a_lone_deployment(project: Path, pipeline_text: str) -> None:
    (project / "toy.yaml").write_text(pipeline_text.replace("  - {endpoint", "  {endpoint"))
    assert load(project, "deploy[0].rollout.steps=[100%]").deploy[0].rollout.steps == (1.0,)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("gates[0].noise_factor=0", "gates[0].noise_factor: must be at least 1, got the number 0"),
        ("export.opsett=17", "export: unknown key 'opsett'; did you mean 'opset'?"),
        ("export.opset=.inf", "export.opset: .inf is not a finite number"),
        ("export=*x", "found undefined alias 'x'"),
        ("train.with={a: 1, a: 2}", "train.with: duplicate key 'a'"),
        ("train.with={a: !!int 2}", "train.with.a: tags are not allowed: '!!int'"),
        ("export=", "export: expected a mapping, got nothing"),
        ("gates[7].kind=parity", "gates has 3 entries, counted from 0; there is no gates[7]"),
        ("gates.kind=parity", "gates is a list; name an entry by its index, such as gates[0]"),
        ("pipeline.x=1", "pipeline is the text 'toy', so nothing can be set inside it"),
        ("pipeline.x.y=1", "pipeline is the text 'toy', so nothing can be set inside it"),
        ("epochs", "expected path=value, such as train.with.epochs=3"),
        ("=3", "expected path=value, such as train.with.epochs=3"),
        ("[0].a=3", "'[0].a' is not a path; write keys with dots and indices in brackets: gates[1].max_drop"),
        ("a..b=3", "'a..b' is not a path; write keys with dots and indices in brackets: gates[1].max_drop"),
        ("benchmark.targets=[odd]", "benchmark.targets[0]: no target is called 'odd'; did you mean 'old'?"),
    ],
)
def test_problems_point_at_the_override(project: Path, override: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(project, override)
    assert f"--set {override}: {problem}" in str(caught.value).splitlines()


def test_problems_of_overrides_and_file_appear_together(problems: Problems, pipeline_text: str, golden: Golden) -> None:
    text = pipeline_text.replace("epochs: 3", "epochs: 012").replace("max_drop: 1%", "max_drop: 1")
    golden("errors", "\n".join(problems(text, ["gates[9].kind=x", "train.with.epochs=12"])))


@given(
    st.text("abc_-", min_size=1),
    st.lists(st.one_of(st.text("abc_-1", min_size=1), st.integers(0, 99))),
)
def test_a_path_is_what_problems_print(first: str, rest: list[str | int]) -> None:
    loc = (first, *rest)
    assert parse_path(path_text(loc)) == loc


def test_environment_variables_where_allowed(project: Path, pipeline_text: str) -> None:
    text = pipeline_text.replace("{sklearn: digits, split: train}", "{file: '${env:ROOT}/a.npz', inputs: {x: x}}")
    text = text.replace("{model: toy}", "{model: 'toy-${env:STAGE}'}")
    text = text.replace("{endpoint: toy", "{endpoint: toy, settings: {region: '${env:STAGE}-1'}")
    (project / "toy.yaml").write_text(text)
    environ = {"ROOT": "/data", "STAGE": "dev"}
    pipeline = load_pipeline(project / "toy.yaml", root=project, environ=environ)
    assert pipeline.data["train"] == FileData(file="/data/a.npz", inputs={"x": "x"})
    assert pipeline.register is not None
    assert pipeline.register.model == "toy-dev"
    assert pipeline.deploy[0].settings == {"region": "dev-1"}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{model: toy}", "{model: '${env:NOPE}'}", "18:19: register.model: environment variable NOPE is not set"),
        ("{model: toy}", "{model: '${env:A-B}'}", "18:19: register.model: '${env:A-B}' is not of the form ${env:NAME}"),
        ("{model: toy}", "{model: '${env:A'}", "18:19: register.model: '${env:A' is not of the form ${env:NAME}"),
        (
            "{epochs: 3}",
            "{epochs: '${env:E}'}",
            "7:18: train.with.epochs: " + NOT_HERE,
        ),
        (
            "{epochs: 3}",
            "{'${env:E}': 3}",
            "7:10: train.with: " + NOT_HERE,
        ),
    ],
)
def test_environment_problems(problems: Problems, pipeline_text: str, old: str, new: str, problem: str) -> None:
    assert problems(pipeline_text.replace(old, new), environ={"E": "1"}) == [f"toy.yaml:{problem}"]


def test_a_value_from_the_environment_is_not_read_as_a_reference(project: Path, pipeline_text: str) -> None:
    (project / "toy.yaml").write_text(pipeline_text.replace("{model: toy}", "{model: '${env:A}'}"))
    pipeline = load_pipeline(project / "toy.yaml", root=project, environ={"A": "$B 012"})
    assert pipeline.register is not None
    assert pipeline.register.model == "$B 012"
