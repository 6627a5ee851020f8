from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import Conflict, DigestMismatch, NotFound, ServiceUnavailable, UserError
from onnx_ops.serving.endpoint import Endpoint
from onnx_ops.serving.models import LoadedModel, load_model
from onnx_ops.serving.table import TableFile
from onnx_ops.testing.endpoints import state_of


class Loads:
    """Loads models, and remembers which."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, deployment: Deployment) -> LoadedModel:
        self.names.append(deployment.name)
        return load_model(deployment)


@pytest.fixture
def loads() -> Loads:
    return Loads()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def endpoint(folder: Path, loads: Loads) -> Endpoint:
    return Endpoint(TableFile(folder), loads)


def at(generation: int, state: EndpointState) -> EndpointState:
    return replace(state, generation=generation)


def test_only_what_is_missing_is_loaded(endpoint: Endpoint, loads: Loads, blue: Deployment, green: Deployment) -> None:
    endpoint.publish(at(1, state_of(blue, blue=100)))
    endpoint.publish(at(2, state_of(blue, green, blue=50, green=50)))
    endpoint.publish(at(3, state_of(blue, green, blue=100, green=0)))
    assert loads.names == ["blue", "green"]
    endpoint.publish(at(4, state_of(blue, blue=100)))
    assert set(endpoint.current().models) == {"blue"}


def test_the_same_state_again_is_the_same_snapshot(endpoint: Endpoint, blue: Deployment) -> None:
    first = endpoint.publish(at(1, state_of(blue, blue=100)))
    assert endpoint.publish(at(1, state_of(blue, blue=100))) is first


def test_generations_are_ordered(endpoint: Endpoint, folder: Path, blue: Deployment, green: Deployment) -> None:
    both = state_of(blue, green, blue=50, green=50)
    endpoint.publish(at(5, both))
    with pytest.raises(Conflict, match="generation 4 is older"):
        endpoint.publish(at(4, both))
    with pytest.raises(Conflict, match="another content"):
        endpoint.publish(at(5, state_of(blue, blue=100)))
    endpoint.publish(at(6, both))
    assert TableFile(folder).read() == endpoint.current().table
    assert endpoint.current().table.state.generation == 6


def test_a_failed_load_or_write_changes_nothing(
    endpoint: Endpoint, folder: Path, blue: Deployment, green: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = endpoint.publish(at(1, state_of(blue, blue=100)))
    forged = replace(green, manifest=blue.manifest)
    with pytest.raises(DigestMismatch):
        endpoint.publish(at(2, state_of(blue, forged, blue=50, green=50)))

    def full(_: object, __: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TableFile, "write", full)
    with pytest.raises(ServiceUnavailable, match="could not be written"):
        endpoint.publish(at(2, state_of(green, green=100)))
    assert endpoint.current() is before
    assert TableFile(folder).read() == before.table


def test_one_endpoint_serves_one_model(endpoint: Endpoint, blue: Deployment, green: Deployment) -> None:
    with pytest.raises(UserError, match="exactly one model"):
        endpoint.publish(state_of(blue, replace(green, model="other"), blue=50, green=50))
    with pytest.raises(ServiceUnavailable, match="no deployment is published"):
        endpoint.current()


def test_a_restart_serves_what_it_can_and_the_next_publication_heals(
    endpoint: Endpoint, folder: Path, blue: Deployment, green: Deployment
) -> None:
    state = at(3, state_of(blue, green, blue=50, green=50))
    published = endpoint.publish(state)
    away = Path(green.location).rename(folder.parent / "away")
    again = Endpoint(TableFile(folder))
    again.restore()
    snapshot = again.current()
    assert snapshot.table == published.table
    assert snapshot.router == published.router
    assert snapshot.loaded("blue").deployment == blue
    with pytest.raises(ServiceUnavailable, match="'green' is not loaded"):
        snapshot.loaded("green")
    with pytest.raises(NotFound):
        again.publish(state)
    away.rename(green.location)
    assert not again.publish(state).failed
    assert again.current().version("2").deployment == green
    with pytest.raises(NotFound, match="no version '9'"):
        again.current().version("9")


def test_nothing_to_restore(endpoint: Endpoint) -> None:
    endpoint.restore()
    assert endpoint.snapshot is None


def test_a_model_in_use_outlives_its_deployment(endpoint: Endpoint, blue: Deployment, green: Deployment) -> None:
    held = endpoint.publish(at(1, state_of(blue, blue=100)))
    endpoint.publish(at(2, state_of(green, green=100)))
    values = held.loaded("blue").run({"x": np.ones((1, 2), np.float32)}, ("y",))
    assert values["y"].tolist() == [[2.0, 2.0]]
