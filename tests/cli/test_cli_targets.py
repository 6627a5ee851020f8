"""`onnx-ops targets`: the measurable targets, and the reasons for the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from onnx_ops.adapters.runtimes.onnxruntime_session import list_providers
from onnx_ops.app.context import open_project
from onnx_ops.cli.diagnosis import diagnose
from onnx_ops.config.targets import UNMEASURED, profile_names
from tests.support.command import run_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "configs" / "targets"
    folder.mkdir(parents=True)
    (folder / "cpu-1t.yaml").write_text("name: cpu-1t\n")
    (folder / "boards.yaml").write_text("name: boards\npool: boards\n")
    (folder / "wrong.yaml").write_text("name: wrong\nprovider: x\n")
    (folder / "node.yaml").write_text("name: node\nruntime: no-such-runtime\n")
    return tmp_path


def listed(project: Path) -> Mapping[str, Mapping[str, object]]:
    return {one["name"]: one for one in run_command("targets", "--json", cwd=project).parsed()}


def test_targets_lists_each_target_and_profile_with_status(project: Path) -> None:
    found = listed(project)
    assert set(found) == {"boards", "cpu-1t", "node", "wrong", *profile_names()}
    assert found["cpu-1t"] == {
        "name": "cpu-1t",
        "source": "configs/targets/cpu-1t.yaml",
        "measured": None,
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


def test_targets_with_environment_reports_packages_that_first_run_installs(project: Path) -> None:
    environments = {
        "pinned": "env: {requirements: [onnxruntime-openvino==1.24.1]}",
        "unpinned": "env: {timeout: 60 s}",
        "javascript": "runtime: node\nproviders: [wasm]\nenv: {timeout: 60 s}",
        "shared": "env: {isolated: false}",
    }
    for name, text in environments.items():
        (project / f"configs/targets/{name}.yaml").write_text(f"name: {name}\n{text}\n")
    statuses = listed(project)
    install = "the first run installs {} into a separate environment"
    assert {name: (statuses[name]["here"], statuses[name]["why"]) for name in environments} == {
        "pinned": (None, install.format("onnxruntime-openvino==1.24.1")),
        "unpinned": (False, "the environment does not name the build of ONNX Runtime to measure"),
        "javascript": (None, install.format("the packages of its runtime")),
        "shared": (True, ""),
    }


def test_targets_marks_profiles_that_were_never_measured(project: Path) -> None:
    statuses = listed(project)
    measured = {name: statuses[name]["measured"] for name in profile_names()}
    assert measured == {
        name: None if name in ("cpu-1t", "node") else name not in UNMEASURED
        for name in profile_names()
    }
    lines = run_command("targets", cwd=project, environ={"COLUMNS": "200"}).stdout.splitlines()
    marked = {line.split()[0] for line in lines if "shipped, never measured" in line}
    assert marked == UNMEASURED


def test_targets_with_missing_provider_reports_reason(project: Path) -> None:
    found = listed(project)
    for provider in (
        set(map(str, (one["provider"] for one in found.values()))) - set(list_providers()) - {""}
    ):
        for one in found.values():
            is_explained = one["here"] is None or (one["here"] is False and one["remedy"])
            assert one["provider"] != provider or (is_explained and one["why"])
    result = run_command("targets", cwd=project, environ={"COLUMNS": "200"})
    assert result.code == 0
    assert "cannot measure it" in result.stdout
    assert "passed" not in result.stdout.lower()


def test_doctor_reports_devices(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in diagnose(open_project(tmp_path))}
    assert found["devices"].ok
    assert "CPUExecutionProvider on CPU (" in found["devices"].found


def test_check_with_unmeasurable_target_exits_with_4(project: Path) -> None:
    shutil.copyfile(ROOT / "examples" / "models" / "iris.onnx", project / "iris.onnx")
    text = (
        (ROOT / "configs" / "pipelines" / "iris-onnx.yaml")
        .read_text()
        .replace("examples/models/", "")
    )
    (project / "p.yaml").write_text(text.replace("[cpu-1t]", "[cpu-1t, boards, coreml]"))
    done = run_command("check", "p.yaml", cwd=project)
    assert done.code == 4
    (line,) = done.stderr.splitlines()
    assert "benchmark.targets[2]: this machine cannot measure coreml" in line
    assert "CoreMLExecutionProvider is not in this build" in line
    assert "copy the profile to configs/targets/coreml.yaml" in line
    assert run_command("check", "p.yaml", "--static", cwd=project).code == 0


def test_check_with_target_of_other_hardware_exits_with_4(project: Path) -> None:
    (project / "configs" / "targets" / "arm.yaml").write_text(
        "name: arm\nrequires: {cpu: Neoverse}\n"
    )
    shutil.copyfile(ROOT / "examples" / "models" / "iris.onnx", project / "iris.onnx")
    text = (
        (ROOT / "configs" / "pipelines" / "iris-onnx.yaml")
        .read_text()
        .replace("examples/models/", "")
    )
    (project / "p.yaml").write_text(text.replace("[cpu-1t]", "[arm]"))
    done = run_command("check", "p.yaml", cwd=project)
    assert done.code == 4
    assert "this machine cannot measure arm" in done.stderr
    assert "set `pool` in configs/targets/arm.yaml" in done.stderr


@pytest.fixture
def packaged(project: Path) -> Path:
    """Return a project with a target whose package is not installed."""
    (project / "configs/targets/images.yaml").write_text(
        "name: images\ncustom_ops: {package: acme_missing, domains: [acme]}\n"
    )
    (project / "configs/targets/wrong.yaml").unlink()
    shutil.copyfile(ROOT / "examples/models/iris.onnx", project / "iris.onnx")
    text = (ROOT / "configs/pipelines/iris-onnx.yaml").read_text()
    text = text.replace("examples/models/", "")
    (project / "p.yaml").write_text(text)
    (project / "q.yaml").write_text(text.replace("[cpu-1t]", "[cpu-1t, images]"))
    return project


def test_targets_with_missing_package_reports_reason_and_remedy(packaged: Path) -> None:
    status = listed(packaged)["images"]
    findings = {finding.check: finding for finding in diagnose(open_project(packaged))}

    assert status["here"] is False
    assert "configs/targets/images.yaml:2:23: custom_ops.package: " in str(status["why"])
    assert "pip install acme_missing" in str(status["why"])
    finding = findings["target images"]
    assert finding.absent
    assert "package acme_missing is not installed" in finding.found


def test_check_and_run_with_missing_package_report_it_once_and_exit_with_4(packaged: Path) -> None:
    for command in (("check",), ("run", "--until", "validate")):
        done = run_command(*command, "q.yaml", cwd=packaged)
        assert done.code == 4, done.stderr
        assert done.stderr.count("package acme_missing is not installed") == 1
        assert "images.yaml:2:23" in done.stderr
    assert run_command("check", "q.yaml", "--static", cwd=packaged).code == 0
    assert run_command("check", "p.yaml", cwd=packaged).code == 0


def test_inspect_with_target_of_missing_package_reports_reason(packaged: Path) -> None:
    found = run_command("inspect", "iris.onnx", "--json", cwd=packaged).parsed()["targets"]

    assert found["cpu-1t"]["accepts"]
    assert "package acme_missing is not installed" in found["images"]["reason"]
