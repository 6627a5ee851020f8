from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.domain.gate import LatencyGate, MetricGate, ParityGate
from onnx_ops.domain.pipeline import Calibrate, Deploy, SklearnData
from onnx_ops.domain.rollout import RolloutPolicy
from onnx_ops.errors import NotFound, Problem, SpecError, UserError
from onnx_ops.spec import check_pipeline, load_pipeline

Problems = Callable[..., list[str]]
PLUGINS = {"exporters": ("sklearn", "torch"), "optimizers": ("dynamic", "static"), "endpoints": ("local",)}
STATIC = "  - {name: small, method: static, calibrate: {data: train}}\n"
METRIC = "  - {kind: metric, max_drop: 1%}\n"
DEPLOY = "  - {endpoint: toy, target: cpu-1t, rollout: {steps: [10%, 100%]}}\n"


def test_a_right_file_becomes_the_domain(project: Path) -> None:
    pipeline = load_pipeline(project / "toy.yaml", root=project, environ={})
    assert pipeline.data["train"] == SklearnData(sklearn="digits", split="train")
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 3}
    assert pipeline.quantize[0].calibrate == Calibrate(data="train")
    assert pipeline.benchmark.targets == ("cpu-1t",)
    assert pipeline.gates == (ParityGate(), MetricGate(max_drop=0.01), LatencyGate(p99=0.005))
    assert pipeline.deploy == (Deploy(endpoint="toy", target="cpu-1t", rollout=RolloutPolicy(steps=(0.1, 1.0))),)
    hash(pipeline.gates)


def _cases() -> list[Any]:
    """Blocks of `wrong_files.txt`: what is replaced in the right file, by what, and the problems that follow."""
    cases = []
    for block in (Path(__file__).parent / "wrong_files.txt").read_text(encoding="utf-8").strip().split("\n\n"):
        old, new, *expected = block.split("\n")
        unescaped = [line.removeprefix(mark).replace("\\n", "\n") for line, mark in ((old, "< "), (new, "> "))]
        cases.append(pytest.param(*unescaped, expected, id=new[2:]))
    return cases


@pytest.mark.parametrize(("old", "new", "expected"), _cases())
def test_wrong_files(problems_after: Problems, old: str, new: str, expected: list[str]) -> None:
    assert problems_after(old, new) == expected


def test_all_problems_appear_at_once_with_line_and_column(problems: Problems) -> None:
    text = """\
pipeline: toy
data:
  test: {sklearn: digits, lable: target}
train:
  run: models.toy:trian
  retries: no
  retries: 2
  timeout: 30
quantize:
  - {name: fp32, method: dynamic}
benchmark:
  targets: [cpu-2t]
  batch: .inf
gates:
  - {kind: metric, name: accuracy}
  - {kind: size, max: 2 Mb}
deploy:
  - {endpoint: toy, target: cpu-1t, rollout: {steps: [50%]}}
"""
    assert problems(text) == [
        "toy.yaml:1:1: missing key 'export'",
        "toy.yaml:3:27: data.test: unknown key 'lable'; did you mean 'label'?",
        "toy.yaml:5:8: train.run: no function 'trian' in models/toy.py; did you mean 'train'?",
        "toy.yaml:6:12: train.retries: expected a whole number, got the text 'no'",
        "toy.yaml:7:3: train: duplicate key 'retries' (first on line 6)",
        "toy.yaml:8:12: train.timeout: expected a duration, got the number 30; write it with a unit, e.g. 5 ms",
        "toy.yaml:10:12: quantize[0].name: 'fp32' is the name of the export itself; choose another",
        "toy.yaml:12:13: benchmark.targets[0]: no target is called 'cpu-2t'; did you mean 'cpu-1t'?",
        "toy.yaml:13:10: benchmark.batch: .inf is not a finite number",
        "toy.yaml:15:5: gates[0]: a metric gate needs 'max_drop' or 'min'",
        "toy.yaml:16:23: gates[1].max: unknown unit 'Mb' in '2 Mb'; did you mean 'MB'?",
        "toy.yaml:18:3: deploy: only registered versions are deployed; add a 'register' section",
        "toy.yaml:18:29: deploy[0].target: target 'cpu-1t' is not among benchmark.targets; did you mean 'cpu-2t'?",
        "toy.yaml:18:54: deploy[0].rollout.steps: the last step must be 100%, not 50%",
    ]


def test_a_wrong_part_does_not_breed_problems_elsewhere(problems_after: Problems) -> None:
    assert problems_after("calibrate: {data: train}", "calibrate: {data: train, samples: many}") == [
        "11:69: quantize[0].calibrate.samples: expected a whole number, got the text 'many'"
    ]
    assert problems_after("targets: [cpu-1t]", "targets: [3]") == [
        "13:13: benchmark.targets[0]: expected a text, got the number 3; put it in quotes: '3'"
    ]
    assert problems_after("{sklearn: digits, split: test}", "{sklearn: digits, seed: -1}") == [
        "4:33: data.test.seed: must be at least 0, got the number -1"
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_so(problems: Problems, text: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith("the file is empty")


def test_a_file_that_is_no_mapping(problems: Problems) -> None:
    assert problems("- a\n") == ["toy.yaml:1:1: expected a mapping, got a list"]


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("2", "1:9: schema: this file needs a newer onnx-ops: it has schema 2, this release reads up to 1"),
        ("0", "1:9: schema: must be at least 1, got the number 0"),
        ("one", "1:9: schema: expected a whole number, got the text 'one'"),
        ("true", "1:9: schema: expected a whole number, got true"),
    ],
)
def test_schema_versions(problems: Problems, pipeline_text: str, version: str, problem: str) -> None:
    assert problems(f"schema: {version}\n{pipeline_text}") == [f"toy.yaml:{problem}"]
    assert problems(f"schema: 1\n{pipeline_text}") == []


def test_a_newer_file_is_not_judged_by_older_rules(problems: Problems) -> None:
    (problem,) = problems("schema: 7\nsomething: new\n")
    assert "needs a newer onnx-ops" in problem


def test_blank_lists_and_a_lone_deployment(project: Path, pipeline_text: str) -> None:
    text = pipeline_text.replace(STATIC, "").replace("  - {endpoint", "  {endpoint")
    (project / "toy.yaml").write_text(text)
    pipeline = load_pipeline(project / "toy.yaml", root=project, environ={})
    assert pipeline.quantize == ()
    assert [entry.endpoint for entry in pipeline.deploy] == ["toy"]


def test_problems_of_a_lone_deployment_have_no_index(problems: Problems, pipeline_text: str) -> None:
    text = pipeline_text.replace("  - {endpoint: toy,", "  {endpoint: toy, setings: 1,").replace("10%", "1.5%")
    assert problems(text) == [
        "toy.yaml:20:19: deploy: unknown key 'setings'; did you mean 'settings'?",
        "toy.yaml:20:65: deploy.rollout.steps[0]: 1.5% is not a whole percentage",
    ]


def test_a_parity_gate_is_put_first_if_there_is_none(project: Path, pipeline_text: str) -> None:
    path = project / "toy.yaml"
    path.write_text(pipeline_text.replace("  - {kind: parity}\n", ""))
    assert load_pipeline(path, root=project, environ={}).gates[0] == ParityGate()
    moved = pipeline_text.replace("  - {kind: parity}\n", "").replace(METRIC, METRIC + "  - {kind: parity}\n")
    path.write_text(moved)
    assert [gate.kind for gate in load_pipeline(path, root=project, environ={}).gates] == [
        "metric",
        "parity",
        "latency",
    ]


def test_a_missing_file_is_not_a_problem_of_a_file(project: Path) -> None:
    with pytest.raises(NotFound, match=r"toi\.yaml: no such file\. Did you mean 'toy\.yaml'\?"):
        load_pipeline(project / "toi.yaml", root=project)


def test_problems_in_a_target_file_come_along(project: Path, problems_after: Problems) -> None:
    (project / "configs/targets/odd.yaml").write_text("name: odd\nsession: {spinning: off}\n")
    assert problems_after("targets: [cpu-1t]", "targets: [cpu-1t, odd, none]") == [
        "configs/targets/odd.yaml:2:21: session.spinning: expected true or false, got the text 'off'; write false",
        "13:26: benchmark.targets[2]: no target is called 'none'; did you mean 'node'?",
    ]


def checked(project: Path, text: str) -> list[str]:
    path = project / "configs/pipelines/toy.yaml"
    path.write_text(text)
    try:
        check_pipeline(path, root=project, plugins=PLUGINS, environ={})
    except SpecError as error:
        return [problem.removeprefix("configs/pipelines/toy.yaml:") for problem in str(error).splitlines()]
    return []


def test_check_knows_the_plugins(project: Path, pipeline_text: str) -> None:
    (project / "configs/targets/web.yaml").write_text("name: web\nruntime: browser\n")
    assert checked(project, pipeline_text) == []
    text = pipeline_text.replace("framework: sklearn", "framework: sklaern").replace("method: static", "method: statik")
    text = text.replace("{endpoint: toy", "{endpoint: toy, provider: aws").replace("{sklearn: digits, split: train}",
        "{use: lake, inputs: {x: x}}").replace("[cpu-1t]", "[cpu-1t, web]")  # fmt: skip
    plugins = {**PLUGINS, "data": (), "runtimes": ("onnxruntime",)}
    path = project / "configs/pipelines/toy.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        check_pipeline(path, root=project, plugins=plugins, environ={})
    assert [str(problem).split(": ", 2)[2] for problem in caught.value.problems] == [
        "no data plugin is called 'lake'; installed: none",
        "no exporter plugin is called 'sklaern'; did you mean 'sklearn'?",
        "no optimizer plugin is called 'statik'; did you mean 'static'?",
        "no runtime plugin is called 'browser'; installed: onnxruntime",
        "no endpoint plugin is called 'aws'; installed: local",
    ]


def test_check_finds_endpoints_of_other_pipelines(project: Path, pipeline_text: str) -> None:
    pipelines = project / "configs/pipelines"
    (pipelines / "broken.yaml").write_text("{")
    (pipelines / "list.yaml").write_text("- deploy\n")
    (pipelines / "wrong.yaml").write_text("deploy: [3, {endpoint: [1]}]\n")
    (pipelines / "other.yaml").write_text("deploy: {endpoint: toy}\n")
    assert checked(project, pipeline_text) == [
        "20:16: deploy[0].endpoint: endpoint 'toy' belongs to configs/pipelines/other.yaml already"
    ]


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ("{source: prometheus, url: http://p}", []),
        ("{}", []),
        ("{source: promethius}", ["no metric plugin is called 'promethius'; did you mean 'prometheus'?"]),
        ("{url: http://p}", ["metrics need a source: one of prometheus"]),
        ("{source: prometheus}", ["there is no url. Write one"]),
    ],
)
def test_check_asks_the_source_of_metrics_about_its_settings(
    project: Path, pipeline_text: str, metrics: str, found: list[str]
) -> None:
    def needs_a_url(source: str, settings: Mapping[str, object]) -> None:
        assert source == "prometheus"
        if "url" not in settings:
            raise UserError("there is no url", remedy="Write one.")

    path = project / "toy.yaml"
    path.write_text(pipeline_text.replace("{endpoint: toy", f"{{endpoint: toy, metrics: {metrics}"))
    plugins = {**PLUGINS, "metrics": ("prometheus",)}
    messages: list[str] = []
    try:
        check_pipeline(path, root=project, plugins=plugins, metrics=needs_a_url, environ={})
    except SpecError as error:
        messages = [problem.message for problem in error.problems]
    assert messages == found


def test_check_asks_the_provider_about_its_settings(project: Path, pipeline_text: str) -> None:
    def only_ports(provider: str, settings: Mapping[str, object]) -> None:
        assert provider == "local"
        for name in settings:
            if name != "port":
                raise UserError(f"there is no setting {name!r}", remedy="did you mean 'port'?")

    path = project / "configs/pipelines/toy.yaml"
    for settings, found in (("port: 8080", []), ("prot: 8080", ["there is no setting 'prot'. did you mean 'port'?"])):
        path.write_text(pipeline_text.replace("{endpoint: toy", f"{{endpoint: toy, settings: {{{settings}}}"))
        problems: tuple[Problem, ...] = ()
        try:
            check_pipeline(path, root=project, plugins=PLUGINS, settings=only_ports, environ={})
        except SpecError as error:
            problems = error.problems
        assert [problem.message for problem in problems] == found
        assert all(problem.line for problem in problems)
