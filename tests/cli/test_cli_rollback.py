"""The selection of endpoints and the output of `onnx-ops rollback`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onnx_ops.app.context import open_project
from onnx_ops.cli import rollouts
from onnx_ops.cli.main import app
from tests.support.extras import hide
from tests.support.golden import Golden


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNX_OPS_ROOT", str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--all"], ["--all"], ["a", "--model", "m"], ["--target", "cpu"]]
)
def test_rollback_without_clear_endpoint_selection_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["rollback", *arguments, "--reason", "slow"])
    assert result.exit_code == 2
    assert "a rollback needs either the names of endpoints" in result.output


def test_rollback_of_model_without_endpoint_exits_with_2() -> None:
    result = CliRunner().invoke(
        app, ["rollback", "--all", "--model", "m", "--target", "cpu", "--reason", "slow"]
    )
    assert result.exit_code == 2
    assert "no endpoint serves m" in result.output


def test_rollback_of_unknown_endpoint_exits_with_2_without_prompt_for_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: pytest.fail("a reason is asked for"))
    with pytest.raises(typer.Exit) as ended:
        rollouts.rollback(["nowhere"])
    assert ended.value.exit_code == 2


def test_rollback_of_several_endpoints_reports_error_of_each(
    capfd: pytest.CaptureFixture[str], golden: Golden
) -> None:
    result = CliRunner().invoke(app, ["rollback", "a", "b", "--reason", "slow", "--json"])
    assert result.exit_code == 2
    documents = json.loads(capfd.readouterr().out)
    golden("errors", "\n".join(f"{one['endpoint']}: {one['what']}" for one in documents))


def test_hand_over_without_mlflow_names_extra_for_aliases_and_retry_of_pending_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "mlflow")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: None)
    (tmp_path / "onnx-ops.toml").write_text('notify = ["webhook"]\n', encoding="utf-8")
    project = open_project(tmp_path)
    project.settings.state.mkdir(parents=True, exist_ok=True)
    assert project.settings.notify, "a second process sends notifications, with another log"
    documents = rollouts._hand_over(project, ("digits", "silent"), ("digits",))
    assert f"(log: {project.settings.state / 'registry.log'})" in documents["silent"]
    assert "onnx-ops[mlflow]" in documents["digits"]
    assert documents["digits"].endswith("onnx-ops reconcile digits")
    assert documents["silent"].startswith("The rollback is retried in the background")
    assert documents["silent"].endswith("onnx-ops reconcile silent")
