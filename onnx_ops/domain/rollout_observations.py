"""What was counted of a rollout: readings of a source, the intervals between them, and thresholds that stay fixed.

Everything is a whole number of requests, so that any source of metrics can tell it and any driver can go on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.quantities import OMIT_DEFAULT
from onnx_ops.domain.rollout_policy import LATENCY_PLACES, LATENCY_QUANTILES


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyThresholds:
    """Latencies in seconds that a version's requests may exceed, read off `requests` requests to the stable version
    before the rollout. They stay what they are until it ends."""

    p50_s: float
    p99_s: float
    requests: int
    p90_s: float | None = field(default=None, metadata=OMIT_DEFAULT)
    p95_s: float | None = field(default=None, metadata=OMIT_DEFAULT)
    places_s: tuple[float, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def by_guardrail(self) -> Mapping[str, float]:
        """Those that are known, by the guardrail that they belong to, or its place in `LATENCY_PLACES`."""
        found = {name: getattr(self, f"{name.removeprefix('latency_')}_s") for name in LATENCY_QUANTILES}
        named = {name: latency_s for name, latency_s in found.items() if latency_s is not None}
        return {**named, **dict(zip(LATENCY_PLACES, self.places_s, strict=False))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests that one deployment answered, and how many of them were something.

    `errors` are the server's own failures; `refused` are requests that it did not take, which is the client's fault
    unless the other version takes them. Of the `timed` ones, which are all where that is None, `over_p50` and its
    like took longer than the deployment's thresholds; None where the source cannot tell. `over_places` are those over
    each of `LATENCY_PLACES`. `outcomes` are reports of clients, of which `successes` good.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    over_p50: int | None = None
    over_p99: int | None = None
    outcomes: int = 0
    successes: int = 0
    timed: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_p90: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_p95: int | None = field(default=None, metadata=OMIT_DEFAULT)
    over_places: tuple[int, ...] | None = field(default=None, metadata=OMIT_DEFAULT)

    def over(self) -> Mapping[str, int]:
        """Requests that took longer than each threshold of a guardrail of latency, where that is known."""
        found = {name: getattr(self, _over(name)) for name in LATENCY_QUANTILES}
        named = {name: count for name, count in found.items() if count is not None}
        return {**named, **dict(zip(LATENCY_PLACES, self.over_places or (), strict=False))}

    def with_over(self, counts: Mapping[str, int | None]) -> RequestCounts:
        named: dict[str, Any] = {_over(name): counts[name] for name in LATENCY_QUANTILES if name in counts}
        places = tuple(count for name in LATENCY_PLACES if (count := counts.get(name)) is not None)
        return replace(self, **named, over_places=places if len(places) == len(LATENCY_PLACES) else None)

    def minus(self, before: RequestCounts) -> RequestCounts | None:
        """What was counted since `before`; None if the counts do not follow each other or make no sense."""
        found = RequestCounts(
            requests=self.requests - before.requests,
            errors=self.errors - before.errors,
            refused=self.refused - before.refused,
            outcomes=self.outcomes - before.outcomes,
            successes=self.successes - before.successes,
            timed=_less(self.timed, before.timed),
        ).with_over({name: _less(count, before.over().get(name)) for name, count in self.over().items()})
        alike = (self.timed is None) == (before.timed is None)
        return found if found.sound and alike else None

    @property
    def sound(self) -> bool:
        """Whether these are counts of requests at all."""
        over = self.over().values()
        whole = min(self.errors, self.refused) >= 0 and 0 <= self.failed <= self.requests
        return whole and all(0 <= n <= self.measured for n in over) and 0 <= self.successes <= self.outcomes

    @property
    def measured(self) -> int:
        """Requests of which it is known how long they took."""
        return self.requests if self.timed is None else self.timed

    @property
    def failed(self) -> int:
        """Requests without an answer, whoever is at fault."""
        return self.errors + self.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCounts:
    """Copies of requests: answers that were compared, those of them that differ, and copies that failed."""

    compared: int = 0
    differing: int = 0
    failed: int = 0

    @property
    def seen(self) -> int:
        return self.compared + self.failed

    @property
    def wrong(self) -> int:
        return self.differing + self.failed

    @property
    def sound(self) -> bool:
        return min(self.compared, self.differing, self.failed) >= 0 and self.differing <= self.compared


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantiles:
    """Latencies in seconds of the requests since the last reading, from a source that counts no exceedances."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSums:
    """Sums over units of n requests of which e are events, of both versions: of n, e, n squared, e squared, and e n.

    A unit is what the split assigns: a user whose requests carry a key, else the single request.
    """

    requests: int = 0
    events: int = 0
    requests_squared: int = 0
    events_squared: int = 0
    products: int = 0

    @classmethod
    def single(cls, requests: int, events: int) -> UnitSums:
        """Of requests without keys."""
        return cls(requests=requests, events=events, requests_squared=requests, events_squared=events, products=events)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReading:
    """What a source has counted since `origin`, by name of deployment. `at` is seconds since the epoch.

    Another origin means that the counters began anew, as after a restart. `shadow` is about copies to the candidate.
    `units` are by name of guardrail, and `outcomes` for those; a source that cannot tell users has none. `cold_s` are
    seconds that loads of either version took, before the candidate got any traffic.
    """

    origin: str
    at: float
    tallies: Mapping[str, RequestCounts] = field(default_factory=dict)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    quantiles: Mapping[str, LatencyQuantiles] = field(default_factory=dict)
    units: Mapping[str, UnitSums] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    cold_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationInterval:
    """What happened between two readings during one step. The split of traffic did not change in between."""

    step: int
    canary: RequestCounts = field(default_factory=RequestCounts)
    stable: RequestCounts = field(default_factory=RequestCounts)
    shadow: ShadowCounts = field(default_factory=ShadowCounts)
    canary_latency: LatencyQuantiles | None = None
    stable_latency: LatencyQuantiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Everything counted of the rollout in progress. `began` is when its present step took effect.

    `thresholds` are the stable version's, `slower` the candidate's. `reading` is where the next interval begins; None
    where the split has changed since. It did so last at `split_at`. `units` are the last ones of each origin: what is
    counted by user begins anew with it, and grows from step to step. `cold_s` are the loads of the candidate and of the
    stable version that were read last.
    """

    candidate: Digest
    step: int = 0
    began: float = 0.0
    split_at: float = 0.0
    thresholds: LatencyThresholds | None = None
    slower: LatencyThresholds | None = None
    reading: MetricsReading | None = None
    intervals: tuple[ObservationInterval, ...] = ()
    units: Mapping[str, Mapping[str, UnitSums]] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    cold_s: tuple[tuple[float, ...], tuple[float, ...]] = field(default=((), ()), metadata=OMIT_DEFAULT)

    def at_step(self, step: int, began: float) -> Observations:
        """The same rollout after its split of traffic was set (again)."""
        moved = self.split_again(began)
        return moved if step == self.step else replace(moved, step=step, began=began)

    def split_again(self, at: float) -> Observations:
        """No interval spans a change of the split, nor what may have been one."""
        return replace(self, reading=None, split_at=at)

    def after(self, reading: MetricsReading, *, stable: str, candidate: str) -> Observations:
        """With one more reading. The first one after a change of the split, or of counters that began anew, only says
        where the next interval begins. A source that is behind may still tell of the time before: that counts for
        nothing."""
        if reading.at < self.split_at:
            return self
        found = diff_readings(self.reading, reading, step=self.step, stable=stable, candidate=candidate)
        intervals = self.intervals if found is None else (*self.intervals, found)
        units = {**self.units, reading.origin: reading.units} if reading.units else self.units
        cold_s = (reading.cold_s.get(candidate, ()), reading.cold_s.get(stable, ())) if reading.cold_s else self.cold_s
        return replace(self, reading=reading, intervals=intervals, units=units, cold_s=cold_s)

    def units_of(self, name: str) -> tuple[UnitSums, ...]:
        """What was counted by user of an event, in each origin."""
        return tuple(found[name] for found in self.units.values() if name in found)


def diff_readings(
    before: MetricsReading | None, now: MetricsReading, *, step: int, stable: str, candidate: str
) -> ObservationInterval | None:
    """What lies between two readings; None if they do not follow each other or make no sense."""
    if before is None or before.origin != now.origin or now.at < before.at:
        return None
    tallies = [
        now.tallies.get(name, RequestCounts()).minus(before.tallies.get(name, _unseen(now.tallies.get(name))))
        for name in (candidate, stable)
    ]
    copies = ShadowCounts(
        compared=now.shadow.compared - before.shadow.compared,
        differing=now.shadow.differing - before.shadow.differing,
        failed=now.shadow.failed - before.shadow.failed,
    )
    if tallies[0] is None or tallies[1] is None or not copies.sound:
        return None
    return ObservationInterval(
        step=step,
        canary=tallies[0],
        stable=tallies[1],
        shadow=copies,
        canary_latency=now.quantiles.get(candidate),
        stable_latency=now.quantiles.get(stable),
    )


def _unseen(later: RequestCounts | None) -> RequestCounts:
    """The counts of a deployment before it was counted for the first time."""
    if later is None:
        return RequestCounts()
    none = RequestCounts(timed=None if later.timed is None else 0)
    return none.with_over(dict.fromkeys(later.over(), 0))


def _over(name: str) -> str:
    return f"over_{name.removeprefix('latency_')}"


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
