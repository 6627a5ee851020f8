"""Small real models, and a server process to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import Server, deploy, save_graph
from tests.serving.serving_worker import Gate
from tests.support.server import scaled


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Deployment]:
    """Return a function that builds a model and returns its deployment.

    It takes the nodes, inputs, outputs and weights of the model.
    """

    def make(*graph: Any) -> Deployment:
        return deploy(save_graph(tmp_path / "built", *graph).parent)

    return make


@pytest.fixture
def blue(tmp_path: Path) -> Deployment:
    return scaled(tmp_path, "blue")


@pytest.fixture
def green(tmp_path: Path) -> Deployment:
    return scaled(tmp_path, "green")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(folder=tmp_path / "state") as server:
        yield server


@pytest.fixture
def two_workers(tmp_path: Path, blue: Deployment) -> Iterator[Server]:
    """Yield a server with two workers, which serves blue."""
    with Server(folder=tmp_path / "state", options=("--workers=2", "--drain=5 s")) as server:
        assert server.publish(state_of(blue, blue=100), 1).status == 200
        yield server


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()
