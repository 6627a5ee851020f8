"""Published tables: loaded deployments, routing, and the state after a restart."""

from __future__ import annotations

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
from onnx_ops.serving.inference import deployments
from onnx_ops.serving.inference.deployments import (
    LoadedDeployment,
    LoadedDeployments,
    TableRevision,
)
from onnx_ops.serving.inference.request_queue import LatencyEstimator, RequestQueue, WorkerThreads
from onnx_ops.serving.metrics import LOAD_FAILURES, LOADS, REVISION, MetricsRow, SharedMetrics
from onnx_ops.serving.workers.supervisor import TablePublisher
from onnx_ops.testing.endpoints import state_of
from tests.serving.serving_process import load_once


class Loads:
    """A loader that records which models it loads."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.builds_control = True

    def __call__(self, deployment: Deployment, row: MetricsRow, control: bool) -> LoadedDeployment:
        if control and not self.builds_control:
            raise InfrastructureError("there is no memory for another one")
        self.names.append(f"replica of {deployment.name}" if control else deployment.name)
        model = load_once(deployment)
        queue: RequestQueue[Any] = RequestQueue(
            WorkerThreads(),
            lambda _: None,
            limit=1,
            max_batch=1,
            max_batches=1,
            row=row,
            latency=LatencyEstimator(),
        )
        return LoadedDeployment(
            deployment=deployment,
            signature=model.signature,
            run=model.run,
            row=row,
            queue=queue,
            latency=queue.latency,
            size_bytes=model.size_bytes,
            max_body=1 << 20,
        )


class Server:
    """A supervisor's endpoint and one worker's deployments.

    There are no processes between them.
    """

    def __init__(self, folder: Path) -> None:
        self.loads = Loads()
        self.shared = SharedMetrics(1)
        self.endpoint = TablePublisher(TableFile(folder), self.shared)
        self.deployments = LoadedDeployments(self.shared, 0, self.loads)
        self.dismissed: list[str] = []

    def publish(self, generation: int, state: EndpointState) -> TableRevision | None:
        state = replace(state, generation=generation)
        if self.endpoint.is_published(state):
            return self.endpoint.current
        revision = self.endpoint.build_revision(state)
        try:
            self.deployments.prepare(revision)
            self.endpoint.publish(revision)
        except Exception:
            self.deployments.discard(revision.number)
            raise
        finally:
            self.dismissed += [r.deployment.name for r in self.deployments.release()]
        return revision

    @property
    def table(self) -> RoutingTable:
        return self.deployments.get_current().table


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_prepare_loads_missing_deployments_and_keeps_previous_revision(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    server.publish(2, state_of(blue, green, blue=50, green=50))
    server.publish(3, state_of(green, green=100))
    assert server.loads.names == ["blue", "green"]
    assert set(server.deployments.get_current().deployments) == {"green"}
    # A rollback needs no load.
    server.publish(4, state_of(blue, blue=100))
    assert server.loads.names == ["blue", "green"]
    assert server.deployments.get_current().deployments["blue"].deployment == blue
    # Neither of the last two tables names green.
    server.publish(5, state_of(blue, blue=100))
    assert server.deployments.release() == []
    server.deployments.get_current()
    assert [r.deployment.name for r in server.deployments.release()] == ["green"]
    assert server.dismissed == []


def test_prepare_with_unequal_traffic_builds_control_replica(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    assert server.deployments.get_current().control is None
    server.publish(2, state_of(blue, green, blue=90, green=10))
    control = server.deployments.get_current().control
    assert control is not None
    loaded, replica = control.loaded, control.replica
    assert loaded.deployment == blue
    assert (replica.deployment, replica.slot, replica.header_lines) == (
        blue,
        loaded.slot,
        loaded.header_lines,
    )
    assert replica.row is loaded.row
    assert replica.queue.row is not loaded.row
    server.publish(3, state_of(blue, green, blue=75, green=25))
    again = server.deployments.get_current().control
    assert again is not None
    assert again.replica is replica
    server.publish(4, state_of(blue, green, blue=50, green=50))
    assert server.deployments.get_current().control is None
    server.publish(5, state_of(blue, green, blue=20, green=80))
    assert server.loads.names == ["blue", "green", "replica of blue", "replica of green"]
    assert replica not in server.deployments.release()
    server.publish(6, state_of(blue, green, blue=0, green=100))
    server.publish(7, state_of(blue, green, blue=0, green=100))
    server.deployments.get_current()
    gone = server.deployments.release()
    assert sorted(each.deployment.name for each in gone) == ["blue", "green"]
    assert replica in gone
    assert not {*gone} & {*server.deployments.get_current().deployments.values()}


def test_prepare_with_large_model_or_failed_replica_load_builds_no_control_replica(
    server: Server, blue: Deployment, green: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "MAX_REPLICA_BYTES", 10)
    server.publish(1, state_of(blue, green, blue=90, green=10))
    assert server.deployments.get_current().control is None
    monkeypatch.undo()
    server.loads.builds_control = False
    server.publish(2, state_of(blue, green, blue=80, green=20))
    assert server.deployments.get_current().control is None
    assert set(server.deployments.get_current().deployments) == {"blue", "green"}


def test_latency_leader_stays_same_until_rollout_ends(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    def leader(generation: int, **weights: int) -> str:
        server.publish(generation, state_of(blue, green, **weights))
        held = server.deployments.get_current().deployments
        (name,) = [
            name for name, loaded in held.items() if loaded.latency is server.deployments.leader
        ]
        return name

    assert leader(1, blue=50, green=50) == "blue"
    assert leader(2, blue=10, green=90) == "blue"
    assert leader(3, blue=0, green=100) == "green"
    assert leader(4, blue=90, green=10) == "green"
    assert leader(5, blue=100, green=0) == "blue"


def test_get_current_after_publication_returns_new_revision(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    server.publish(1, state_of(blue, blue=100))
    first = server.deployments.get_current()
    server.publish(2, state_of(green, green=100))
    assert first.revision == 1
    assert server.deployments.get_current().revision == 2
    assert server.deployments.get_current() is server.deployments.get_current()
    (values,) = first.get_deployment("blue").run(("y",), {"x": np.ones((1, 2), np.float32)})
    # A request that began with the old deployment ends with it.
    assert values.tolist() == [[2.0, 2.0]]


def test_publish_of_older_or_changed_generation_raises_conflict_error(
    server: Server, tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    both = state_of(blue, green, blue=50, green=50)
    first = server.publish(5, both)
    assert server.publish(5, both) is first
    with pytest.raises(ConflictError, match="generation 4 is older"):
        server.publish(4, both)
    with pytest.raises(ConflictError, match="different content"):
        server.publish(5, state_of(blue, blue=100))
    with pytest.raises(ConflictError, match="different content"):
        server.publish(5, replace(both, split=replace(both.split, shadow={"green": 10})))
    server.publish(6, both)
    assert TableFile(tmp_path).read() == server.table
    assert server.table.state.generation == 6


def test_publish_with_failed_load_or_write_changes_nothing(
    server: Server,
    tmp_path: Path,
    blue: Deployment,
    green: Deployment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.publish(1, state_of(blue, blue=100))
    before = server.deployments.get_current()
    forged = replace(green, manifest=blue.manifest)
    with pytest.raises(DigestMismatchError):
        server.publish(2, state_of(blue, forged, blue=50, green=50))

    def full(_: object, __: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TableFile, "write", full)
    with pytest.raises(ServiceUnavailableError, match="could not be written"):
        server.publish(2, state_of(green, green=100))
    assert server.deployments.get_current() is before
    assert TableFile(tmp_path).read() == before.table


def test_publish_of_two_models_raises_user_error(
    server: Server, blue: Deployment, green: Deployment
) -> None:
    with pytest.raises(UserError, match="exactly one model"):
        server.publish(0, state_of(blue, replace(green, model="other"), blue=50, green=50))
    with pytest.raises(ServiceUnavailableError, match="no deployment is published"):
        server.deployments.get_current()
    assert server.deployments.get_published() is None


def test_restore_with_missing_model_serves_remaining_deployments(
    server: Server, tmp_path: Path, blue: Deployment, green: Deployment
) -> None:
    server.publish(3, state_of(blue, green, blue=50, green=50))
    published = server.deployments.get_current()
    Path(green.location).rename(tmp_path / "away")
    again = Server(tmp_path)
    again.endpoint.restore()
    revision = again.endpoint.current
    assert revision is not None
    failed = again.deployments.restore(revision)
    snapshot = again.deployments.get_current()
    assert snapshot.table == published.table
    assert snapshot.router == published.router
    assert not snapshot.is_ready()
    assert snapshot.get_deployment("blue").deployment == blue
    assert set(snapshot.failed) == set(failed) == {"green"}
    with pytest.raises(ServiceUnavailableError, match="'green' is not loaded"):
        snapshot.get_deployment("green")
    with pytest.raises(NotFoundError, match="not serve version '9'"):
        snapshot.get_version("9")
    totals = [again.shared.sum_slot(revision.slots[name]) for name in ("blue", "green")]
    assert [(row[LOADS], row[LOAD_FAILURES]) for row in totals] == [(1, 0), (0, 1)]


def test_restore_of_empty_folder_has_no_state(server: Server) -> None:
    server.endpoint.restore()
    assert server.endpoint.state is None
    assert server.shared.header[REVISION] == 0
