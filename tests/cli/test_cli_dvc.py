"""`onnx-ops export-dvc`: a release in DVC's formats, as DVC itself shows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_ops.app.project import execute, open_project, prepare
from onnx_ops.cli.main import app
from tests.adapters.dvc_parts import Repository, dvc, source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one release of one variant."""
    root = tmp_path_factory.mktemp("dvc-released")
    for name in ("configs/targets", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "configs/pipelines").mkdir()
    shutil.copyfile(ROOT / "configs/pipelines/iris-onnx.yaml", root / "configs/pipelines/iris-onnx.yaml")
    (root / "onnx-ops.toml").write_text("signing = 'auto'\n")
    project = open_project(root)
    execute(project, prepare(project, root / "configs/pipelines/iris-onnx.yaml"))
    return root


@pytest.fixture
def here(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNX_OPS_ROOT", str(released))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_figures_of_a_release_are_written(here: Path) -> None:
    done = CliRunner().invoke(app, ["export-dvc", "iris-onnx/1"])
    assert (done.exit_code, done.stdout.split()) == (0, ["metrics.json", "plots/latency.json", "plots/size.json"])
    figures = json.loads((here / "metrics.json").read_text())["fp32"]["cpu-1t"]
    assert figures["verdict"] == "pass"
    assert figures["size_bytes"] > 0
    assert 0.85 <= figures["accuracy"] <= 1


@pytest.mark.nightly
def test_dvc_shows_what_was_written(here: Path) -> None:
    assert CliRunner().invoke(app, ["export-dvc", "iris-onnx/1"]).exit_code == 0
    figures = json.loads((here / "metrics.json").read_text())["fp32"]["cpu-1t"]
    repository = Repository(here)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.write("dvc.yaml", "metrics: [metrics.json]\nplots:\n- plots/latency.json: {x: quantile, y: ms}\n")
    environments = source(here).environments
    dvc(repository, environments, ("init", "-q"))
    repository.commit("v1")
    shown = json.loads(dvc(repository, environments, ("metrics", "show", "--json")))
    assert shown[""]["data"]["metrics.json"]["data"]["fp32"]["cpu-1t"] == figures
    assert "fp32.cpu-1t.accuracy" in dvc(repository, environments, ("metrics", "show"))
    dvc(repository, environments, ("plots", "show", "-o", "page"))
    assert '"quantile"' in (here / "page/index.html").read_text()


def test_it_tells_its_files_as_json_and_writes_where_it_is_told(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["export-dvc", "iris-onnx/v1", "--metrics", "a/m.json", "--plots", "b", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert json.loads(done.stdout or capfd.readouterr().out)["files"] == ["a/m.json", "b/latency.json", "b/size.json"]
    points = json.loads((here / "b/latency.json").read_text())
    assert {point["variant"] for point in points} <= {"fp32"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["iris-onnx"], "is not MODEL/VERSION"),
        (["iris-onnx/9"], "has no version '9'"),
        (["iris-onnx/1", "--metrics", "/proc/none/m.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_told(here: Path, arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["export-dvc", *arguments])
    assert done.exit_code == 2
    assert told in done.output + capfd.readouterr().err
