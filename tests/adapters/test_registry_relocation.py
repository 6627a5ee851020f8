"""MLflow's artifacts in a project that was moved, renamed or copied."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from onnx_ops.adapters.registries.mlflow import MlflowRegistry
from onnx_ops.adapters.registries.mlflow_relocation import relocate_artifacts
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.testing.registries import publication

ELSEWHERE = "s3://bucket/artifacts/of-others"


def open_registry(root: Path) -> MlflowRegistry:
    return MlflowRegistry(f"sqlite:///{root}/mlflow.db", artifact_root=str(root / "mlartifacts"))


def publish(root: Path, seed: str) -> str:
    return open_registry(root).publish(
        publication(root / f"files-{seed}", model="digits", seed=seed)
    )["fp32"]


def list_locations(root: Path) -> set[str]:
    with closing(sqlite3.connect(root / "mlflow.db")) as database:
        tables = (
            ("experiments", "artifact_location"),
            ("runs", "artifact_uri"),
            ("logged_models", "artifact_location"),
        )
        return {
            row[0]
            for table, column in tables
            for row in database.execute(f"SELECT {column} FROM {table}")  # noqa: S608
        }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with one version, and an experiment of another tool."""
    root = tmp_path / "shop"
    root.mkdir()
    publish(root, "a")
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        database.execute(
            "INSERT INTO experiments (name, artifact_location, lifecycle_stage, workspace) "
            "SELECT 'theirs', ?, 'active', workspace FROM experiments LIMIT 1",
            (ELSEWHERE,),
        )
    return root


@pytest.mark.parametrize("is_copied", [False, True])
def test_registry_of_moved_or_copied_project_uses_its_own_artifacts(
    root: Path, tmp_path: Path, is_copied: bool
) -> None:
    new = tmp_path / "renamed shop"
    if is_copied:
        shutil.copytree(root, new)
    else:
        root.rename(new)
    before = sorted(root.rglob("*"))
    registry = open_registry(new)
    for version in ("1", publish(new, "b")):
        record = registry.version("digits", version)
        fetched = tmp_path / f"fetched-{version}"
        fetched.mkdir()
        assert registry.fetch(record, fetched).digest() == record.manifest
    assert sorted(root.rglob("*")) == before
    own = {location for location in list_locations(new) if "mlartifacts" in location}
    assert len(own) >= 4
    assert all(location.startswith(f"{new}/mlartifacts/") for location in own)
    assert ELSEWHERE in list_locations(new)
    if is_copied:
        assert not any(location.startswith(str(new)) for location in list_locations(root))


def test_relocate_artifacts_in_place_changes_nothing(root: Path) -> None:
    before = (root / "mlflow.db").read_bytes()
    assert relocate_artifacts(root / "mlflow.db", root / "mlartifacts") == ()
    assert (root / "mlflow.db").read_bytes() == before


def test_relocate_artifacts_without_moved_artifacts_keeps_locations(
    root: Path, tmp_path: Path
) -> None:
    """Only the database was moved; its artifacts are at their old location."""
    before = list_locations(root)
    assert relocate_artifacts(root / "mlflow.db", tmp_path / "mlartifacts") == ()
    assert list_locations(root) == before


def test_relocate_artifacts_leaves_root_with_similar_prefix_unchanged(
    root: Path, tmp_path: Path
) -> None:
    other = f"{root}/mlartifacts-of-others/digits/7/artifacts"
    with closing(sqlite3.connect(root / "mlflow.db")) as database, database:
        database.execute("UPDATE runs SET artifact_uri = ?", (other,))
    new = root.rename(tmp_path / "moved")
    assert relocate_artifacts(new / "mlflow.db", new / "mlartifacts") == (f"{root}/mlartifacts",)
    assert other in list_locations(new)


@pytest.mark.parametrize("content", [None, b"", b"not a database"])
def test_relocate_artifacts_of_invalid_or_missing_database_relocates_nothing(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "mlflow.db"
    if content is not None:
        path.write_bytes(content)
    assert relocate_artifacts(path, tmp_path / "mlartifacts") == ()


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_registry_of_moved_project_with_locked_database_raises_error_until_unlocked(
    root: Path, tmp_path: Path, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = root.rename(tmp_path / "moved")
    monkeypatch.setattr("onnx_ops.adapters.registries.mlflow_relocation.TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(new / "mlflow.db", isolation_level=None)) as other:
        other.execute(f"BEGIN {lock}")
        with pytest.raises(ServiceUnavailableError, match="the database cannot be changed"):
            open_registry(new)
        other.execute("ROLLBACK")
    open_registry(new)
    assert not any(location.startswith(f"{root}/") for location in list_locations(new))
