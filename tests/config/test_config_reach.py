"""The files, variables and functions that a pipeline file can use.

It uses those of its project, and others only if the settings allow them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_ops.config.reach import PROJECT_ONLY, Reach
from onnx_ops.domain.pipeline import Pipeline
from onnx_ops.errors import ConfigError
from onnx_ops.printable import show

Load = Callable[..., Pipeline]
SECRET = "s3cr3t-token-of-another-service"  # noqa: S105 (not a real secret)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project at `root` with a data folder, and files beside it."""
    for name in ("root/data/own.csv", "elsewhere/rows.csv", "elsewhere-too/rows.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link, place in {
        "linked.csv": "elsewhere/rows.csv",
        "linked": "elsewhere",
        "inside": "root/data",
    }.items():
        (tmp_path / "root" / link).symlink_to(tmp_path / place)
    (tmp_path / "root" / "loop").symlink_to("loop")
    return tmp_path / "root"


@pytest.mark.parametrize(
    "text", ["data/own.csv", "inside/own.csv", "./data/../data/own.csv", "data/none.csv", "loop"]
)
def test_explain_path_within_project_returns_empty_text(root: Path, text: str) -> None:
    assert PROJECT_ONLY.explain_path(text, root) == ""


@pytest.mark.parametrize(
    "text",
    [
        "../elsewhere/rows.csv",
        "/etc/passwd",
        "data/../../elsewhere/rows.csv",
        "linked.csv",
        "linked/rows.csv",
        "file:///etc/passwd",
        "http://example.org/x.onnx",
        "simplecache::file:///etc/passwd",
        "s3://bucket/x.onnx",
        "git@example.org:acme/data.git",
        "ssh::example.org/data.git",
    ],
)
def test_explain_path_outside_project_names_setting(root: Path, text: str) -> None:
    assert "allowed_paths" in PROJECT_ONLY.explain_path(text, root)


@pytest.mark.parametrize("text", ["rows\0.npz", "../rows\0.npz", "\0"])
def test_explain_path_with_null_byte_names_it(root: Path, text: str) -> None:
    assert "contains a null byte" in PROJECT_ONLY.explain_path(text, root)


@pytest.mark.parametrize(
    ("allowed", "text", "expected"),
    [
        ("../elsewhere", "../elsewhere/rows.csv", True),
        ("../elsewhere", "linked/rows.csv", True),
        ("../elsewhere", "../elsewhere-too/rows.csv", False),
        ("../elsewhere", "../elsewhere/../elsewhere-too/rows.csv", False),
        ("s3://bucket/models", "s3://bucket/models/x.onnx", True),
        ("s3://bucket/models/", "s3://bucket/models/x.onnx", True),
        ("s3://bucket/models", "s3://bucket/models-of-others/x.onnx", False),
        ("s3://bucket/models", "s3://bucket/models/../others/x.onnx", False),
        ("s3://bucket/models", "http://s3://bucket/models/x.onnx", False),
        ("git@example.org:acme", "git@example.org:acme/data.git", True),
        ("git@example.org:acme", "git@example.org:acme-of-others/data.git", False),
        ("/", "/etc/passwd", True),
    ],
)
def test_explain_path_outside_project_allows_only_paths_below_allowed_path(
    root: Path, allowed: str, text: str, expected: bool
) -> None:
    assert (Reach(paths=(allowed,)).explain_path(text, root) == "") is expected


def test_explain_package_allows_only_modules_of_allowed_package() -> None:
    reach = Reach(packages=("company.metrics",))
    assert (
        reach.explain_package("company.metrics")
        == reach.explain_package("company.metrics.gain")
        == ""
    )
    for module in ("company", "company.metrics_of_others", "metrics", "os"):
        assert "allowed_packages" in reach.explain_package(module)


@pytest.mark.parametrize(
    "reference", ["os:system", "subprocess:run", "sklearn.metrics:f1_score", "pickle:loads"]
)
def test_load_pipeline_with_function_of_foreign_package_raises_config_error(
    load: Load, reference: str
) -> None:
    with pytest.raises(ConfigError, match="allowed_packages"):
        load(overrides=[f"train.run={reference}"])


def test_load_pipeline_with_function_of_allowed_package_succeeds(load: Load) -> None:
    overrides = ["train.run=shutil:copyfile", "train.with={dst: x}"]
    load(overrides=overrides, reach=Reach(packages=("shutil",)))


def test_load_pipeline_with_forbidden_variable_raises_config_error(load: Load) -> None:
    overrides = ["register.model=${env:MLFLOW_TRACKING_TOKEN}"]
    with pytest.raises(ConfigError, match="to read variable MLFLOW_TRACKING_TOKEN") as caught:
        load(overrides=overrides, environ={"MLFLOW_TRACKING_TOKEN": SECRET}, reach=PROJECT_ONLY)
    assert SECRET not in str(caught.value)


def test_load_pipeline_error_shows_variable_name_instead_of_value(load: Load) -> None:
    overrides = ["data.train={file: '${env:FOLDER_OF_DATA}/x.csv'}"]
    with pytest.raises(ConfigError) as caught:
        load(
            overrides=overrides,
            environ={"FOLDER_OF_DATA": f"/{SECRET}"},
            reach=Reach(variables=("FOLDER_*",)),
        )
    assert SECRET not in str(caught.value)
    assert "${env:FOLDER_OF_DATA}" in str(caught.value)
    assert show(f"opened /{SECRET}/x.csv") == "opened ${env:FOLDER_OF_DATA}/x.csv"


def test_load_pipeline_with_path_outside_project_raises_before_preflight(load: Load) -> None:
    read: list[object] = []
    with pytest.raises(ConfigError):
        load(
            overrides=["data.train={file: /etc/passwd}"],
            preflight=lambda *given: read.append(given),
            reach=PROJECT_ONLY,
        )
    assert read == []
