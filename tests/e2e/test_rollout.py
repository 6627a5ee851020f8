"""The PyTorch pipeline, and a second release that an operator moves in by steps."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project

pytestmark = pytest.mark.services

CNN = "configs/pipelines/digits-cnn.yaml"
STEPS, BY_STEPS = "steps: [100%]", "steps: [10%, 50%, 100%]"


@pytest.fixture
def candidate(once: Project) -> Project:
    """The second release has 10 % of the traffic."""
    file = once.root / MLP
    text = file.read_text(encoding="utf-8")
    assert STEPS in text
    file.write_text(text.replace(STEPS, BY_STEPS), encoding="utf-8")
    once.run(ONLY_FP32, SECOND)
    assert once.status()["traffic"] == {"v2": 10, "v1": 90}
    return once


def who_answers(address: str, users: int = 300) -> Counter[str]:
    """Deployments that answer for so many user keys, each of which always has the same one."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]})
    found: Counter[str] = Counter()
    for user in range(users):
        headers = {"content-type": "application/json", "x-user-key": f"user-{user}"}
        connection.request("POST", "/v2/models/digits-mlp/infer", body, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        found[response.headers["x-onnx-ops-deployment"]] += 1
    connection.close()
    return found


@pytest.mark.nightly
def test_the_release_of_a_torch_model_is_right_and_takes_all_traffic(fresh_project: Project) -> None:
    from sklearn.datasets import load_digits

    first = fresh_project.run(ONLY_FP32, "train.with.epochs=6", pipeline=CNN)
    assert first["choices"][0]["variant"] == "fp32"
    assert fresh_project.status("digits-cnn")["traffic"] == {"v1": 100}
    digits = load_digits()
    images = (digits.images[:40, None] / 16).astype(np.float32)
    tensor = {"name": "image", "shape": [40, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}
    answer = fresh_project.ask("digits-cnn", "v2/models/digits-cnn/infer", {"inputs": [tensor]})
    scores = np.array(answer["outputs"][0]["data"]).reshape(40, 10)
    assert np.mean(scores.argmax(axis=1) == digits.target[:40]) >= 0.85


@pytest.mark.nightly
def test_the_second_release_moves_in_by_steps(candidate: Project) -> None:
    answered = who_answers(candidate.status()["address"])
    assert 0 < answered["v2"] < answered["v1"]
    candidate.document("rollout", "resume", "digits")
    assert candidate.status()["traffic"] == {"v2": 50, "v1": 50}
    candidate.document("rollout", "resume", "digits", "--reason", "looks good")
    now = candidate.status()
    assert now["traffic"] == {"v2": 100, "v1": 0}
    assert now["roles"]["previous"]["name"] == "v1"
    assert set(who_answers(now["address"])) == {"v2"}


def test_an_aborted_rollout_gives_all_traffic_back_and_does_not_start_again(candidate: Project) -> None:
    candidate.document("rollout", "abort", "digits", "--reason", "worse on eights")
    assert candidate.status()["traffic"] == {"v1": 100}
    candidate.run(ONLY_FP32, SECOND, code=5)
    assert candidate.status()["traffic"] == {"v1": 100}
    wrong_word = candidate.command("rollout", "resume", "digits")
    assert wrong_word.code == 2
    assert "no rollout" in wrong_word.stderr
