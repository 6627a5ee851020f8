"""Replicas whose reported counts differ from those of the others.

The reports are files in a folder.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.files import open_objects
from onnx_ops.domain.rollout import ServerOutlier
from onnx_ops.domain.rollout_observations import BADNESS_EDGES
from onnx_ops.protocol.messages import (
    CELL_ERRORS,
    CELL_FIELDS,
    CELL_REQUESTS,
    Counts,
    DeploymentCounts,
    EpochCounts,
    TableCounts,
    encode_cells,
)
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
    """Return a site of four replicas.

    Each replica has reported a thousand requests, one of which failed.
    """
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
    table = TableCounts(
        generation=generation, split="s", deployments={"blue": counted, "green": counted}
    )
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


def test_count_by_server_of_similar_replicas_shows_no_outlier(site: ReplicaSite) -> None:
    counts = site.provider.count_by_server(site.config, NAMES, ["blue"])
    assert [(each.server, each.generation, *each.tallies) for each in counts] == [
        (name, 3, "blue") for name in NAMES
    ]
    assert not find(site)


@pytest.mark.parametrize(("errors", "service", "place"), [(60, FAST, "errors"), (1, SLOW, "slow")])
def test_count_by_server_of_faulty_replica_shows_outlier(
    site: ReplicaSite, errors: int, service: tuple[int, ...], place: str
) -> None:
    report(site, "r3", errors=errors, service=service)
    assert compare(site) == [("r3", place)]
    assert compare(site, "r3", "r4") == [("r3", place)]
    assert not compare(site, "r1", "r2", "r4")


def test_count_by_server_with_many_starts_adds_counts_of_last_eight(site: ReplicaSite) -> None:
    for start in range(40, 52):
        report(site, "r3", start, errors=start)
    (outlier,) = find(site)
    assert outlier.own == (sum(range(44, 52)), 8000), "the last eight starts"


def test_count_by_server_with_eight_follower_starts_counts_server_once(site: ReplicaSite) -> None:
    for start in range(8):
        report(site, "r3", start, errors=60, origin="one")
    (outlier,) = find(site)
    assert outlier.own == (60, 1000)


def test_count_by_server_with_load_only_table_ignores_it(site: ReplicaSite) -> None:
    report(site, "r3", errors=60, generation=TableNumber(3, 0).generation)
    counts = site.provider.count_by_server(site.config, NAMES, ["blue"])
    assert {each.server for each in counts} == {"r1", "r2", "r4"}
    assert not find(site)


def test_metrics_read_of_replica_reports_returns_counts_of_each_replica(site: ReplicaSite) -> None:
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
def test_count_by_server_with_impossible_counts_compares_other_replicas(
    site: ReplicaSite, place: str, value: object
) -> None:
    report(site, "r3", errors=60)
    path = report(site, "r4")
    document = json.loads(path.read_bytes())
    for counted in (document, document["tables"][0]):
        counted["deployments"]["blue"][place] = value
    path.write_text(json.dumps(document))
    assert ("r3", "errors") in compare(site)
    assert {server for server, _ in compare(site)} <= {"r3", "r4"}


@pytest.mark.parametrize("bounds_s", [[], [0.0] * 5, [-1.0] * 5, [1e308] * 5, [float("inf")] * 5])
def test_count_by_server_with_impossible_bounds_compares_other_replicas(
    site: ReplicaSite, bounds_s: list[float]
) -> None:
    report(site, "r3", service=SLOW)
    path = report(site, "r4")
    path.write_text(
        json.dumps({**json.loads(path.read_bytes()), "bounds_s": bounds_s, "server": "r1"})
    )
    assert compare(site) == [("r3", "slow")]


def test_count_by_server_with_damaged_reports_compares_other_replicas(site: ReplicaSite) -> None:
    report(site, "r3", errors=60)
    report(site, "r4").write_bytes(b"{")
    os.truncate(report(site, "r2"), 40)
    assert compare(site) == [("r3", "errors")]


def encode_failed(*cells: int, errors: int = 1) -> dict[str, str]:
    """Return encoded counts: one failed request to green in each of these cells."""
    row = [0] * CELL_FIELDS
    row[CELL_REQUESTS], row[CELL_ERRORS] = 1, errors
    nothing = encode_cells(np.zeros(0, np.int64), np.zeros((0, CELL_FIELDS), np.int64))
    return {"green": encode_cells(np.array(cells), np.array([row] * len(cells))), "blue": nothing}


def write_open_epoch(
    site: ReplicaSite,
    name: str,
    cells: Mapping[str, str],
    *,
    is_live: bool = True,
    is_healthy: bool = True,
) -> None:
    """Report an open epoch with these encoded counts.

    The last closed epoch is 7 if the replica is live, and 6 if this is its final report.
    """
    path = report(site, name)
    counts = codec.loads(path.read_bytes(), Counts)
    opened = EpochCounts(generation=NUMBER.generation, epoch=7, cells=cells)
    path.write_bytes(
        codec.dumps(replace(counts, open_epoch=opened, closed_through=7 if is_live else 6))
    )
    source = ReportSource(name, f"{0:012x}")
    status = ReplicaStatus(
        replica=name,
        start=source.start,
        endpoint="digits",
        adopted=NUMBER,
        is_final=not is_live,
        failed={} if is_healthy else {"green": "it is broken"},
    )
    (site.reports_folder / source.status_name).write_bytes(codec.dumps(status))


def count_candidate(site: ReplicaSite) -> int:
    """Return the units of the candidate in closed epochs."""
    reading = site.provider.metrics().read(site.config, {"green": None, "blue": None})
    return sum(sum(epoch.units["errors"].candidate) for epoch in reading.epochs)


def test_metrics_read_after_end_of_replica_counts_its_open_epoch(site: ReplicaSite) -> None:
    write_open_epoch(site, "r1", encode_failed(5))
    assert count_candidate(site) == 0, "it reports, and closes the epoch itself"
    write_open_epoch(site, "r2", encode_failed(6), is_live=False)
    write_open_epoch(site, "r3", encode_failed(7), is_live=False)
    assert count_candidate(site) == 2


def test_metrics_read_with_unhealthy_replica_ignores_its_open_epoch(site: ReplicaSite) -> None:
    write_open_epoch(site, "r1", encode_failed(5))
    write_open_epoch(site, "r2", encode_failed(6), is_healthy=False)
    assert count_candidate(site) == 0


def test_metrics_read_with_complete_epoch_ignores_open_epoch(site: ReplicaSite) -> None:
    write_open_epoch(site, "r1", encode_failed(5))
    write_open_epoch(site, "r2", encode_failed(6), is_live=False)
    source = ReportSource("r2", f"{0:012x}")
    whole = EpochCounts(generation=NUMBER.generation, epoch=7, cells=encode_failed(6, 7, 8))
    reports = open_objects(site.reports_url)
    reports.create(source.name_epoch(whole.generation, whole.epoch), codec.dumps(whole))
    assert count_candidate(site) == 3


@pytest.mark.parametrize("text", ["", "no cells", base64.b64encode(zlib.compress(b"abc")).decode()])
def test_metrics_read_with_unreadable_open_epoch_omits_replica_and_reports_its_name(
    site: ReplicaSite, text: str
) -> None:
    write_open_epoch(site, "r1", encode_failed(5))
    write_open_epoch(site, "r2", {**encode_failed(6), "green": text})
    epoch = EpochCounts(generation=NUMBER.generation, epoch=7, cells={"green": text, "blue": text})
    name = ReportSource("r3", f"{0:012x}").name_epoch(epoch.generation, epoch.epoch)
    open_objects(site.reports_url).create(name, codec.dumps(epoch))
    reading = site.provider.metrics().read(site.config, {"green": None, "blue": None})
    assert reading.failure == "the counts of replica r2 cannot be read"
    assert {each.server for each in reading.counts} == {"r1", "r3", "r4"}


def test_metrics_read_with_more_errors_than_requests_limits_errors(site: ReplicaSite) -> None:
    write_open_epoch(site, "r1", encode_failed(5, errors=9))
    reading = site.provider.metrics().read(site.config, {"green": None, "blue": None})
    assert reading.open_epoch is not None
    assert reading.open_epoch.units["errors"].candidate == (*[0] * (len(BADNESS_EDGES) - 1), 1)
