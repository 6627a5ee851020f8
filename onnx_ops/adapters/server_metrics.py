"""Metrics from the counts of an endpoint's own servers."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from onnx_ops.domain.endpoint import EndpointConfig
from onnx_ops.domain.rollout_observations import (
    BADNESS_EDGES,
    USER_BLOCKS,
    EpochUnits,
    GenerationCounts,
    LatencyThresholds,
    MetricsReading,
    RequestCounts,
    ServerUptime,
    ShadowCounts,
    UnitCounts,
    UserBlocks,
)
from onnx_ops.errors import ServiceUnavailableError
from onnx_ops.ports import MetricsSource
from onnx_ops.protocol import messages
from onnx_ops.protocol.messages import (
    FAILURE_STATUSES,
    KEYLESS_CELL,
    REJECTION_STATUSES,
    Counts,
    DeploymentCounts,
    EpochCounts,
    TableCounts,
    UserCountsRequest,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_LAG = 4
"""Number of epochs by which a server can be behind the median server.

A server that is further behind, for example because of its clock, does not delay the reading.
"""


class ServerMetrics(MetricsSource):
    """Metrics source that combines the counts of all servers of an endpoint.

    `counts` requests the counts from the servers. If it gets a `UserCountsRequest`, these include
    counts by user.
    """

    def __init__(
        self, counts: Callable[[EndpointConfig, UserCountsRequest | None], Sequence[Counts]]
    ) -> None:
        self._counts = counts

    def capabilities(self) -> frozenset[str]:
        """Return the kinds of counts of an onnx-ops server."""
        return frozenset({"exceedances", "shadow", "feedback", "cold_starts"})

    def latencies(
        self, config: EndpointConfig, deployment: str
    ) -> tuple[Sequence[float], Sequence[int]] | None:
        """Return the histogram of service times, without the time in the queue.

        The result is the bounds of the buckets in seconds, and the count of each bucket. The result
        is None if no server has the deployment.
        """
        counts = self._counts(config, None)
        histograms = [
            each.deployments[deployment].service
            for each in counts
            if deployment in each.deployments
        ]
        return (counts[0].bounds_s, _add(histograms)) if histograms else None

    def read(
        self, config: EndpointConfig, deployments: Mapping[str, LatencyThresholds | None]
    ) -> MetricsReading:
        """Return the counts of all servers by generation.

        A generation whose table lacks one of `deployments` is left out. With two deployments, the
        reading also contains the closed epochs and the open epoch.

        Raises:
            ServiceUnavailableError: the counts cannot be read, or are invalid.
        """
        watched = _Watch.from_thresholds(deployments)
        limits_s = {
            name: () if each is None else each.list_limits() for name, each in deployments.items()
        }
        counts = self._counts(config, UserCountsRequest(limits_s=limits_s))
        names = set(deployments)
        try:
            return MetricsReading(
                at=min(one.at for one in counts),
                counts=tuple(
                    watched.count_table(one, table)
                    for one in counts
                    for table in one.tables
                    if names <= set(table.deployments)
                ),
                epochs=tuple(watched.add_epochs(counts)) if len(names) == 2 else (),
                open_epoch=watched.add_open_epochs(counts) if len(names) == 2 else None,
                cold_s=_collect_loads(counts, deployments),
                failure="; ".join(dict.fromkeys(one.failure for one in counts if one.failure)),
                uptimes=tuple(_sum_uptimes(each for one in counts for each in one.uptimes)),
            )
        except (ValueError, zlib.error) as error:
            raise ServiceUnavailableError(
                "the counts of the endpoint's servers are not valid",
                where=config.endpoint,
                why=str(error),
            ) from error


def count_by_server(
    counts: Sequence[Counts], deployments: Collection[str]
) -> list[GenerationCounts]:
    """Return the counts of each server by generation.

    `over_p99` counts requests that are slower than a bucket bound of at least twice the usual
    latency; see `_find_slow_limit`. The usual latency is the median of the medians of the servers
    since their last starts. One of three servers cannot change this median arbitrarily.
    """
    slow_s = {name: _find_slow_limit(counts, name) for name in deployments}
    limits_s = {
        name: {} if limit_s is None else {"latency_p99": limit_s}
        for name, limit_s in slow_s.items()
    }
    return [
        GenerationCounts(
            origin=one.origin,
            generation=table.generation,
            tallies={
                name: _tally(table.deployments[name], one.bounds_s, limits_s[name])
                for name in limits_s.keys() & table.deployments.keys()
            },
            server=one.server,
        )
        for one in counts
        for table in one.tables
    ]


def _find_slow_limit(counts: Sequence[Counts], deployment: str) -> float | None:
    """Return the smallest bucket bound that is at least twice the usual latency.

    The usual latency is the lower median of the servers' medians. The result is None without timed
    requests, or if all bounds are smaller.
    """
    medians: dict[str, tuple[float, Sequence[float]]] = {}
    for one in counts:
        service = one.deployments[deployment].service if deployment in one.deployments else ()
        places, timed = zip(one.bounds_s, accumulate(service), strict=False), sum(service)
        median_s = next((bound_s for bound_s, below in places if 0 < timed <= 2 * below), None)
        if median_s is not None:
            medians[one.server] = median_s, one.bounds_s
    if not medians:
        return None
    median_s, bounds_s = sorted(medians.values())[(len(medians) - 1) // 2]
    return next((bound_s for bound_s in bounds_s if bound_s >= 2 * median_s), None)


def _collect_loads(
    counts: Sequence[Counts], deployments: Iterable[str]
) -> dict[str, tuple[float, ...]]:
    """Return the durations in seconds of each deployment's loads on all servers.

    A deployment without loads is left out.
    """
    loads = {
        name: tuple(s for one in counts for s in one.cold_s.get(name, ())) for name in deployments
    }
    return {name: loads_s for name, loads_s in loads.items() if loads_s}


def _sum_uptimes(uptimes: Iterable[ServerUptime]) -> Iterable[ServerUptime]:
    """Yield the uptimes summed over all servers, and the process ends of each server.

    Uptimes and ends are by generation. All generations in which the stable version was alone are
    summed as one generation.
    """
    seconds: dict[tuple[int, bool], float] = {}
    ends: dict[tuple[str, int, bool], int] = {}
    for each in uptimes:
        place = (0 if each.is_alone else each.generation, each.is_alone)
        seconds[place] = seconds.get(place, 0.0) + each.seconds
        if each.ends:
            ends[each.server, *place] = ends.get((each.server, *place), 0) + each.ends
    for (generation, is_alone), total in sorted(seconds.items()):
        yield ServerUptime(
            server="", generation=generation, seconds=round(total, 1), is_alone=is_alone
        )
    for (server, generation, is_alone), count in sorted(ends.items()):
        yield ServerUptime(server=server, generation=generation, ends=count, is_alone=is_alone)


def _add(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*counts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """Latency thresholds of the compared deployments.

    For epochs, the first deployment is the candidate.

    `limits_s` maps each deployment to its thresholds in seconds by the name of the guardrail.
    """

    limits_s: Mapping[str, Mapping[str, float]]

    @classmethod
    def from_thresholds(cls, thresholds: Mapping[str, LatencyThresholds | None]) -> Self:
        """Build the thresholds from argument `deployments` of `MetricsSource.read`."""
        return cls(
            limits_s={
                name: {} if each is None else each.by_guardrail()
                for name, each in thresholds.items()
            }
        )

    def count_table(self, counts: Counts, table: TableCounts) -> GenerationCounts:
        """Return the counts of one server in one generation."""
        named = {name: table.deployments[name] for name in self.limits_s}
        return GenerationCounts(
            origin=counts.origin,
            generation=table.generation,
            tallies={
                name: _tally(one, counts.bounds_s, self.limits_s[name])
                for name, one in named.items()
            },
            shadow=ShadowCounts(
                compared=sum(one.shadow_answered for one in named.values()),
                differing=sum(one.shadow_differing for one in named.values()),
                failed=sum(one.shadow_failed for one in named.values()),
            ),
            blocks={
                name: self._sum_blocks(name, table.cells[name])
                for name in named
                if name in table.cells
            },
            server=counts.server,
        )

    def _sum_blocks(self, name: str, text: str) -> Mapping[str, UserBlocks]:
        """Return the counts of a deployment by block of users, for each guardrail."""
        cells = _Cells.decode([text])
        return {
            "errors": cells.sum_blocks(*cells.get_errors()),
            "feedback": cells.sum_blocks(*cells.get_feedback()),
            **{
                place: cells.sum_blocks(*cells.get_slow(grade))
                for place, grade in self._list_grades(name).items()
            },
        }

    def add_epochs(self, counts: Sequence[Counts]) -> Iterable[EpochUnits]:
        """Yield the units of the closed epochs.

        An epoch is closed if each server whose `closed_through` is above 0 has closed it. A server
        that is more than `_MAX_LAG` epochs behind the median server is not waited for.

        In an epoch, every server assigns a cell to the same version. The servers' counts of a cell
        are therefore added to one unit. If a follower replaced another follower of a server, both
        report the epochs of this server. Each epoch is added only once.
        """
        numbers = sorted(one.closed_through for one in counts if one.closed_through)
        if not numbers:
            return
        closed_through = max(numbers[0], numbers[len(numbers) // 2] - _MAX_LAG)
        parts: dict[tuple[int, int], dict[str, EpochCounts]] = {}
        for one in counts:
            for each in one.epochs:
                parts.setdefault((each.epoch, each.generation), {})[one.origin] = each
        for epoch, generation in sorted(parts):
            if epoch <= closed_through:
                yield self._form_units(list(parts[epoch, generation].values()))

    def add_open_epochs(self, counts: Sequence[Counts]) -> EpochUnits | None:
        """Return the units of the last open epoch until now; None without an open epoch."""
        opened = [one.open_epoch for one in counts if one.open_epoch is not None]
        if not opened:
            return None
        last = max((each.epoch, each.generation) for each in opened)
        return self._form_units([each for each in opened if (each.epoch, each.generation) == last])

    def _form_units(self, parts: Sequence[EpochCounts]) -> EpochUnits:
        """Return the units of one epoch, from the counts of each server."""
        names = list(self.limits_s)
        units = _bin_epoch(
            tuple(
                tuple(part.cells[name] for part in parts if name in part.cells) for name in names
            ),
            tuple(tuple(self._list_grades(name).items()) for name in names),
        )
        return EpochUnits(generation=parts[0].generation, epoch=parts[0].epoch, units=units)

    def _list_grades(self, name: str) -> Mapping[str, int]:
        """Return the grade of each latency guardrail of a deployment.

        A request is slow for a guardrail if it exceeds at least `grade` thresholds.
        """
        ascending = sorted(set(self.limits_s[name].values()))
        return {
            place: ascending.index(limit_s) + 1 for place, limit_s in self.limits_s[name].items()
        }


@functools.lru_cache(maxsize=256)
def _bin_epoch(
    texts: tuple[tuple[str, ...], ...], grades: tuple[tuple[tuple[str, int], ...], ...]
) -> Mapping[str, UnitCounts]:
    """Return the units of an epoch by guardrail.

    The result is cached, since closed epochs are read repeatedly, and decoding an epoch takes 10
    ms.

    Args:
        texts: the encoded cells of each server, for candidate and stable version.
        grades: the grades of the guardrails, for candidate and stable version; see `_list_grades`.
    """
    candidate, stable = (_Cells.decode(each) for each in texts)
    mine, theirs = map(dict, grades)
    slow = {
        place: (candidate.get_slow(mine[place]), stable.get_slow(theirs[place]))
        for place in mine
        if place in theirs
    }
    events = {
        "errors": (candidate.get_errors(), stable.get_errors()),
        "refused": (candidate.get_refused(), stable.get_refused()),
        **slow,
    }
    return {
        place: UnitCounts(candidate=candidate.bin_units(*one), stable=stable.bin_units(*other))
        for place, (one, other) in events.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """Counts of one deployment by cell.

    `cells` are the numbers of the cells, shape (n,). `counts` are the counts of the cells, shape
    (n, `CELL_FIELDS`).
    """

    cells: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, texts: Sequence[str]) -> _Cells:
        """Decode and add the counts of several servers.

        Raises:
            ValueError: a string does not encode cells.
            zlib.error: a string does not encode compressed data.
        """
        import numpy as np

        parts = [messages.decode_cells(text) for text in texts]
        if len(parts) == 1:
            return cls(*parts[0])
        cells = np.unique(
            np.concatenate([np.zeros(0, np.int64), *(numbers for numbers, _ in parts)])
        )
        total = np.zeros((len(cells), messages.CELL_FIELDS), np.int64)
        for numbers, counts in parts:
            total[np.searchsorted(cells, numbers)] += counts
        return cls(cells, total)

    def get_errors(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return requests and errors of each cell."""
        return self._get_part(messages.CELL_REQUESTS, messages.CELL_ERRORS)

    def get_refused(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return requests and refused requests of each cell."""
        return self._get_part(messages.CELL_REQUESTS, messages.CELL_REFUSED)

    def get_feedback(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return feedback and successes of each cell."""
        return self._get_part(messages.CELL_FEEDBACK, messages.CELL_SUCCESSES)

    def _get_part(
        self, whole: int, part: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return two counts of each cell: a total, and a part that is at most the total.

        The reported part can exceed the total if the server counted a request after it had read the
        total. In a forged report, any part can exceed the total.
        """
        import numpy as np

        total = self.counts[:, whole]
        return total, np.minimum(total, self.counts[:, part])

    def get_slow(self, grade: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return timed requests of each cell; and those above at least `grade` thresholds."""
        timed = self.counts[:, messages.CELL_LATENCIES :]
        return timed.sum(1), timed[:, grade:].sum(1)

    def bin_units(
        self, requests: npt.NDArray[np.int64], events: npt.NDArray[np.int64]
    ) -> tuple[int, ...]:
        """Return the number of units by their share of bad events.

        The bins are those of `BADNESS_EDGES`; zeros at the end are left out. Each request without a
        key is a unit.
        """
        import numpy as np

        is_single = self.cells == KEYLESS_CELL
        is_unit = ~is_single & (requests > 0)
        bins = np.searchsorted(BADNESS_EDGES, events[is_unit] / requests[is_unit], side="left")
        numbers = np.bincount(bins, minlength=len(BADNESS_EDGES))
        bad = events[is_single].sum()
        numbers[0] += requests[is_single].sum() - bad
        numbers[-1] += bad
        return tuple(np.trim_zeros(numbers, "b").tolist())

    def sum_blocks(
        self, requests: npt.NDArray[np.int64], events: npt.NDArray[np.int64]
    ) -> UserBlocks:
        """Return the sums of requests and events by block of users.

        The last block contains the requests without a key.
        """
        import numpy as np

        blocks = np.where(self.cells == KEYLESS_CELL, USER_BLOCKS, self.cells % USER_BLOCKS)
        sums = [
            np.bincount(blocks, values, USER_BLOCKS + 1).astype(int).tolist()
            for values in (requests, events)
        ]
        return UserBlocks(requests=tuple(sums[0]), events=tuple(sums[1]))


def _tally(
    one: DeploymentCounts, bounds_s: Sequence[float], limits_s: Mapping[str, float]
) -> RequestCounts:
    timed, below = sum(one.service), dict(zip(bounds_s, accumulate(one.service), strict=False))
    return RequestCounts(
        requests=sum(one.statuses.values()),
        errors=sum(one.statuses.get(status, 0) for status in FAILURE_STATUSES),
        refused=sum(one.statuses.get(status, 0) for status in REJECTION_STATUSES),
        feedback=one.feedback,
        successes=one.successes,
        timed=timed,
    ).with_over(
        {name: count_slower(below, timed, limit_s, 1e-9) for name, limit_s in limits_s.items()}
    )


def count_slower(
    below: Mapping[float, int], timed: int, latency_s: float, tolerance: float
) -> int | None:
    """Return the number of requests slower than a bound of a cumulative histogram.

    The result is None if `latency_s` is not a bound. `below` maps each bound in seconds to the
    number of requests up to the bound. `timed` is the number of all timed requests. `tolerance` is
    relative.
    """
    counts = (
        count for bound, count in below.items() if math.isclose(bound, latency_s, rel_tol=tolerance)
    )
    return next((timed - count for count in counts), None)
