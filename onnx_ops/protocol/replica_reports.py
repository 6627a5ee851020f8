"""What replicas report: their status, their counts, and their closed epochs.

Reports are claims of one process about itself. They judge a rollout, and hold no authority: they
cannot change what is served.
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
REPORT_S = 5.0
"""Seconds between two reports of a replica."""
SILENT_S = 20.0
"""A replica without a report for this long is silent."""
MAX_REPORT_BYTES = 8 << 20

_LARGEST_COUNT = 1 << 48
"""The sum of 32,768 such counts has 63 bits."""
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_START = re.compile(r"[0-9a-f]{12}")
_SEPARATOR = "~"
"""Separates the parts of a report's name; no part contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica serves.

    Attributes:
        replica: its name, the same after a restart on the same folder.
        start: random number of this start.
        endpoint: the endpoint whose tables it follows.
        adopted: the table that it serves; None before the first.
        loaded: deployments of that table that it has loaded.
        failed: deployments that could not be loaded, with the reason.
        refused: why a newer table than the adopted one is not served; empty if none is refused.
        skipped: objects among the tables that do not count, with the reason.
        out_of_service: deployments that get no requests, with the reason.
        has_lease: whether it may give a candidate traffic.
        lapsed: requests that the fallback answered because there was no lease.
        beat: number of this report.
        at: seconds since the epoch, on the replica's clock.
        address: where clients reach it; empty if it does not know.
        versions: by package, of what it runs.
        image: of its container; empty if it does not know.
        memory: of its server; None if it cannot be read.
        is_final: whether it has ended.
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
        """Whether it serves all deployments of its table."""
        return not self.failed and not self.refused


@dataclass(frozen=True, slots=True, order=True)
class ReportSource:
    """One start of one replica. The counts of a start only grow."""

    replica: str
    start: str

    @property
    def status_name(self) -> str:
        """Name of the replica's status; a later start replaces it."""
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
        """Return the source in the last two parts of a name; None if they are no source."""
        if len(parts) < 2 or not _REPLICA.fullmatch(parts[-2]) or not _START.fullmatch(parts[-1]):
            return None
        return cls(parts[-2], parts[-1])


def has_possible_counts(counts: Counts) -> bool:
    """Return whether a server can have counted these numbers.

    None of them is negative, or too large for sums of 64 bits.
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
    """Return whether the counts by cell of each deployment can be read."""
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

    None if its name is not that of a report.
    """
    return ReportSource.parse(name.removesuffix(".json").split(_SEPARATOR))


def parse_epoch_name(name: str) -> tuple[int, int, ReportSource] | None:
    """Return generation, epoch and source of an object in the folder of the epochs.

    None if its name is not that of a report.
    """
    parts = name.removesuffix(".json").split(_SEPARATOR)
    generation, _, epoch = parts[0].partition("-")
    source = ReportSource.parse(parts)
    if source is None or not (generation.isdecimal() and epoch.isdecimal()):
        return None
    return int(generation), int(epoch), source


def check_replica_name(name: str) -> str:
    """Return the name of a replica.

    Raises:
        UserError: it cannot be part of a report's name.
    """
    if not _REPLICA.fullmatch(name):
        raise UserError(
            f"{name[:80]!r} cannot be the name of a replica",
            remedy="Use letters, digits and hyphens, at most 63.",
        )
    return name
