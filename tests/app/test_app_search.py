"""A pipeline with `method: auto`, from its file to its gates and its report.

All parts are real.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnx_ops import codec
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.results import Summary, summarize
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.plan import Stage, StageKind, StageOutcome, StageStatus
from onnx_ops.domain.quantization import SEARCH_FILE, SearchRecord
from onnx_ops.pipeline import RunResult
from onnx_ops.ports import Observer
from tests.support.checkout import copy_parts
from tests.support.must import must

PIPELINE = """
pipeline: searched
data:
  train: {file: train.npz, inputs: {x: x}, label: label}
  tune: {file: tune.npz, inputs: {x: x}, label: label}
  test: {file: test.npz, inputs: {x: x}, label: label}
model: model.onnx
export: {framework: onnx}
validate: {samples: {data: test}}
quantize:
  - name: best
    method: auto
    calibrate: {data: train, samples: 64}
    tuning_data: {data: tune}
    budget: {metric_drop: 5%, max_minutes: 5}
benchmark: {targets: [cpu-1t]}
objective: size
gates:
  - {kind: parity}
  - {kind: metric, name: accuracy, max_drop: 10%}
register: {model: searched}
"""


class Listening(Observer):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def progressed(self, stage: Stage, line: str) -> None:
        self.lines.append((stage.id, line))


def write_project(root: Path) -> None:
    """Write a perceptron of two wide layers, and rows that it answers correctly."""
    rng = np.random.default_rng(0)
    first, second = (
        rng.normal(size=shape).astype(np.float32) / 8 for shape in ((64, 256), (256, 4))
    )
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        searched (float[batch, 64] x) => (float[batch, 4] scores) {
            [first] hidden = MatMul(x, first_w)
            [relu] active = Relu(hidden)
            [second] scores = MatMul(active, second_w)
        }""")
    model.graph.initializer.extend(
        [numpy_helper.from_array(first, "first_w"), numpy_helper.from_array(second, "second_w")]
    )
    onnx.save(model, root / "model.onnx")
    for name, count in (("train", 64), ("tune", 200), ("test", 400)):
        x = rng.normal(size=(count, 64)).astype(np.float32)
        np.savez(
            root / f"{name}.npz", x=x, label=(np.maximum(x @ first, 0) @ second).argmax(axis=1)
        )
    copy_parts(root, "configs/targets")
    (root / "configs/pipelines").mkdir()
    (root / "configs/pipelines/searched.yaml").write_text(PIPELINE)
    (root / "onnx-ops.toml").write_text("signing = 'auto'\n")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    write_project(tmp_path)
    return open_project(tmp_path)


def run(
    project: Project, observer: Observer | None = None, *overrides: str
) -> tuple[RunResult, Summary]:
    prepared = prepare(
        project, project.settings.root / "configs/pipelines/searched.yaml", overrides=overrides
    )
    result = execute(project, prepared, observer=observer)
    return result, summarize(prepared.pipeline, result, project.context)


def of_kind(result: RunResult, kind: StageKind) -> list[StageOutcome]:
    return [result.outcomes[stage.id] for stage in result.plan.stages if stage.kind is kind]


@pytest.mark.nightly
def test_run_with_search_registers_variant_and_report(project: Project) -> None:
    heard = Listening()
    result, summary = run(project, heard)
    failed = [
        (o.stage, o.reason) for o in result.outcomes.values() if o.status is StageStatus.FAILED
    ]
    assert failed == []
    read = project.context.store.read
    manifest = must(result.outcomes["search/best"].manifest)
    record = codec.loads(read(manifest[SEARCH_FILE]), SearchRecord)
    assert {t.recipe for t in record.trials} >= {"static", "dynamic", "weights-8", "weights-4"}
    assert (record.metric, record.rows, record.targets) == ("accuracy", 200, ("cpu-1t",))
    assert any(stage == "search/best" and "the time of fp32" in line for stage, line in heard.lines)

    filled = {slot.role for slot in record.slots if slot.trial is not None}
    assert filled
    for slot in record.slots:
        outcome = result.outcomes[f"quantize/best-{slot.role}"]
        gate = result.outcomes[f"gate/best-{slot.role}@cpu-1t"]
        if slot.role not in filled:
            assert (outcome.status, outcome.reason) == (StageStatus.SKIPPED, slot.reason)
            assert gate.status is StageStatus.SKIPPED
            continue
        assert outcome.manifest is not None
        assert gate.status is StageStatus.DONE
        measured = must(result.outcomes[f"benchmark/best-{slot.role}@cpu-1t"].manifest)
        evidence = codec.loads(read(measured["evidence.json"]), Evidence)
        assert evidence.recipe[0].startswith("found by search best among")
        assert evidence.weights
        assert evidence.opsets[""] == 18
        assert sum(evidence.operators.values()) > 0
        assert [(c.metric, c.n) for c in evidence.metrics if not c.against] == [("accuracy", 400)]

    names = {d.variant for d in summary.decisions}
    assert names == {"fp32", *(f"best-{role}" for role in filled)}
    (choice,) = summary.choices
    assert (choice.verdict, choice.objective) == (Verdict.PASS, "size")
    assert choice.variant != "fp32"
    assert "smallest" in choice.reason
    registration = must(summary.registration)
    assert choice.variant is not None
    assert set(registration.versions) == names
    registry = project.context.registry()
    version = registry.version("searched", registration.versions[choice.variant])
    page = registry.document(version, "report.html").decode()
    assert "Search best" in page
    assert "Models of the search best on cpu-1t" in page
    assert codec.loads(registry.document(version, SEARCH_FILE), SearchRecord) == record
    assert b'"objective":"size"' in registry.document(
        version, "evidence/cpu-1t.choice.json"
    ).replace(b" ", b"")

    again, _ = run(project)
    assert again.executed() == ()
    assert {o.status for o in again.outcomes.values()} <= {StageStatus.CACHED, StageStatus.SKIPPED}


@pytest.mark.nightly
def test_run_with_unreachable_search_budget_selects_fp32(project: Project) -> None:
    result, lines = run(
        project,
        None,
        "quantize[0].budget.size=1 B",
        "quantize[0].variants=[fast]",
        "objective=latency",
    )
    (slot,) = of_kind(result, StageKind.QUANTIZE)
    assert slot.status is StageStatus.SKIPPED
    assert "than the budget allows" in slot.reason
    (choice,) = lines.choices
    assert choice.variant == "fp32"
    assert lines.exit_code == 0
