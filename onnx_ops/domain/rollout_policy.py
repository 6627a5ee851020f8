"""The rollout policy of a pipeline file, and its planned steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le, Lt, MinLen, Unit, doc

from onnx_ops.domain.endpoint import MAX_EPOCH_S, MIN_EPOCH_S
from onnx_ops.domain.quantities import Count, Fraction, Notation, Seconds

DAY = 86_400.0

DEFAULT_EPOCH_S = 60.0
DEFAULT_MINIMUM = 300
"""Requests to the candidate that a step needs if the policy has no `min_requests`."""

DEFAULT_UNITS = 20

GuardrailName: TypeAlias = Literal[
    "errors", "latency", "latency_p50", "latency_p90", "latency_p95", "latency_p99", "cold_start"
]
LATENCY_QUANTILES: Mapping[str, float] = {
    "latency_p50": 0.5,
    "latency_p90": 0.9,
    "latency_p95": 0.95,
    "latency_p99": 0.99,
}
"""Guardrails of latency quantiles.

The number is the share of the stable version's requests below the threshold.
"""
LATENCY_PLACES: Mapping[str, float] = {
    f"latency@p{percent}": percent / 100 for percent in (*range(5, 100, 5), 99)
}
"""Places of the distribution that guardrail `latency` compares.

The number is the share of the stable version's requests below the place.
"""
StepKind: TypeAlias = Literal["cold", "shadow", "canary", "ab_test", "full"]

Share = Annotated[float, Unit("1"), Gt(0), Lt(1)]
"""A percentage above 0% and below 100%."""
OddsRatio = Annotated[float, Ge(1), Lt(100)]
COLD_START_SAMPLES = 8
"""Number of loads of each version that guardrail `cold_start` needs."""

DEFAULT_SLOWDOWN = 0.1
"""Slow-down that is tolerated by default.

With less traffic, the weights of a version are cached less often. A model of 47 MB took 12 % longer
with cold caches (docs/adr/0030-comparing-versions.md).
"""

_TOLERATED: Mapping[str, float] = {
    "latency_p95": 1.1,
    "latency_p99": 1.2,
    "latency@p95": 1.1,
    "latency@p99": 1.2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrail:
    """A measure that must not get worse: errors, latency or cold start.

    A latency guardrail compares how many requests of each version exceed a threshold. The threshold
    is a percentile of the stable version before the rollout; for the candidate, it is raised by
    `max_latency_increase`. `latency` without a percentile compares all of `LATENCY_PLACES`.
    `cold_start` is compared once, before the candidate gets any traffic.
    """

    name: Annotated[GuardrailName, Notation.SHORT_FORM, doc("Name of the guardrail.")]
    odds_ratio: Annotated[
        OddsRatio | None,
        doc(
            "Tolerated odds of an error or a slow request, as a multiple of the stable "
            "version's odds; default 1, p95 1.1, p99 1.2."
        ),
    ] = None
    max_latency_increase: Annotated[
        Fraction | None,
        doc("Tolerated slow-down against the stable version; default 10%."),
    ] = None
    max: Annotated[
        Seconds | None,
        doc(
            "cold_start only, instead of `max_latency_increase`: "
            "largest time from the start of a load until the candidate can answer."
        ),
    ] = None
    on_violation: Annotated[
        Literal["rollback", "hold"],
        doc(
            "Action if the candidate is worse: `rollback`, or `hold` at this step for an operator."
        ),
    ] = "rollback"

    @property
    def places(self) -> Sequence[str]:
        """Names of the events that the guardrail compares."""
        return tuple(LATENCY_PLACES) if self.name == "latency" else (self.name,)

    def tolerated(self, place: str) -> float:
        """Return the odds ratio that is tolerated at a place."""
        return _TOLERATED.get(place, 1.0) if self.odds_ratio is None else self.odds_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """An absolute target that a candidate must be shown to meet to get more traffic."""

    error_rate: Annotated[Share, doc("Error rate that the candidate must be shown to stay below.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowTrial:
    """A trial on copies of requests: answers are compared, and reach no client."""

    fraction: Annotated[float, Unit("1"), Gt(0), Le(1), doc("Share of requests to copy.")] = 1.0
    min_requests: Annotated[Count, doc("Number of answers to compare before traffic moves.")] = 500
    max_differing: Annotated[Share, doc("Tolerated share of answers that differ or fail.")] = 0.01
    tolerance: Annotated[
        float,
        Unit("1"),
        Ge(0),
        Lt(1),
        doc(
            "A number differs if its error exceeds this share of the largest absolute value in its "
            "output."
        ),
    ] = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTest:
    """A fixed split until clients' feedback shows a better version or time runs out."""

    split: Annotated[Share, doc("The candidate's share of traffic.")] = 0.5
    duration: Annotated[Seconds, doc("Longest time to wait for a decision.")]
    goal: Annotated[Literal["higher", "lower"], doc("Which success rate is better.")] = "higher"
    on_inconclusive: Annotated[
        Literal["hold", "finish", "abort"],
        doc("Action after `duration` if no version is shown to be better."),
    ] = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a rollout.

    `percent` is the candidate's percentage of traffic. `mirror_percent` is the percentage of
    requests that are copied to the candidate in a shadow step. Both are 0 in a step that measures
    the cold start.

    `minimum` is the number of requests to the candidate, or of copies, that the step needs. It is 0
    without analysis, in the step of the cold start, and in the last step. `approval`: whether a
    step with analysis ends only after an operator's command. Without analysis, it is False, and
    each step before the last waits for the command.
    """

    kind: StepKind
    percent: int
    mirror_percent: int = 0
    minimum: int = 0
    approval: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPolicy:
    """How traffic is moved to the challenger.

    Without guardrails, slo, shadow or ab_test, each step before 100% waits for approval.
    """

    steps: Annotated[
        tuple[Fraction, ...], MinLen(1), doc("Traffic shares of the candidate, ending at 100%.")
    ] = (1.0,)
    scale_down_delay: Annotated[
        Seconds, doc("How long the previous version stays loaded after the last step.")
    ] = DAY
    strategy: Annotated[
        Literal["all-at-once", "canary", "ab_test", "shadow"] | None,
        doc("Kind of rollout; the other keys must match it. Default: derived from them."),
    ] = None
    guardrails: Annotated[
        tuple[Guardrail, ...],
        doc(
            "What must not get worse: errors, latency, latency_p50, latency_p90, "
            "latency_p95, latency_p99, cold_start."
        ),
    ] = ()
    min_requests: Annotated[
        tuple[Count, ...],
        Notation.SINGLE_ENTRY,
        doc(
            "Requests to the candidate before a step ends: one number, or one for each step; "
            "default 300."
        ),
    ] = ()
    min_units: Annotated[
        Count,
        doc(
            "Independent units of the candidate before a step ends: "
            "users in an epoch and requests without a key; in an A/B test, users of each version."
        ),
    ] = DEFAULT_UNITS
    slo: Annotated[
        ServiceLevel | None, doc("Service level that must be shown before each advance.")
    ] = None
    epoch: Annotated[
        Seconds,
        Ge(MIN_EPOCH_S),
        Le(MAX_EPOCH_S),
        doc(
            "How long a user stays with one version in a canary step; "
            "then all users are assigned anew."
        ),
    ] = DEFAULT_EPOCH_S
    min_step_duration: Annotated[
        Seconds | None,
        doc(
            "Shortest time at each step, except that of the cold start, regardless of the number "
            "of requests."
        ),
    ] = None
    step_timeout: Annotated[
        Seconds, doc("Time after which an inconclusive step pauses for an operator.")
    ] = DAY
    approval_steps: Annotated[
        tuple[Fraction, ...], doc("Steps that advance only after `onnx-ops rollout advance`.")
    ] = ()
    depends_on: Annotated[
        tuple[str, ...],
        doc("Endpoints of this file that must serve the release before this rollout starts."),
    ] = ()
    depends_on_soak: Annotated[
        Seconds, doc("How long the endpoints of `depends_on` must have served the release.")
    ] = 0.0
    shadow: Annotated[
        ShadowTrial | None, doc("Comparison of answers on copies of requests, before any traffic.")
    ] = None
    ab_test: Annotated[
        SplitTest | None, doc("A/B test by a success metric, after the steps and before 100%.")
    ] = None

    def max_latency_increases(self) -> Mapping[str, float]:
        """Return the tolerated slow-down of the candidate, by guardrail or place.

        Each value is a fraction of the stable version's latency.
        """
        limits = {
            place: rail.max_latency_increase for rail in self.guardrails for place in rail.places
        }
        ordered = {
            name: limits[name] for name in (*LATENCY_QUANTILES, *LATENCY_PLACES) if name in limits
        }
        return dict.fromkeys(LATENCY_QUANTILES, DEFAULT_SLOWDOWN) | {
            k: DEFAULT_SLOWDOWN if v is None else v for k, v in ordered.items()
        }

    @property
    def is_analyzed(self) -> bool:
        """Return whether metrics decide about the steps of the rollout."""
        return bool(self.guardrails or self.slo or self.shadow or self.ab_test)

    @property
    def cold(self) -> Guardrail | None:
        """The guardrail of the cold start; None without such a guardrail."""
        return next((rail for rail in self.guardrails if rail.name == "cold_start"), None)

    @property
    def has_latency(self) -> bool:
        """Return whether a guardrail compares latencies in the steps of the rollout."""
        return any(rail.name not in ("errors", "cold_start") for rail in self.guardrails)

    @property
    def trials(self) -> tuple[float, ...]:
        """Traffic shares before 100 %; the share of the A/B test is last."""
        return (*self.steps[:-1], *((self.ab_test.split,) if self.ab_test else ()))

    def planned(self) -> tuple[PlannedStep, ...]:
        """Return every step in order; the last one is 100 %."""
        return _plan_steps(self)

    def needs(self) -> Mapping[str, tuple[str, ...]]:
        """Return the capabilities that a provider must have.

        Each capability is returned with the path of a key that requires it.
        """
        needs: dict[str, tuple[str, ...]] = {}
        if any(rail.name in ("latency", "latency_p90", "latency_p95") for rail in self.guardrails):
            needs["exceedances"] = ("guardrails",)
        if self.cold:
            needs["cold_starts"] = ("guardrails",)
        if self.shadow:
            needs["shadow"] = ("shadow",)
        if len(self.steps) > 1:
            needs["split"] = ("steps",)
        if self.ab_test:
            needs |= dict.fromkeys(("split", "sticky", "feedback"), ("ab_test",))
        return needs


@functools.lru_cache(maxsize=256)
def _plan_steps(policy: RolloutPolicy) -> tuple[PlannedStep, ...]:
    steps = [PlannedStep(kind="cold", percent=0)] if policy.cold else []
    if policy.shadow:
        mirror_percent = round(policy.shadow.fraction * 100)
        steps.append(
            PlannedStep(
                kind="shadow",
                percent=0,
                mirror_percent=mirror_percent,
                minimum=policy.shadow.min_requests,
            )
        )
    minimums = policy.min_requests or (DEFAULT_MINIMUM,)
    for index, share in enumerate(policy.trials):
        steps.append(
            PlannedStep(
                kind="ab_test" if index == len(policy.steps) - 1 else "canary",
                percent=round(share * 100),
                minimum=minimums[min(index, len(minimums) - 1)] if policy.is_analyzed else 0,
                approval=any(
                    round(share * 100) == round(stop * 100) for stop in policy.approval_steps
                ),
            )
        )
    return (*steps, PlannedStep(kind="full", percent=round(policy.steps[-1] * 100)))
