"""The PyTorch pipeline, and a second release of it that moves in by steps at an operator's word."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.e2e.e2e_project import Project

pytestmark = pytest.mark.services

CNN = "configs/pipelines/digits-cnn.yaml"
FIRST = ("quantize=[]", "train.with.epochs=6")
SECOND = ("quantize=[]", "train.with.epochs=6", "train.with.seed=8", "gates[1].max_drop=5%")


def status(project: Project) -> Any:
    return project.document("status", "digits-cnn")[0]


def who_answers(address: str, users: int = 300) -> Counter[str]:
    """Deployments that answer for so many user keys, each of which always has the same one."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    body = json.dumps({"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]})
    found: Counter[str] = Counter()
    for user in range(users):
        headers = {"content-type": "application/json", "x-user-key": f"user-{user}"}
        connection.request("POST", "/v2/models/digits-cnn/infer", body, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        found[response.headers["x-onnx-ops-deployment"]] += 1
    connection.close()
    return found


def test_the_first_release_is_right_and_takes_all_traffic(project: Project) -> None:
    first = project.run(*FIRST, pipeline=CNN)
    assert first["choices"][0]["variant"] == "fp32"
    now = status(project)
    assert now["traffic"] == {"v1": 100}
    digits = load_digits()
    images = (digits.images[:40, None] / 16).astype(np.float32)
    place = urlsplit(now["address"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    tensor = {"name": "image", "shape": [40, 1, 8, 8], "datatype": "FP32", "data": images.ravel().tolist()}
    connection.request("POST", "/v2/models/digits-cnn/infer", json.dumps({"inputs": [tensor]}))
    answer = json.load(connection.getresponse())
    connection.close()
    scores = np.array(answer["outputs"][0]["data"]).reshape(40, 10)
    assert np.mean(scores.argmax(axis=1) == digits.target[:40]) >= 0.85


def test_the_second_release_moves_in_by_steps(project: Project) -> None:
    project.run(*SECOND, pipeline=CNN)
    assert status(project)["traffic"] == {"v2": 10, "v1": 90}
    answered = who_answers(status(project)["address"])
    assert 0 < answered["v2"] < answered["v1"]
    project.document("rollout", "resume", "digits-cnn")
    assert status(project)["traffic"] == {"v2": 50, "v1": 50}
    project.document("rollout", "resume", "digits-cnn", "--reason", "looks good")
    now = status(project)
    assert now["traffic"] == {"v2": 100, "v1": 0}
    assert now["roles"]["previous"]["name"] == "v1"
    assert set(who_answers(now["address"])) == {"v2"}


def test_an_aborted_rollout_gives_all_traffic_back_and_does_not_start_again(project: Project) -> None:
    third = ("quantize=[]", "train.with.epochs=6", "train.with.seed=9", "gates[1].max_drop=5%")
    project.run(*third, pipeline=CNN)
    assert status(project)["traffic"] == {"v3": 10, "v2": 90}
    project.document("rollout", "abort", "digits-cnn", "--reason", "worse on eights")
    assert status(project)["traffic"] == {"v2": 100}
    project.run(*third, pipeline=CNN, code=5)
    assert status(project)["traffic"] == {"v2": 100}
    wrong_word = project.command("rollout", "resume", "digits-cnn")
    assert wrong_word.returncode == 2
    assert "no rollout is in progress" in wrong_word.stderr
