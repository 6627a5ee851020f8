"""Fixtures of several files: servers, repositories with data in DVC, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnx_ops.adapters.data.dvc import DvcSource
from onnx_ops.adapters.endpoints.sagemaker import SageMakerEndpoints
from onnx_ops.testing.models import write_perceptron
from tests.adapters.azureml_parts import World, open_world
from tests.adapters.dvc_parts import Repository, make_repository, source
from tests.adapters.endpoint_site import make_models
from tests.adapters.sagemaker_cloud import Site
from tests.support.clouds.sagemaker import FakeSageMaker, fake_sagemaker

QUIET = {"taken_back": "", "stuck": "", "quota": "", "lag": 0, "reads": 2}


@pytest.fixture(scope="session")
def sagemaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSageMaker]:
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
    """Return the file of a perceptron."""
    write_perceptron(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture(scope="module")
def empty_site(sagemaker: FakeSageMaker, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return the fake in its initial state, and models that are new to it.

    The fixture is made once for each module.
    """
    sagemaker.reset()
    blue, green = make_models(tmp_path_factory.mktemp("models"))
    return Site(fake=sagemaker, blue=blue, green=green)


@pytest.fixture
def site(empty_site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield the module's site with a new provider and without faults.

    Every boto3 client reaches the site through the environment. The policies in `infra/aws` permit
    all requests that the provider sends in the test.
    """
    fake = empty_site.fake
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    # botocore pauses between its attempts. Only its own name `time` is replaced, since the module
    # belongs to the whole process.
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    fake.fault()
    fake.behave(**QUIET)
    yield replace(empty_site, provider=SageMakerEndpoints())
    assert fake.denied() == []


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("azure")) as world:
        yield world


@pytest.fixture
def world(azure: World, tmp_path: Path) -> Iterator[World]:
    """Yield the module's cloud without resources, and a machine that sent nothing yet."""
    azure.cloud.calls.clear()
    with azure.cloud.kept():
        yield replace(azure, folder=tmp_path / "endpoints")
    assert azure.cloud.denied == []
