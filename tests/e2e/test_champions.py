"""Champions that `onnx-ops recheck` measures again.

They are measured unchanged, and under a runtime that computes differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.e2e_project import ONLY_FP32, Project
from tests.support.command import Result

OTHERWISE = """
import numpy as np
import onnxruntime

run = onnxruntime.InferenceSession.run


def otherwise(session, *arguments, **options):
    return [np.roll(found, 1, axis=0) for found in run(session, *arguments, **options)]


onnxruntime.InferenceSession.run = otherwise
"""


def champion(done: Result, code: int) -> dict[str, Any]:
    document: dict[str, Any]
    (document,) = done.parsed(code)
    assert (document["model"], document["target"], document["pipeline"]) == (
        "digits-mlp",
        "cpu-1t",
        "digits-mlp",
    )
    return document


@pytest.fixture(scope="module")
def rechecked(released: Project) -> Result:
    """Return the result of a recheck of the unchanged champion."""
    return released.command("recheck", "digits-mlp", "--json")


def test_recheck_of_unchanged_champion_reports_no_failure(rechecked: Result) -> None:
    found = champion(rechecked, 0)
    assert found["verdict"] in ("pass", "inconclusive"), found
    assert found["changed"] == []
    assert any(
        result["metric"] == "accuracy since" and result["estimate"] == 0
        for result in found["results"]
    )


def test_run_after_recheck_executes_nothing(released: Project, rechecked: Result) -> None:
    champion(rechecked, 0)
    again = released.run(ONLY_FP32)
    assert again["executed"] == []


@pytest.mark.nightly
def test_recheck_with_wrong_runtime_results_reports_failure(
    released: Project, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHERWISE, encoding="utf-8")
    metadata = tmp_path / "onnxruntime-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: onnxruntime\nVersion: 99.0\n", encoding="utf-8"
    )
    inherited = released.environment().get("PYTHONPATH", "")
    environ = {"PYTHONPATH": f"{tmp_path}:{inherited}"}
    found = champion(released.process("recheck", "--json", environ=environ), 1)
    assert (found["verdict"], found["measured"]) == ("fail", 2)
    assert any(
        change.startswith("runtime onnxruntime 99.0, was onnxruntime ")
        for change in found["changed"]
    )
    failed = {result["gate"] for result in found["results"] if result["verdict"] == "fail"}
    assert "metric" in failed
