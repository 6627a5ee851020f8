"""Reports of replicas: their status, their counts, and their closed epochs.

Each report describes the replica that wrote it. The analysis of a rollout uses reports as evidence.
Reports cannot change which table is served.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from onnx_ops.domain.endpoint import ServerMemory
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.errors import UserError
from onnx_ops.protocol.messages import Counts, DeploymentCounts, decode_cells
from onnx_ops.protocol.replica_tables import TableNumber

STATUS_FOLDER, COUNTS_FOLDER, EPOCHS_FOLDER = "status", "counts", "epochs"
CLOCK_FOLDER = "clock"
CLOCK_FILE = f"{CLOCK_FOLDER}/now"
"""Empty object whose time of modification shows the time of the store's clock."""
REPORT_S = 5.0
"""Seconds between two reports of a replica."""
SILENT_S = 20.0
"""Seconds without a report after which a replica is regarded as silent."""
MAX_REPORT_BYTES = 8 << 20

_LARGEST_COUNT = 1 << 48
"""Largest count in a report. The sum of 32,767 such counts fits into an int64."""
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_START = re.compile(r"[0-9a-f]{12}")
_SEPARATOR = "~"
"""Separator of the parts of a report's name. No part contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """Status of a replica, as the replica reports it.

    Attributes:
        replica: name of the replica, which is the same after a restart with the same folder.
        start: random id of this start of the replica.
        endpoint: the endpoint whose tables it follows.
        adopted: number of the table that was published last to the running server; None before
            that.
        loaded: manifests of the deployments that its server has loaded.
        failed: deployments that could not be loaded, or that lack their shadow process, with the
            reason. If the server's state could not be read, the only entry is `server`.
        refused: why the publication of a table newer than the adopted one failed; empty if none
            failed.
        skipped: objects in the folder of the tables that are not valid tables, with the reason.
        out_of_service: deployments that get no requests, with the reason.
        has_lease: whether it can give traffic to a candidate.
        lapsed: requests that the fallback answered, or that were refused, because the replica had
            no lease.
        beat: number of this report.
        at: seconds since the epoch, on the replica's clock.
        address: address for clients; empty if it is unknown.
        versions: versions of the packages that it runs, by package.
        image: image of its container; empty if it is unknown.
        memory: memory of its server; None if it cannot be read.
        is_final: whether the replica has ended.
    """

    replica: str
    start: str
    endpoint: str
    adopted: TableNumber | None
    loaded: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)
    out_of_service: Mapping[str, str] = field(default_factory=dict)
    has_lease: bool = False
    lapsed: int = 0
    beat: int = 0
    at: float = 0.0
    address: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    memory: ServerMemory | None = None
    is_final: bool = field(default=False, metadata=OMIT_DEFAULT)

    @property
    def is_healthy(self) -> bool:
        """Whether the status names neither a failed deployment nor a refused table."""
        return not self.failed and not self.refused


@dataclass(frozen=True, slots=True, order=True)
class ReportSource:
    """One start of one replica.

    The counts of a start decrease only after its server was started again.
    """

    replica: str
    start: str

    @property
    def status_name(self) -> str:
        """Name of the status of the replica, which a later start overwrites."""
        return f"{STATUS_FOLDER}/{self.replica}.json"

    @property
    def counts_name(self) -> str:
        """Name of the counts of this start."""
        return f"{COUNTS_FOLDER}/{self.replica}{_SEPARATOR}{self.start}.json"

    def name_epoch(self, generation: int, epoch: int) -> str:
        """Return the name of the counts of a closed epoch, which never change."""
        return (
            f"{EPOCHS_FOLDER}/{generation:08d}-{epoch}"
            f"{_SEPARATOR}{self.replica}{_SEPARATOR}{self.start}.json"
        )

    @classmethod
    def parse(cls, parts: list[str]) -> Self | None:
        """Return the source that the last two parts of a name describe; None if invalid."""
        if len(parts) < 2 or not _REPLICA.fullmatch(parts[-2]) or not _START.fullmatch(parts[-1]):
            return None
        return cls(parts[-2], parts[-1])


def has_possible_counts(counts: Counts) -> bool:
    """Return whether these counts are values that a server can report.

    The counts of deployments and the uptimes must be between 0 and `_LARGEST_COUNT`. The counts by
    cell of the tables and of the open epoch must be decodable. Closed epochs are not checked.
    """
    opened = {} if counts.open_epoch is None else counts.open_epoch.cells
    if not all(map(has_possible_cells, (opened, *(table.cells for table in counts.tables)))):
        return False
    tables = (counts.deployments, *(table.deployments for table in counts.tables))
    numbers = [
        number for by_name in tables for each in by_name.values() for number in _list_numbers(each)
    ]
    numbers += [number for uptime in counts.uptimes for number in (uptime.seconds, uptime.ends)]
    return all(0 <= number <= _LARGEST_COUNT for number in numbers)


def has_possible_cells(cells: Mapping[str, str]) -> bool:
    """Return whether the counts by cell of each deployment can be decoded."""
    try:
        for text in cells.values():
            decode_cells(text)
    except (ValueError, zlib.error):
        return False
    return True


def _list_numbers(counts: DeploymentCounts) -> Iterator[float]:
    yield from (
        *counts.statuses.values(),
        *counts.unjudged.values(),
        *counts.latency,
        *counts.service,
    )
    yield from (counts.shadow_answered, counts.shadow_differing, counts.shadow_failed)
    yield from (counts.feedback, counts.successes)


def parse_counts_name(name: str) -> ReportSource | None:
    """Return the source of an object in the folder of the counts.

    The result is None if the name is not that of a report.
    """
    return ReportSource.parse(name.removesuffix(".json").split(_SEPARATOR))


def parse_epoch_name(name: str) -> tuple[int, int, ReportSource] | None:
    """Return generation, epoch and source of an object in the folder of the epochs.

    The result is None if the name is not that of a report.
    """
    parts = name.removesuffix(".json").split(_SEPARATOR)
    generation, _, epoch = parts[0].partition("-")
    source = ReportSource.parse(parts)
    if source is None or not (generation.isdecimal() and epoch.isdecimal()):
        return None
    return int(generation), int(epoch), source


def check_replica_name(name: str) -> str:
    """Return the name of a replica if it is valid.

    Raises:
        UserError: the name cannot be part of a report's name.
    """
    if not _REPLICA.fullmatch(name):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a replica",
            remedy="Use at most 63 letters, digits and hyphens; do not begin with a hyphen.",
        )
    return name
