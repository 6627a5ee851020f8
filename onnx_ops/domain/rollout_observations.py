"""Counts of a rollout: readings, the intervals between them, and thresholds.

A metrics source supplies the readings. The thresholds are fixed before the rollout. Counts are
whole numbers of requests or units, so that any process can add to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyThresholds:
    """Latencies in seconds above which requests of a version are counted.

    They are fixed before the rollout, from `requests` requests to the stable version. `places_s`
    are in the order of `LATENCY_PLACES`.
    """

    p50_s: float
    p99_s: float
    requests: int
    p90_s: float | None = field(default=None, metadata=OMIT_DEFAULT)
    p95_s: float | None = field(default=None, metadata=OMIT_DEFAULT)
    places_s: tuple[float, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def by_guardrail(self) -> Mapping[str, float]:
        """Return the known thresholds by the name of their guardrail or place."""
        values = {
            name: getattr(self, f"{name.removeprefix('latency_')}_s") for name in LATENCY_QUANTILES
        }
        known = {name: latency_s for name, latency_s in values.items() if latency_s is not None}
        return {**known, **dict(zip(LATENCY_PLACES, self.places_s, strict=False))}

    def list_limits(self) -> tuple[float, ...]:
        """Return the ascending thresholds in seconds that a server counts above."""
        return tuple(sorted(set(self.by_guardrail().values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests to one deployment, by result.

    `errors` are the server's own failures. `refused` are requests that the server did not accept.
    They are the client's fault unless the other version accepts them. `timed` counts the requests
    with a latency (None: all requests). Of these, `over_p50` and similar fields count the requests
    above the deployment's thresholds (None: unknown). `over_places` counts those above the
    thresholds of `LATENCY_PLACES`. `feedback` counts the entries that clients reported, and
    `successes` the successes among these entries.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    over_p50: int | None = None
    over_p99: int | None = None
    feedback: int = 0
    successes: int = 0
    timed: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_p90: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_p95: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_places: tuple[int, ...] | None = field(default=None, metadata=OMIT_DEFAULT)

    def over(self) -> Mapping[str, int]:
        """Return the known counts of requests over a threshold.

        The keys are the names of the threshold's guardrail or place.
        """
        counts = {name: getattr(self, _over_field(name)) for name in LATENCY_QUANTILES}
        known = {name: count for name, count in counts.items() if count is not None}
        return {**known, **dict(zip(LATENCY_PLACES, self.over_places or (), strict=False))}

    def with_over(self, counts: Mapping[str, int | None]) -> RequestCounts:
        """Return these counts with the counts over the thresholds replaced."""
        named: dict[str, Any] = {
            _over_field(name): counts[name] for name in LATENCY_QUANTILES if name in counts
        }
        places = tuple(count for name in LATENCY_PLACES if (count := counts.get(name)) is not None)
        return replace(
            self, **named, over_places=places if len(places) == len(LATENCY_PLACES) else None
        )

    def plus(self, other: RequestCounts) -> RequestCounts:
        """Return the sums of these and the other counts.

        A count that is unknown in either object is unknown in the sum.
        """
        return RequestCounts(
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            refused=self.refused + other.refused,
            feedback=self.feedback + other.feedback,
            successes=self.successes + other.successes,
            timed=None if self.timed is None or other.timed is None else self.timed + other.timed,
        ).with_over(
            {
                name: count + other.over()[name]
                for name, count in self.over().items()
                if name in other.over()
            }
        )

    def minus(self, before: RequestCounts | None) -> RequestCounts | None:
        """Return the counts since `before` (None: all counts).

        The result is None if the differences contradict each other (`is_consistent`), as after a
        restart. It is also None if `timed` is known in only one of the two objects.
        """
        if before is None:
            zero = RequestCounts(timed=None if self.timed is None else 0)
            before = zero.with_over(dict.fromkeys(self.over(), 0))
        difference = RequestCounts(
            requests=self.requests - before.requests,
            errors=self.errors - before.errors,
            refused=self.refused - before.refused,
            feedback=self.feedback - before.feedback,
            successes=self.successes - before.successes,
            timed=_subtract(self.timed, before.timed),
        ).with_over(
            {name: _subtract(count, before.over().get(name)) for name, count in self.over().items()}
        )
        alike = (self.timed is None) == (before.timed is None)
        return difference if difference.is_consistent and alike else None

    @property
    def is_consistent(self) -> bool:
        """Return whether the counts do not contradict each other."""
        valid = min(self.errors, self.refused) >= 0 and 0 <= self.failed <= self.requests
        return (
            valid
            and all(0 <= n <= self.measured for n in self.over().values())
            and 0 <= self.successes <= self.feedback
        )

    @property
    def measured(self) -> int:
        """Number of requests with a known latency."""
        return self.requests if self.timed is None else self.timed

    @property
    def failed(self) -> int:
        """Number of requests without an answer: errors and refused requests."""
        return self.errors + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCounts:
    """Counts of mirrored requests.

    Attributes:
        compared: answers that were compared.
        differing: answers that differ.
        failed: mirrored requests that failed.
    """

    compared: int = 0
    differing: int = 0
    failed: int = 0

    def plus(self, other: ShadowCounts) -> ShadowCounts:
        """Return the sums of these and the other counts."""
        return ShadowCounts(
            compared=self.compared + other.compared,
            differing=self.differing + other.differing,
            failed=self.failed + other.failed,
        )

    def minus(self, before: ShadowCounts) -> ShadowCounts:
        """Return the counts that were added since `before`."""
        return ShadowCounts(
            compared=self.compared - before.compared,
            differing=self.differing - before.differing,
            failed=self.failed - before.failed,
        )

    @property
    def seen(self) -> int:
        """Number of mirrored requests with a result."""
        return self.compared + self.failed

    @property
    def wrong(self) -> int:
        """Number of mirrored requests that failed, or whose answer differs."""
        return self.differing + self.failed

    @property
    def is_consistent(self) -> bool:
        """Return whether the counts of copies do not contradict each other."""
        return (
            min(self.compared, self.differing, self.failed) >= 0 and self.differing <= self.compared
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantiles:
    """Quantiles of the latency of recent requests, in seconds.

    A source reports quantiles of its latest minutes if it cannot count requests over a threshold.
    """

    p50_s: float
    p99_s: float


BADNESS_EDGES = (0.0, *(2.0**-k for k in range(10, 5, -1)), *(k / 32 for k in range(1, 33)))
"""Upper edges of the bins of badness.

The first bin is for units without events. Powers of two from 2^-10 to 2^-6 follow, for rare events
of users with many requests, and then the multiples of 1/32. A unit is in the first bin whose edge
is not below events / requests. Rounding up to an edge needs no correction, since it is independent
of the assignment of the unit.
"""
USER_BLOCKS = 64
"""Number of blocks of users.

The block of a user is the cell of the user's key modulo this number.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCounts:
    """Units of the candidate and of the stable version, by badness.

    The badness of a unit is the share of its requests that were events.

    A unit is a set of requests that is assigned to a version independently of other units. It
    consists of the requests of one cell of users in one epoch, or of a single request without a
    key. Each version has a number of units for each of `BADNESS_EDGES`; zeros at the end can be
    left out.
    """

    candidate: tuple[int, ...] = ()
    stable: tuple[int, ...] = ()

    def plus(self, other: UnitCounts) -> UnitCounts:
        """Return the sums of these and the other units."""
        return UnitCounts(
            candidate=_add(self.candidate, other.candidate),
            stable=_add(self.stable, other.stable),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochUnits:
    """Units of one epoch.

    All units were assigned with the traffic split of the routing table `generation`. `units` are by
    place: `errors`, `refused`, and the latency guardrails and places with a threshold. For latency,
    only the timed requests of a unit count towards its badness. Counts of one cell from several
    servers are added before its badness is formed.
    """

    generation: int
    epoch: int
    units: Mapping[str, UnitCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBlocks:
    """Requests and events of one deployment by block of users.

    They are counted while the split is sticky by user.

    Each array has `USER_BLOCKS` + 1 numbers; the last number is for requests without a key. For
    feedback, requests are entries and events are successes.
    """

    requests: tuple[int, ...]
    events: tuple[int, ...]

    def plus(self, other: UserBlocks) -> UserBlocks:
        """Return the sums of these and the other counts."""
        return UserBlocks(
            requests=_add(self.requests, other.requests),
            events=_add(self.events, other.events),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts:
    """Counts of one server since one start, under one generation of its routing table.

    The counts only grow. `origin` identifies the server and its start. `tallies` are by deployment.
    `shadow` counts copies to the candidate. `blocks` are by deployment and place (`errors`,
    `feedback`, latency); empty unless the split is sticky by user. `server` is the name of the
    server, which stays the same after a restart; empty if it has no such name.
    """

    origin: str
    generation: int
    tallies: Mapping[str, RequestCounts]
    shadow: ShadowCounts = field(default_factory=ShadowCounts, metadata=OMIT_DEFAULT)
    blocks: Mapping[str, Mapping[str, UserBlocks]] = field(
        default_factory=dict, metadata=OMIT_DEFAULT
    )
    server: str = field(default="", metadata=OMIT_DEFAULT)

    def is_later_than(self, before: GenerationCounts) -> bool:
        """Return whether these counts were read after `before`, or are equal to it.

        `before` must have the same origin and generation.
        """
        grown = all(
            self.tallies.get(name, RequestCounts()).requests >= tally.requests
            for name, tally in before.tallies.items()
        )
        return grown and self.shadow.minus(before.shadow).is_consistent

    def plus(self, other: GenerationCounts) -> GenerationCounts:
        """Return the sum of both counts, with the origin and generation of this object."""
        tallies = {**other.tallies, **self.tallies}
        for name in self.tallies.keys() & other.tallies.keys():
            tallies[name] = self.tallies[name].plus(other.tallies[name])
        blocks = {name: dict(by_place) for name, by_place in self.blocks.items()}
        for name, by_place in other.blocks.items():
            mine = blocks.setdefault(name, {})
            for place, added in by_place.items():
                mine[place] = mine[place].plus(added) if place in mine else added
        return replace(self, tallies=tallies, shadow=self.shadow.plus(other.shadow), blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUptime:
    """Seconds in which a server served one generation of the routing table.

    `ends` counts how often the server ended without a final report. `is_alone`: whether only the
    stable version got requests. `server` is empty for the sum of several servers.
    """

    server: str
    generation: int
    seconds: float = 0.0
    ends: int = 0
    is_alone: bool = field(default=False, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReading:
    """The counts of a metrics source.

    `at` is in seconds since the epoch, by the source's clock.

    Servers of onnx-ops report `counts` by server, start and generation. They also report `epochs`:
    the closed epochs that the servers still store, in ascending order. An epoch is closed once
    every server has closed it, except servers that are far behind. `open_epoch` is the latest epoch
    that is not closed. The clocks of servers are never compared.

    Sources without data about the assignment of users (CloudWatch, Azure Monitor, Prometheus)
    report `tallies` by deployment, and optionally `shadow` and `quantiles`. `origin` identifies the
    start from which `tallies` and `shadow` are counted. Counts of different origins are not
    comparable; for example, the counters restarted.

    `cold_s` are the seconds of loads of each version, which servers measure before the candidate
    gets any traffic.
    `failure` is the reason why counts are missing at present. `uptimes` are the uptimes of servers
    that another system restarts, with the stable version alone and with both versions.
    """

    at: float
    counts: tuple[GenerationCounts, ...] = field(default=(), metadata=OMIT_DEFAULT)
    epochs: tuple[EpochUnits, ...] = field(default=(), metadata=OMIT_DEFAULT)
    open_epoch: EpochUnits | None = field(default=None, metadata=OMIT_DEFAULT)
    origin: str = ""
    tallies: Mapping[str, RequestCounts] = field(default_factory=dict)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    quantiles: Mapping[str, LatencyQuantiles] = field(default_factory=dict)
    cold_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    failure: str = field(default="", metadata=OMIT_DEFAULT)
    uptimes: tuple[ServerUptime, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def sum_tallies(self) -> Mapping[str, RequestCounts]:
        """Return the counts by deployment, of all servers and generations."""
        total = GenerationCounts(origin="", generation=0, tallies=self.tallies)
        for one in self.counts:
            total = total.plus(one)
        return total.tallies


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationInterval:
    """Counts between two readings, under one traffic split of a step.

    `seconds` is the time between the readings; 0 if unknown.
    """

    step: int
    canary: RequestCounts = field(default_factory=RequestCounts)
    stable: RequestCounts = field(default_factory=RequestCounts)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    canary_latency: LatencyQuantiles | None = None
    stable_latency: LatencyQuantiles | None = None
    seconds: float = field(default=0.0, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationUnits:
    """The traffic split of one generation of the routing table, and its units.

    `epochs` is the number of epochs whose units are counted, and `last_epoch` the last of these.
    `percent` is the candidate's share. `units` are by place; empty unless users are assigned anew
    in each epoch (`is_drawn`).
    """

    generation: int
    step: int
    percent: int
    is_drawn: bool
    epochs: int = 0
    last_epoch: int = -1
    units: Mapping[str, UnitCounts] = field(default_factory=dict)

    def with_epoch(self, epoch: EpochUnits) -> GenerationUnits:
        """Return the sums with one more epoch.

        Epochs must be added in ascending order: an epoch up to `last_epoch` is ignored.
        """
        if epoch.epoch <= self.last_epoch:
            return self
        added = {
            place: self.units.get(place, UnitCounts()).plus(units)
            for place, units in epoch.units.items()
        }
        return replace(
            self, epochs=self.epochs + 1, last_epoch=epoch.epoch, units={**self.units, **added}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All counts of the rollout in progress.

    `started_at` is when its present step took effect. `thresholds` apply to the stable version,
    `slower` to the candidate. `cold_s` has the seconds of the last loads of candidate and stable
    version. `reading` is the last reading, without the counts and epochs that are in other fields.

    For servers of onnx-ops, `counts` has the latest counts of each origin and generation.
    `generations` has the splits of this rollout with their units. The generation shows to which
    step counts belong; clocks are never compared. A restart or another server adds counts with
    another origin, without a gap in the counts.

    For other sources, the next interval starts at `reading`. If the split changed since, `reading`
    is None, and the interval starts with the next reading. The last change was at `split_at`.

    With `is_independent`, each request was assigned to a version independently of all others. The
    counts then need no design effect, whatever causes the events.
    """

    candidate: Digest
    step: int = 0
    started_at: float = 0.0
    split_at: float = 0.0
    thresholds: LatencyThresholds | None = None
    slower: LatencyThresholds | None = None
    reading: MetricsReading | None = None
    intervals: tuple[ObservationInterval, ...] = ()
    counts: tuple[GenerationCounts, ...] = field(default=(), metadata=OMIT_DEFAULT)
    generations: tuple[GenerationUnits, ...] = field(default=(), metadata=OMIT_DEFAULT)
    open_epoch: EpochUnits | None = field(default=None, metadata=OMIT_DEFAULT)
    cold_s: tuple[tuple[float, ...], tuple[float, ...]] = field(
        default=((), ()), metadata=OMIT_DEFAULT
    )
    is_independent: bool = field(default=False, metadata=OMIT_DEFAULT)

    @property
    def drawn(self) -> tuple[GenerationUnits, ...]:
        """The counted splits in which users were assigned anew in each epoch.

        The result is empty for all sources except servers of onnx-ops.
        """
        return tuple(split for split in self.generations if split.is_drawn) if self.counts else ()

    def sum_blocks(self, place: str) -> tuple[UserBlocks, ...]:
        """Return the present step's counts by block of users, for each version.

        The result is empty if the source does not count by block.
        """
        total = GenerationCounts(origin="", generation=0, tallies={})
        ours = {split.generation for split in self.generations if split.step == self.step}
        for one in self.counts:
            total = total.plus(one) if one.generation in ours else total
        return tuple(by_place[place] for by_place in total.blocks.values() if place in by_place)

    def split_uptimes(self) -> tuple[tuple[ServerUptime, ...], tuple[ServerUptime, ...]]:
        """Return the uptimes of the stable version alone, and those of this rollout."""
        ours = {split.generation for split in self.generations}
        uptimes = () if self.reading is None else self.reading.uptimes
        return (
            tuple(each for each in uptimes if each.is_alone and each.generation not in ours),
            tuple(each for each in uptimes if each.generation in ours),
        )

    def move_to_step(self, split: GenerationUnits, at: float) -> Observations:
        """Return the observations after the traffic split was set for a step."""
        moved = replace(
            self.reset_reading(at), generations=(*self.generations, split), open_epoch=None
        )
        return moved if split.step == self.step else replace(moved, step=split.step, started_at=at)

    def reset_reading(self, at: float) -> Observations:
        """Return the observations after a change, or a possible change, of the split.

        No interval of counts spans the change. Counts of servers of onnx-ops are unchanged, since
        each of them belongs to one generation.
        """
        return self if self.counts else replace(self, reading=None, split_at=at)

    def select_new(self, reading: MetricsReading) -> MetricsReading:
        """Return the part of a reading that is new for this rollout.

        Counts of other rollouts, and epochs that are counted already, are left out.
        """
        last = {split.generation: split.last_epoch for split in self.generations}
        return replace(
            reading,
            counts=tuple(one for one in reading.counts if one.generation in last),
            epochs=tuple(
                one for one in reading.epochs if one.epoch > last.get(one.generation, one.epoch)
            ),
        )

    def with_reading(self, reading: MetricsReading, *, stable: str, candidate: str) -> Observations:
        """Return the observations with one more reading.

        `stable` and `candidate` are names of deployments.
        """
        cold_s = (
            (reading.cold_s.get(candidate, ()), reading.cold_s.get(stable, ()))
            if reading.cold_s
            else self.cold_s
        )
        add = self._with_tallies if reading.origin else self._with_counts
        return replace(add(reading, stable=stable, candidate=candidate), cold_s=cold_s)

    def _with_tallies(
        self, reading: MetricsReading, *, stable: str, candidate: str
    ) -> Observations:
        """Add the interval since the last reading of a source without generations.

        The first reading after a change of the split, or of counters that restarted, only marks
        where the next interval starts. A delayed reading from before the change is ignored.
        """
        if reading.at < self.split_at:
            return self
        interval = diff_readings(
            self.reading, reading, step=self.step, stable=stable, candidate=candidate
        )
        intervals = self.intervals if interval is None else (*self.intervals, interval)
        return replace(self, reading=reading, intervals=intervals)

    def _with_counts(self, reading: MetricsReading, *, stable: str, candidate: str) -> Observations:
        """Add what servers of onnx-ops counted since the last reading, by generation."""
        new = self.select_new(reading)
        by_origin = {(one.origin, one.generation): one for one in self.counts}
        for one in new.counts:
            before = by_origin.get((one.origin, one.generation))
            if before is None or one.is_later_than(before):
                by_origin[one.origin, one.generation] = one
        counts = tuple(by_origin.values())
        seconds = 0.0 if self.reading is None else max(0.0, reading.at - self.reading.at)
        intervals = []
        for split in self.generations:
            was, now = (sum_generation(each, split.generation) for each in (self.counts, counts))
            if now != was:
                interval = _diff_counts(was, now, stable=stable, candidate=candidate)
                intervals.append(replace(interval, step=split.step, seconds=seconds))
        generations = {split.generation: split for split in self.generations}
        for epoch in sorted(new.epochs, key=lambda one: one.epoch):
            generations[epoch.generation] = generations[epoch.generation].with_epoch(epoch)
        latest = reading.open_epoch
        return replace(
            self,
            reading=replace(reading, counts=(), epochs=(), open_epoch=None),
            intervals=(*self.intervals, *intervals),
            counts=counts,
            generations=tuple(generations.values()),
            open_epoch=latest if latest is not None and latest.generation in generations else None,
        )


def sum_generation(counts: Iterable[GenerationCounts], generation: int) -> GenerationCounts:
    """Return the counts of all servers under one generation.

    Blocks of users are added, too.
    """
    total = GenerationCounts(origin="", generation=generation, tallies={})
    for one in counts:
        if one.generation == generation:
            total = total.plus(one)
    return total


def diff_readings(
    before: MetricsReading | None, now: MetricsReading, *, step: int, stable: str, candidate: str
) -> ObservationInterval | None:
    """Return the counts between two readings of a source without generations.

    The result is None without an earlier reading, or if `now` is older than `before`. It is also
    None if the counters restarted or fell between the readings, or if the differences contradict
    each other. `stable` and `candidate` are names of deployments.
    """
    if before is None or before.origin != now.origin or now.at < before.at:
        return None
    canary_counts, stable_counts = (
        now.tallies.get(name, RequestCounts()).minus(before.tallies.get(name))
        for name in (candidate, stable)
    )
    copies = now.shadow.minus(before.shadow)
    if canary_counts is None or stable_counts is None or not copies.is_consistent:
        return None
    return ObservationInterval(
        step=step,
        canary=canary_counts,
        stable=stable_counts,
        shadow=copies,
        canary_latency=now.quantiles.get(candidate),
        stable_latency=now.quantiles.get(stable),
        seconds=now.at - before.at,
    )


def _diff_counts(
    before: GenerationCounts, now: GenerationCounts, *, stable: str, candidate: str
) -> ObservationInterval:
    """Return the counts of one generation between two readings.

    Counts that have decreased, as after a restart, are left out.
    """
    canary_counts, stable_counts = (
        now.tallies.get(name, RequestCounts()).minus(before.tallies.get(name)) or RequestCounts()
        for name in (candidate, stable)
    )
    return ObservationInterval(
        step=0, canary=canary_counts, stable=stable_counts, shadow=now.shadow.minus(before.shadow)
    )


def _over_field(name: str) -> str:
    return f"over_{name.removeprefix('latency_')}"


def _add(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in itertools.zip_longest(one, other, fillvalue=0))


def _subtract(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidencePath:
    """One guardrail for a plot: log10 evidence by requests, and the limit."""

    name: str
    requests: tuple[int, ...]
    log10_evidence: tuple[float, ...]
    limit: float
