"""An operator writes off a replica that is permanently gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from onnx_ops.cli.endpoints import status_document, status_report
from onnx_ops.domain.endpoint import EndpointConfig, EndpointServer
from onnx_ops.domain.rollout_observations import GenerationCounts, RequestCounts
from onnx_ops.errors import NotFoundError, RefusedError, UserError
from onnx_ops.release.rollback import write_off_server
from onnx_ops.release.status import HistoryFilter, read_history, read_status
from tests.release.release_parts import Scene
from tests.release.release_scenes import serving


@dataclass
class Servers:
    """The servers of a provider of replicas, which can list them and end their records."""

    listed: dict[str, EndpointServer] = field(default_factory=dict)

    def add(self, *servers: EndpointServer) -> None:
        self.listed.update({server.name: server for server in servers})

    def list_servers(self, config: EndpointConfig) -> Sequence[EndpointServer]:
        return list(self.listed.values())

    def forget_server(self, config: EndpointConfig, name: str) -> None:
        self.listed[name] = replace(self.listed[name], state="ended")


@pytest.fixture
def servers() -> Servers:
    servers = Servers()
    servers.add(
        EndpointServer(
            name="r1",
            state="reports",
            table="00000003-1",
            age_s=2,
            versions={"onnxruntime": "1.31.1"},
        ),
        EndpointServer(
            name="r2",
            state="reports",
            table="00000003-1",
            age_s=3,
            versions={"onnxruntime": "1.30.0"},
        ),
        EndpointServer(name="r3", state="silent", table="00000002-1", age_s=600),
    )
    return servers


@pytest.fixture
def scene(servers: Servers) -> Scene:
    scene = serving("a")
    scene.world.provider.list_servers = servers.list_servers  # type: ignore[method-assign]
    scene.world.provider.forget_server = servers.forget_server  # type: ignore[method-assign]
    return scene


def test_write_off_server_records_reason_and_ends_server(scene: Scene, servers: Servers) -> None:
    assert write_off_server(scene.context, "digits", "r3", reason="disk crashed", actor="ada")
    assert servers.listed["r3"].state == "ended"
    lines, _ = read_history(scene.context, HistoryFilter(endpoints=("digits",)))
    assert (lines[-1].actor, lines[-1].what, lines[-1].why) == (
        "ada",
        "wrote off replica r3",
        "disk crashed",
    )
    entries = len(lines)
    assert not write_off_server(scene.context, "digits", "r3", reason="again")
    assert len(read_history(scene.context, HistoryFilter(endpoints=("digits",)))[0]) == entries


@pytest.mark.parametrize(
    ("name", "reason", "error", "text"),
    [
        ("r1", "gone", RefusedError, "replica r1 still reports"),
        ("r9", "gone", NotFoundError, "Silent replicas: r3"),
        ("r3", " ", UserError, "needs a reason"),
    ],
)
def test_write_off_server_of_reporting_or_unknown_server_or_without_reason_raises_error(
    scene: Scene, servers: Servers, name: str, reason: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        write_off_server(scene.context, "digits", name, reason=reason)
    assert sorted(servers.listed) == ["r1", "r2", "r3"]


def test_status_after_write_off_shows_written_off_server(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    write_off_server(scene.context, "digits", "r3", reason="gone")
    status_report([read_status(scene.context, "digits")], 0.0)
    assert "r3 written off" in " ".join(capsys.readouterr().out.split())


def test_written_off_server_that_reports_again_is_shown_as_back(
    scene: Scene, servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    write_off_server(scene.context, "digits", "r3", reason="gone")
    servers.add(EndpointServer(name="r3", state="reports", table="00000003-1", age_s=1))
    status = read_status(scene.context, "digits")
    status_report([status], 0.0)
    assert "reports, back" in capsys.readouterr().out
    document = status_document(status)
    assert document["written_off"] == {"r3": "gone"}
    assert [server["name"] for server in document["servers"]] == ["r1", "r2", "r3"]
    servers.add(EndpointServer(name="r3", state="silent", table="00000003-1", age_s=100))
    assert write_off_server(scene.context, "digits", "r3", reason="gone again")


def test_status_with_differing_package_versions_names_replicas(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    status_report([read_status(scene.context, "digits")], 0.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "replicas differ: onnxruntime 1.30.0 (r2); 1.31.1 (r1)" in shown
    assert "r3 silent 00000002-1" in shown


def count(server: str, errors: int) -> GenerationCounts:
    tally = RequestCounts(requests=1000, errors=errors)
    return GenerationCounts(origin=server, generation=1, tallies={"v1": tally}, server=server)


@pytest.mark.parametrize(("errors", "expected"), [(2, []), (90, ["r2"])])
def test_status_names_outlier_only_for_failing_replica(
    scene: Scene, capsys: pytest.CaptureFixture[str], errors: int, expected: list[str]
) -> None:
    scene.world.provider.count_by_server = lambda config, servers, deployments: [  # type: ignore[method-assign]
        count(name, errors if name == "r2" else 2) for name in servers if "v1" in deployments
    ]
    status = read_status(scene.context, "digits")
    status_report([status], 0.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "replicas differ: replica r2: 90/1000 (9.00%) requests to v1 failed, 2/1000" in shown
    ) is bool(expected)
    assert [outlier["server"] for outlier in status_document(status)["outliers"]] == expected


def test_status_with_one_reporting_replica_reads_no_counts(scene: Scene, servers: Servers) -> None:
    del servers.listed["r2"]
    scene.world.provider.count_by_server = None  # type: ignore[method-assign, assignment]
    assert read_status(scene.context, "digits").outliers == ()


def test_status_without_reporting_replica_shows_newest_table_in_place_of_address(
    scene: Scene, servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.listed.clear()
    scene.world.provider.address = lambda config: None  # type: ignore[method-assign]
    status_report([read_status(scene.context, "digits")], 0.0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "no replica reports; the newest table: v1 100 %" in shown
    assert "answers at" not in shown
