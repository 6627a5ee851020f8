"""The service of analyses: it reads counts, records them, and returns verdicts.

A verdict is returned only after the counts that it depends on are recorded. If the service cannot
read or record counts of Prometheus, the verdict is `inconclusive` with the reason. A verdict `fail`
that is recorded and can be read takes precedence. Any number of instances can share the recorded
state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from onnx_ops.adapters.analysis_log import AnalysisLog
from onnx_ops.adapters.files import open_objects
from onnx_ops.adapters.metrics.revisions import RevisionCounters, RevisionsReading
from onnx_ops.config.analysis import AnalysisServiceConfig, AnalysisSettings
from onnx_ops.domain.rollout_analysis import (
    CLOCK_TOLERANCE_S,
    MAX_INTERVALS,
    AnalysisEntry,
    AnalysisPolicy,
    AnalysisStarted,
    AnalysisState,
    AnalysisVerdict,
    CountsRecorded,
    RolloutForgotten,
    RolloutKey,
    TrafficOpened,
    apply_entry,
    diff_revisions,
)
from onnx_ops.domain.rollout_observations import (
    MetricsReading,
    ObservationInterval,
    RequestCounts,
)
from onnx_ops.domain.rollout_policy import DAY
from onnx_ops.errors import (
    ConflictError,
    CorruptStateError,
    InfrastructureError,
    NotFoundError,
    OnnxOpsError,
    RefusedError,
    UserError,
)
from onnx_ops.ports import Clock
from onnx_ops.statistics.rollout.guardrails import fix_thresholds
from onnx_ops.statistics.rollout.verdict import is_share_changed, judge_state

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 8
"""Number of attempts to record, if other instances record at the same time."""
_LOCKS = 64
"""Number of locks of rollouts.

Rollouts whose keys' hashes have the same remainder share a lock.
"""
FRESH_S = 300.0
"""Maximum age of counts in seconds, unless three times `recording_s` is longer.

With older counts from Prometheus, the verdict is `inconclusive`.
"""
STORE_S = 5.0
"""Longest time of a request to an object store, in seconds."""
OPEN_S = 120.0
"""Seconds in which the permission for the first traffic is repeated.

The answer to the first request for it can be lost.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisAnswer:
    """A verdict with the state that it depends on.

    `is_ready` is True only if current counts of the stable revision were read from Prometheus and
    recorded. For counts of clients, it is always False.
    """

    state: AnalysisState
    verdict: AnalysisVerdict
    is_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCounts:
    """Counts of both revisions that a client sends.

    If `interval` is not empty, it is the id of the interval of the counts. Otherwise the counts
    grow since a start that `origin` identifies. `at` is their time in seconds since the epoch;
    None is the time of the request. `digest` is that of the sent document.
    """

    stable: RequestCounts
    canary: RequestCounts
    step: int | None = None
    interval: str = ""
    digest: str = ""
    origin: str = ""
    at: float | None = None


class AnalysisService:
    """Analyses of a configuration with their recorded rollouts."""

    def __init__(
        self,
        config: AnalysisServiceConfig,
        log: AnalysisLog,
        clock: Clock,
        counters: Mapping[str, RevisionCounters],
    ) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._counters = counters
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def get_settings(self, analysis: str) -> AnalysisSettings:
        """Return the settings of an analysis.

        Raises:
            NotFoundError: there is no such analysis.
        """
        settings = self._config.analyses.get(analysis)
        if settings is None:
            raise NotFoundError("no such analysis", where=analysis[:80])
        return settings

    def observe(
        self, key: RolloutKey, stable: str, canary: str, step: int | None = None
    ) -> AnalysisAnswer:
        """Read and record counts if they are due, and return the verdict.

        An unknown or abandoned rollout is started.

        Raises:
            NotFoundError: there is no such analysis.
            UserError: both revisions are the same.
        """
        settings = self.get_settings(key.analysis)
        _require_different(stable, canary)
        return self._guard(key, lambda: self._observe(key, stable, canary, settings.policy, step))

    def start(
        self, key: RolloutKey, stable: str, canary: str, policy: AnalysisPolicy
    ) -> AnalysisAnswer:
        """Start a rollout; no error if it was started with the same revisions and policy.

        Raises:
            NotFoundError: there is no such analysis.
            UserError: both revisions are the same.
            RefusedError: the rollout was started with other revisions, or another policy.
            InfrastructureError, ConflictError: the state cannot be read or recorded.
        """
        self.get_settings(key.analysis)
        _require_different(stable, canary)

        def start() -> AnalysisAnswer:
            state = self._log.read(key)
            if state.policy is not None:
                if (state.stable, state.canary, state.policy) != (stable, canary, policy):
                    raise RefusedError(
                        "the rollout was started with other revisions or another policy",
                        where=key.rollout,
                        remedy="Delete the rollout first, or start one with another name.",
                    )
                return self._answer(state)
            body = AnalysisStarted(stable=stable, canary=canary, policy=policy)
            return self._answer(self._log.append(state, body, self._clock.now()))

        return self._repeat(key, start)

    def show(self, key: RolloutKey) -> AnalysisAnswer:
        """Return the verdict of a started rollout; read counts first if they are due.

        A rollout that was deleted because of its age is inconclusive.

        Raises:
            NotFoundError: the analysis is unknown, or the rollout was not started, or is forgotten.
            InfrastructureError: the state cannot be read.
        """
        self.get_settings(key.analysis)
        state = self._log.read(key)
        if state.deleted:
            return _hold(state, state.deleted)
        state = self._require_started(key)
        if key.analysis not in self._counters:
            return self._answer(state)
        return self.observe(key, state.stable, state.canary)

    def add_counts(self, key: RolloutKey, counts: ClientCounts) -> AnalysisAnswer:
        """Record counts of a client, and return the verdict.

        Raises:
            NotFoundError: the analysis is unknown, or the rollout was not started, or is forgotten.
            RefusedError: the interval was sent with other counts, the time of the counts is in the
                future, or counts of this analysis come from Prometheus.
            InfrastructureError, ConflictError: the state cannot be read or recorded.
        """
        self.get_settings(key.analysis)
        if key.analysis in self._counters:
            raise RefusedError(
                "the counts were not recorded",
                where=key.analysis,
                why="all counts of this analysis come from Prometheus",
            )
        return self._repeat(key, lambda: self._add_counts(key, counts))

    def open_traffic(self, result: AnalysisAnswer) -> bool:
        """Permit the canary's first traffic; return whether the permission applies.

        The permission applies once for a rollout, if `result` is ready, and the canary has no
        request yet. It never applies after the verdict `fail`. It is repeated for `OPEN_S`.
        """
        state, now = result.state, self._clock.now()
        has_traffic = any(each.canary.requests for each in state.intervals) or bool(
            state.margins and state.margins[0]
        )
        if not result.is_ready or has_traffic or state.is_failed:
            return False
        if state.opened_at:
            return now - state.opened_at <= OPEN_S
        try:
            self._log.append(state, TrafficOpened(), now)
        except OnnxOpsError:  # The client repeats its request.
            return False
        return True

    def forget(self, key: RolloutKey) -> bool:
        """End the attempt of a rollout; return whether there was one.

        Raises:
            NotFoundError: there is no such analysis.
            InfrastructureError, ConflictError: the state cannot be read or recorded.
        """
        self.get_settings(key.analysis)

        def forget() -> bool:
            state = self._log.read(key)
            if state.policy is None:
                return False
            self._log.append(state, RolloutForgotten(), self._clock.now())
            return True

        return self._repeat(key, forget)

    def delete_old(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Delete rollouts that are older than `keep`; return the number of ended attempts.

        The age is that of the last entry, and must also exceed the rollout's `max_duration`. Faults
        are logged; the next call continues.
        """
        keep_s = self._config.keep
        why = f"the rollout was deleted: nothing was recorded for more than {keep_s / DAY:g} days"
        ended = 0
        try:
            for key in self._log.list_keys(skip_corrupt=True):
                if should_stop():
                    break
                ended += self._delete_old(key, keep_s, why)
        except OnnxOpsError as error:
            _log.warning("the deletion of old rollouts stopped: %s", error)
        return ended

    def _delete_old(self, key: RolloutKey, keep_s: float, why: str) -> bool:
        try:
            with self._locks[hash(key) % _LOCKS]:
                return self._log.delete_old(key, keep_s, why)
        except ConflictError:  # The rollout is in use again, or another instance deletes it.
            return False
        except CorruptStateError as error:
            _log.warning("a rollout was not deleted: %s", error)
            return False

    def _guard(self, key: RolloutKey, observe: Callable[[], AnalysisAnswer]) -> AnalysisAnswer:
        """Return the result, or `inconclusive` if the state cannot be read or recorded."""
        try:
            return self._repeat(key, observe)
        except (InfrastructureError, ConflictError) as error:
            return _hold(AnalysisState(key=key), str(error))

    def _repeat(self, key: RolloutKey, act: Callable[[], T]) -> T:
        """Return an action's result; repeat the action if another instance records first.

        At most `_ATTEMPTS` attempts are made.
        """
        with self._locks[hash(key) % _LOCKS]:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return act()
                except ConflictError:
                    continue
            return act()

    def _observe(
        self, key: RolloutKey, stable: str, canary: str, policy: AnalysisPolicy, step: int | None
    ) -> AnalysisAnswer:
        now = self._clock.now()
        state = self._log.read(key)
        if state.policy is None or state.is_abandoned(now):
            body = AnalysisStarted(stable=stable, canary=canary, policy=policy)
            state = self._log.append(state, body, now)
        policy = state.policy or policy
        if state.is_failed or state.is_expired(now) or key.analysis not in self._counters:
            return self._answer(state)
        step = max(state.step, step or 0)
        if step == state.step and now - state.recorded_at < policy.recording_s:
            return self._answer(state, is_ready=True)
        try:
            revisions = self._counters[key.analysis].read(state.stable, state.canary)
        except OnnxOpsError as error:
            return _hold(state, str(error))
        if why := _explain_unusable(state, revisions, now):
            return _hold(state, why)
        if state.reading is not None and revisions.at <= state.reading.at and step == state.step:
            return self._answer(state, is_ready=True)
        recorded = _make_counts(state, policy, revisions, step)
        return self._answer(self._log.append(state, recorded, now), is_ready=True)

    def _add_counts(self, key: RolloutKey, counts: ClientCounts) -> AnalysisAnswer:
        now = self._clock.now()
        state = self._require_started(key)
        policy = state.policy or AnalysisPolicy()
        if counts.at is not None and counts.at > now + CLOCK_TOLERANCE_S:
            raise RefusedError(
                f"the time of the counts is {counts.at - now:.0f} s in the future",
                where=key.rollout,
                remedy="Synchronize the clocks of the client and of this machine.",
            )
        if state.is_failed or state.is_expired(now):
            return self._answer(state)
        if len(state.intervals) >= MAX_INTERVALS:
            why = (
                f"the rollout has {MAX_INTERVALS} intervals, which is the maximum; start another "
                "rollout with longer intervals"
            )
            return _hold(state, why)
        body = _make_client_counts(state, counts, now)
        if body is None:
            return self._answer(state)
        return self._answer(self._log.append(state, _judge(state, policy, body), now))

    def _require_started(self, key: RolloutKey) -> AnalysisState:
        state = self._log.read(key)
        if state.policy is None:
            raise NotFoundError("the rollout was not started, or was deleted", where=key.rollout)
        return state

    def _answer(self, state: AnalysisState, *, is_ready: bool = False) -> AnalysisAnswer:
        """Return the recorded verdict if it is current, or `inconclusive`.

        The verdict `fail` is always current. Other verdicts are current until the rollout has
        lasted for `max_duration`, or the last counts are too old.
        """
        now = self._clock.now()
        verdict = state.verdict
        if verdict is None:
            return replace(_hold(state, "no counts are recorded yet"), is_ready=is_ready)
        if verdict.verdict == "fail":
            return AnalysisAnswer(state=state, verdict=verdict)
        if state.is_expired(now):
            return _hold(state, "the rollout took longer than max_duration")
        age = 0.0 if state.reading is None else now - state.reading.at
        policy = state.policy or AnalysisPolicy()
        is_stale = age > max(FRESH_S, 3 * policy.recording_s)
        if is_stale and state.key.analysis in self._counters:
            return _hold(state, f"the last counts from Prometheus are {age:.0f} s old")
        return AnalysisAnswer(state=state, verdict=verdict, is_ready=is_ready)


_PENDING = AnalysisVerdict(verdict="inconclusive", reason="")


def _require_different(stable: str, canary: str) -> None:
    if stable == canary:
        raise UserError("stable and canary are the same revision", where=stable)


def _hold(state: AnalysisState, why: str) -> AnalysisAnswer:
    """Return the verdict `inconclusive` with a reason, or the recorded verdict `fail`."""
    if state.verdict is not None and state.verdict.verdict == "fail":
        return AnalysisAnswer(state=state, verdict=state.verdict)
    known = state.verdict or _PENDING
    verdict = replace(known, verdict="inconclusive", reason=why, waits_for=known.waits_for or why)
    return AnalysisAnswer(state=state, verdict=verdict)


def _explain_unusable(state: AnalysisState, revisions: RevisionsReading, now: float) -> str:
    """Return why counts of Prometheus are not recorded, or an empty string."""
    if revisions.at > now + CLOCK_TOLERANCE_S:
        return (
            f"the clock of Prometheus is {revisions.at - now:.0f} s ahead of this machine's clock"
        )
    counts = revisions.revisions.get(state.stable)
    if counts is None or not counts.requests:
        return f"Prometheus has no requests of the stable revision {state.stable}"
    return ""


def _make_counts(
    state: AnalysisState, policy: AnalysisPolicy, revisions: RevisionsReading, step: int
) -> CountsRecorded:
    """Return the entry about counts of Prometheus.

    The thresholds of latency are fixed as soon as the stable revision has enough requests.
    """
    fixed = slower = None
    if state.thresholds is None and any(rail.name != "errors" for rail in policy.guardrails):
        histogram = revisions.latencies(state.stable)
        if histogram is not None:
            increases = policy.make_rollout_policy(0).max_latency_increases()
            fixed, slower = fix_thresholds(*histogram, increases)
    reading = revisions.make_reading(
        {state.stable: state.thresholds or fixed, state.canary: state.slower or slower}
    )
    reading = replace(
        reading,
        tallies={
            revision: reading.tallies.get(revision, RequestCounts())
            for revision in (state.stable, state.canary)
        },
    )
    body = replace(_compare(state, reading, step), thresholds=fixed, slower=slower)
    return _judge(state, policy, body)


def _compare(state: AnalysisState, reading: MetricsReading, step: int) -> CountsRecorded:
    """Return the entry about a reading, with the interval since the last reading.

    The first interval of a step only shows the split: a proxy can apply a weight after it was set.
    """
    body = CountsRecorded(step=step, reading=reading, verdict=_PENDING)
    if state.reading is None:
        return body
    if step != state.step:
        return replace(body, left_out=f"step {step} began")
    interval, why = diff_revisions(state.reading, reading, state)
    if interval is None:
        return replace(body, left_out=why)
    canary = interval.canary.requests
    margins = canary, canary + interval.stable.requests
    if not margins[1]:
        return replace(body, interval=interval)
    if state.margins is None:
        return replace(
            body, left_out="the share of traffic before this interval is unknown", margins=margins
        )
    if is_share_changed(state.margins, margins):
        return replace(body, left_out="the share of traffic changed", margins=margins)
    return replace(body, interval=interval, margins=margins)


def _make_client_counts(
    state: AnalysisState, counts: ClientCounts, now: float
) -> CountsRecorded | None:
    """Return the entry about counts of a client; None if they add nothing.

    Raises:
        RefusedError: the interval was sent with other counts.
    """
    step = max(state.step, counts.step or 0)
    if counts.interval:
        known = state.ids.get(counts.interval)
        if known is not None and known != counts.digest:
            raise RefusedError("this interval was sent with other counts", where=counts.interval)
        if known is not None:
            return None
        interval = ObservationInterval(step=step, canary=counts.canary, stable=counts.stable)
        return CountsRecorded(
            step=step,
            interval=interval,
            id=counts.interval,
            digest=counts.digest,
            verdict=_PENDING,
        )
    reading = MetricsReading(
        at=now if counts.at is None else counts.at,
        origin=counts.origin or "client",
        tallies={state.stable: counts.stable, state.canary: counts.canary},
    )
    last = state.reading
    is_known = last is not None and (
        reading.at < last.at
        or (
            last.tallies == reading.tallies and last.origin == reading.origin and step == state.step
        )
    )
    return None if is_known else _compare(state, reading, step)


def _judge(state: AnalysisState, policy: AnalysisPolicy, body: CountsRecorded) -> CountsRecorded:
    """Return the entry with the verdict that its counts lead to."""
    entry = AnalysisEntry(key=state.key, sequence=state.head + 1, at=0.0, body=body)
    return replace(body, verdict=judge_state(apply_entry(state, entry), policy))


def find_state(config: AnalysisServiceConfig, folder: Path) -> str:
    """Return the location of the state; a relative path is below `folder`."""
    return config.state if "://" in config.state else str(folder / config.state)


def make_service(config: AnalysisServiceConfig, folder: Path, clock: Clock) -> AnalysisService:
    """Return the service of a configuration; a relative `state` is below `folder`."""
    counters = {
        name: RevisionCounters(name, settings.prometheus)
        for name, settings in config.analyses.items()
        if settings.prometheus is not None
    }
    log = AnalysisLog(open_objects(find_state(config, folder), deadline_s=STORE_S), clock)
    return AnalysisService(config, log, clock, counters)
