"""A pipeline with data in DVC, from its file to MLflow, with only real parts."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.app.affected import affected
from onnx_ops.app.context import open_project
from onnx_ops.app.project import execute, prepare
from onnx_ops.domain.plan import StageStatus
from onnx_ops.onnx_graph.model_info import read_lineage
from onnx_ops.pipeline import RunResult
from tests.adapters.dvc_parts import ENVIRONMENTS, Repository, archive, configure, md5
from tests.support.checkout import copy_parts

FILE = Path("configs/pipelines/kept.yaml")

PIPELINE = """
pipeline: kept
data:
  train: {source: dvc, options: {path: data/train.npz, rev: v1}, inputs: {x: x}, label: y}
  test: {source: dvc, options: {path: data/test.npz}, inputs: {x: x}, label: y}
model: model.onnx
export: {framework: onnx}
validate: {samples: {data: test, limit: '${params:limit}'}}
benchmark: {targets: [cpu-1t]}
gates:
  - {kind: parity}
  - {kind: size, max: 2 MB}
register: {model: kept}
"""


def iris(side: int) -> bytes:
    from sklearn.datasets import load_iris

    bunch, stream = load_iris(), io.BytesIO()
    np.savez(stream, x=bunch.data[side::2].astype(np.float32), y=bunch.target[side::2])
    return stream.getvalue()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    repository = Repository(tmp_path / "project")
    root = repository.root
    copy_parts(root, "configs/targets", "examples/models/iris.onnx")
    (root / "examples/models/iris.onnx").rename(root / "model.onnx")
    repository.write(FILE.as_posix(), PIPELINE)
    repository.write("params.yaml", "limit: 40\n")
    repository.write("onnx-ops.toml", "signing = 'auto'\n")
    repository.write(".gitignore", ".dvc/cache\n.onnx-ops\n")
    repository.git("init", "--quiet", "--initial-branch", "main")
    configure(repository)
    repository.add("data/train.npz", iris(0))
    repository.add("data/test.npz", iris(1))
    repository.commit("v1")
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    (root / ".onnx-ops").mkdir()
    (root / ".onnx-ops/environments").symlink_to(ENVIRONMENTS)
    return repository


def run(repository: Repository) -> RunResult:
    project = open_project(repository.root)
    result = execute(project, prepare(project, repository.root / FILE))
    assert [
        (o.stage, o.reason) for o in result.outcomes.values() if o.status is StageStatus.FAILED
    ] == []
    return result


@pytest.mark.nightly
def test_run_with_dvc_data_records_lineage_in_mlflow_and_model(repository: Repository) -> None:
    commit = repository.git("rev-parse", "v1")
    run(repository)
    project = open_project(repository.root)
    registry = project.context.registry()
    record = registry.version("kept", "1")
    folder = repository.root.parent / "fetched"
    folder.mkdir()
    registry.fetch(record, folder)
    lineage = read_lineage(folder / "model.onnx")
    for name, rev in (("train", "v1"), ("test", "HEAD")):
        assert lineage[f"onnx-ops.origin.{name}.repo"] == "."
        assert lineage[f"onnx-ops.origin.{name}.rev"] == rev
        assert lineage[f"onnx-ops.origin.{name}.commit"] == commit
        assert lineage[f"onnx-ops.origin.{name}.path"] == f"data/{name}.npz"
        assert lineage[f"onnx-ops.origin.{name}.md5"] == md5(iris(0 if name == "train" else 1))

    from mlflow import MlflowClient

    client = MlflowClient(project.settings.tracking_uri)
    tracked = client.get_run(str(client.get_model_version("kept", "1").run_id))
    assert tracked.data.tags["origin.train.commit"] == commit
    assert tracked.data.params["params.limit"] == "40"
    assert tracked.inputs is not None
    inputs: dict[str, Any] = {one.dataset.name: one for one in tracked.inputs.dataset_inputs}
    train = inputs["train"]
    assert train.dataset.source_type == "dvc"
    source = json.loads(train.dataset.source)
    assert (source["commit"], source["path"], source["rev"]) == (commit, "data/train.npz", "v1")
    tags = {tag.key: tag.value for tag in train.tags}
    assert tags["dvc.commit"] == commit
    assert tags["dvc.md5"] == md5(iris(0))
    assert {tag.key for tag in inputs["test"].tags} >= {"dvc.commit", "mlflow.data.context"}

    page = registry.document(record, "report.html").decode()
    assert "train.commit" in page
    assert commit in page


@pytest.mark.nightly
def test_run_with_dvc_data_executes_only_stages_of_changed_inputs(repository: Repository) -> None:
    assert run(repository).executed()
    repository.write("README", "another commit")
    repository.commit()
    assert run(repository).executed() == ()
    shutil.rmtree(repository.root / ".dvc/cache")
    repository.remote.rename(repository.remote.with_name("gone"))
    assert run(repository).executed() == (), "unchanged data is not fetched"
    repository.add("data/test.npz", iris(0))
    repository.commit()
    executed = run(repository).executed()
    assert {"data/test", "export", "register"} <= set(executed)
    assert "data/train" not in executed
    repository.write("params.yaml", "limit: 30\n")
    executed = run(repository).executed()
    assert "export" in executed
    assert not [stage for stage in executed if stage.startswith("data/")]


def test_run_with_tampered_dvc_cache_fails_data_stage(repository: Repository) -> None:
    repository.cached(md5(iris(1))).write_bytes(archive(3))
    project = open_project(repository.root)
    result = execute(project, prepare(project, repository.root / FILE))
    failed = result.outcomes["data/test"]
    assert failed.status is StageStatus.FAILED
    assert "the DVC cache file does not match its pointer" in failed.reason
    assert str(repository.cached(md5(iris(1)))) in failed.reason
    assert result.outcomes["export"].status is StageStatus.SKIPPED
    assert result.errors["data/test"].exit_code == 5


def test_affected_by_dvc_pointer_without_rev_or_by_parameters_lists_pipeline(
    repository: Repository,
) -> None:
    project = open_project(repository.root)
    for changed, touched in (
        ("data/test.npz.dvc", True),
        ("data/train.npz.dvc", False),
        ("params.yaml", True),
        ("data/other.npz.dvc", False),
    ):
        assert [one.file for one in affected(project, [changed])] == (
            [FILE.as_posix()] if touched else []
        ), changed
