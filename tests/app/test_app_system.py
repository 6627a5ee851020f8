"""The section `system`: a release fails where a deployed step differs from the project's code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_ops import codec
from onnx_ops.app.affected import affected
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import PreparedPipeline, check, execute, prepare
from onnx_ops.app.results import Summary, summarize
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import SystemResult
from onnx_ops.domain.plan import StageKind
from onnx_ops.domain.quantities import Json
from onnx_ops.errors import ConfigError, UserError
from onnx_ops.pipeline.stages.register import read_example
from onnx_ops.pipeline.stages.system import execute as compare_system
from onnx_ops.reporting.html import release_report
from onnx_ops.reporting.system_parity import build_example
from onnx_ops.statistics.judge import judge
from tests.support.checkout import copy_parts
from tests.support.command import run_command
from tests.support.evidence import make_evidence
from tests.support.must import must

MODEL = """<ir_version: 9, opset_import: ["" : 18]>
g (float[N,2] x) => (float[N,2] scores) { scores = Neg(x) }"""
HALF = """<ir_version: 9, opset_import: ["" : 18]>
g (float[N,2] raw) => (float[N,2] x) {
    two = Constant<value = float[1] {2.0}>()
    x = Div(raw, two)
}"""
CODE = """\
import numpy as np
import shared
from onnx_ops import record_step


def read(row):
    return np.array([[float(row["a"]), float(row["b"])]], np.float32)


def name_label(scores):
    return shared.LABELS[int(scores.argmax())]


def predict(row):
    x = record_step("scale", record_step("read", read(row)) / 2)
    return name_label(record_step("output", -x))
"""
CLIENT = """\
import numpy as np


def read(row):
    return np.array([[float(row["b"]), float(row["a"])]], np.float32)
"""
PIPELINE = """\
pipeline: p
data: {test: {file: test.npz, inputs: {x: x}}}
model: model.onnx
export: {framework: onnx}
system:
  source: project:predict
  files: rows.jsonl
  rows: 24
  before:
    - {name: read, use: "project:read"}
    - {name: scale, graph: half.onnx}
  after: [{name: label, use: "project:name_label"}]
  tolerances: {answers: 2%, steps: {scale: 2}}
quantize: [{name: slim, method: graph}]
benchmark: {targets: [cpu-1t]}
gates: [{kind: parity}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    random = np.random.default_rng(0)
    for name, text in (("model.onnx", MODEL), ("half.onnx", HALF)):
        onnx.save(onnx.parser.parse_model(text), tmp_path / name)
    np.savez(tmp_path / "test.npz", x=random.normal(size=(32, 2)).astype(np.float32))
    rows = [dict(zip("ab", pair, strict=True)) for pair in random.normal(size=(40, 2)).tolist()]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    copy_parts(tmp_path, "configs/targets")
    (tmp_path / "configs/pipelines").mkdir()
    (tmp_path / "configs/pipelines/p.yaml").write_text(PIPELINE)
    (tmp_path / "project.py").write_text(CODE)
    (tmp_path / "shared.py").write_text('LABELS = ("first", "second")\n')
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "onnx-ops.toml").touch()
    return open_project(tmp_path)


def change(project: Project, old: str, new: str) -> None:
    file = project.settings.root / "configs/pipelines/p.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def prepare_pipeline(project: Project, until: StageKind) -> PreparedPipeline:
    file = project.settings.root / "configs/pipelines/p.yaml"
    return prepare(project, file, until=until)


def run(project: Project) -> Summary:
    prepared = prepare_pipeline(project, StageKind.GATE)
    return summarize(prepared.pipeline, execute(project, prepared), project.context)


def plan_settings(project: Project) -> dict[str, Mapping[str, Json]]:
    stages = prepare_pipeline(project, StageKind.BENCHMARK).plan.stages
    return {stage.id: stage.settings for stage in stages}


def find_problems(project: Project) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(project, project.settings.root / "configs/pipelines/p.yaml")
    return {problem.path: problem.message for problem in caught.value.problems}


def test_comparison_with_differing_step_fails_decision_at_first_step(project: Project) -> None:
    change(project, "project:read", "client:read")
    result = execute(project, prepare_pipeline(project, StageKind.SYSTEM))
    assert not result.errors
    stored = project.context.store.read(must(result.outcomes["system"].manifest)["results.json"])
    results = codec.loads(stored, tuple[SystemResult, ...])
    manifests = {name: must(one.manifest) for name, one in result.outcomes.items()}
    assert must(read_example(manifests, project.context.store)).step == "read"
    assert {one.step: (one.verdict, one.inputs) for one in results} == {
        "read": ("fail", 24),
        "scale": ("pass", 24),
        "output": ("pass", 24),
        "label": ("pass", 24),
        "answer": ("fail", 24),
    }
    decision = judge((), make_evidence(system=results))
    assert decision.verdicts["system"] is Verdict.FAIL
    assert decision.reason.startswith(
        "system: step read: 24 of 24 inputs differ; the worst is rows.jsonl:"
    )


def test_comparison_passes_trained_model_to_source_with_parameter_model(project: Project) -> None:
    file = project.settings.root / "project.py"
    text = CODE.replace("def predict(row):", "def predict(row, model):")
    text = text.replace("-x", 'ReferenceEvaluator(str(model)).run(None, {"x": x})[0]')
    file.write_text(f"from onnx.reference import ReferenceEvaluator\n{text}")

    result = execute(project, prepare_pipeline(project, StageKind.SYSTEM))

    assert not result.errors
    stored = project.context.store.read(must(result.outcomes["system"].manifest)["results.json"])
    verdicts = {one.step: one.verdict for one in codec.loads(stored, tuple[SystemResult, ...])}
    assert verdicts == dict.fromkeys(("read", "scale", "output", "label", "answer"), "pass")


def test_check_of_source_with_parameter_model_and_isolated_exporter_reports_source(
    project: Project,
) -> None:
    change(project, "{framework: onnx}", "{framework: onnx, env: {requirements: [onnx]}}")
    check(project, project.settings.root / "configs/pipelines/p.yaml")
    file = project.settings.root / "project.py"
    file.write_text(CODE.replace("def predict(row):", "def predict(row, model):"))
    assert "only in an isolated environment" in find_problems(project)["system.source"]


def test_comparison_with_hidden_parameter_model_and_isolated_exporter_raises_user_error(
    project: Project,
) -> None:
    # The check of the file reads `def predict(row)`. It does not detect that a later assignment
    # replaces the function, as a decorator would.
    file = project.settings.root / "project.py"
    file.write_text(f"{CODE}\n\npredict = lambda row, model: 0\n")
    prepared = prepare_pipeline(project, StageKind.SYSTEM)
    (stage,) = (one for one in prepared.plan.stages if one.kind is StageKind.SYSTEM)
    assert stage.settings["isolated"] is False
    isolated = replace(stage, settings={**stage.settings, "isolated": True})
    outcomes = execute(project, prepare_pipeline(project, StageKind.EXPORT)).outcomes
    inputs = {name: must(outcomes[name].manifest) for name in ("train", "export")}
    with pytest.raises(UserError, match="only in an isolated environment"):
        compare_system(isolated, must(outcomes["export"].key), inputs, project.context)


@pytest.mark.nightly
def test_run_passes_with_agreeing_steps_and_fails_and_reports_differing_step(
    project: Project,
) -> None:
    passed = run(project)
    assert passed.exit_code == 0
    change(project, "project:read", "client:read")
    failed = run(project)
    assert failed.exit_code == 1
    # There is a decision about the export, and one about its variant.
    for decision in failed.decisions:
        assert decision.verdicts["system"] is Verdict.FAIL
        assert decision.reason.startswith("system: step read: ")
    root = project.settings.root
    command = ("run", "configs/pipelines/p.yaml", "--until", "gate", "--html")
    assert run_command(*command, "report.html", cwd=root).code == 1
    assert "read on rows.jsonl" in (root / "report.html").read_text(encoding="utf-8")
    assert run_command(*command, "missing/report.html", cwd=root).code == 2


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("shared.py", "second", "other"),
        ("rows.jsonl", "{", " {"),
        ("configs/pipelines/p.yaml", "answers: 2%", "answers: 3%"),
    ],
)
def test_plan_after_change_of_code_inputs_or_tolerances_changes_only_comparison(
    project: Project, file: str, old: str, new: str
) -> None:
    before = plan_settings(project)
    path = project.settings.root / file
    path.write_text(path.read_text().replace(old, new))
    after = plan_settings(project)
    assert {stage for stage in before if before[stage] != after[stage]} == {"system"}


def test_benchmark_of_each_variant_needs_comparison(project: Project) -> None:
    stages = prepare_pipeline(project, StageKind.GATE).plan.stages
    needing = [stage.id for stage in stages if "system" in stage.needs]
    assert needing == ["benchmark/fp32@cpu-1t", "benchmark/slim@cpu-1t"]


def test_comparison_is_affected_by_inputs_graphs_and_imported_modules(project: Project) -> None:
    changed = ("half.onnx", "other.py", "project.py", "rows.jsonl", "shared.py")
    (found,) = affected(project, changed)
    assert found.because == ("half.onnx", "project.py", "rows.jsonl", "shared.py")


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        ("rows.jsonl", "rows.json", "system.files", "no such folder or file"),
        ("rows.jsonl", "../rows.jsonl", "system.files", "not below the project's root"),
        ("project:predict", "project:predit", "system.source", "did you mean 'predict'"),
        ("project:read", "projet:read", "system.before[0].use", "did you mean 'project'"),
        ("half.onnx", "haf.onnx", "system.before[1].graph", "no such file"),
        ("half.onnx", "test.npz", "system.before[1].graph", "not"),
        ("half.onnx", "/half.onnx", "system.before[1].graph", "not below the project's root"),
        ("graph: half.onnx", "", "system.before[1]", "needs 'use'"),
        ("name: label", "name: output", "system.after[0].name", "the step of the model"),
        ("name: label", "name: scale", "system.after[0].name", "named twice"),
        ("{scale: 2}", "{scal: 2}", "system.tolerances.steps.scal", "did you mean 'scale'"),
        ("answers: 2%", "anwsers: 2%", "system.tolerances", "did you mean 'answers'"),
        ("rows: 24", "rows: 24\n  depends: [words.txt]", "system.depends[0]", "no file"),
    ],
)
def test_check_of_invalid_system_section_reports_key(
    project: Project, old: str, new: str, path: str, message: str
) -> None:
    change(project, old, new)
    assert message in find_problems(project)[path]


def test_report_of_release_shows_example_of_step_that_differs() -> None:
    example = build_example("read", "rows.jsonl:3", np.array([1.0, 2.0]), np.array([2.0, 1.0]))
    page = release_report((), (make_evidence(),), (), None, {}, example=example)
    assert "read on rows.jsonl:3" in page
    assert "img-src data:" in page
    assert "rows.jsonl" not in release_report((), (make_evidence(),), (), None, {})
