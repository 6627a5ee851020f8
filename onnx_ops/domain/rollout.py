"""The rollout state machine: its values, and the function for the next action.

    first-deployment -> (start -> advance* -> finish) -> retire-previous
                                    \\-> abort                  \\-> rollback

`choose_next_action` takes the desired deployment, the observed endpoint, the roles of the ledger
and the policy. It also takes the analysis of the metrics, the operator's command and the time. It
returns the one `Action` to perform, or the reason to `Wait`. It depends on no provider, registry or
process.
`release.reconcile` applies the action through `release.effects`, which records the action through
`release.journal`. `domain.ledger` folds the record into the roles. `domain.rollout_policy` plans
the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.endpoint import Deployment, EndpointState, TrafficSplit
from onnx_ops.domain.rollout_policy import PlannedStep, RolloutPolicy, SplitTest

_NO_TRAFFIC = PlannedStep(kind="canary", percent=0)
_NO_FEEDBACK = "no feedback was reported"
_REPORTED_DESIGN_EFFECT = 1.5
"""Smallest design effect that a guardrail's summary mentions."""


class ActionKind(StrEnum):
    """Kinds of effects on an endpoint. The values are stored."""

    FIRST = "first-deployment"
    START = "start"
    ADVANCE = "advance"
    FINISH = "finish"
    ABORT = "abort"
    ROLLBACK = "rollback"
    RETIRE = "retire-previous"
    RESTORE = "restore"
    CLEAN_UP = "clean-up"
    RECONFIGURE = "reconfigure"


class OperatorCommand(StrEnum):
    """Commands of an operator for a rollout in progress. The values are stored.

    `ADVANCE` skips the checks of the present step that have not passed yet. `RESUME` ends a pause,
    after which the checks decide again.
    """

    ADVANCE = "advance"
    PAUSE = "pause"
    RESUME = "resume"


class WaitKind(StrEnum):
    """Reasons to do nothing now. The values are stored."""

    IDLE = "idle"
    ANALYZING = "analyzing"
    REPLACING = "replacing-instances"
    APPROVAL = "waiting-for-approval"
    PAUSED = "paused"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Deployments of one endpoint by role.

    `step` is an index of the policy's planned steps while there is a candidate. `finished_at` is
    when the last rollout finished, in seconds since the epoch. It is 0 once `previous` is retired,
    a new rollout starts, or a rollback takes effect.
    """

    stable: Deployment | None = None
    previous: Deployment | None = None
    candidate: Deployment | None = None
    step: int = 0
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One effect on an endpoint: the state to apply, and the resulting roles.

    `aliases` are the registry writes that follow (None deletes the alias). `reject` are releases
    that require an override to return, or manifests of single versions whose release stays in
    service.
    """

    kind: ActionKind
    state: EndpointState
    roles: Roles
    why: str
    aliases: Mapping[str, str | None] = field(default_factory=dict)
    reject: tuple[Digest, ...] = ()

    @property
    def is_rollback(self) -> bool:
        """Whether the action moves all traffic back to one version."""
        return self.kind in (ActionKind.ABORT, ActionKind.ROLLBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The decision to perform no action now, and the reason.

    Every pass decides again, so that a wait ends once its reason no longer applies. A pause by an
    operator ends only on an operator's command, or with the rollout.
    """

    why: str
    kind: WaitKind = WaitKind.IDLE


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailResult:
    """The result of one guardrail, with the evidence against the candidate.

    Attributes:
        percentile: the percentile at which the counts are strongest evidence against the candidate.
        canary: events among the requests of the candidate, and all its requests.
        stable: events among the requests of the stable version, and all its requests.
        units: units with any event, and all units, of candidate and stable version, where the
            source counts them.
        evidence: log10 of the evidence against the candidate.
        limit: log10 of the evidence that is a violation.
        low: lower bound of the odds ratio at any time; None where not computed.
        high: upper bound of the odds ratio at any time; None where not computed.
        design_effect: where units are not counted, how many requests contain the information of one
            independent request.
        holds: whether a violation pauses the rollout; otherwise a violation aborts it.
        compared: number of observations on which the evidence of the present step is based.
        required: the value of `compared` that the step needs.
        rule: description of what was compared, if that is not a pair of counts.
    """

    name: str
    percentile: str = ""
    canary: tuple[int, int] = (0, 0)
    stable: tuple[int, int] = (0, 0)
    units: tuple[tuple[int, int], tuple[int, int]] | None = None
    evidence: float = 0.0
    limit: float
    low: float | None = None
    high: float | None = None
    design_effect: float = 1.0
    holds: bool = False
    compared: int = 0
    required: int = 0
    rule: str = ""

    @property
    def is_violated(self) -> bool:
        """Whether the evidence reaches the limit."""
        return self.evidence >= self.limit

    @property
    def summary(self) -> str:
        """One line about the guardrail's result, for messages and reports."""
        where = f"above {self.percentile} " if self.percentile else ""
        parts = [
            self.rule
            or f"{where}canary {_format_share(*self.canary)} vs stable "
            f"{_format_share(*self.stable)}"
        ]
        if self.units is not None:
            (mine, of_mine), (theirs, of_theirs) = self.units
            parts.append(f"{mine} of {of_mine} units vs {theirs} of {of_theirs}")
        details = (
            []
            if self.low is None or self.high is None
            else [f"odds ratio {self.low:.3g}-{self.high:.3g}"]
        )
        if self.design_effect >= _REPORTED_DESIGN_EFFECT:
            details.append(f"design effect {self.design_effect:.2g}")
        details.append(f"evidence {_format_odds(self.evidence)} (limit {_format_odds(self.limit)})")
        text = f"{self.name}: {'; '.join([*parts, ', '.join(details)])}"
        return f"{text} -> {'HOLD' if self.holds else 'ROLL BACK'}" if self.is_violated else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOutlier:
    """A server whose share of bad requests to a deployment differs from others.

    `place` names what makes a request bad, such as `errors`. `own` and `others` are the numbers of
    bad requests and of all requests, on this server and on the others. `evidence` is the log10 of
    the evidence. The result is only a hint, because it treats requests as independent.
    """

    server: str
    deployment: str
    place: Literal["errors", "slow"]
    own: tuple[int, int]
    others: tuple[int, int]
    evidence: float

    @property
    def summary(self) -> str:
        """One line about the server, for messages and reports."""
        what = "failed" if self.place == "errors" else "were slow"
        return (
            f"replica {self.server}: {_format_share(*self.own)} requests to {self.deployment} "
            f"{what}, {_format_share(*self.others)} on the others (evidence "
            f"{_format_odds(self.evidence)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisResult:
    """The result of the analysis of the present step's metrics.

    Texts are empty where there is nothing to report. `started_at` is when the step took effect.
    `requests` counts the candidate's requests since then (copies in a shadow step). `unmet_target`
    describes what the step still lacks, such as evidence for a service level, or independent units.
    `split_mismatch` describes traffic that is not split as planned. `gross_failure` describes a
    candidate that fails or refuses far more requests than the stable version. `ab_outcome` is the
    outcome of the A/B test. `outliers` have no effect on the rollout.
    """

    started_at: float
    requests: int = 0
    guardrails: tuple[GuardrailResult, ...] = ()
    unmet_target: str = ""
    split_mismatch: str = ""
    gross_failure: str = ""
    ab_outcome: Literal["better", "worse", "undecided"] = "undecided"
    ab_summary: str = ""
    outliers: tuple[ServerOutlier, ...] = ()

    @property
    def abort_reason(self) -> str:
        """Why the candidate must be rolled back, in one line, or empty."""
        worst = self._worst_violation(holds=False)
        return (
            self.gross_failure or worst or (self.ab_summary if self.ab_outcome == "worse" else "")
        )

    @property
    def hold_reason(self) -> str:
        """Why the candidate must not get more traffic, in one line, or empty."""
        return self._worst_violation(holds=True)

    def _worst_violation(self, *, holds: bool) -> str:
        violated = [
            guard for guard in self.guardrails if guard.is_violated and guard.holds is holds
        ]
        return (
            max(violated, key=lambda guard: guard.evidence - guard.limit).summary
            if violated
            else ""
        )


def format_alias(role: str, target: str) -> str:
    """Return the registry alias of a role on a target, such as `champion-cpu-1t`."""
    return f"{role}-{target}"


def choose_next_action(
    *,
    desired: Deployment | None,
    observed: EndpointState | None,
    roles: Roles,
    policy: RolloutPolicy,
    target: str,
    command: OperatorCommand | None,
    now: float,
    analysis: AnalysisResult | None = None,
    draws_epochs: bool = False,
    has_fleet: bool = False,
) -> Action | Wait:
    """Return the next action, or the reason to wait.

    Without analysis, each step before 100 % waits for an operator. Otherwise `analysis` determines
    the steps. A command to advance then skips the requirements that are still missing. A candidate
    that a guardrail rejects is rolled back regardless of commands. No candidate advances while the
    provider changes instances.

    Args:
        desired: the verified deployment that the registry requests; None if it requests none.
        observed: the state that the provider reports; None if the endpoint is unreachable or
            missing, or if one of its deployments is missing.
        command: the operator's last command that is not carried out yet.
        now: seconds since the epoch.
        draws_epochs: whether the provider can assign users anew in each epoch.
        has_fleet: whether the provider changes instances separately from the traffic.
    """
    stable = roles.stable
    if stable is None:
        return _deploy_first(desired, target)
    rollout = _Rollout(stable, roles, policy, target, command, now, analysis, draws_epochs)
    if (abort := rollout.find_abort(desired)) is not None:
        return abort
    expected = rollout.build_expected_state()
    if observed is None or not observed.covers(expected):
        why = "the endpoint does not report its expected state"
        return Action(kind=ActionKind.RESTORE, state=expected, roles=roles, why=why)
    if (hold := rollout.find_hold(observed)) is not None:
        return hold
    step = None if roles.candidate is None else rollout.proceed(roles.candidate)
    is_step_first = isinstance(step, Wait) or not (has_fleet and observed.drift)
    if step is not None and is_step_first:
        return step
    if observed.drift:
        # Drift is corrected before a rollout, so that both versions run with the same options. For
        # a fleet, it is also corrected before each later step.
        why = f"the endpoint does not match its options: {'; '.join(observed.drift)}"
        return Action(kind=ActionKind.RECONFIGURE, state=expected, roles=roles, why=why)
    if desired is not None and desired.manifest != stable.manifest:
        return rollout.move_to_step(0, desired)
    return rollout.tidy(observed, expected)


def plan_abort(roles: Roles, target: str, *, why: str, reject: bool) -> Action:
    """Return the action that gives the stable version all traffic.

    The candidate stays loaded without traffic. With `reject`, its release is rejected, and the
    challenger's alias is deleted. If the stable version has the same release, only the candidate's
    version is rejected.

    Raises:
        ValueError: no rollout is in progress.
    """
    if roles.candidate is None or roles.stable is None:
        raise ValueError("no rollout is in progress")
    return Action(
        kind=ActionKind.ABORT,
        state=build_split_state(roles.stable, roles.candidate, 0),
        roles=replace(roles, candidate=None, step=0),
        why=why,
        aliases={format_alias("challenger", target): None} if reject else {},
        reject=_rejected((roles.candidate,), roles.stable) if reject else (),
    )


def plan_rollback(roles: Roles, to: Deployment, target: str, *, why: str) -> Action:
    """Return the action that gives `to` all traffic and rejects the other versions.

    The stable version and the candidate are rejected, unless they have the files of `to`. They stay
    loaded without traffic.
    """
    left = [
        d for d in (roles.candidate, roles.stable) if d is not None and d.manifest != to.manifest
    ]
    return Action(
        kind=ActionKind.ROLLBACK,
        state=build_split_state(to, None, 0, *left),
        roles=Roles(stable=to),
        why=why,
        aliases={
            format_alias("champion", target): to.version,
            format_alias("previous", target): None,
            format_alias("challenger", target): None,
        },
        reject=_rejected(left, to),
    )


def plan_reversal(roles: Roles, begun: Action, target: str, *, why: str) -> Action | None:
    """Return the action that reverses `begun`, which started at `roles`.

    A version must have been stable before, and `begun` must start, advance or finish a rollout.
    Otherwise, return None.
    """
    if roles.stable is None or begun.kind not in (
        ActionKind.START,
        ActionKind.ADVANCE,
        ActionKind.FINISH,
    ):
        return None
    if roles.candidate is not None:
        return plan_abort(roles, target, why=why, reject=True)
    return plan_rollback(begun.roles, roles.stable, target, why=why)


def build_split_state(
    stable: Deployment | None,
    candidate: Deployment | None,
    percent: int,
    *idle: Deployment,
    mirror_percent: int = 0,
    tolerance: float | None = None,
    epoch_s: float = 0.0,
) -> EndpointState:
    """Return the state with `percent` of the traffic on `candidate`.

    `stable` receives the rest.

    Args:
        idle: deployments that stay loaded without traffic.
        mirror_percent: percentage of requests that are copied to the candidate.
        tolerance: tolerated relative difference of the answers to copies.
        epoch_s: seconds after which all users are assigned anew; 0: a user stays with a version.

    Raises:
        ValueError: a deployment that would receive traffic is missing, or a number is outside the
            limits of `TrafficSplit`.
    """
    weights: dict[str, int] = {}
    deployments: dict[str, Deployment] = {}
    for deployment, weight in ((candidate, percent), (stable, 100 - percent)):
        if deployment is not None:
            deployments[deployment.name] = deployment
            weights[deployment.name] = weights.get(deployment.name, 0) + weight
    for deployment in idle:
        deployments.setdefault(deployment.name, deployment)
        weights.setdefault(deployment.name, 0)
    shadow = {candidate.name: mirror_percent} if candidate is not None and mirror_percent else {}
    split = TrafficSplit(weights=weights, shadow=shadow, epoch_s=epoch_s)
    if shadow and tolerance is not None:
        split = replace(split, shadow_tolerance=tolerance)
    return EndpointState(deployments=tuple(deployments.values()), split=split)


def _rejected(bad: Iterable[Deployment], good: Deployment) -> tuple[Digest, ...]:
    """Return the digests to reject: whole releases, or the manifests of versions.

    A version in the release of `good` is rejected alone, since this release continues to serve.
    """
    return tuple(dict.fromkeys(d.manifest if d.release == good.release else d.release for d in bad))


def _deploy_first(desired: Deployment | None, target: str) -> Action | Wait:
    if desired is None:
        return Wait(why=f"no version is approved: set alias challenger-{target} on a version")
    return Action(
        kind=ActionKind.FIRST,
        state=build_split_state(None, desired, 100),
        roles=Roles(stable=desired),
        why="the first deployment gets 100 % of traffic immediately",
        aliases={
            format_alias("champion", target): desired.version,
            format_alias("challenger", target): None,
        },
    )


def find_step(policy: RolloutPolicy, index: int) -> PlannedStep:
    """Return the candidate's step, which is never 100 %.

    If the policy was shortened, the step is the last one before 100 %. If only the step of 100 % is
    left, the result is a step without traffic.
    """
    before = policy.planned()[:-1] or (_NO_TRAFFIC,)
    return before[min(index, len(before) - 1)]


def get_step_limit_s(policy: RolloutPolicy, index: int) -> float:
    """Return the time limit in seconds of a step.

    It is `step_timeout`, or `duration` for an A/B test.
    """
    is_test = find_step(policy, index).kind == "ab_test"
    return policy.ab_test.duration if is_test and policy.ab_test else policy.step_timeout


@dataclass(frozen=True, slots=True)
class _Rollout:
    """The rollout of an endpoint that has a stable version.

    The fields other than `stable` are arguments of `choose_next_action`.
    """

    stable: Deployment
    roles: Roles
    policy: RolloutPolicy
    target: str
    command: OperatorCommand | None
    now: float
    analysis: AnalysisResult | None
    draws_epochs: bool

    def find_abort(self, desired: Deployment | None) -> Action | None:
        """Return the abort of a candidate that failed or that is no longer requested.

        A candidate stays requested while the registry requests it or the stable version. The result
        is None if the rollout can continue, or without a candidate.
        """
        candidate, analysis = self.roles.candidate, self.analysis
        if candidate is None:
            return None
        if desired is None or desired.manifest not in (candidate.manifest, self.stable.manifest):
            return plan_abort(
                self.roles, self.target, why="no longer requested by the registry", reject=False
            )
        failure = analysis.abort_reason if self.policy.is_analyzed and analysis is not None else ""
        if analysis is None or not failure:
            return None
        why = "; ".join([failure, *(outlier.summary for outlier in analysis.outliers)])
        return plan_abort(self.roles, self.target, why=why, reject=True)

    def find_hold(self, observed: EndpointState) -> Wait | None:
        """Return the wait for an operator or for the provider, or None."""
        if self.command is OperatorCommand.PAUSE:
            is_rollout = self.roles.candidate is not None
            kind = WaitKind.PAUSED if is_rollout else WaitKind.IDLE
            return Wait(why="paused by an operator", kind=kind)
        if observed.replacements:
            why = f"the cloud is changing the instances: {'; '.join(observed.replacements)}"
            return Wait(why=why, kind=WaitKind.REPLACING)
        return None

    def build_expected_state(self) -> EndpointState:
        """Return the state that the roles require."""
        roles = self.roles
        idle = [roles.previous] if roles.previous is not None and roles.finished_at else []
        if roles.candidate is None:
            return build_split_state(self.stable, None, 0, *idle)
        return self.build_state(roles.candidate, find_step(self.policy, roles.step), *idle)

    def build_state(
        self, candidate: Deployment, step: PlannedStep, *idle: Deployment
    ) -> EndpointState:
        """Return the state of the endpoint in a step.

        In a canary step with analysis, users are assigned anew in each epoch if the provider
        supports this. In an A/B test, and without analysis, a user stays with one version.
        """
        policy = self.policy
        has_epochs = (
            self.draws_epochs
            and policy.is_analyzed
            and step.kind == "canary"
            and 0 < step.percent < 100
        )
        return build_split_state(
            self.stable,
            candidate,
            step.percent,
            *idle,
            mirror_percent=step.mirror_percent,
            tolerance=None if policy.shadow is None else policy.shadow.tolerance,
            epoch_s=policy.epoch if has_epochs else 0.0,
        )

    def proceed(self, candidate: Deployment) -> Action | Wait:
        """Return the action that continues the rollout in progress, or a wait."""
        because = ""
        if self.command is not OperatorCommand.ADVANCE:
            step = find_step(self.policy, self.roles.step)
            if not self.policy.is_analyzed:
                why = f"{candidate.name} has {step.percent} % of traffic and waits for approval"
                return Wait(why=why, kind=WaitKind.APPROVAL)
            outcome = self._evaluate_step(candidate, step)
            if not isinstance(outcome, str):
                return outcome
            because = f"; {outcome}"
        return self.move_to_step(self.roles.step + 1, candidate, because)

    def _evaluate_step(self, candidate: Deployment, step: PlannedStep) -> Action | Wait | str:
        """Return the action or wait that is due, or why the step is complete.

        Without counts of the step, the rollout waits.
        """
        policy, analysis = self.policy, self.analysis
        share = _describe_share(candidate, step)
        if analysis is None:
            return Wait(why=f"{share}; its counts are not available", kind=WaitKind.ANALYZING)
        if why := analysis.split_mismatch or analysis.hold_reason:
            return Wait(why=f"{share} and is paused: {why}", kind=WaitKind.PAUSED)
        elapsed = self.now - analysis.started_at
        missing = find_missing(step, policy, analysis, elapsed)
        is_late = elapsed >= policy.step_timeout
        if (
            step.kind == "ab_test"
            and policy.ab_test is not None
            and analysis.ab_outcome != "better"
        ):
            if elapsed >= policy.ab_test.duration:
                return self._conclude_test(policy.ab_test, analysis, share, is_complete=not missing)
            missing = missing or analysis.ab_summary or _NO_FEEDBACK
            # Until an A/B test finds the candidate better, `duration` limits the step in place of
            # `step_timeout`.
            is_late = False
        if missing and is_late:
            why = f"{share} and needs an operator: step_timeout is over ({missing})"
            return Wait(why=why, kind=WaitKind.INCONCLUSIVE)
        if missing:
            return Wait(why=f"{share}: {missing}", kind=WaitKind.ANALYZING)
        if step.approval:
            return Wait(
                why=f"{share}, no regression is detected, and it waits for approval",
                kind=WaitKind.APPROVAL,
            )
        return _describe_evidence(step, analysis)

    def _conclude_test(
        self, test: SplitTest, analysis: AnalysisResult, share: str, *, is_complete: bool
    ) -> Action | Wait | str:
        """Return what the policy requires after an A/B test without a better version.

        With `on_inconclusive: finish`, the rollout continues only if feedback was reported and the
        step is otherwise complete.
        """
        why = f"the A/B test is over and undecided: {analysis.ab_summary or _NO_FEEDBACK}"
        if test.on_inconclusive == "abort":
            return plan_abort(self.roles, self.target, why=why, reject=True)
        if test.on_inconclusive == "finish" and analysis.ab_summary and is_complete:
            return why
        return Wait(why=f"{share} and needs an operator: {why}", kind=WaitKind.INCONCLUSIVE)

    def move_to_step(self, index: int, candidate: Deployment, because: str = "") -> Action:
        """Return the action that starts the rollout, advances it, or finishes it.

        Args:
            index: index of the planned step to move to.
            because: text that is appended to the reason of the action.
        """
        count, is_start = len(self.policy.planned()), self.roles.candidate is None
        if index < count - 1:
            step = find_step(self.policy, index)
            share = (
                f"a copy of {step.mirror_percent} %"
                if step.kind == "shadow"
                else f"{step.percent} %"
            )
            return Action(
                kind=ActionKind.START if is_start else ActionKind.ADVANCE,
                state=self.build_state(candidate, step),
                roles=replace(self.roles, candidate=candidate, step=index, finished_at=0.0),
                why=f"step {index + 1} of {count}: {share} to {candidate.name}{because}",
            )
        why = "without steps" if is_start else f"step {count} of {count}"
        return Action(
            kind=ActionKind.FINISH,
            state=build_split_state(candidate, None, 0, self.stable),
            roles=Roles(stable=candidate, previous=self.stable, finished_at=self.now),
            why=f"{why}: 100 % to {candidate.name}{because}",
            aliases={
                format_alias("champion", self.target): candidate.version,
                format_alias("previous", self.target): self.stable.version,
                format_alias("challenger", self.target): None,
            },
        )

    def tidy(self, observed: EndpointState, expected: EndpointState) -> Action | Wait:
        """Return the action that unloads deployments that are not needed, or a wait."""
        roles, is_kept = (
            self.roles,
            self.roles.previous is not None and bool(self.roles.finished_at),
        )
        if is_kept and self.now >= roles.finished_at + self.policy.scale_down_delay:
            return Action(
                kind=ActionKind.RETIRE,
                state=build_split_state(self.stable, None, 0),
                roles=replace(roles, finished_at=0.0),
                why="scale_down_delay is over",
            )
        if not observed.is_equivalent(expected):
            why = "the endpoint has further deployments, which get no traffic"
            return Action(kind=ActionKind.CLEAN_UP, state=expected, roles=roles, why=why)
        return Wait(why=f"{self.stable.name} serves all traffic")


def _describe_share(candidate: Deployment, step: PlannedStep) -> str:
    if step.kind == "shadow":
        return f"{candidate.name} gets a copy of {step.mirror_percent} %"
    return f"{candidate.name} has {step.percent} % of traffic"


def _describe_evidence(step: PlannedStep, analysis: AnalysisResult) -> str:
    """Return the evidence of a complete step, in one line."""
    summary = analysis.guardrails[-1].summary if step.kind == "cold" else analysis.ab_summary
    return summary or f"no regression detected in {analysis.requests} requests"


def find_missing(
    step: PlannedStep, policy: RolloutPolicy, analysis: AnalysisResult, elapsed: float
) -> str:
    """Return the first requirement that a step does not meet yet, or empty.

    A measurement of NaN meets no requirement. `elapsed` is the time in seconds since the step took
    effect.
    """
    if not analysis.requests >= step.minimum:
        return f"{analysis.requests} of {step.minimum} requests"
    for guard in analysis.guardrails:
        if not guard.compared >= guard.required:
            return f"{guard.name} has {guard.compared} of {guard.required} comparisons"
    if analysis.unmet_target:
        return analysis.unmet_target
    if (
        policy.min_step_duration is not None
        and step.kind != "cold"
        and not elapsed >= policy.min_step_duration
    ):
        return f"{elapsed:.0f} s of min_step_duration ({policy.min_step_duration:g} s)"
    return ""


def _format_share(events: int, requests: int) -> str:
    return f"{events}/{requests}" + (f" ({100 * events / requests:.2f}%)" if requests else "")


def _format_odds(log10: float) -> str:
    """Return odds such as `60:1`, given their log10; `1e7:1` from 10 million."""
    if log10 >= 7:
        return f"1e{log10:.0f}:1"
    return f"{10**log10:.0f}:1" if log10 >= 0 else f"{10 ** max(log10, -99):.2g}:1"
