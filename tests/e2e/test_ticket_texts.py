"""The example of texts, from training to an endpoint that takes a text.

A second version gets a part of the traffic and then all of it, and is rolled back.
"""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest

from tests.e2e.e2e_project import Project

pytestmark = [pytest.mark.services, pytest.mark.nightly]

PIPELINE = "configs/pipelines/ticket-texts.yaml"
SECOND = "train.with.strength=3.0"
TEXTS = ["the app crashes on start", "you charged my card twice, SVP aidez-moi 😀", ""]


def ask(project: Project, texts: list[str], version: str = "") -> dict[str, Any]:
    """Return the outputs by name, asked in the open inference protocol."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    path = f"v2/models/ticket-texts{version and f'/versions/{version}'}/infer"
    answer = project.ask("tickets", path, {"inputs": [tensor]})
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    return found | {"version": answer["model_version"]}


def list_answering_versions(project: Project) -> set[str]:
    return {ask(project, [f"{text} {number}"])["version"] for text in TEXTS for number in range(80)}


def test_ticket_texts_release_after_canary_and_rollback_serves_first_version(
    fresh_project: Project,
) -> None:
    # This module imports scikit-learn, so it is imported only when the test runs.
    from examples.ticket_texts import fit

    file = fresh_project.root / PIPELINE
    steps = file.read_text().replace("steps: [100%]", "steps: [50%, 100%]")
    file.write_text(steps)
    fresh_project.run(pipeline=PIPELINE)
    data = (fresh_project.root / "examples/data/tickets-train.csv").read_text(encoding="utf-8")
    rows = [*csv.DictReader(io.StringIO(data))]
    texts, teams = [row["text"] for row in rows], [row["team"] for row in rows]
    first, second = fit(texts, teams), fit(texts, teams, strength=3.0)

    found = ask(fresh_project, TEXTS)
    assert found["label"] == first.predict(TEXTS).tolist()
    records = {"dataframe_records": [{"text": text} for text in TEXTS]}
    predictions = fresh_project.ask("tickets", "invocations", records)["predictions"]
    expected = first.predict_proba(TEXTS)
    np.testing.assert_allclose([row["probabilities"] for row in predictions], expected, atol=1e-5)

    fresh_project.run(SECOND, pipeline=PIPELINE)
    assert fresh_project.status("tickets")["traffic"] == {"v2": 50, "v1": 50}
    assert list_answering_versions(fresh_project) == {"1", "2"}
    for version, model in (("1", first), ("2", second)):
        probabilities = np.reshape(ask(fresh_project, TEXTS, version)["probabilities"], (-1, 4))
        np.testing.assert_allclose(probabilities, model.predict_proba(TEXTS), atol=1e-5)

    fresh_project.document("rollout", "advance", "tickets", "--reason", "looks good")
    assert list_answering_versions(fresh_project) == {"2"}
    fresh_project.document("rollback", "tickets", "--reason", "wrong team")
    assert list_answering_versions(fresh_project) == {"1"}
    assert ask(fresh_project, TEXTS)["label"] == first.predict(TEXTS).tolist()
