from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.config.document import path_text
from onnx_ops.config.substitution import parse_path
from onnx_ops.domain.gate import MetricGate
from onnx_ops.domain.pipeline import FileData, Pipeline
from tests.support.golden import Golden

Load = Callable[..., Pipeline]
Problems = Callable[..., list[str]]


def test_override_value_is_parsed_as_strict_yaml(load: Load) -> None:
    overrides = (
        "train.with.epochs=5",
        "train.with.lr=1e-3",
        "train.with.mode=no",
        "gates[1].max_drop=2%",
        "deploy[0].rollout.steps=[50%,100%]",
        "export.dynamic.x[0]=batch",
    )
    pipeline = load(overrides=overrides)
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 5, "lr": 0.001, "mode": "no"}
    assert isinstance(pipeline.gates[1], MetricGate)
    assert pipeline.gates[1].max_drop == 0.02
    assert pipeline.deploy[0].rollout.steps == (0.5, 1.0)
    assert pipeline.export.dynamic == {"x": {0: "batch"}}


def test_override_that_is_repeated_uses_last_value(load: Load, pipeline_text: str) -> None:
    overrides = ("train.with.epochs=5", "train.with.epochs=6", "validate.samples.limit=9")
    pipeline = load(pipeline_text.replace("with: {epochs: 3}", "with:"), overrides=overrides)
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 6}
    assert pipeline.validate.samples.limit == 9


def test_override_of_index_0_changes_single_deployment(load: Load, pipeline_text: str) -> None:
    lone = pipeline_text.replace("  - {endpoint", "  {endpoint")
    assert load(lone, overrides=["deploy[0].rollout.steps=[100%]"]).deploy[0].rollout.steps == (
        1.0,
    )


WRONG = (
    "gates[0].noise_factor=0",
    "export.opsett=17",
    "export.opset=.inf",
    "export=*x",
    "train.with={a: 1, a: 2}",
    "train.with={a: !!int 2}",
    "export=",
    "gates[7].kind=parity",
    "gates.kind=parity",
    "pipeline.x=1",
    "pipeline.x.y=1",
    "epochs",
    "=3",
    "[0].a=3",
    "a..b=3",
    "benchmark.targets=[odd]",
)


def test_override_with_wrong_path_or_value_is_named_in_problem(
    problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    lines = []
    for override in WRONG:
        found = problems(pipeline_text, overrides=[override])
        lines += [line for line in found if line.startswith(f"--set {override}: ")]
    assert len(lines) == len(WRONG)
    golden("errors", "\n".join(lines))


def test_override_and_file_problems_are_reported_together(
    problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    text = pipeline_text.replace("epochs: 3", "epochs: 012").replace("max_drop: 1%", "max_drop: 1")
    golden(
        "errors", "\n".join(problems(text, overrides=["gates[9].kind=x", "train.with.epochs=12"]))
    )


@given(
    st.text("abc_-", min_size=1),
    st.lists(st.one_of(st.text("abc_-1", min_size=1), st.integers(0, 99))),
)
def test_parse_path_of_printed_path_returns_it(first: str, rest: list[str | int]) -> None:
    loc = (first, *rest)
    assert parse_path(path_text(loc)) == loc


def test_environment_variable_in_allowed_place_is_replaced(load: Load, pipeline_text: str) -> None:
    text = pipeline_text.replace(
        "{sklearn: digits, split: train}", "{file: '${env:ROOT}/a.npz', inputs: {x: x}}"
    )
    text = text.replace("{model: toy}", "{model: 'toy-${env:STAGE}'}")
    text = text.replace("{endpoint: toy", "{endpoint: toy, options: {region: '${env:STAGE}-1'}")
    pipeline = load(text, environ={"ROOT": "/data", "STAGE": "dev"})
    assert pipeline.data["train"] == FileData(file="/data/a.npz", inputs={"x": "x"})
    assert pipeline.register is not None
    assert pipeline.register.model == "toy-dev"
    assert pipeline.deploy[0].options == {"region": "dev-1"}


def test_wrong_environment_variable_reference_reports_problem(
    problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    lines = []
    for old, new in (
        ("{model: toy}", "{model: '${env:NOPE}'}"),
        ("{model: toy}", "{model: '${env:A-B}'}"),
        ("{model: toy}", "{model: '${env:A'}"),
        ("{epochs: 3}", "{epochs: '${env:E}'}"),
        ("{epochs: 3}", "{'${env:E}': 3}"),
    ):
        (problem,) = problems(pipeline_text.replace(old, new), environ={"E": "1"})
        lines.append(f"{new}\n    {problem}")
    golden("errors", "\n".join(lines))


def test_environment_variable_value_is_not_expanded_again(load: Load, pipeline_text: str) -> None:
    text = pipeline_text.replace(
        "test: {sklearn: digits, split: test}", "test: {file: '${env:A}', label: y}"
    )
    for value in ("$B 012", "${env:B}"):
        pipeline = load(text, environ={"A": value, "B": "other.npz"})
        assert pipeline.data["test"].file == value  # type: ignore[union-attr]
