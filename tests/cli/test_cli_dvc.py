"""`onnx-ops export-dvc`: a release in DVC's formats, as DVC itself shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from onnx_ops.app.context import open_project
from onnx_ops.app.project import execute, prepare
from tests.adapters.dvc_parts import Repository, dvc, source
from tests.support.checkout import copy_parts
from tests.support.command import Result, run_command


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with one release of one variant."""
    root = tmp_path_factory.mktemp("dvc-released")
    copy_parts(root, "configs/targets", "examples", "configs/pipelines/iris-onnx.yaml")
    (root / "onnx-ops.toml").write_text("signing = 'auto'\n")
    project = open_project(root)
    execute(project, prepare(project, root / "configs/pipelines/iris-onnx.yaml"))
    return root


@pytest.fixture
def export(released: Path, tmp_path: Path) -> Callable[..., Result]:
    return partial(
        run_command, "export-dvc", cwd=tmp_path, environ={"ONNX_OPS_ROOT": str(released)}
    )


def test_export_dvc_writes_metrics_and_plots(export: Callable[..., Result], tmp_path: Path) -> None:
    done = export("iris-onnx/1")
    assert (done.code, done.stdout.split()) == (
        0,
        ["metrics.json", "plots/latency.json", "plots/size.json"],
    )
    figures = json.loads((tmp_path / "metrics.json").read_text())["fp32"]["cpu-1t"]
    assert figures["verdict"] == "pass"
    assert figures["size_bytes"] > 0
    assert 0.85 <= figures["accuracy"] <= 1
    for plot in ("latency", "size"):
        assert json.loads((tmp_path / f"plots/{plot}.json").read_text())


@pytest.mark.nightly
def test_export_dvc_files_are_readable_by_dvc(
    export: Callable[..., Result], tmp_path: Path
) -> None:
    assert export("iris-onnx/1").code == 0
    figures = json.loads((tmp_path / "metrics.json").read_text())["fp32"]["cpu-1t"]
    repository = Repository(tmp_path)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.write(
        "dvc.yaml", "metrics: [metrics.json]\nplots:\n- plots/latency.json: {x: quantile, y: ms}\n"
    )
    environments = source(tmp_path).environments
    dvc(repository, environments, ("init", "-q"))
    repository.commit("v1")
    shown = json.loads(dvc(repository, environments, ("metrics", "show", "--json")))
    assert shown[""]["data"]["metrics.json"]["data"]["fp32"]["cpu-1t"] == figures
    assert "fp32.cpu-1t.accuracy" in dvc(repository, environments, ("metrics", "show"))
    dvc(repository, environments, ("plots", "show", "-o", "page"))
    assert '"quantile"' in (tmp_path / "page/index.html").read_text()


def test_export_dvc_with_paths_writes_to_them_and_prints_json(
    export: Callable[..., Result], tmp_path: Path
) -> None:
    done = export("iris-onnx/v1", "--metrics", "a/m.json", "--plots", "b", "--json")
    assert done.parsed()["files"] == ["a/m.json", "b/latency.json", "b/size.json"]
    assert "fp32" in json.loads((tmp_path / "a/m.json").read_text())
    points = json.loads((tmp_path / "b/latency.json").read_text())
    assert {point["variant"] for point in points} == {"fp32"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["iris-onnx"], "is not MODEL/VERSION"),
        (["iris-onnx/9"], "has no version '9'"),
        (["iris-onnx/1", "--metrics", "/proc/none/m.json"], "cannot be written"),
    ],
)
def test_export_dvc_with_wrong_arguments_exits_with_2(
    export: Callable[..., Result], arguments: list[str], expected: str
) -> None:
    done = export(*arguments)
    assert done.code == 2
    assert expected in done.stderr
