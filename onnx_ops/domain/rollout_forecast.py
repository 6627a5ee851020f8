"""The forecast of a rollout: its inputs and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from onnx_ops.domain.rollout_policy import PlannedStep

CountSource: TypeAlias = Literal["units", "intervals", "percentiles"]
"""What a metrics source counts: units, events by interval, or only percentiles."""
WaitKind: TypeAlias = Literal[
    "requests",
    "timed requests",
    "units",
    "intervals",
    "comparisons",
    "service level",
    "copies",
    "users",
    "thresholds",
    "min_step_duration",
    "duration",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of an endpoint before a rollout.

    Attributes:
        rate: requests per second.
        errors: share of requests that fail.
        users: number of users with keys; 0 if requests have no key.
        counted: number of requests from which rate and errors were measured; 0 if they are given.
        bounds_s: upper bounds of the stable version's latency histogram in seconds; empty if
            unknown.
        latencies: requests in each bucket, one more than bounds.
        feedback: results that clients report for each request.
        success: share of successes among them.
    """

    rate: float
    errors: float = 0.0
    users: int = 0
    counted: int = 0
    bounds_s: tuple[float, ...] = ()
    latencies: tuple[int, ...] = ()
    feedback: float = 0.0
    success: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How counts reach the analysis of a rollout.

    `look_s` is the time between two passes of the reconciler. `lag_s` is the time until a closed
    epoch, or an interval of a metrics service, is reported. Both are in seconds.
    """

    source: CountSource = "units"
    look_s: float = 5.0
    lag_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """The smallest harm that a rollout has to find.

    For `errors` and `shadow`, `value` is the candidate's share of failed requests, or of differing
    answers. For `latency` and its percentiles, it is the factor by which all latencies grow, and
    for `feedback` that of the success rate.
    """

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A duration in seconds: the median, and the bounds of 90 % of rollouts.

    A value is None if the wait does not end within the simulated time.
    """

    median_s: float | None
    low_s: float | None
    high_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """A requirement of a step, and how long a healthy candidate waits for it.

    `needed` is the required number of what `kind` names, and `per_s` is its rate. The rate is 0 if
    it has no meaning.
    """

    kind: WaitKind
    needed: float
    duration: Duration
    per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmForecast:
    """How long it takes until a harm is found, counted from the start of the step.

    The times are valid if the step does not end earlier. They are None if the harm is not found
    within thirty times the duration of the step.

    Attributes:
        median_s: time within which half of rollouts find the harm.
        most_s: time within which 95 % find it.
        undetected: of the rollouts that reach the step, the share that leaves it before the harm is
            found.
        needed_requests: requests of the candidate within `most_s`.
    """

    harm: Harm
    median_s: float | None
    most_s: float | None
    undetected: float
    needed_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """The forecast of one step.

    `waits` are sorted by duration, the longest first. `timeout` is the share of rollouts in which
    the step pauses for an operator because `step_timeout` is over first.
    """

    step: PlannedStep
    duration: Duration
    waits: tuple[StepWait, ...]
    timeout: float
    harms: tuple[HarmForecast, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutForecast:
    """The forecast of a rollout.

    `total` is the time of a healthy candidate until it has all traffic, without approvals and cold
    starts. `harms` count from the start of the rollout. Their `undetected` is the share of rollouts
    in which the candidate gets all traffic.
    """

    traffic: Traffic
    steps: tuple[StepForecast, ...]
    total: Duration
    harms: tuple[HarmForecast, ...]
