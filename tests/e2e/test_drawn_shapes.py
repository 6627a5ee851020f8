"""The example of a detector, from training to an endpoint that takes images.

A second version gets a part of the traffic and then all of it, and is rolled back.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.e2e_project import Project

pytestmark = [pytest.mark.services, pytest.mark.nightly]

PIPELINE = "configs/pipelines/drawn-shapes.yaml"
SECOND = "train.with.seed=6"
IMAGES = ("000.png", "001.jpg", "002.jpg")


def read_image(project: Project, name: str) -> bytes:
    return (project.root / "examples/data/shapes" / name).read_bytes()


def detect(project: Project, images: list[bytes], version: str = "") -> dict[str, Any]:
    """Return the version that answers, and the boxes that it finds in each image.

    The request follows the open inference protocol.
    """
    data = [base64.b64encode(image).decode() for image in images]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}
    path = f"v2/models/drawn-shapes{version and f'/versions/{version}'}/infer"
    answer = project.ask("shapes", path, {"inputs": [tensor]})
    (output,) = answer["outputs"]
    boxes = np.reshape(output["data"], output["shape"])
    return {"version": answer["model_version"], "boxes": boxes}


def list_answering_versions(project: Project) -> set[str]:
    images = [read_image(project, name) for name in IMAGES]
    return {detect(project, [images[number % 3]])["version"] for number in range(120)}


def test_drawn_shapes_release_after_canary_and_rollback_serves_first_version(
    fresh_project: Project,
) -> None:
    # This module imports torch, so it is imported only when the test runs.
    from examples.drawn_shapes import list_objects, predict

    file = fresh_project.root / PIPELINE
    steps = file.read_text().replace("steps: [100%]", "steps: [50%, 100%]")
    file.write_text(steps)
    fresh_project.run(pipeline=PIPELINE)
    images = [read_image(fresh_project, name) for name in IMAGES]

    found = detect(fresh_project, images)
    assert found["version"] == "1"
    model = find_model(fresh_project)
    for name, boxes in zip(IMAGES, found["boxes"], strict=True):
        path = str(fresh_project.root / "examples/data/shapes" / name)
        expected, objects = predict(path, model), list_objects(boxes)
        assert [one["name"] for one in objects] == [one["name"] for one in expected]
        for one, other in zip(objects, expected, strict=True):
            np.testing.assert_allclose(one["box"], other["box"], atol=0.5)

    fresh_project.run(SECOND, pipeline=PIPELINE)
    assert fresh_project.status("shapes")["traffic"] == {"v2": 50, "v1": 50}
    assert list_answering_versions(fresh_project) == {"1", "2"}

    fresh_project.document("rollout", "advance", "shapes", "--reason", "looks good")
    assert list_answering_versions(fresh_project) == {"2"}
    fresh_project.document("rollback", "shapes", "--reason", "wrong boxes")
    assert list_answering_versions(fresh_project) == {"1"}
    np.testing.assert_array_equal(detect(fresh_project, images)["boxes"], found["boxes"])


def find_model(project: Project) -> Path:
    """Return the path of the file that the endpoint serves."""
    (path,) = project.root.glob(".onnx-ops/endpoints/shapes/models/*/model.onnx")
    return path
