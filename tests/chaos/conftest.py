"""Real servers that the tests attack, and the models that they serve."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from onnx_ops.domain.endpoint import Deployment
from onnx_ops.testing.endpoints import state_of
from tests.chaos.chaos_parts import INFER, Make, Patient
from tests.support.load import LoadPlan, Payload
from tests.support.server import ServerFamily, scaled


@pytest.fixture
def blue(tmp_path: Path) -> Deployment:
    return scaled(tmp_path, "blue")


@pytest.fixture
def green(tmp_path: Path) -> Deployment:
    return scaled(tmp_path, "green")


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that starts servers, which end after the test."""
    with ExitStack() as stack:
        yield lambda *options, folder=tmp_path / "state": stack.enter_context(
            ServerFamily(folder=folder, options=options)
        )


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    """Yield one server that all tests of a file attack one after the other.

    These tests only send requests to it.
    """
    root = tmp_path_factory.mktemp("patient")
    with ServerFamily(
        folder=root / "state", options=("--read-timeout", "2 s", "--allowed-hosts", "x")
    ) as server:
        assert server.publish(state_of(scaled(root, "blue"), blue=100), 1).status == 200
        yield Patient(server)
        assert server.stop() == 0
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture
def plan() -> Callable[..., LoadPlan]:
    """Return a function that plans a load of one good request."""

    def make(server: ServerFamily, **options: float) -> LoadPlan:
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'
        chosen = {"connections": 8, "seconds": 300.0, **options}
        return LoadPlan(url=server.url(INFER), payloads=[Payload(body=body)], **chosen)  # type: ignore[arg-type]

    return make


@pytest.fixture
def many_files() -> Iterator[int]:
    """Raise the limit of open files to its maximum, and yield that.

    The limit applies to this process and to the servers that it starts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
