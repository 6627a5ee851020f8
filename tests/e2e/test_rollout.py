"""The PyTorch pipeline, and a second release that an operator rolls out in steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project

pytestmark = pytest.mark.services

CNN = "configs/pipelines/digits-cnn.yaml"
STEPS, BY_STEPS = "steps: [100%]", "steps: [10%, 50%, 100%]"


@pytest.fixture
def candidate(once: Project) -> Project:
    """Return a project whose second release has 10 % of the traffic."""
    file = once.root / MLP
    text = file.read_text(encoding="utf-8")
    assert STEPS in text
    file.write_text(text.replace(STEPS, BY_STEPS), encoding="utf-8")
    once.run(ONLY_FP32, SECOND)
    assert once.status()["traffic"] == {"v2": 10, "v1": 90}
    return once


@pytest.mark.nightly
def test_run_of_torch_pipeline_serves_accurate_model(fresh_project: Project) -> None:
    from sklearn.datasets import load_digits

    first = fresh_project.run(ONLY_FP32, "train.with.epochs=6", pipeline=CNN)
    assert first["choices"][0]["variant"] == "fp32"
    assert fresh_project.status("digits-cnn")["traffic"] == {"v1": 100}
    digits = load_digits()
    images = (digits.images[:40, None] / 16).astype(np.float32)
    tensor = {
        "name": "image",
        "shape": [40, 1, 8, 8],
        "datatype": "FP32",
        "data": images.ravel().tolist(),
    }
    answer = fresh_project.ask("digits-cnn", "v2/models/digits-cnn/infer", {"inputs": [tensor]})
    scores = np.array(answer["outputs"][0]["data"]).reshape(40, 10)
    assert np.mean(scores.argmax(axis=1) == digits.target[:40]) >= 0.85


def test_rollout_advanced_and_aborted_by_command_moves_traffic_back_to_stable_version(
    candidate: Project,
) -> None:
    candidate.document("rollout", "advance", "digits", "--reason", "looks good")
    assert candidate.status()["traffic"] == {"v2": 50, "v1": 50}
    candidate.document("rollout", "abort", "digits", "--reason", "worse on eights")
    assert candidate.status()["traffic"] == {"v1": 100}
    candidate.run(ONLY_FP32, SECOND, code=5)
    assert candidate.status()["traffic"] == {"v1": 100}
    wrong_word = candidate.command("rollout", "resume", "digits")
    assert wrong_word.code == 2
    assert "no rollout" in wrong_word.stderr
