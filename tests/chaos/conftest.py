"""Real server families to be hurt, and what they serve."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import scaling_deployment, state_of
from tests.chaos.chaos_parts import INFER, Make, Patient
from tests.support.load import LoadPlan, Payload
from tests.support.server import ServerFamily


@pytest.fixture
def blue(tmp_path: Path) -> Deployment:
    return scaling_deployment(tmp_path / "blue", name="blue", version="1", scale=2.0, model="m")


@pytest.fixture
def green(tmp_path: Path) -> Deployment:
    return scaling_deployment(tmp_path / "green", name="green", version="2", scale=3.0, model="m")


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Make]:
    """Makes servers that are gone after the test."""
    made: list[ServerFamily] = []

    def make(*options: str, folder: Path | None = None) -> ServerFamily:
        server = ServerFamily(folder=folder or tmp_path / "state", options=options)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.destroy()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    """One server for all tests of a file that only call it: they hurt it one after the other."""
    root = tmp_path_factory.mktemp("patient")
    deployment = scaling_deployment(root / "blue", name="blue", version="1", scale=2.0, model="m")
    server = ServerFamily(folder=root / "state", options=("--read-timeout", "2 s", "--allowed-hosts", "x"))
    server.start()
    assert server.publish(state_of(deployment, blue=100), 1).status == 200
    yield Patient(server)
    assert server.stop() == 0
    assert "Traceback" not in server.log(), server.log()
    server.destroy()


@pytest.fixture
def plan() -> Callable[..., LoadPlan]:
    """Plans a load of one good request."""

    def make(server: ServerFamily, **options: float) -> LoadPlan:
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
        chosen = {"connections": 8, "seconds": 300.0, **options}
        return LoadPlan(url=server.url(INFER), payloads=[Payload(body=body)], **chosen)  # type: ignore[arg-type]

    return make


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many open files as the system lets this process, and the servers that it starts, have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
