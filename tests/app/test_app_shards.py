"""Rows that are scored in shards.

The metrics are the same as in one piece. A run continues where another one ended.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnx_ops import codec
from onnx_ops.app.champions import REQUEST, load_benchmark
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.app.stage_request import parse_request
from onnx_ops.domain.evidence import Evidence
from onnx_ops.domain.plan import StageKind
from onnx_ops.measure.files import RANGES
from onnx_ops.pipeline import RunResult
from tests.support.checkout import copy_parts
from tests.support.must import must

FEATURES, CLASSES = 256, 4
ROWS = 20_000
"""Five batches of 4 MiB."""

PIPELINE = """
pipeline: sharded
data:
  train: {file: train.npz, inputs: {x: x}, label: label}
  test: {file: test.npz, inputs: {x: x}, label: label}
model: model.onnx
export: {framework: onnx}
validate: {samples: {data: test, limit: 1000000}}
quantize:
  - {name: half, method: fp16}
  - {name: static, method: static, calibrate: {data: train, samples: 200}}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: parity}
  - {kind: metric, name: accuracy, max_drop: 10%}
  - {kind: metric, name: f1, average: macro, max_drop: 10%}
  - {kind: metric, name: top_k, k: 2, max_drop: 10%}
"""

SHARDS = tuple(
    f"score/{variant}@cpu-1t#{number}" for variant in ("fp32", "half") for number in (1, 2, 3)
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(FEATURES, CLASSES)).astype(np.float32)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        wide (float[batch, {FEATURES}] x) => (float[batch, {CLASSES}] scores)
        {{ [product] scores = MatMul(x, weights) }}
    """)
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    onnx.save(model, tmp_path / "model.onnx")
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    label = (x @ weights + rng.normal(size=(ROWS, CLASSES))).argmax(axis=1)
    np.savez(tmp_path / "test.npz", x=x, label=label)
    np.savez(tmp_path / "train.npz", x=x[:200] / 2, label=label[:200])
    copy_parts(tmp_path, "configs/targets")
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "onnx-ops.toml").write_text("signing = 'auto'\n")
    return open_project(tmp_path)


def run(project: Project, *overrides: str) -> RunResult:
    file = project.settings.root / "pipeline.yaml"
    result = execute(
        project, prepare(project, file, overrides=overrides, until=StageKind.BENCHMARK), jobs=2
    )
    assert not result.errors
    return result


def evidence(project: Project, result: RunResult, variant: str) -> Evidence:
    manifest = must(result.outcomes[f"benchmark/{variant}@cpu-1t"].manifest)
    return codec.loads(project.context.store.read(manifest["evidence.json"]), Evidence)


@pytest.mark.nightly
def test_run_in_shards_returns_same_results_as_whole_run_and_repeats_only_lost_shard(
    project: Project,
) -> None:
    whole = run(project)
    sharded = run(project, "benchmark.shards=3")
    assert set(SHARDS) <= set(sharded.executed())
    for variant in ("fp32", "half"):
        one, joined = (evidence(project, result, variant) for result in (whole, sharded))
        assert {count.metric for count in one.metrics} == {"accuracy", "top_2"}
        assert {count.n for count in one.metrics} == {ROWS}
        assert joined.metrics == one.metrics
        assert joined.scores == one.scores
        assert {score.metric for score in one.scores} == {"f1 macro"}
        assert (one.scored_on, joined.scored_on) == ((), (joined.hardware,))

    measured = must(sharded.outcomes["benchmark/half@cpu-1t"].manifest)
    store = project.context.store
    memory = must(load_benchmark(store, measured["evidence.json"]))
    stage, _, inputs = parse_request(json.loads(store.read(memory[REQUEST])))
    assert "shards" not in stage.settings, "a repetition would take the scores of then"
    assert not set(SHARDS) & set(inputs)

    again = run(project, "quantize[1].calibrate.shards=3")
    assert {f"calibrate/static#{number}" for number in (1, 2, 3)} <= set(again.executed())
    parts = [must(again.outcomes[f"calibrate/static#{number}"].manifest) for number in (1, 2, 3)]
    assert all(set(part.files) <= {RANGES} for part in parts), "a shard only reads ranges"
    assert any(part.files for part in parts)
    made = [result.outcomes["quantize/static"].manifest for result in (whole, again)]
    assert made[0] is not None
    assert made[0] == made[1]

    lost = must(sharded.outcomes[SHARDS[1]].manifest)
    project.context.store.path(lost["predictions.npz"]).unlink()
    assert run(project, "benchmark.shards=3").executed() == (SHARDS[1],)
