"""Replicas whose reported counts differ from those of the others, from reports in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from onnx_ops import codec
from onnx_ops.adapters.files import open_objects
from onnx_ops.domain.rollout import ServerOutlier
from onnx_ops.protocol.messages import Counts, DeploymentCounts, TableCounts
from onnx_ops.protocol.replica_reports import ReplicaStatus, ReportSource
from onnx_ops.protocol.replica_tables import TableNumber
from onnx_ops.statistics.rollout.outliers import find_outliers
from tests.adapters.replica_site import ReplicaSite, open_site

NAMES = ("r1", "r2", "r3", "r4")
BOUNDS_S = (0.001, 0.002, 0.004, 0.008, 0.016)
FAST, SLOW = (900, 80, 20, 0, 0, 0), (0, 0, 0, 900, 80, 20)
NUMBER = TableNumber(3)


@pytest.fixture
def site(tmp_path: Path) -> ReplicaSite:
    """Four replicas that have reported a thousand requests each, one of which failed."""
    site = open_site(tmp_path)
    for name in NAMES:
        report(site, name)
    return site


def report(
    site: ReplicaSite,
    name: str,
    start: int = 0,
    *,
    errors: int = 1,
    service: Sequence[int] = FAST,
    origin: str = "",
    generation: int = NUMBER.generation,
) -> Path:
    """Write the status and the counts of a start, and return the path of the counts."""
    source, reports = ReportSource(name, f"{start:012x}"), open_objects(site.reports_url)
    status = ReplicaStatus(replica=name, start=source.start, endpoint="digits", adopted=NUMBER)
    reports.write(source.status_name, codec.dumps(status))
    statuses = {"200": 1000 - errors, "500": errors}
    counted = DeploymentCounts(statuses=statuses, latency=tuple(service), service=tuple(service))
    table = TableCounts(generation=generation, split="s", deployments={"blue": counted, "green": counted})
    counts = Counts(
        origin=origin or f"{name}-{start}",
        at=0.0,
        bounds_s=BOUNDS_S,
        deployments=table.deployments,
        tables=(table,),
    )
    reports.write(source.counts_name, codec.dumps(counts))
    return site.reports_folder / source.counts_name


def compare(site: ReplicaSite, *names: str) -> list[tuple[str, str]]:
    return [(outlier.server, outlier.place) for outlier in find(site, *names)]


def find(site: ReplicaSite, *names: str) -> Sequence[ServerOutlier]:
    return find_outliers(site.provider.count_by_server(site.config, names or NAMES, ["blue"]))


def test_count_by_server_of_replicas_that_are_alike_shows_no_outlier(site: ReplicaSite) -> None:
    counts = site.provider.count_by_server(site.config, NAMES, ["blue"])
    assert [(each.server, each.generation, *each.tallies) for each in counts] == [(name, 3, "blue") for name in NAMES]
    assert not find(site)


@pytest.mark.parametrize(("errors", "service", "place"), [(60, FAST, "errors"), (1, SLOW, "slow")])
def test_count_by_server_of_broken_replica_shows_it(
    site: ReplicaSite, errors: int, service: tuple[int, ...], place: str
) -> None:
    report(site, "r3", errors=errors, service=service)
    assert compare(site) == [("r3", place)]
    assert compare(site, "r3", "r4") == [("r3", place)]
    assert not compare(site, "r1", "r2", "r4")


def test_count_by_server_adds_starts_of_replica(site: ReplicaSite) -> None:
    for start in range(40, 52):
        report(site, "r3", start, errors=start)
    (outlier,) = find(site)
    assert outlier.own == (sum(range(44, 52)), 8000), "the last eight starts"


def test_count_by_server_counts_server_of_two_followers_once(site: ReplicaSite) -> None:
    for start in range(8):
        report(site, "r3", start, errors=60, origin="one")
    (outlier,) = find(site)
    assert outlier.own == (60, 1000)


def test_count_by_server_leaves_out_tables_that_only_load_models(site: ReplicaSite) -> None:
    report(site, "r3", errors=60, generation=TableNumber(3, 0).generation)
    assert not find(site)


def test_read_of_metrics_names_replicas(site: ReplicaSite) -> None:
    report(site, "r3", errors=60)
    reading = site.provider.metrics().read(site.config, {"green": None, "blue": None})
    assert {each.server for each in reading.counts} == set(NAMES)
    assert {(each.server, each.deployment) for each in find_outliers(reading.counts)} == {
        ("r3", "blue"),
        ("r3", "green"),
    }


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("statuses", {"200": 10**30, "500": 10**29}),
        ("statuses", {"200": -5, "500": -(10**30)}),
        ("statuses", {"200": float("nan"), "500": 3}),
        ("statuses", {}),
        ("service", [10**30] * 6),
        ("service", [-1] * 6),
        ("service", [float("nan")] * 6),
        ("service", []),
        ("service", [1] * 999),
    ],
)
def test_count_by_server_with_invented_counts_compares_the_others(site: ReplicaSite, place: str, value: object) -> None:
    report(site, "r3", errors=60)
    path = report(site, "r4")
    document = json.loads(path.read_bytes())
    for counted in (document, document["tables"][0]):
        counted["deployments"]["blue"][place] = value
    path.write_text(json.dumps(document))
    assert ("r3", "errors") in compare(site)
    assert {server for server, _ in compare(site)} <= {"r3", "r4"}


@pytest.mark.parametrize("bounds_s", [[], [0.0] * 5, [-1.0] * 5, [1e308] * 5, [float("inf")] * 5])
def test_count_by_server_with_invented_bounds_compares_the_others(site: ReplicaSite, bounds_s: list[float]) -> None:
    report(site, "r3", service=SLOW)
    path = report(site, "r4")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "bounds_s": bounds_s, "server": "r1"}))
    assert compare(site) == [("r3", "slow")]


def test_count_by_server_of_damaged_reports_shows_the_rest(site: ReplicaSite) -> None:
    report(site, "r3", errors=60)
    report(site, "r4").write_bytes(b"{")
    os.truncate(report(site, "r2"), 40)
    assert compare(site) == [("r3", "errors")]
