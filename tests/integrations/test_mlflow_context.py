"""Tags of runs that are started inside a flow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onnx_ops.integrations.mlflow_context import RunContext
from tests.support.git import commit_all


def test_run_context_outside_flow_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    assert not RunContext().in_context()


def test_run_context_before_import_of_prefect_returns_tag_with_flow_run_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "0f3a")
    monkeypatch.delitem(sys.modules, "prefect", raising=False)
    assert RunContext().tags()["prefect.flow_run"] == "0f3a"


def test_mlflow_resolve_tags_in_flow_include_flow_run_and_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import prefect.runtime
    from mlflow.tracking.context.registry import resolve_tags

    assert prefect.runtime.flow_run.id is None
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "77c1")
    sha = commit_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert {"prefect.flow_run": "77c1", "git.sha": sha}.items() <= resolve_tags().items()
