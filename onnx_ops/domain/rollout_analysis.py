"""Analyses of rollouts that other programs move: Argo Rollouts and Flagger.

An *analysis* is a named policy: what is compared, and what is tolerated. A *rollout* compares a
canary with a stable revision. Its state is the fold of recorded entries. An entry with counts also
has the resulting verdict, so that a recorded verdict does not depend on the code that reads it. A
failed verdict is final: later entries of the same attempt do not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Le, MinLen, doc

from onnx_ops.domain.artifact import digest_json, hex_digits
from onnx_ops.domain.quantities import OMIT_DEFAULT, Count, Notation, Seconds
from onnx_ops.domain.rollout import GuardrailResult
from onnx_ops.domain.rollout_observations import (
    LatencyThresholds,
    MetricsReading,
    ObservationInterval,
    RequestCounts,
)
from onnx_ops.domain.rollout_policy import (
    DAY,
    Guardrail,
    RolloutPolicy,
    ServiceLevel,
)

MAX_INTERVALS = 2_000
"""Maximum number of intervals of one attempt.

Whenever an interval is added, the evidence is computed from all intervals again.
"""
LONGEST_GAP_S = 600.0
"""Longest time in seconds that one interval can cover, unless readings are rare.

`AnalysisPolicy.longest_s` is then longer. A longer interval is left out, because it could hide a
change of the traffic split that was reverted within the interval.
"""
CLOCK_TOLERANCE_S = 60.0
"""Tolerated lead of another machine's clock, in seconds.

Counts with a later time are refused.
"""

VerdictKind: TypeAlias = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisPolicy:
    """What is compared between the two revisions, and what is tolerated."""

    guardrails: Annotated[
        tuple[Guardrail, ...],
        MinLen(1),
        doc(
            "What must not get worse: errors, latency, latency_p50, latency_p90, latency_p95, "
            "latency_p99."
        ),
    ] = (Guardrail(name="errors"),)
    min_requests: Annotated[
        tuple[Count, ...],
        Notation.SINGLE_ENTRY,
        doc(
            "Requests of the canary before a verdict `pass`: one number, or one for each step; "
            "default 300."
        ),
    ] = ()
    slo: Annotated[
        ServiceLevel | None, doc("Service level that must be shown before a verdict `pass`.")
    ] = None
    assignment: Annotated[
        Literal["request", "sticky"],
        doc(
            "How the proxy assigns a revision: `request` if it draws one for each request, "
            "`sticky` if a user or a connection stays with one."
        ),
    ] = "request"
    interval: Annotated[Seconds, doc("Shortest time between two recorded readings.")] = 15.0
    max_duration: Annotated[
        Seconds,
        Le(30 * DAY),
        doc("Time after which the verdict is `inconclusive`, unless it is `fail`."),
    ] = DAY

    @property
    def recording_s(self) -> float:
        """Shortest time between two recorded readings, in seconds.

        It is at least `interval`, and so long that `max_duration` has at most `MAX_INTERVALS`.
        """
        return max(self.interval, self.max_duration / MAX_INTERVALS)

    @property
    def longest_s(self) -> float:
        """Longest time that an interval can cover, in seconds."""
        return max(LONGEST_GAP_S, 5 * self.recording_s)

    def make_rollout_policy(self, step: int) -> RolloutPolicy:
        """Return the policy of the rollout up to a step.

        The shares of traffic are those of other programs, and unknown here. The policy contains a
        placeholder for them, on which no result depends.
        """
        return RolloutPolicy(
            steps=(*[0.5] * (step + 1), 1.0),
            guardrails=self.guardrails,
            min_requests=self.min_requests,
            slo=self.slo,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutKey:
    """Identity of a rollout of an analysis.

    `stable`, `canary` and `checksum` are empty where the client names a rollout only by its name.
    """

    analysis: str
    rollout: str
    stable: str = ""
    canary: str = ""
    checksum: str = ""

    @property
    def folder(self) -> str:
        """Path of the folder of the rollout's entries, below that of its analysis.

        The last part is a digest of the names that the client sent, so that no such name can refer
        to another folder.
        """
        names = [self.rollout, self.stable, self.canary, self.checksum]
        return f"{self.analysis}/{hex_digits(digest_json(names))[:32]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisVerdict:
    """A verdict, its reason, and the results of the guardrails.

    `waits_for` names the first requirement of a verdict that is not met yet. `requests` are those
    of the canary and of the stable revision in the present step.
    """

    verdict: VerdictKind
    reason: str
    waits_for: str = ""
    requests: tuple[int, int] = (0, 0)
    guardrails: tuple[GuardrailResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisStarted:
    """The start of an attempt, with the policy that applies to it."""

    kind: Literal["started"] = "started"
    stable: str
    canary: str
    policy: AnalysisPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsRecorded:
    """Counts of both revisions, and the resulting verdict.

    `reading` is where the next interval starts; None for counts that a client sends by interval.
    `interval` is None for a first reading, or if it was left out for the reason `left_out`.
    `margins` are the requests of the canary and of both revisions since the last reading, if they
    are known. `id` and `digest` identify counts that a client sent.
    """

    kind: Literal["counts"] = "counts"
    step: int
    verdict: AnalysisVerdict
    reading: MetricsReading | None = None
    interval: ObservationInterval | None = None
    left_out: str = ""
    margins: tuple[int, int] | None = None
    thresholds: LatencyThresholds | None = None
    slower: LatencyThresholds | None = None
    id: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOpened:
    """Permission for the first traffic of the canary, which needs no evidence."""

    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutForgotten:
    """The end of an attempt, after which nothing of it is used.

    `why` is empty if a client requested it. Otherwise, it explains why the rollout was deleted.
    """

    kind: Literal["forgotten"] = "forgotten"
    why: str = ""


EntryBody: TypeAlias = AnalysisStarted | CountsRecorded | TrafficOpened | RolloutForgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisEntry:
    """One entry of a rollout's log; `at` is in seconds since the epoch."""

    key: RolloutKey
    sequence: int
    at: float
    body: EntryBody


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisState:
    """State of a rollout after a number of entries.

    `head` is the sequence number of the last entry, and `changed_at` its time. `recorded_at` is the
    time of the last counts, and `opened_at` that of the permission for traffic; 0 without one. All
    times are in seconds since the epoch. An attempt is in progress if `policy` is not None.
    `deleted` is why the last attempt was deleted, if it was. `ids` maps the ids of the counts that
    a client sent to the digests of the counts. `left_out` is the number of intervals that were left
    out, and `left_out_reason` why the last of them was.
    """

    key: RolloutKey
    head: int = 0
    changed_at: float = 0.0
    deleted: str = ""
    stable: str = ""
    canary: str = ""
    policy: AnalysisPolicy | None = None
    started_at: float = 0.0
    recorded_at: float = 0.0
    opened_at: float = 0.0
    step: int = 0
    reading: MetricsReading | None = None
    margins: tuple[int, int] | None = None
    intervals: tuple[ObservationInterval, ...] = ()
    thresholds: LatencyThresholds | None = None
    slower: LatencyThresholds | None = None
    ids: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    left_out: int = 0
    left_out_reason: str = ""
    verdict: AnalysisVerdict | None = None

    @property
    def is_failed(self) -> bool:
        """Whether the verdict is `fail`, which is final."""
        return self.verdict is not None and self.verdict.verdict == "fail"

    def is_expired(self, now: float) -> bool:
        """Return whether the attempt has lasted longer than its policy allows."""
        return self.policy is not None and now - self.started_at > self.policy.max_duration

    def is_abandoned(self, now: float) -> bool:
        """Return whether the attempt is so old that a new query starts another attempt.

        A failed attempt is never abandoned.
        """
        return (
            self.policy is not None
            and not self.is_failed
            and self.is_expired(now)
            and now - max(self.recorded_at, self.started_at) > self.policy.max_duration
        )

    def is_over(self, now: float, keep_s: float) -> bool:
        """Return whether the last entry is so old that the rollout can be deleted.

        It must be older than `keep_s` and than `max_duration`, within which an attempt in progress
        adds an entry.
        """
        longest_s = 0.0 if self.policy is None else self.policy.max_duration
        return now - self.changed_at > max(keep_s, longest_s)


def apply_entry(state: AnalysisState, entry: AnalysisEntry) -> AnalysisState:
    """Return the state after one more entry."""
    head = replace(state, head=entry.sequence, changed_at=entry.at)
    match entry.body:
        case AnalysisStarted(stable=stable, canary=canary, policy=policy):
            return AnalysisState(
                key=state.key,
                head=entry.sequence,
                changed_at=entry.at,
                stable=stable,
                canary=canary,
                policy=policy,
                started_at=entry.at,
            )
        case RolloutForgotten(why=why):
            return AnalysisState(
                key=state.key, head=entry.sequence, changed_at=entry.at, deleted=why
            )
        case TrafficOpened():
            return replace(head, opened_at=entry.at)
        case CountsRecorded():
            return _apply_counts(head, entry.body, entry.at)


def _apply_counts(state: AnalysisState, body: CountsRecorded, at: float) -> AnalysisState:
    intervals = state.intervals if body.interval is None else (*state.intervals, body.interval)
    margins = state.margins if body.step == state.step else None
    return replace(
        state,
        recorded_at=at,
        step=body.step,
        reading=state.reading if body.reading is None else body.reading,
        margins=margins if body.margins is None else body.margins,
        intervals=intervals,
        thresholds=body.thresholds or state.thresholds,
        slower=body.slower or state.slower,
        ids={**state.ids, body.id: body.digest} if body.id else state.ids,
        left_out=state.left_out + bool(body.left_out),
        left_out_reason=body.left_out or state.left_out_reason,
        verdict=state.verdict if state.is_failed else body.verdict,
    )


def fold_entries(key: RolloutKey, entries: Iterable[AnalysisEntry]) -> AnalysisState:
    """Return the state after all entries of a rollout."""
    state = AnalysisState(key=key)
    for entry in entries:
        state = apply_entry(state, entry)
    return state


def diff_revisions(
    before: MetricsReading, now: MetricsReading, state: AnalysisState
) -> tuple[ObservationInterval | None, str]:
    """Return the interval between two readings, or why it must be left out.

    The reason is empty if there is an interval.
    """
    if before.origin != now.origin:
        return None, "the origin of the counts changed, as after a restart of a Prometheus target"
    counts = []
    for revision in (state.canary, state.stable):
        difference = now.tallies.get(revision, RequestCounts()).minus(
            _align(before.tallies.get(revision, RequestCounts()), now.tallies.get(revision))
        )
        if difference is None:
            return None, f"counts of revision {revision} fell or contradict each other"
        counts.append(difference)
    seconds = now.at - before.at
    if state.policy is not None and seconds > state.policy.longest_s:
        return None, f"{seconds:.0f} s passed without a reading"
    if not before.tallies.get(state.canary, RequestCounts()).requests and counts[0].requests:
        return None, "the traffic of the canary began within the interval"
    interval = ObservationInterval(
        step=state.step, canary=counts[0], stable=counts[1], seconds=seconds
    )
    return interval, ""


def _align(before: RequestCounts, now: RequestCounts | None) -> RequestCounts:
    """Return earlier counts, with `timed` 0 if only one of the counts has a histogram."""
    if now is None or (before.timed is None) == (now.timed is None):
        return before
    return replace(before, timed=0).with_over(dict.fromkeys(now.over(), 0))


def make_document(state: AnalysisState, verdict: AnalysisVerdict) -> dict[str, Any]:
    """Return a verdict as the JSON document of the HTTP service.

    Evidence and limit are odds: 60 stands for 60:1.
    """
    canary, stable = verdict.requests
    return {
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "waits_for": verdict.waits_for,
        "analysis": state.key.analysis,
        "rollout": state.key.rollout,
        "stable": state.stable or state.key.stable,
        "canary": state.canary or state.key.canary,
        "checksum": state.key.checksum,
        "step": state.step,
        "requests": {"canary": canary, "stable": stable},
        "intervals": len(state.intervals),
        "left_out": state.left_out,
        "left_out_reason": state.left_out_reason,
        "recorded_at": state.recorded_at,
        "guardrails": [_describe_guardrail(each) for each in verdict.guardrails],
    }


def _describe_guardrail(result: GuardrailResult) -> dict[str, Any]:
    known = result.low is not None and result.high is not None
    return {
        "name": result.name,
        "canary": {"events": result.canary[0], "requests": result.canary[1]},
        "stable": {"events": result.stable[0], "requests": result.stable[1]},
        "evidence": _to_odds(result.evidence),
        "limit": _to_odds(result.limit),
        "odds_ratio": {"low": result.low, "high": result.high} if known else None,
        "summary": result.summary,
    }


def _to_odds(log10: float) -> float:
    return float(f"{10 ** min(max(log10, -300.0), 300.0):.4g}")
