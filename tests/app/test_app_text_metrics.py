"""A pipeline whose metric reads texts that a function of the project decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.app.context import Project, open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.domain.evidence import Evidence, ScoreComparison
from onnx_ops.domain.plan import StageKind
from onnx_ops.testing.models import FEATURES, write_perceptron
from tests.support.checkout import copy_parts
from tests.support.must import must

ROWS = 300
PIPELINE = """
pipeline: speech
data:
  test: {file: test.npz, inputs: {x: x}, label: text}
model: model.onnx
export: {framework: onnx}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: metric, name: wer, decode: "decoding:transcribe", max: 0.5}
"""
DECODING = """
WORDS = "one", "two", "three"


def transcribe(outputs):
    order = (-outputs["scores"]).argsort(axis=1)
    return [" ".join(WORDS[number] for number in row) for row in order.tolist()]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    write_perceptron(tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, text=np.array(["three one two"] * ROWS))
    copy_parts(tmp_path, "configs/targets")
    (tmp_path / "decoding.py").write_text(DECODING)
    (tmp_path / "speech.yaml").write_text(PIPELINE)
    (tmp_path / "onnx-ops.toml").write_text("signing = 'auto'\n")
    return open_project(tmp_path)


def measure(project: Project, *overrides: str) -> tuple[ScoreComparison, tuple[str, ...]]:
    """Return the score of the export, and the stages that ran."""
    file = project.settings.root / "speech.yaml"
    prepared = prepare(project, file, overrides=overrides, until=StageKind.BENCHMARK)
    result = execute(project, prepared)
    assert not result.errors
    manifest = must(result.outcomes["benchmark/fp32@cpu-1t"].manifest)
    evidence = codec.loads(project.context.store.read(manifest["evidence.json"]), Evidence)
    (score,) = (one for one in evidence.scores if one.metric.startswith("wer"))
    return score, result.executed()


def test_benchmark_of_decoded_texts_in_shards_returns_same_score(project: Project) -> None:
    score, _ = measure(project)
    assert score.candidate is not None
    assert score.n == ROWS
    sharded, _ = measure(project, "benchmark.shards=2")
    assert sharded.candidate == score.candidate


def test_run_after_changed_decoder_measures_again(project: Project) -> None:
    before, _ = measure(project)
    (project.settings.root / "decoding.py").write_text(DECODING.replace('"one"', '"four"'))
    after, executed = measure(project)
    assert executed == ("benchmark/fp32@cpu-1t",)
    assert before.candidate is not None
    assert after.candidate is not None
    assert after.candidate.estimate > before.candidate.estimate
