"""`onnx-ops targets`: what can be measured here, and why the rest cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_ops.adapters.runtimes.onnxruntime_session import list_providers
from onnx_ops.app.project import open_project
from onnx_ops.cli.diagnosis import diagnose
from onnx_ops.cli.main import app
from onnx_ops.config.targets import profile_names

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "configs" / "targets"
    folder.mkdir(parents=True)
    (folder / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (folder / "boards.yaml").write_text("name: boards\npool: boards\n")
    (folder / "wrong.yaml").write_text("name: wrong\nprovider: x\n")
    (folder / "node.yaml").write_text("name: node\nruntime: no-such-runtime\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def listed(capfd: Captured) -> Mapping[str, Mapping[str, object]]:
    assert CliRunner().invoke(app, ["targets", "--json"]).exit_code == 0
    return {one["name"]: one for one in json.loads(capfd.readouterr().out)}


def test_each_target_and_each_profile_is_told_once(project: Path, capfd: Captured) -> None:
    found = listed(capfd)
    assert set(found) == {"boards", "cpu-1t", "node", "wrong", *profile_names()}
    assert found["cpu-1t"] == {
        "name": "cpu-1t",
        "source": "configs/targets/cpu-1t.yaml",
        "provider": "CPUExecutionProvider",
        "here": True,
        "why": "",
        "remedy": "",
    }
    assert found["cpu-all"]["source"] == "shipped"
    assert found["boards"]["here"] is None
    assert "pool boards" in str(found["boards"]["why"])
    assert "unknown key 'provider'" in str(found["wrong"]["why"])
    assert found["node"]["here"] is False
    assert "'no-such-runtime'" in str(found["node"]["why"])


def test_what_is_not_in_the_build_is_not_measured_here(project: Path, capfd: Captured) -> None:
    found = listed(capfd)
    for provider in set(map(str, (one["provider"] for one in found.values()))) - set(list_providers()) - {""}:
        for one in found.values():
            told = one["here"] is None or (one["here"] is False and one["remedy"])
            assert one["provider"] != provider or (told and one["why"])
    result = CliRunner().invoke(app, ["targets"])
    assert result.exit_code == 0
    text = result.output + capfd.readouterr().out
    assert "not measured here" in text
    assert "passed" not in text.lower()


def test_the_doctor_names_the_devices(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in diagnose(open_project(tmp_path))}
    assert found["devices"].ok
    assert "CPUExecutionProvider on CPU (" in found["devices"].found
