"""What the supervisor publishes and in which order, and what a worker holds for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.domain.endpoint import Deployment, EndpointState
from onnx_ops.errors import (
    ConflictError,
    DigestMismatchError,
    InfrastructureError,
    NotFoundError,
    ServiceUnavailableError,
    UserError,
)
from onnx_ops.protocol.routing_table import RoutingTable, TableFile
from onnx_ops.serving import residents
from onnx_ops.serving.endpoint import Edition, Endpoint
from onnx_ops.serving.lanes import Hands, Lane
from onnx_ops.serving.models import load_model
from onnx_ops.serving.resident import Resident
from onnx_ops.serving.residents import Residents
from onnx_ops.serving.run_time import RunTime
from onnx_ops.serving.shared import LOAD_FAILURES, LOADS, Row, Shared
from onnx_ops.testing.endpoints import state_of


class Loads:
    """Loads models, and remembers which."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.twins = True

    def __call__(self, deployment: Deployment, row: Row, twin: bool) -> Resident:
        if twin and not self.twins:
            raise InfrastructureError("there is no memory for another one")
        self.names.append(f"twin of {deployment.name}" if twin else deployment.name)
        model = load_model(deployment)
        lane: Lane[Any] = Lane(Hands(), lambda _: None, limit=1, together=1, threads=1, row=row, run_time=RunTime())
        return Resident(
            deployment=deployment,
            signature=model.signature,
            run=model.run,
            row=row,
            lane=lane,
            run_time=lane.run_time,
        )


class Server:
    """A supervisor's endpoint and one worker's residents, without processes between them."""

    def __init__(self, folder: Path) -> None:
        self.loads = Loads()
        self.shared = Shared(1)
        self.endpoint = Endpoint(TableFile(folder), self.shared)
        self.residents = Residents(self.shared, 0, self.loads)
        self.dismissed: list[str] = []

    def publish(self, generation: int, state: EndpointState) -> Edition | None:
        state = replace(state, generation=generation)
        if self.endpoint.settled(state):
            return self.endpoint.current
        return asyncio.run(self.endpoint.publish(state, self._prepare))

    async def _prepare(self, edition: Edition) -> None:
        try:
            self.residents.prepare(edition.number, edition.table, edition.slots)
        except Exception:
            self.residents.discard(edition.number)
            raise
        finally:
            self.dismissed += [r.deployment.name for r in self.residents.dismiss()]

    @property
    def table(self) -> RoutingTable:
        return self.residents.current().table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def server(folder: Path) -> Server:
    return Server(folder)


def test_only_what_is_missing_is_loaded_and_the_previous_edition_stays(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    server.publish(2, state_of(blue, green, blue=50, green=50))
    server.publish(3, state_of(green, green=100))
    assert server.loads.names == ["blue", "green"]
    assert set(server.residents.current().residents) == {"green"}
    server.publish(4, state_of(blue, blue=100))  # the way back needs no load
    assert server.loads.names == ["blue", "green"]
    assert server.residents.current().residents["blue"].deployment == blue
    server.publish(5, state_of(blue, blue=100))  # green has been gone for two editions
    assert server.residents.dismiss() == []
    server.residents.current()
    assert [r.deployment.name for r in server.residents.dismiss()] == ["green"]
    assert server.dismissed == []


def test_the_deployment_with_more_of_the_traffic_has_a_twin_while_it_is_compared(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    assert server.residents.current().pair is None
    server.publish(2, state_of(blue, green, blue=90, green=10))
    pair = server.residents.current().pair
    assert pair is not None
    assert (pair.resident.deployment, pair.share) == (blue, 1 / 9)
    assert (pair.twin.deployment, pair.twin.slot, pair.twin.lines) == (blue, pair.resident.slot, pair.resident.lines)
    assert pair.twin.row is pair.resident.row
    assert pair.twin.lane.row is not pair.resident.row
    server.publish(3, state_of(blue, green, blue=75, green=25))
    again = server.residents.current().pair
    assert again is not None
    assert again.twin is pair.twin
    assert again.share == 1 / 3
    server.publish(4, state_of(blue, green, blue=50, green=50))
    assert server.residents.current().pair is None
    server.publish(5, state_of(blue, green, blue=20, green=80))
    assert server.loads.names == ["blue", "green", "twin of blue", "twin of green"]
    assert pair.twin not in server.residents.dismiss()
    server.publish(6, state_of(blue, green, blue=0, green=100))
    server.publish(7, state_of(blue, green, blue=0, green=100))
    server.residents.current()
    gone = server.residents.dismiss()
    assert sorted(resident.deployment.name for resident in gone) == ["blue", "green"]
    assert pair.twin in gone
    assert not {*gone} & {*server.residents.current().residents.values()}


def test_a_twin_that_is_too_large_or_cannot_be_loaded_is_done_without(
    server: Server, blue: Deployment, green: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "_LARGEST_TWIN", 10)
    server.publish(1, state_of(blue, green, blue=90, green=10))
    assert server.residents.current().pair is None
    monkeypatch.undo()
    server.loads.twins = False
    server.publish(2, state_of(blue, green, blue=80, green=20))
    assert server.residents.current().pair is None
    assert set(server.residents.current().residents) == {"blue", "green"}


def test_who_says_where_models_are_run_stays_the_same_until_a_rollout_ends(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    def leader(generation: int, **weights: int) -> str:
        server.publish(generation, state_of(blue, green, **weights))
        held = server.residents.current().residents
        (name,) = [name for name, resident in held.items() if resident.run_time is server.residents.leader]
        return name

    assert leader(1, blue=50, green=50) == "blue"
    assert leader(2, blue=10, green=90) == "blue"
    assert leader(3, blue=0, green=100) == "green"
    assert leader(4, blue=90, green=10) == "green"
    assert leader(5, blue=100, green=0) == "blue"


def test_an_edition_is_served_from_the_moment_its_number_is_set(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    first = server.residents.current()
    server.publish(2, state_of(green, green=100))
    assert first.edition == 1
    assert server.residents.current().edition == 2
    assert server.residents.current() is server.residents.current()
    (values,) = first.loaded("blue").run(("y",), {"x": np.ones((1, 2), np.float32)})
    assert values.tolist() == [[2.0, 2.0]]  # who began with the old one ends with it


def test_the_same_state_again_is_settled(server: Server, blue: Deployment) -> None:
    first = server.publish(1, state_of(blue, blue=100))
    assert server.publish(1, state_of(blue, blue=100)) is first


def test_generations_are_ordered(server: Server, folder: Path, blue: Deployment, green: Deployment) -> None:
    both = state_of(blue, green, blue=50, green=50)
    server.publish(5, both)
    with pytest.raises(ConflictError, match="generation 4 is older"):
        server.publish(4, both)
    with pytest.raises(ConflictError, match="another content"):
        server.publish(5, state_of(blue, blue=100))
    with pytest.raises(ConflictError, match="another content"):
        server.publish(5, replace(both, split=replace(both.split, shadow={"green": 10})))
    server.publish(6, both)
    assert TableFile(folder).read() == server.table
    assert server.table.state.generation == 6


def test_a_failed_load_or_write_changes_nothing(
    server: Server, folder: Path, blue: Deployment, green: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.publish(1, state_of(blue, blue=100))
    before = server.residents.current()
    forged = replace(green, manifest=blue.manifest)
    with pytest.raises(DigestMismatchError):
        server.publish(2, state_of(blue, forged, blue=50, green=50))

    def full(_: object, __: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TableFile, "write", full)
    with pytest.raises(ServiceUnavailableError, match="could not be written"):
        server.publish(2, state_of(green, green=100))
    assert server.residents.current() is before
    assert TableFile(folder).read() == before.table


def test_one_endpoint_serves_one_model(server: Server, blue: Deployment, green: Deployment) -> None:
    with pytest.raises(UserError, match="exactly one model"):
        server.publish(0, state_of(blue, replace(green, model="other"), blue=50, green=50))
    with pytest.raises(ServiceUnavailableError, match="no deployment is published"):
        server.residents.current()
    assert server.residents.snapshot is None


def test_a_restart_serves_what_it_can(server: Server, folder: Path, blue: Deployment, green: Deployment) -> None:
    server.publish(3, state_of(blue, green, blue=50, green=50))
    published = server.residents.current()
    Path(green.location).rename(folder.parent / "away")
    again = Server(folder)
    again.endpoint.restore()
    edition = again.endpoint.current
    assert edition is not None
    snapshot = again.residents.restore(edition.number, edition.table, edition.slots)
    assert again.residents.current() is snapshot
    assert snapshot.table == published.table
    assert snapshot.router == published.router
    assert not snapshot.ready()
    assert snapshot.loaded("blue").deployment == blue
    assert set(snapshot.failed) == {"green"}
    with pytest.raises(ServiceUnavailableError, match="'green' is not loaded"):
        snapshot.loaded("green")
    with pytest.raises(NotFoundError, match="no version '9'"):
        snapshot.version("9")
    totals = [again.shared.totals(edition.slots[name]) for name in ("blue", "green")]
    assert [(row[LOADS], row[LOAD_FAILURES]) for row in totals] == [(1, 0), (0, 1)]


def test_nothing_to_restore(server: Server) -> None:
    server.endpoint.restore()
    assert server.endpoint.state is None
    assert server.shared.edition == 0
