"""What several files share: servers, repositories with data in DVC, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.testing.models import write_perceptron
from tests.adapters.dvc_parts import Repository, make_repository, source
from tests.support.clouds.sagemaker import FakeSageMaker, fake_sagemaker


@pytest.fixture(scope="session")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSageMaker]:
    """The fake cloud, with whatever the module before has left in it: see `sagemaker_cloud.cloud`."""
    with fake_sagemaker(tmp_path_factory.mktemp("sagemaker")) as fake:
        yield fake


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return make_repository(tmp_path / "project")


@pytest.fixture
def reads(tmp_path: Path) -> DvcSource:
    return source(tmp_path / "state")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A perceptron."""
    write_perceptron(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"
