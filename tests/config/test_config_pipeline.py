from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import plugins
from onnx_ops.config.loader import load_pipeline
from onnx_ops.domain.gate import LatencyGate, MetricGate, ParityGate
from onnx_ops.domain.pipeline import Calibrate, Deploy, Pipeline, SklearnData
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.errors import NotFoundError, Problem, UserError
from onnx_ops.ports import Optimizer, OptimizeRequest
from tests.support.golden import Golden

Load = Callable[..., Pipeline]
Problems = Callable[..., list[str]]
FindProblems = Callable[..., tuple[Problem, ...]]
PLUGINS = {
    "exporters": ("sklearn", "torch"),
    "optimizers": ("dynamic", "static"),
    "endpoints": ("local",),
}


def test_load_pipeline_of_valid_file_returns_domain_objects(load: Load) -> None:
    pipeline = load()
    assert pipeline.data["train"] == SklearnData(sklearn="digits", split="train")
    assert pipeline.train is not None
    assert pipeline.train.with_ == {"epochs": 3}
    assert pipeline.quantize[0].calibrate == Calibrate(data="train")
    assert pipeline.benchmark.targets == ("cpu-1t",)
    assert pipeline.gates == (ParityGate(), MetricGate(max_drop=0.01), LatencyGate(p99=0.005))
    assert pipeline.deploy == (
        Deploy(endpoint="toy", target="cpu-1t", rollout=RolloutPolicy(steps=(0.1, 1.0))),
    )
    hash(pipeline.gates)


def _cases() -> list[Any]:
    """Return the blocks of `wrong_files.txt`: replacements in the valid file."""
    cases = []
    for block in (
        (Path(__file__).parent / "wrong_files.txt")
        .read_text(encoding="utf-8")
        .strip()
        .split("\n\n")
    ):
        old, new = (line[2:].replace("\\n", "\n") for line in block.split("\n"))
        cases.append(pytest.param(old, new, id=f"{old} -> {new}"))
    return cases


@pytest.mark.parametrize(("old", "new"), _cases())
def test_load_pipeline_with_wrong_text_in_file_reports_problem(
    problems_after: Problems, old: str, new: str, golden: Golden
) -> None:
    found = problems_after(old, new)
    assert found
    golden("errors", "\n".join(found))


def test_load_pipeline_reports_all_problems_with_line_and_column(
    problems: Problems, golden: Golden
) -> None:
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
    golden("errors", "\n".join(problems(text)))


def test_load_pipeline_with_one_wrong_value_reports_one_problem(
    problems_after: Problems, golden: Golden
) -> None:
    found = [
        *problems_after("calibrate: {data: train}", "calibrate: {data: train, samples: many}"),
        *problems_after("targets: [cpu-1t]", "targets: [3]"),
        *problems_after("{sklearn: digits, split: test}", "{sklearn: digits, seed: -1}"),
    ]
    assert len(found) == 3
    golden("errors", "\n".join(found))


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_load_pipeline_of_empty_file_reports_it(problems: Problems, text: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith("the file is empty")


def test_load_pipeline_of_file_without_mapping_reports_it(
    problems: Problems, golden: Golden
) -> None:
    golden("errors", "\n".join(problems("- a\n")))


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (
            "2",
            (
                "1:9: schema: this file needs a newer onnx-ops: its schema is 2, "
                "and the installed version reads up to schema 1"
            ),
        ),
        ("0", "1:9: schema: must be at least 1, got the number 0"),
        ("one", "1:9: schema: expected a whole number, got the string 'one'"),
        ("true", "1:9: schema: expected a whole number, got true"),
    ],
)
def test_load_pipeline_with_wrong_schema_version_reports_it(
    problems: Problems, pipeline_text: str, version: str, problem: str
) -> None:
    assert problems(f"schema: {version}\n{pipeline_text}") == [f"toy.yaml:{problem}"]
    assert problems(f"schema: 1\n{pipeline_text}") == []


def test_load_pipeline_of_newer_schema_reports_version_only(problems: Problems) -> None:
    (problem,) = problems("schema: 7\nsomething: new\n")
    assert "needs a newer onnx-ops" in problem


def test_load_pipeline_with_blank_list_or_single_deployment_returns_tuples(
    load: Load, pipeline_text: str
) -> None:
    text = pipeline_text.replace(
        "  - {name: small, method: static, calibrate: {data: train}}\n", ""
    )
    pipeline = load(text.replace("  - {endpoint", "  {endpoint"))
    assert pipeline.quantize == ()
    assert [entry.endpoint for entry in pipeline.deploy] == ["toy"]


def test_load_pipeline_with_wrong_single_deployment_reports_path_without_index(
    problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    text = pipeline_text.replace("  - {endpoint: toy,", "  {endpoint: toy, opions: 1,").replace(
        "10%", "1.5%"
    )
    golden("errors", "\n".join(problems(text)))


def test_load_pipeline_adds_parity_gate_first_only_if_it_is_missing(
    load: Load, pipeline_text: str
) -> None:
    parity, metric = "  - {kind: parity}\n", "  - {kind: metric, max_drop: 1%}\n"
    without = pipeline_text.replace(parity, "")
    assert load(without).gates[0] == ParityGate()
    moved = load(without.replace(metric, metric + parity))
    assert [gate.kind for gate in moved.gates] == ["metric", "parity", "latency"]


def test_load_pipeline_of_missing_file_raises_not_found_error(project: Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"toi\.yaml: no such file\. Did you mean .*toy\.yaml\?"
    ):
        load_pipeline(project / "toi.yaml", root=project)


def test_load_pipeline_with_wrong_target_file_reports_its_problems(
    project: Path, problems_after: Problems, golden: Golden
) -> None:
    (project / "configs/targets/odd.yaml").write_text("name: odd\nsession: {spinning: off}\n")
    golden("errors", "\n".join(problems_after("targets: [cpu-1t]", "targets: [cpu-1t, odd, none]")))


def test_load_pipeline_with_unknown_plugins_reports_them(
    project: Path, problems: Problems, pipeline_text: str, golden: Golden
) -> None:
    (project / "configs/targets/web.yaml").write_text("name: web\nruntime: browser\n")
    assert problems(pipeline_text, plugins=PLUGINS) == []
    text = pipeline_text.replace("framework: sklearn", "framework: sklaern").replace(
        "method: static", "method: statik"
    )
    text = (
        text.replace("{endpoint: toy", "{endpoint: toy, provider: aws")
        .replace("{sklearn: digits, split: train}", "{source: lake, inputs: {x: x}}")
        .replace("[cpu-1t]", "[cpu-1t, web]")
    )
    golden(
        "errors",
        "\n".join(problems(text, plugins={**PLUGINS, "data": (), "runtimes": ("onnxruntime",)})),
    )


def test_load_pipeline_with_endpoint_of_other_pipeline_reports_it(
    project: Path, problems: Problems, pipeline_text: str
) -> None:
    pipelines = project / "configs/pipelines"
    (pipelines / "broken.yaml").write_text("{")
    (pipelines / "list.yaml").write_text("- deploy\n")
    (pipelines / "wrong.yaml").write_text("deploy: [3, {endpoint: [1]}]\n")
    (pipelines / "other.yaml").write_text("deploy: {endpoint: toy}\n")
    (problem,) = problems(pipeline_text, plugins=PLUGINS)
    assert problem.startswith(
        "toy.yaml:20:16: deploy[0].endpoint: endpoint 'toy' is already declared in "
        "configs/pipelines/other.yaml"
    )


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ("{source: prometheus, options: {url: http://p}}", []),
        ("null", []),
        (
            "{source: promethius}",
            ["no metric plugin is called 'promethius'; did you mean 'prometheus'?"],
        ),
        ("{options: {url: http://p}}", ["missing key 'source'"]),
        (
            "{sorce: prometheus}",
            ["missing key 'source'", "unknown key 'sorce'; did you mean 'source'?"],
        ),
        ("{source: prometheus, url: http://p}", ["unknown key 'url'; known keys: source, options"]),
        ("{source: prometheus}", ["there is no url. Write one."]),
    ],
)
def test_load_pipeline_validates_options_of_metrics_source(
    find_problems: FindProblems, pipeline_text: str, metrics: str, found: list[str]
) -> None:
    def needs_a_url(source: str, options: Mapping[str, object]) -> None:
        assert source == "prometheus"
        if "url" not in options:
            raise UserError("there is no url", remedy="Write one.")

    text = pipeline_text.replace("{endpoint: toy", f"{{endpoint: toy, metrics: {metrics}")
    problems = find_problems(
        text, plugins={**PLUGINS, "metrics": ("prometheus",)}, metrics=needs_a_url
    )
    assert [problem.message for problem in problems] == found


def test_load_pipeline_validates_options_of_provider(
    find_problems: FindProblems, pipeline_text: str
) -> None:
    def only_ports(provider: str, options: Mapping[str, object]) -> None:
        assert provider == "local"
        for name in options:
            if name != "port":
                raise UserError(f"there is no option {name!r}", remedy="did you mean 'port'?")

    for options, found in (
        ("port: 8080", []),
        ("prot: 8080", ["there is no option 'prot'. did you mean 'port'?"]),
    ):
        text = pipeline_text.replace("{endpoint: toy", f"{{endpoint: toy, options: {{{options}}}")
        problems = find_problems(text, plugins=PLUGINS, options=only_ports)
        assert [problem.message for problem in problems] == found
        assert all(problem.line for problem in problems)


class PartedQuantizer(Optimizer):
    """An optimizer of another package, which reads calibration rows in parts."""

    needs_calibration = True
    reads_ranges = True

    def optimize(self, request: OptimizeRequest) -> tuple[str, ...]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("calibrate", "lines"), [("", [11]), (", calibrate: {data: train, shards: 4}", [])]
)
def test_load_pipeline_checks_calibration_by_optimizer_attributes(
    find_problems: FindProblems,
    pipeline_text: str,
    monkeypatch: pytest.MonkeyPatch,
    calibrate: str,
    lines: list[int],
) -> None:
    monkeypatch.setattr(plugins, "load", lambda *_: PartedQuantizer())
    old = "method: static, calibrate: {data: train}"
    assert old in pipeline_text
    found = find_problems(pipeline_text.replace(old, f"method: parted{calibrate}"))
    assert [problem.line for problem in found] == lines
    assert all("parted quantization needs 'calibrate'" in problem.message for problem in found)
